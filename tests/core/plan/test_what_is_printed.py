"""What a plan prints of its boundaries can be written back, and all of it can be explained."""

from __future__ import annotations

from dataclasses import replace

import pytest

import hyper_parallel as hp
from hyper_parallel import ModelDescription, PlanError
from hyper_parallel.core.plan.boundaries import TYPES
from hyper_parallel.core.plan.explain import _TENSOR
from hyper_parallel.core.plan.role_rules import ROLES
from tests.core.plan.by_hand import HEADS, MODELS, by_hand, stored
from tests.core.plan.test_mixers_and_more import MODELS as MIXERS_AND_MORE

STORED = sorted(path.stem for path in MODELS.glob("*.json") if path.stem != "mamba")
PLANNED = [*STORED, *MIXERS_AND_MORE]
MESH = hp.DeviceMesh((2, 2, 2), ("shard", "context", "tensor"))

HALVES = by_hand(
    {
        "layers.0.fc1.weight": ((48, 32), "Linear"),
        "layers.0.fc2.weight": ((32, 48), "Linear"),
        "layers.0.final_layer_norm.weight": ((32,), "LayerNorm"),
    }
    | {f"layers.0.self_attn.{each}_proj.weight": ((32, 32), "Linear") for each in ("q", "k", "v", "out")},
    {"layers": "ModuleList", "layers.0": "OPTDecoderLayer"},
    HEADS | {"num_key_value_heads": 4},
)


def model_of(name: str) -> ModelDescription:
    """A stored model, or one written by hand with the modules that it leaves out."""
    if name not in MIXERS_AND_MORE:
        return stored(name)
    model, _ = MIXERS_AND_MORE[name]
    paths = [each.split(".") for each in model.modules]
    around = {".".join(path[:end]): "Module" for path in paths for end in range(len(path))}
    return replace(model, modules=around | model.modules)


def kinds(plan: hp.ShardingPlan) -> dict[str, str]:
    return {each.module: each.kind for each in plan.boundaries}


@pytest.mark.parametrize("name", PLANNED)
def test_every_type_that_a_plan_prints_is_taken_as_an_override_and_changes_nothing(name):
    plan = hp.plan(model_of(name), MESH)
    again = hp.plan(model_of(name), MESH, {"boundaries": {m: {"type": kind} for m, kind in kinds(plan).items()}})
    assert replace(again, overrides={}) == plan


def test_types_of_what_is_kept_whole_and_of_regions_are_taken_too():
    overrides = {
        "parameters": {"model.layers.0.mlp.**": {"role": "none"}},
        "regions": {"model.layers.1": {"kind": "transparent"}},
        "sequence_parallel": False,
    }
    plan = hp.plan(stored("llama"), MESH, overrides)
    found = kinds(plan)
    assert (found["model.layers.0.mlp"], found["model.layers.1"]) == ("whole", "region")
    types = {"boundaries": {module: {"type": kind} for module, kind in found.items()}}
    assert replace(hp.plan(stored("llama"), MESH, overrides | types), overrides={}) == replace(plan, overrides={})


def test_the_type_of_what_is_no_group_of_parameters_can_not_be_another():
    with pytest.raises(PlanError) as error:
        hp.plan(stored("llama"), MESH, {"boundaries": {"model.layers.0": {"type": "exit"}}})
    assert "model.layers.0: type: it follows from what is in there, and can't be exit; write entry" in str(error.value)


def test_kinds_are_types():
    assert kinds(hp.plan(HALVES, MESH))["layers.0.fc1"] == "up"
    assert kinds(hp.plan(HALVES, MESH))["layers.0.fc2"] == "down"
    norm = hp.plan(stored("olmo2"), MESH)
    assert kinds(norm)["model.layers.0.self_attn.q_norm"] == "wide_norm"
    assert f"  3 boundary: wide_norm: {TYPES['wide_norm']}" in norm.explain("model.layers.0.self_attn.q_norm")
    assert {kind for name in PLANNED for kind in kinds(hp.plan(model_of(name), MESH)).values()} <= set(TYPES)


def test_every_way_in_which_tensor_treats_a_role_has_a_sentence():
    assert {each.tensor for each in ROLES.values()} == set(_TENSOR)


@pytest.mark.parametrize("name", PLANNED)
def test_everything_can_be_explained(name):
    plan = hp.plan(model_of(name), hp.DeviceMesh((2, 2, 2, 2), ("replicate", "shard", "context", "tensor")))
    for each in (*(each.name for each in plan.parameters), *plan.tied, *kinds(plan)):
        assert plan.explain(each).startswith(f"{each}: ")
