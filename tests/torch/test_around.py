"""Which of a module's arguments a contract speaks of."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from hyper_parallel import DeviceMesh, Replicate, Shard, backends
from hyper_parallel.core.execution.adaptations import Adaptations
from hyper_parallel.core.execution.around import Maker
from hyper_parallel.core.execution.inprocess import InProcessWorld
from hyper_parallel.core.plan.contracts import BoundaryPlan, Contract

WHOLE, PART = {"tensor": Replicate()}, {"tensor": Shard(1)}


def test_a_tensor_that_nothing_changes_counts_among_the_contracts():
    stays = Contract("hidden", 3, 4, WHOLE, WHOLE, WHOLE)
    is_cut = Contract("memory", 3, 4, WHOLE, PART, PART)
    planned = BoundaryPlan("block", "region", (stays, is_cut), (stays,), "opaque")

    def body(backend):
        facts = SimpleNamespace(
            backend=backend,
            modules={"block": nn.Identity()},
            boundaries={"block": planned},
            plan=SimpleNamespace(mesh=DeviceMesh((2,), ("tensor",)), boundaries=(planned,)),
            ranks=2,
            place=backend.collectives.rank(),
        )
        (boundary,) = Maker(facts).boundaries(Adaptations())
        (hidden, memory), named = boundary.enter((torch.ones(1, 6, 4), torch.ones(1, 6, 4)), {"mask": None})
        assert not boundary.outputs
        return list(hidden.shape), list(memory.shape), named

    for found in InProcessWorld(backends.load("torch"), 2, timeout_s=20).run(body):
        assert found == ([1, 6, 4], [1, 3, 4], {"mask": None})
