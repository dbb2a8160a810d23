"""Planning does each kind of work once, however many layers and ranks there are. Counts, which no machine changes."""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path

import pytest

from hyper_parallel import DeviceMesh, PlanError, ShardingPlan, plan
from hyper_parallel.core.layout import chunk_bounds
from hyper_parallel.core.plan.fully_sharded import notes_on_shards
from hyper_parallel.core.plan.plan import ParameterPlan
from hyper_parallel.core.topology import Topology
from hyper_parallel.core.transition import lower

PLANNER = Path(__file__).parents[3] / "benchmarks" / "planner.py"


@pytest.fixture(scope="module")
def planner():
    """benchmarks/planner.py, which is no package."""
    spec = importlib.util.spec_from_file_location("planner_benchmark", PLANNER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_large_models_have_their_published_sizes(planner):
    # 235B and 671B parameters, as their makers count them
    assert sum(each.numel for each in planner.qwen3_235b().parameters) == 235_093_634_560
    assert sum(each.numel for each in planner.deepseek_v3().parameters) == 671_026_404_352
    assert len(planner.llama_of_1000_tensors().parameters) == 1_002
    one_by_one = planner.deepseek_v3_one_by_one()
    assert sum(each.numel for each in one_by_one.parameters) == 671_026_404_352
    assert len(one_by_one.parameters) == 45_337


@pytest.mark.parametrize("place", range(3))
def test_transitions_are_worked_out_once_for_all_layers_on_few_ranks(planner, place):
    _, make, sizes, supernode = planner.CASES[place]
    mesh = DeviceMesh.from_sizes(sizes)
    lower.cache_clear()
    made = plan(make(), mesh, {"tokens": [mesh.size, 4096]})
    text = made.table(Topology.regular(mesh.size, 8, supernode // 8))
    contracts = sum(len(each.inputs) + len(each.outputs) for each in made.boundaries)
    assert contracts > 800
    # a dozen kinds of crossings, forward and backward, with a topology and without one
    assert lower.cache_info().misses <= 48
    assert len(text.splitlines()) < 100


def test_looking_a_parameter_up_does_not_search_the_plan(planner):
    made = plan(planner.llama_of_1000_tensors(), DeviceMesh((2, 2), ("shard", "tensor")))
    assert all(made[each.name] is each for each in made.parameters)
    assert made._by_name is made._by_name


def test_768_ranks_are_planned_as_few_are(planner):
    """What a parameter is does not depend on how many replicas there are."""
    few, many = (
        plan(
            planner.qwen3_235b(), DeviceMesh.from_sizes({"replicate": replicas, "shard": 2, "expert": 16, "tensor": 4})
        )
        for replicas in (2, 6)
    )
    assert many.mesh.size == 768
    assert few.parameters == many.parameters
    assert few.memory().parameters == many.memory().parameters


@pytest.mark.parametrize("size", [2, 3, 8, 768])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 7, 9, 100, 767, 768, 769, 1500])
def test_ranks_without_rows_are_counted_without_asking_each(rows, size):
    parameter = ParameterPlan("weight", (rows, 4), "float32", True, {}, "")
    parts = [chunk_bounds(rows, size, rank) for rank in range(size)]
    empty = sum(start == stop for start, stop in parts)
    told = list(notes_on_shards([parameter], DeviceMesh((size,), ("shard",))))
    assert len(told) == bool(empty)
    assert not empty or f": {empty} of {size} ranks hold nothing" in told[0]


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_of_garbage_is_left_as_it_was(planner, tmp_path, on):
    """It rests while a plan is made, written and read, however that ends."""
    model, mesh = planner.llama_of_1000_tensors(), DeviceMesh((2,), ("tensor",))
    try:
        (gc.enable if on else gc.disable)()
        plan(model, mesh).save(tmp_path / "plan.yaml")
        assert ShardingPlan.load(tmp_path / "plan.yaml").model_class == model.class_name
        with pytest.raises(PlanError):
            plan(model, DeviceMesh((3,), ("tensor",)))
        (tmp_path / "plan.yaml").write_text("[")
        with pytest.raises(PlanError):
            ShardingPlan.load(tmp_path / "plan.yaml")
        assert gc.isenabled() == on
    finally:
        gc.enable()
