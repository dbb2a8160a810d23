"""Replays of Muon's plans on ranks that are threads."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel import ConfigError, DeviceMesh, Layout, Shard
from hyper_parallel.backends import load
from hyper_parallel.core.execution.inprocess import InProcessWorld
from hyper_parallel.core.muon.matrices import usual_view
from hyper_parallel.core.muon.newton_schulz import NewtonSchulz
from hyper_parallel.core.muon.parameters import MuonParameter
from hyper_parallel.core.muon.plan import make_plan
from hyper_parallel.core.muon.replay import Replay

SHAPES = {"a": (8, 12), "b": (10, 6), "c": (7, 12)}


@pytest.mark.parametrize("skipped", [(), (0, 1, 2)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_float16_does_not_hold_are_orthogonalized_in_float16_all_the_same(ranks, skipped):
    """They have their norm before they are cast, so they travel as they are."""
    mesh, settings = DeviceMesh((ranks,), ("shard",)), NewtonSchulz(dtype="float16")
    layouts = {name: Layout(mesh, [Shard(0)], shape) for name, shape in SHAPES.items()}
    plan = make_plan(
        MuonParameter(name, layout, usual_view(layout.shape), "float32", settings) for name, layout in layouts.items()
    )
    torch.manual_seed(0)
    gradients = [torch.randn(shape) * 1e-9 for shape in SHAPES.values()]
    expected = [load("torch").muon.newton_schulz(each[None], settings)[0] for each in gradients]

    def part(rank, index, whole):
        return torch.from_numpy(plan.parameters[index].layout.shard(whole.numpy(), rank))

    def body(backend):
        rank, replay = backend.collectives.rank(), Replay(backend, plan)
        kept = replay.program.kept
        inputs = {number: part(rank, each.index, gradients[each.index]) for number, each in enumerate(kept)}
        shards = {index: torch.zeros(each.layout.local_shape(rank)) for index, each in enumerate(plan.parameters)}

        def compute(batch, matrices):
            return backend.muon.newton_schulz(matrices, batch.settings)

        found = {kept[n].index: each.clone() for n, each in replay.updates(inputs, compute, shards, skipped)}
        assert set(found) == {each.index for each in kept} - set(skipped)
        for index, update in found.items():
            assert update.dtype == torch.float32
            # batches of other sizes may add up in another order: a few roundings of 2**-11
            torch.testing.assert_close(update, part(rank, index, expected[index]), rtol=0, atol=4e-3)
            assert update.abs().max() > 0.1

    InProcessWorld(load("torch"), ranks, timeout_s=30).run(body)


def replayed(backend, plan, compute, steps=1):
    """Steps on this rank, and the buffers after each: in which memory, and how large."""
    replay, rank = Replay(backend, plan), backend.collectives.rank()
    shards = {index: torch.zeros(each.layout.local_shape(rank)) for index, each in enumerate(plan.parameters)}
    buffers = []
    for _ in range(steps):
        inputs = {number: torch.ones(each.local_shape) for number, each in enumerate(replay.program.kept)}
        for _ in replay.updates(inputs, compute, shards):
            pass
        buffers.append({key: (each.data_ptr(), each.numel()) for key, each in replay.buffers.items()})
    return replay, buffers


def plan_on(ranks, **settings):
    mesh = DeviceMesh((ranks,), ("shard",))
    layouts = {name: Layout(mesh, [Shard(0)], shape) for name, shape in SHAPES.items()}
    return make_plan(
        MuonParameter(name, layout, usual_view(layout.shape), "float32", NewtonSchulz(**settings))
        for name, layout in layouts.items()
    )


def test_buffers_are_made_once_and_as_large_as_the_program_says():
    plan = plan_on(2, dtype="float32")

    def body(backend):
        replay, (first, second) = replayed(backend, plan, lambda batch, matrices: matrices.clone(), steps=2)
        assert first == second
        assert {(name, dtype): numel for (name, dtype, _), (_, numel) in first.items()} == replay.program.capacities

    InProcessWorld(load("torch"), 2, timeout_s=30).run(body)


@pytest.mark.parametrize("wrong", [lambda it: it[:, :1], lambda it: it.double()], ids=["shape", "dtype"])
def test_results_that_are_not_like_the_matrices_are_refused(wrong):
    plan = plan_on(1, dtype="float32")

    def body(backend):
        with pytest.raises(ConfigError, match=r"batch 0 of Muon: orthogonalizing 1 matrices of \[8, 12\] in float32"):
            replayed(backend, plan, lambda batch, matrices: wrong(matrices))

    InProcessWorld(load("torch"), 1, timeout_s=30).run(body)
