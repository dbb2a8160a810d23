"""Ranks as threads of one process: the same collectives, so the same tests as for real ranks."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel import CommunicationError, backends
from hyper_parallel.core.execution.inprocess import InProcessWorld
from tests.equivalence import collective_bodies as bodies
from tests.equivalence import test_collectives as of_processes

BODIES = of_processes.test_agrees_with_numpy.pytestmark[0].args[1]
MISTAKES = dict(of_processes.test_wrong_arguments_are_refused_by_every_rank.pytestmark[0].args[1])


def world(ranks: int, **options) -> InProcessWorld:
    return InProcessWorld(backends.load("torch"), ranks, **options)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_agrees_with_numpy(body, ranks):
    world(ranks).run(body)


def test_half_precision_is_summed_in_float32():
    for bfloat16, float16 in world(4).run(bodies.half_precision_sums):
        assert bfloat16 == {"all_reduce": 260.0, "reduce_scatter": 260.0}
        assert float16 == {"all_reduce": 2052.0, "reduce_scatter": 2052.0}


def test_wrong_arguments_are_refused_by_every_rank():
    for rank, messages in enumerate(world(4).run(bodies.refusals)):
        for mistake, says in MISTAKES.items():
            assert says in messages[mistake]
            assert f"on ranks [0, 1, 2, 3], at rank {rank}: " in messages[mistake]


def test_a_rank_that_fails_ends_the_others_and_its_error_is_told():
    def body(backend):
        if backend.collectives.rank() == 1:
            raise KeyError("of rank 1")
        backend.collectives.barrier()

    with pytest.raises(KeyError, match="of rank 1"):
        world(3).run(body)


def test_a_rank_that_does_not_come_is_noticed():
    def body(backend):
        if backend.collectives.rank():
            backend.collectives.all_reduce(torch.ones(1), backend.collectives.world())

    with pytest.raises(CommunicationError, match="another rank has failed, or did not come in time"):
        world(2, timeout_s=0.2).run(body)


def test_a_message_that_nobody_sends_is_noticed():
    def body(backend):
        if backend.collectives.rank():
            backend.collectives.receive(torch.ones(1), 0, backend.collectives.world())

    with pytest.raises(CommunicationError, match="at rank 1: failed: the message has not come for 0.2 s"):
        world(2, timeout_s=0.2).run(body)
