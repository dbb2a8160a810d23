"""The first plan: from a description, as data, as text, as YAML."""

from dataclasses import replace

import pytest

from hyper_parallel import DeviceMesh, ModelDescription, PlanError, Shard, ShardingPlan, plan
from hyper_parallel.core.plan.costs import Flow
from hyper_parallel.core.plan.model import ParameterDescription
from hyper_parallel.core.topology import Topology

MESH = DeviceMesh((2, 2), ("replicate", "shard"))


def description(*parameters, tied=None):
    made = tuple(ParameterDescription(name, shape, "float32", "Linear", True) for name, shape in parameters)
    modules = {"": "Model"}
    for name, _ in parameters:
        path = name.split(".")[:-1]
        for length in range(1, len(path) + 1):
            modules.setdefault(".".join(path[:length]), "Module")
    return ModelDescription("Model", made, modules, tied or {})


DECODER = description(
    ("embed.weight", (10, 4)),
    ("layers.0.q.weight", (4, 4)),
    ("layers.0.norm.weight", (3,)),
    ("layers.1.q.weight", (4, 4)),
    ("layers.1.experts.0.w.weight", (4, 2)),
    ("norm.weight", (4,)),
    tied={"head.weight": "embed.weight"},
)


NORM = ModelDescription(
    "Model",
    (ParameterDescription("norm.weight", (4,), "float32", "RMSNorm"),),
    {"": "Model", "norm": "RMSNorm"},
    config={"hidden_size": 4},
)


def test_each_repeated_block_is_a_unit_and_the_rest_belongs_to_the_model():
    made = plan(DECODER, MESH)
    assert [unit.name for unit in made.units] == ["layers.0", "layers.1", ""]
    assert [unit.reshard_after_forward for unit in made.units] == [True, True, False]
    assert made["layers.1.experts.0.w.weight"].unit == "layers.1"
    assert made["embed.weight"].unit == "" and made["head.weight"] is made["embed.weight"]
    assert made["norm.weight"].placements == {"shard": Shard(0)}
    assert made.layout("layers.0.norm.weight").local_shape(1) == (1,)


def test_experts_in_a_list_outside_of_blocks_are_no_units():
    """Not every rank calls each of them, and so not every rank would gather it."""
    made = plan(description(("mlp.experts.0.up.weight", (4, 4)), ("mlp.experts.1.up.weight", (4, 4))), MESH)
    assert [unit.name for unit in made.units] == [""]


def test_a_parameter_tied_across_blocks_belongs_to_the_model():
    made = plan(description(("layers.0.w", (4,)), ("layers.1.v", (4,)), tied={"layers.1.w": "layers.0.w"}), MESH)
    assert made["layers.0.w"].unit == "" and made["layers.1.v"].unit == "layers.1"


def test_scalars_stay_whole_and_small_parameters_are_noted_once_a_kind():
    made = plan(description(("scale", ()), ("one", (1, 3)), ("two", (2,)), ("other", (1,))), MESH)
    assert made["scale"].placements == {}
    assert made.notes == (
        "scale: a scalar, which every rank keeps whole.",
        "one and 1 more: 1 row for a shard axis of 2: 1 of 2 ranks hold nothing.",
    )


def test_saving_and_loading_is_the_identity(tmp_path):
    made = plan(DECODER, DeviceMesh((2, 2), ("replicate", "shard"), (3, 1, 2, 0)))
    made.save(tmp_path / "plan.yaml")
    text = (tmp_path / "plan.yaml").read_text()
    loaded = ShardingPlan.load(tmp_path / "plan.yaml")
    assert loaded == made
    loaded.save(tmp_path / "plan.yaml")
    assert (tmp_path / "plan.yaml").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


@pytest.mark.parametrize("text", ["[1]", "format: 1", "format: 2\nmesh: {}", "a: [", "format: 1\nmesh: 3\nranks:"])
def test_what_is_no_plan_is_refused(tmp_path, text):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(PlanError):
        ShardingPlan.load(tmp_path / "plan.yaml")
    with pytest.raises(PlanError, match="can't be read"):
        ShardingPlan.load(tmp_path / "none.yaml")


def test_the_table_shows_every_parameter_and_the_totals():
    made = plan(DECODER, MESH)
    text = made.table()
    assert "unit layers.0: freed after forward" in text
    assert "unit (the model itself): kept until backward" in text
    assert "parameters (float32): over shard; -: whole; local: on rank 0\n" in text
    lines = text.splitlines()
    place = next(place for place, line in enumerate(lines) if "embed.weight" in line)
    assert lines[place].split() == ["embed.weight", "10x4", "shard(0)", "5x4", "80"]
    assert lines[place + 1] == "    = head.weight"
    # embed 160 B, two q of 64 B, norms of 12 B (2 and 1 of its 3 rows) and 16 B, w of 32 B
    kept = "rank 0, which holds the most, keeps 176 B of 348 B of parameters, 176 B of gradients and 352 B"
    assert kept in " ".join(text.split())
    # half of each travels: root 88 B, blocks (32 + 8) and (32 + 16) B, which stay after forward
    assert made.traffic() == (
        Flow("parameters", "all_gather", ("shard",), "fast", 176),
        Flow("parameters", "reduce_scatter", ("shard",), "fast", 176),
        Flow("parameters", "all_reduce", ("replicate",), "fast", 176),
    )


@pytest.mark.parametrize("mesh", [{"replicate": 2, "shard": 1}, {"shard": 1, "tensor": 2}])
def test_an_axis_of_one_rank_places_nothing(mesh, tmp_path):
    made = plan(NORM, DeviceMesh.from_sizes(mesh))
    assert made["norm.weight"].placements == {}
    older = replace(made, parameters=tuple(replace(each, placements={"shard": Shard(0)}) for each in made.parameters))
    older.save(tmp_path / "plan.yaml")
    assert ShardingPlan.load(tmp_path / "plan.yaml")["norm.weight"].local_shape == (4,)


def test_the_tier_of_traffic_is_that_of_the_groups_it_runs_in():
    flows = plan(DECODER, MESH).traffic(Topology.regular(4, ranks_per_machine=2))
    assert [(flow.kind, flow.tier) for flow in flows] == [
        ("all_gather", "fast"),
        ("reduce_scatter", "fast"),
        ("all_reduce", "slow"),
    ]


def test_an_axis_that_needs_roles_is_refused_where_no_rule_gives_one_and_an_unknown_parameter_too():
    with pytest.raises(PlanError, match=r"layers.0.q.weight(.|\n)*no rule knows 'q.weight', \[4, 4\] of a Linear"):
        plan(DECODER, DeviceMesh((2, 2), ("shard", "tensor")))
    assert plan(DECODER, DeviceMesh((2, 1), ("shard", "tensor"))).units
    with pytest.raises(PlanError, match="no parameter 'nothing'"):
        plan(DECODER, MESH)["nothing"]
