"""Families that are not stored: planned by what their forward code does, or refused with every stranger told."""

from __future__ import annotations

import pytest

import hyper_parallel as hp
from hyper_parallel import ModelDescription, PlanError
from hyper_parallel.core.plan.contracts import Contract
from tests.core.plan.by_hand import HEADS, by_hand

TENSOR = hp.DeviceMesh((2,), ("tensor",))
Parameters = dict[str, tuple[tuple[int, ...], str]]


def placed(model: ModelDescription) -> dict[str, str]:
    """What `tensor` does to each parameter, and "pending" where its gradient is a partial sum."""
    plan = hp.plan(model, TENSOR, {"sequence_parallel": False})
    return {
        each.name: " ".join([str(each.placements.get("tensor", "whole")), *(["pending"] if each.pending else [])])
        for each in plan.parameters
    }


def linears(place: str, bias: bool = True, **shapes: tuple[int, int]) -> Parameters:
    found: Parameters = {f"{place}.{name}.weight": (shape, "Linear") for name, shape in shapes.items()}
    biases = {f"{place}.{name}.bias": ((shape[0],), "Linear") for name, shape in shapes.items()}
    return found | (biases if bias else {})


BLOOM_BLOCK = (
    linears("h.0.self_attention", query_key_value=(96, 32), dense=(32, 32))
    | linears("h.0.mlp", dense_h_to_4h=(128, 32), dense_4h_to_h=(32, 128))
    | {"word_embeddings.weight": ((96, 32), "Embedding"), "ln_f.weight": ((32,), "LayerNorm")}
)
BLOOM = by_hand(
    BLOOM_BLOCK,
    {"h": "ModuleList", "h.0": "BloomBlock", "h.0.self_attention": "BloomAttention", "h.0.mlp": "BloomMLP"},
    {"hidden_size": 32, "n_head": 4, "vocab_size": 96, "model_type": "bloom"},
)


def test_bloom_keeps_heads_together_in_its_fused_projection():
    found = placed(BLOOM)
    assert found["h.0.self_attention.query_key_value.weight"] == "shard(0)"
    assert found["h.0.self_attention.dense.weight"] == "shard(1)"
    assert found["h.0.self_attention.dense.bias"] == "whole pending"


def test_a_residual_that_is_added_inside_of_a_module_is_not_summed_up():
    plan = hp.plan(BLOOM, TENSOR)
    boundaries = {each.module: each for each in plan.boundaries}
    for module, linear in (("h.0.self_attention", "dense"), ("h.0.mlp", "dense_4h_to_h")):
        (outer,), (inner,) = boundaries[module].outputs, boundaries[f"{module}.{linear}"].outputs
        assert sides(outer) == ("shard(1)", "shard(1)")
        assert sides(inner) == ("partial", "shard(1)")


def sides(contract: Contract) -> tuple[str, str]:
    return str(contract.before["tensor"]), str(contract.after["tensor"])


def test_one_key_and_value_for_all_heads_are_made_whole():
    parameters = linears("h.0.attn", c_attn=(48, 32), c_proj=(32, 32))
    config = {"hidden_size": 32, "n_head": 4, "vocab_size": 96, "multi_query": True, "model_type": "gpt_bigcode"}
    model = by_hand(parameters, {"h": "ModuleList", "h.0.attn": "GPTBigCodeAttention"}, config)
    plan = hp.plan(model, TENSOR, {"sequence_parallel": False})
    boundaries = {each.module: each for each in plan.boundaries}
    assert sides(boundaries["h.0.attn.c_attn"].outputs[0]) == ("shard(2)", "replicate")
    assert sides(boundaries["h.0.attn.c_proj"].inputs[0]) == ("replicate", "shard(2)")
    assert placed(model)["h.0.attn.c_attn.bias"] == "shard(0)"


def test_norms_with_weights_for_each_head_go_with_their_heads():
    parameters = linears(
        "layers.0.self_attn", False, q_proj=(32, 32), k_proj=(16, 32), v_proj=(16, 32), o_proj=(32, 32)
    )
    parameters |= {
        "layers.0.self_attn.q_norm.weight": ((4, 8), "CohereLayerNorm"),
        "layers.0.self_attn.k_norm.weight": ((2, 8), "CohereLayerNorm"),
    }
    found = placed(by_hand(parameters, {"layers": "ModuleList", "layers.0.self_attn": "CohereAttention"}))
    assert found["layers.0.self_attn.q_norm.weight"] == "shard(0)"
    assert found["layers.0.self_attn.k_norm.weight"] == "shard(0)"


def test_halves_of_a_feed_forward_layer_without_a_module_hand_features_on():
    parameters = linears("layers.0", fc1=(48, 32), fc2=(32, 48)) | {
        "layers.0.final_layer_norm.weight": ((32,), "LayerNorm")
    }
    parameters |= linears("layers.0.self_attn", q_proj=(32, 32), k_proj=(16, 32), v_proj=(16, 32), out_proj=(32, 32))
    plan = hp.plan(by_hand(parameters, {"layers": "ModuleList", "layers.0": "OPTDecoderLayer"}), TENSOR)
    boundaries = {each.module: each for each in plan.boundaries}
    assert sides(boundaries["layers.0.fc1"].outputs[0]) == ("shard(2)", "shard(2)")
    assert sides(boundaries["layers.0.fc2"].inputs[0]) == ("shard(2)", "shard(2)")
    assert sides(boundaries["layers.0.fc2"].outputs[0]) == ("partial", "shard(1)")


STRANGERS: dict[str, Parameters] = {
    "a state-space mixer": {
        "layers.0.mixer.A_log": ((8,), "Mamba2Mixer"),
        "layers.0.mixer.conv1d.weight": ((64, 1, 4), "Conv1d"),
        "layers.0.mixer.in_proj.weight": ((136, 32), "Linear"),
        "layers.0.mixer.out_proj.weight": ((32, 64), "Linear"),
    },
    "linear attention": {
        "layers.0.linear_attn.in_proj_qkvz.weight": ((96, 32), "Linear"),
        "layers.0.linear_attn.dt_bias": ((4,), "Qwen3NextGatedDeltaNet"),
    },
    "time mixing": {
        "layers.0.attention.time_decay": ((32,), "RwkvSelfAttention"),
        "layers.0.attention.receptance.weight": ((32, 32), "Linear"),
    },
    "differential attention": linears(
        "layers.0.self_attn", False, q_proj=(32, 32), k_proj=(16, 32), v_proj=(16, 32), o_proj=(32, 32)
    )
    | {"layers.0.self_attn.lambda_q1": ((8,), "DiffLlamaAttention")},
    "an index of keys": linears(
        "layers.0.self_attn", False, q_proj=(32, 32), k_proj=(16, 32), v_proj=(16, 32), o_proj=(32, 32)
    )
    | {"layers.0.self_attn.indexer.wk.weight": ((8, 32), "Linear")},
    "a norm inside of attention": linears(
        "layers.0.self_attn", False, q_proj=(32, 32), k_proj=(16, 32), v_proj=(16, 32), o_proj=(32, 32)
    )
    | {"layers.0.self_attn.attn_sub_norm.weight": ((32,), "BitNetRMSNorm")},
    "attention to another sequence": linears("layers.0.encoder_attn", q_proj=(32, 32), k_proj=(32, 32)),
    "experts of a class that is not known": {
        "layers.0.mlp.experts.gate_up_proj": ((4, 48, 32), "OwnExperts"),
        "layers.0.mlp.experts.down_proj": ((4, 32, 24), "OwnExperts"),
    },
    "a fused projection of a class that is not known": linears("layers.0.attn", qkv_proj=(96, 32), out_proj=(32, 32)),
}

KNOWN = {"q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"}


@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_are_told_one_by_one(kind):
    with pytest.raises(PlanError) as refused:
        hp.plan(by_hand(STRANGERS[kind], {"layers": "ModuleList"}, HEADS), TENSOR)
    for name in STRANGERS[kind]:
        known = "self_attn" in name and ".".join(name.split(".")[-2:]) in KNOWN
        assert known or name in str(refused.value)
