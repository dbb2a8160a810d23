"""Models renamed in small ways: the same plan under other names, or a refusal of every parameter; never another cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

import hyper_parallel as hp
from hyper_parallel import ModelDescription, PlanError, ShardingPlan
from hyper_parallel.core.plan.model import ParameterDescription
from tests.core.plan.by_hand import renamed, stored
from tests.core.plan.placement_truth import PLACES

MESH = hp.DeviceMesh((2, 2), ("shard", "tensor"))


def told(plan: ShardingPlan) -> dict[str, tuple]:
    return {each.name: (each.role, dict(each.placements), each.pending) for each in plan.parameters}


def same_or_refused(model: ModelDescription, change) -> bool:
    """True where the renamed model has the same plan, false where it is refused by name; anything else fails."""
    plain = told(hp.plan(model, MESH))
    try:
        found = told(hp.plan(renamed(model, change, {}), MESH))
    except PlanError as error:
        assert "can't be planned" in str(error) and "[" in str(error)
        return False
    assert found == {change(name): each for name, each in plain.items()}
    return True


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model.", "net.", "wrapped.inner.module."])
@pytest.mark.parametrize("name", sorted(PLACES))
def test_prefixes_change_nothing(name, prefix):
    assert same_or_refused(stored(name), lambda each: prefix + each)


@pytest.mark.parametrize("wrapper", ["module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt2", "gpt_oss", "phi3", "falcon", "olmo2"])
def test_wrappers_around_blocks_change_nothing(name, wrapper):
    def change(each: str) -> str:
        for number in "01":
            each = each.replace(f".{number}.", f".{number}.{wrapper}.", 1)
        return each

    assert same_or_refused(stored(name), change)


SMALL_CHANGES = {
    "attn_block": ("self_attn", "attn_block"),
    "attention": ("self_attn", "attention"),
    "mixer": ("self_attn", "mixer"),
    "query_proj": ("q_proj", "query_proj"),
    "to_q": ("q_proj", "to_q"),
    "proj": ("o_proj", "proj"),
    "wo": ("o_proj", "wo"),
    "ff": (".mlp", ".ff"),
    "feed_forward": (".mlp", ".feed_forward"),
    "fc_up": ("up_proj", "fc_up"),
    "fc_down": ("down_proj", "fc_down"),
    "blocks": ("model.layers", "model.blocks"),
    "ln_1": ("input_layernorm", "ln_1"),
    "vocab": ("embed_tokens", "vocab"),
    "unembed": ("lm_head", "unembed"),
    "moe": ("experts", "specialists"),
    "chooser": ("mlp.gate.", "mlp.chooser."),
    "sink_logits": ("sinks", "sink_logits"),
    "qk_norm": ("q_norm", "norm_of_queries"),
}


@pytest.mark.parametrize("change", SMALL_CHANGES)
@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", "phi3", "olmo2", "llama_bias"]
)
def test_small_changes_of_names_give_the_same_plan_or_a_refusal(name, change):
    old, new = SMALL_CHANGES[change]
    same_or_refused(stored(name), lambda each: each.replace(old, new))


@pytest.mark.parametrize("change", ["attention", "query_proj", "wo", "feed_forward", "blocks", "ln_1", "attn_block"])
def test_usual_names_are_known(change):
    old, new = SMALL_CHANGES[change]
    assert same_or_refused(stored("llama"), lambda each: each.replace(old, new))


LINEARS = {"q_proj": "out", "k_proj": "out", "v_proj": "out", "o_proj": "in", "gate_proj": "out", "down_proj": "in"}


@pytest.mark.parametrize("linear", LINEARS)
def test_adapters_around_linears_follow_their_cut(linear):
    model = stored("llama")
    holder = "mlp" if linear in ("gate_proj", "down_proj") else "self_attn"
    place = f"model.layers.0.{holder}.{linear}"
    out, into = next(each.shape for each in model.parameters if each.name == f"{place}.weight")
    wrapped = renamed(
        model,
        lambda name: name.replace(f"{place}.", f"{place}.base_layer."),
        {place: "AdapterLinear", f"{place}.base_layer": "Linear"},
    )
    factors = {"lora_A": (4, into), "lora_B": (out, 4)}
    added = tuple(
        ParameterDescription(f"{place}.{factor}.default.weight", shape, "float32", "Linear")
        for factor, shape in factors.items()
    )
    plan = hp.plan(replace(wrapped, parameters=wrapped.parameters + added), hp.DeviceMesh((2,), ("tensor",)))
    reads, writes = (plan[f"{place}.{factor}.default.weight"] for factor in factors)
    plain = hp.plan(model, hp.DeviceMesh((2,), ("tensor",)))[f"{place}.weight"]
    assert plan[f"{place}.base_layer.weight"].placements == plain.placements
    whole, cut, dim = (writes, reads, 1) if LINEARS[linear] == "in" else (reads, writes, 0)
    assert {axis: str(each) for axis, each in cut.placements.items()} == {"tensor": f"shard({dim})"}
    assert not cut.pending
    # Each rank adds a part of what the whole factor makes, or makes a part of its gradient.
    assert not whole.placements and whole.pending == ("tensor",)


def test_boundaries_of_a_fused_projection_stand_around_its_adapter():
    model = stored("falcon")
    place = "transformer.h.0.self_attention.query_key_value"
    wrapped = renamed(
        model,
        lambda name: name.replace(f"{place}.", f"{place}.base_layer."),
        {place: "AdapterLinear", f"{place}.base_layer": "FalconLinear"},
    )
    added = tuple(
        ParameterDescription(f"{place}.{factor}.default.weight", shape, "float32", "Linear")
        for factor, shape in {"lora_A": (4, 32), "lora_B": (48, 4)}.items()
    )
    plan = hp.plan(replace(wrapped, parameters=wrapped.parameters + added), hp.DeviceMesh((2,), ("tensor",)))
    modules = [each.module for each in plan.boundaries if each.module.startswith(place)]
    assert modules == [place]
