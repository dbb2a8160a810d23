"""Replays of Muon's plans on ranks that are threads."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel import DeviceMesh, Layout, Shard
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
