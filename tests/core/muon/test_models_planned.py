"""Real models: their matrices, under the placements that the planner gives them, interpreted on all ranks."""

from __future__ import annotations

import numpy as np
import pytest

import hyper_parallel as hp
from hyper_parallel.core.muon.adapters import views_of
from hyper_parallel.core.muon.newton_schulz import NewtonSchulz
from hyper_parallel.core.muon.parameters import MuonParameter
from hyper_parallel.core.muon.plan import MuonPlan, make_plan
from hyper_parallel.core.muon.routing import routes_of
from tests.core.muon.plan_cases import interpreted, newton_schulz, on_one_device
from tests.core.plan.by_hand import layerless, stored

SETTINGS = NewtonSchulz(dtype="float32")
DENSE = {"replicate": 2, "shard": 3, "tensor": 2}
SPARSE = {"replicate": 2, "shard": 2, "expert": 2, "tensor": 2}


def planned(name: str, sizes: dict[str, int]) -> MuonPlan:
    """The plan of one layer of each kind."""
    model = stored(name)
    placed = hp.plan(model, hp.DeviceMesh.from_sizes(sizes))
    routes, views = routes_of(model), views_of(model)
    chosen = {layerless(each): each for each, route in routes.items() if route.algorithm == "muon"}
    return make_plan(
        MuonParameter(each, placed.layout(each), views[each], "float32", SETTINGS) for each in chosen.values()
    )


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, DENSE) for name in ("gpt2", "gpt_neox", "phi3", "falcon", "glm4")),
        *((name, SPARSE) for name in ("deepseek_v3", "gpt_oss", "mixtral")),
    ],
)
def test_every_rank_gets_its_slice_of_what_the_whole_model_gets(name, sizes):
    plan = planned(name, sizes)
    generator = np.random.default_rng(5)
    values = [generator.standard_normal(each.layout.shape) for each in plan.parameters]
    outcome = interpreted(plan, values, newton_schulz)
    for index, (each, value) in enumerate(zip(plan.parameters, values)):
        expected = on_one_device(each.view, value, newton_schulz)
        for rank in each.layout.mesh.ranks:
            np.testing.assert_allclose(
                outcome.shards[rank][index], each.layout.shard(expected, rank), rtol=1e-9, atol=1e-12, err_msg=each.name
            )  # float64; a batch of several may multiply in another order than one
    assert dict(outcome.traffic.bytes) == dict(plan.bytes)
    assert not any(axis == "expert" for axis, _ in plan.bytes)
