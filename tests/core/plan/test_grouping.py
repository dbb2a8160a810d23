"""Groups: every name in exactly one, in the module where its parameters act together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.core.plan.grouping import group
from hyper_parallel.core.plan.model import ModelDescription, ParameterDescription
from hyper_parallel.core.plan.roles import assign_roles
from tests.core.plan.by_hand import by_hand, renamed, stored
from tests.core.plan.truth import TRUTH


def members(model: ModelDescription) -> dict[str, list[str]]:
    """The parameters of each group by its module, names without the module's."""
    return {
        each.module: [name.removeprefix(f"{each.module}.") for name in each.parameters]
        for each in group(model, assign_roles(model))
    }


@pytest.mark.parametrize("name", sorted(TRUTH))
def test_every_name_with_a_role_is_in_one_group(name):
    model = stored(name)
    roles = assign_roles(model)
    groups = group(model, roles)
    grouped = [name for each in groups for name in each.parameters]
    assert sorted(grouped) == sorted(roles.assignments)
    assert len({each.module for each in groups}) == len(groups)
    assert all(each.class_name == model.modules[each.module] for each in groups)
    assert all(name.startswith(f"{each.module}.") for each in groups for name in each.parameters)


def test_attention_holds_its_head_norms_and_the_router_stands_beside_the_experts():
    found = members(stored("qwen3_moe"))
    assert list(found) == [
        "model.embed_tokens",
        *(
            f"model.layers.{layer}.{name}"
            for layer in (0, 1)
            for name in ("self_attn", "mlp.experts", "mlp.gate", "input_layernorm", "post_attention_layernorm")
        ),
        "model.norm",
        "lm_head",
    ]
    assert found["model.layers.0.self_attn"] == [
        "q_proj.weight",
        "k_proj.weight",
        "v_proj.weight",
        "o_proj.weight",
        "q_norm.weight",
        "k_norm.weight",
    ]
    assert found["model.layers.0.mlp.experts"] == ["gate_up_proj", "down_proj"]


def test_sinks_and_latents_belong_to_attention():
    assert members(stored("gpt_oss"))["model.layers.0.self_attn"][0] == "sinks"
    assert len(members(stored("deepseek_v3"))["model.layers.0.self_attn"]) == 7


def test_a_norm_over_all_heads_is_a_group_inside_attention():
    found = members(stored("olmo2"))
    assert found["model.layers.0.self_attn.q_norm"] == ["weight"]
    assert "q_norm.weight" not in found["model.layers.0.self_attn"]


def test_shared_experts_are_a_feed_forward_layer_of_their_own():
    found = members(stored("deepseek_v3"))
    assert found["model.layers.1.mlp.shared_experts"] == ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    assert found["model.layers.1.mlp.gate"] == ["weight"]


def test_a_tied_head_is_a_group():
    assert members(stored("gemma2"))["lm_head"] == ["weight"]


def test_projections_among_other_things_in_a_block_are_groups_alone():
    linears = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "out_proj": (32, 32)}
    parameters = {f"layers.0.self_attn.{name}.weight": (shape, "Linear") for name, shape in linears.items()}
    parameters |= {
        "layers.0.fc1.weight": ((48, 32), "Linear"),
        "layers.0.fc1.bias": ((48,), "Linear"),
        "layers.0.fc2.weight": ((32, 48), "Linear"),
    }
    found = members(by_hand(parameters))
    assert list(found) == ["layers.0.self_attn", "layers.0.fc1", "layers.0.fc2"]
    assert found["layers.0.fc1"] == ["weight", "bias"]


@pytest.mark.parametrize(
    ("container", "module"),
    [("ModuleList", "layers.0.mlp"), ("CellList", "layers.0.mlp"), ("MixtralExperts", "layers.0.mlp.experts")],
)
def test_experts_in_a_list_belong_to_the_module_that_is_called(container, module):
    parameters = {"layers.0.mlp.gate.weight": ((2, 32), "Linear")}
    for index in range(2):
        for name, shape in (("gate_proj", (48, 32)), ("up_proj", (48, 32)), ("down_proj", (32, 48))):
            parameters[f"layers.0.mlp.experts.{index}.{name}.weight"] = (shape, "Linear")
    found = members(by_hand(parameters, {"layers.0.mlp.experts": container, "layers.0.mlp": "MoE"}))
    assert list(found) == ["layers.0.mlp.gate", module]
    assert len(found[module]) == 6


def test_a_helper_below_a_router_belongs_to_it():
    parameters = {
        "layers.0.mlp.gate.weight": ((4, 32), "Ernie4_5_MoeTopKRouter"),
        "layers.0.mlp.gate.moe_statics.e_score_correction_bias": ((1, 4), "Ernie4_5_MoeStatics"),
        "layers.0.mlp.experts.gate_up_proj": ((4, 96, 32), "Ernie4_5_MoeExperts"),
        "layers.0.mlp.experts.down_proj": ((4, 32, 48), "Ernie4_5_MoeExperts"),
    }
    found = members(by_hand(parameters))
    assert found["layers.0.mlp.gate"] == ["weight", "moe_statics.e_score_correction_bias"]


def test_what_corrects_the_choice_of_experts_belongs_to_the_router():
    parameters = {
        "layers.0.mlp.expert_bias": ((4,), "AfmoeSparseMoeBlock"),
        "layers.0.mlp.router.gate.weight": ((4, 32), "Linear"),
        "layers.0.mlp.experts.gate_up_proj": ((4, 96, 32), "AfmoeExperts"),
        "layers.0.mlp.experts.down_proj": ((4, 32, 48), "AfmoeExperts"),
    }
    model = by_hand(parameters)
    found = {each.module: each.parameters for each in group(model, assign_roles(model))}
    assert set(found) == {"layers.0.mlp.router", "layers.0.mlp.experts"}
    assert found["layers.0.mlp.router"] == ("layers.0.mlp.expert_bias", "layers.0.mlp.router.gate.weight")


def test_groups_have_the_names_that_a_wrapped_model_has():
    model = renamed(
        stored("llama"),
        lambda name: (name + ".").replace("layers.0.", "layers.0._orig_mod.")[:-1],
        {"model.layers.0": "OptimizedModule"},
    )
    found = members(model)
    assert found["model.layers.0._orig_mod.self_attn"] == [
        f"{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    ]
    assert "model.layers.0._orig_mod.input_layernorm" in found


def test_an_adapter_stands_with_its_linear():
    model = stored("llama")
    place = "model.layers.0.mlp.up_proj"
    added = tuple(
        ParameterDescription(f"{place}.{name}", shape, "float32", "Linear")
        for name, shape in (("lora_A.weight", (2, 32)), ("lora_B.weight", (48, 2)))
    )
    found = members(replace(model, parameters=model.parameters + added))
    assert found["model.layers.0.mlp"][-2:] == ["up_proj.lora_A.weight", "up_proj.lora_B.weight"]
