"""Types of boundaries: one for each combination of roles, or a violation in words."""

from __future__ import annotations

import pytest

from hyper_parallel.core.errors import PlanError
from hyper_parallel.core.plan.assignment import Assignment, RoleResult
from hyper_parallel.core.plan.boundaries import TYPES, boundary_types
from hyper_parallel.core.plan.grouping import Group, group
from hyper_parallel.core.plan.model import ModelDescription
from hyper_parallel.core.plan.role_rules import ROLES
from hyper_parallel.core.plan.roles import assign_roles
from tests.core.plan.by_hand import by_hand, stored
from tests.core.plan.truth import TRUTH


def types(model: ModelDescription) -> dict[str, str]:
    roles = assign_roles(model)
    return boundary_types(group(model, roles), roles)


def type_of(*roles: str) -> str:
    """The type of a module that holds one parameter of each role."""
    names = tuple(f"layer.module.{number}" for number in range(len(roles)))
    assignments = {name: Assignment(name, role, "") for name, role in zip(names, roles)}
    return boundary_types([Group("layer.module", "Module", names)], RoleResult(assignments, {}))["layer.module"]


@pytest.mark.parametrize("name", sorted(TRUTH))
def test_every_group_has_a_type(name):
    model = stored(name)
    assert set(types(model).values()) <= set(TYPES)


def test_a_dense_layer():
    found = types(stored("olmo2"))
    assert {name.removeprefix("model.layers.0."): kind for name, kind in found.items() if ".1." not in name} == {
        "model.embed_tokens": "embedding",
        "self_attn": "attention",
        "self_attn.q_norm": "wide_norm",
        "self_attn.k_norm": "wide_norm",
        "mlp": "mlp",
        "post_attention_layernorm": "norm",
        "post_feedforward_layernorm": "norm",
        "model.norm": "norm",
        "lm_head": "head",
    }


def test_a_layer_of_experts():
    found = types(stored("deepseek_v3"))
    assert {name: found[f"model.layers.1.mlp.{name}"] for name in ("experts", "gate", "shared_experts")} == {
        "experts": "experts",
        "gate": "router",
        "shared_experts": "mlp",
    }


@pytest.mark.parametrize("role", sorted(set(ROLES) - {"adapter"}))
def test_a_role_alone_makes_a_boundary(role):
    assert type_of(role) in TYPES


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (("query", "key", "value", "attention_output", "head_norm", "sink", "adapter"), "attention"),
        (("latent", "latent_norm", "query_up", "key_value_up", "attention_output"), "attention"),
        (("gate", "up", "down"), "mlp"),
        (("up", "adapter"), "up"),
        (("down",), "down"),
        (("expert_gate_up", "expert_down"), "experts"),
        (("router", "router_bias", "router_correction"), "router"),
        (("router", "expert_gate_up", "expert_down"), "moe"),
        (("embedding", "adapter"), "embedding"),
    ],
)
def test_roles_that_make_a_boundary(roles, expected):
    assert type_of(*roles) == expected


@pytest.mark.parametrize("roles", [("query", "up"), ("norm", "head"), ("embedding", "head"), ("router", "up")])
def test_roles_that_make_none_are_told(roles):
    with pytest.raises(PlanError) as error:
        type_of(*roles)
    assert str(error.value).startswith("'layer.module' (Module) holds ")
    assert all(f"{role} (layer.module." in str(error.value) for role in roles)


def test_all_violations_are_told_at_once():
    parameters = {f"layers.{layer}.block.q_proj.weight": ((32, 32), "Linear") for layer in range(2)}
    parameters |= {f"layers.{layer}.block.k_proj.weight": ((16, 32), "Linear") for layer in range(2)}
    parameters |= {f"layers.{layer}.block.v_proj.weight": ((16, 32), "Linear") for layer in range(2)}
    parameters |= {f"layers.{layer}.block.o_proj.weight": ((32, 32), "Linear") for layer in range(2)}
    parameters |= {f"layers.{layer}.block.e_score_correction_bias": ((4,), "FusedAttention") for layer in range(2)}
    model = by_hand(parameters, {f"layers.{layer}.block": "FusedAttention" for layer in range(2)})
    roles = assign_roles(model)
    extra = {
        name: Assignment(name, "router_correction", "set by hand") for name in roles.unknown if "correction" in name
    }
    assert len(extra) == 2
    roles = RoleResult(dict(roles.assignments) | extra, {})
    with pytest.raises(PlanError) as error:
        boundary_types(group(model, roles), roles)
    assert len(str(error.value).splitlines()) == 2
