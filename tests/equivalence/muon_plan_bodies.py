"""What the workers do in `test_muon_plan.py`: steps of Muon's plans on real ranks."""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np

from hyper_parallel.core.backend import Backend, Tensor
from hyper_parallel.core.muon.plan import MuonPlan
from hyper_parallel.core.muon.program import RankBatch
from hyper_parallel.core.muon.replay import Replay
from tests.core.muon import plan_cases


class Case(NamedTuple):
    """A plan, what is done with each matrix, and what is left out."""

    plan: MuonPlan
    function: str
    skipped: tuple[int, ...] = ()


class Once(dict):
    """Values that are handed over once."""

    def __getitem__(self, key: int) -> Tensor:
        return self.pop(key)


def steps(backend: Backend, cases: Sequence[Case]) -> list[list[list[np.ndarray]]]:
    """The local shards of this rank after each of two steps of every case, in which a shard becomes its update; shards
    that are to be received from a replica are NaN before."""
    return [two_steps(backend, case) for case in cases]


def two_steps(backend: Backend, case: Case) -> list[list[np.ndarray]]:
    replay = Replay(backend, case.plan)
    return [one_step(backend, replay, case, seed) for seed in range(2)]


def one_step(backend: Backend, replay: Replay, case: Case, seed: int) -> list[np.ndarray]:
    tensors, plan, rank = backend.tensors, case.plan, backend.collectives.rank()
    kept, shards, own = replay.program.kept, {}, []
    for index, (each, value) in enumerate(zip(plan.parameters, plan_cases.values_of(plan, seed))):
        own.append(each.layout.shard(value, rank))
        shards[index] = tensors.from_numpy(
            own[-1] if index in case.skipped else np.full_like(own[-1], np.nan), each.dtype
        )
    inputs = Once(
        (number, tensors.from_numpy(plan_cases.part_of(own[each.index], each), "float32"))
        for number, each in enumerate(kept)
        if each.index not in case.skipped
    )

    def compute(batch: RankBatch, matrices: Tensor) -> Tensor:
        made = getattr(plan_cases, case.function)(tensors.to_numpy(matrices))
        return tensors.from_numpy(made, batch.settings.wire_dtype)

    for number, update in replay.updates(inputs, compute, shards, case.skipped):
        assert tuple(update.shape) == kept[number].local_shape
        flat = tensors.flat(shards[kept[number].index])
        tensors.copy_(tensors.alias(flat, kept[number].start, update.shape), update)
    assert not inputs
    return [tensors.to_numpy(shards[index]) for index in range(len(plan.parameters))]
