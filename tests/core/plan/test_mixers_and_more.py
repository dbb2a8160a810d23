"""Mixers of tokens, indexes of keys, gates of heads, bent activations: tables written from the forward code of each."""

from __future__ import annotations

import pytest

import hyper_parallel as hp
from hyper_parallel import ModelDescription, PlanError
from hyper_parallel.core.plan.contracts import BoundaryPlan
from tests.core.plan.by_hand import HEADS, by_hand
from tests.core.plan.linting import mended
from tests.core.plan.test_other_families import TENSOR, Parameters, placed, sides

LATENT = {
    "kv_lora_rank": 12,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}


def block(place: str, owner: str, parameters: Parameters, indexer: str = "", **config: object) -> ModelDescription:
    """A model whose first block holds nothing but these parameters below `place`, of a module of class `owner`; what is
    called `indexer` there has the class `indexer`."""
    named = {f"layers.0.{place}.{name}": value for name, value in parameters.items()}
    classes = {f"layers.0.{place}": owner, f"layers.0.{place}.indexer": indexer}
    return by_hand(
        named, {"layers": "ModuleList"} | {name: each for name, each in classes.items() if each}, HEADS | config
    )


def plain(**shapes: tuple[int, int]) -> Parameters:
    return {f"{name}.weight": (shape, "Linear") for name, shape in shapes.items()}


def attention(**more: tuple[int, int]) -> Parameters:
    return plain(q_proj=(32, 32), k_proj=(16, 32), v_proj=(16, 32), o_proj=(32, 32), **more)


DELTA_NET = {
    # Two key heads and four value heads of 8: 16 + 16 + 32 mixed features. A norm over one head, the same for all.
    "conv1d.weight": ((64, 1, 4), "Conv1d"),
    "norm.weight": ((8,), "Qwen3NextRMSNormGated"),
    "A_log": ((4,), "Qwen3NextGatedDeltaNet"),
    "dt_bias": ((4,), "Qwen3NextGatedDeltaNet"),
}
QWEN3_NEXT = block(
    "linear_attn",
    "Qwen3NextGatedDeltaNet",
    plain(in_proj_qkvz=(96, 32), in_proj_ba=(8, 32), out_proj=(32, 32)) | DELTA_NET,
)
CUT, CLOSES, WHOLE, PENDING = "shard(0)", "shard(1)", "whole", "whole pending"
ATTENTION = {"q_proj.weight": CUT, "k_proj.weight": CUT, "v_proj.weight": CUT, "o_proj.weight": CLOSES}
INNER = {"conv1d.weight": WHOLE, "norm.weight": WHOLE, "A_log": WHOLE, "dt_bias": WHOLE}

MODELS: dict[str, tuple[ModelDescription, dict[str, str]]] = {
    # in_proj_qkvz(x) and in_proj_ba(x) are dealt out to key heads by views, so nothing but all of them will do.
    "qwen3_next": (
        QWEN3_NEXT,
        INNER | {"in_proj_qkvz.weight": CUT, "in_proj_ba.weight": CUT, "out_proj.weight": CLOSES},
    ),
    # in_proj_qkv(x) goes through conv1d as a whole, then splits into blocks of 16, 16 and 32.
    "qwen3_5": (
        block(
            "linear_attn",
            "Qwen3_5GatedDeltaNet",
            plain(in_proj_qkv=(64, 32), in_proj_z=(32, 32), in_proj_b=(4, 32), in_proj_a=(4, 32), out_proj=(32, 32))
            | DELTA_NET,
        ),
        INNER | {f"in_proj_{name}.weight": CUT for name in ("qkv", "z", "b", "a")} | {"out_proj.weight": CLOSES},
    ),
    # The same with projections of their own; o_norm(mixed, g_proj(x)).
    "olmo_hybrid": (
        block(
            "linear_attn",
            "OlmoHybridGatedDeltaNet",
            plain(q_proj=(16, 32), k_proj=(16, 32), v_proj=(32, 32), g_proj=(32, 32))
            | plain(a_proj=(4, 32), b_proj=(4, 32), o_proj=(32, 32))
            | {("o_norm.weight" if name == "norm.weight" else name): value for name, value in DELTA_NET.items()},
        ),
        {f"{name}_proj.weight": CUT for name in "qkvgab"}
        | {"o_proj.weight": CLOSES, "o_norm.weight": WHOLE, "conv1d.weight": WHOLE, "A_log": WHOLE, "dt_bias": WHOLE},
    ),
    # g_b(g_a(x)) and f_b(f_a(x)): the second of each works on what all ranks have.
    "kimi_linear": (
        block(
            "self_attn",
            "KimiLinearDeltaAttention",
            plain(q_proj=(32, 32), k_proj=(32, 32), v_proj=(32, 32), b_proj=(4, 32), o_proj=(32, 32))
            | plain(g_a_proj=(8, 32), g_b_proj=(32, 8))
            | {
                "conv1d.weight": ((96, 1, 4), "Conv1d"),
                "o_norm.weight": ((8,), "KimiLinearRMSNormGated"),
                "forget_gate.f_a_proj.weight": ((8, 32), "Linear"),
                "forget_gate.f_b_proj.weight": ((32, 8), "Linear"),
                "forget_gate.dt_bias": ((32,), "KimiLinearForgetGate"),
                "forget_gate.A_log": ((1, 1, 4, 1), "KimiLinearForgetGate"),
            },
        ),
        {f"{name}.weight": CUT for name in ("q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj", "forget_gate.f_a_proj")}
        | {"o_proj.weight": CLOSES, "g_b_proj.weight": WHOLE, "conv1d.weight": WHOLE, "o_norm.weight": WHOLE}
        | {f"forget_gate.{name}": WHOLE for name in ("f_b_proj.weight", "dt_bias", "A_log")},
    ),
    # in_proj(x).chunk(3), a convolution over each of 32 channels, out_proj.
    "lfm3": (
        block(
            "conv",
            "Lfm3ShortConv",
            plain(in_proj=(96, 32), out_proj=(32, 32))
            | {"in_proj.bias": ((96,), "Linear"), "out_proj.bias": ((32,), "Linear")}
            | {"conv.weight": ((32, 1, 7), "Conv1d")},
        ),
        {
            "in_proj.weight": CUT,
            "in_proj.bias": CUT,
            "conv.weight": WHOLE,
            "out_proj.weight": CLOSES,
            "out_proj.bias": PENDING,
        },
    ),
    # qkv_proj(x).view(.., heads, 3 * 8); one mean over all heads in `norm`; sigmoid(output_gate(x)) on all features.
    "minimax": (
        block(
            "self_attn",
            "MiniMaxLightningAttention",
            plain(qkv_proj=(96, 32), output_gate=(32, 32), out_proj=(32, 32))
            | {"norm.weight": ((32,), "MiniMaxRMSNorm")},
        ),
        {"qkv_proj.weight": CUT, "output_gate.weight": CUT, "out_proj.weight": CLOSES, "norm.weight": WHOLE},
    ),
    # softplus(g_proj(x)): one gate for each head.
    "laguna": (
        block("self_attn", "LagunaAttention", attention(g_proj=(4, 32))),
        ATTENTION | {"g_proj.weight": CUT},
    ),
    # The same with a gate for each feature of each head.
    "laguna, feature by feature": (
        block("self_attn", "LagunaAttention", attention(g_proj=(32, 32))),
        ATTENTION | {"g_proj.weight": CUT},
    ),
    # gate_proj(x).view(.., heads, 8) + gate_bias[:, None].
    "beam": (
        block(
            "self_attn",
            "BeamAttention",
            attention(gate_proj=(32, 32)) | {"gate_bias": ((4,), "BeamAttention")},
        ),
        ATTENTION | {"gate_proj.weight": CUT, "gate_bias": CUT},
    ),
    # query, value, key = qkv_proj(x).view(.., 4, 24).split(8): four groups, whatever the number of ranks.
    "codegen": (
        block("attn", "CodeGenAttention", plain(qkv_proj=(96, 32), out_proj=(32, 32))),
        {"qkv_proj.weight": CUT, "out_proj.weight": CLOSES},
    ),
    # q and k are views by 8, v by v_head_dim; sliding layers have twice as many keys as the configuration says: 2 * 2.
    "mimo_v2_flash": (
        block(
            "self_attn",
            "MiMoV2FlashAttention",
            plain(q_proj=(32, 32), k_proj=(32, 32), v_proj=(16, 32), o_proj=(32, 16))
            | {"sinks": ((4,), "MiMoV2FlashAttention")},
            v_head_dim=4,
        ),
        ATTENTION | {"sinks": CUT},
    ),
    # per_layer_config: this layer's heads have 16 features.
    "gemma4_unified": (
        block(
            "self_attn",
            "Gemma4UnifiedTextAttention",
            plain(q_proj=(64, 32), k_proj=(32, 32), v_proj=(32, 32), o_proj=(32, 64))
            | {f"{name}.weight": ((16,), "Gemma4UnifiedRMSNorm") for name in ("q_norm", "k_norm")},
            per_layer_config={"00": {"head_dim": 16}, "1": {"head_dim": 4}},
        ),
        ATTENTION | {"q_norm.weight": PENDING, "k_norm.weight": PENDING},
    ),
    # post_mlp_layernorm(experts(x) + shared_experts(x)): the norm needs the whole sum.
    "axk1": (
        block(
            "mlp",
            "AXK1MoE",
            {
                "experts.gate_up_proj": ((4, 48, 32), "AXK1Experts"),
                "experts.down_proj": ((4, 32, 24), "AXK1Experts"),
                "gate.weight": ((4, 32), "AXK1TopkRouter"),
                "gate.e_score_correction_bias": ((4,), "AXK1TopkRouter"),
                "shared_experts.gate_proj.weight": ((24, 32), "Linear"),
                "shared_experts.up_proj.weight": ((24, 32), "Linear"),
                "shared_experts.down_proj.weight": ((32, 24), "Linear"),
                "post_mlp_layernorm.weight": ((32,), "AXK1RMSNorm"),
            },
        ),
        {"experts.gate_up_proj": "strided_shard(1, 2)", "experts.down_proj": "shard(2)", "gate.weight": PENDING}
        | {"shared_experts.gate_proj.weight": CUT, "shared_experts.up_proj.weight": CUT}
        | {"shared_experts.down_proj.weight": CLOSES, "gate.e_score_correction_bias": WHOLE}
        | {"post_mlp_layernorm.weight": WHOLE},
    ),
    # act_fn is a function of each inner feature with two numbers, the same for all.
    "apertus": (
        block(
            "mlp",
            "ApertusMLP",
            plain(up_proj=(48, 32), down_proj=(32, 48))
            | {f"act_fn.{name}": ((1,), "XIELUActivation") for name in ("alpha_p", "alpha_n")},
        ),
        {"up_proj.weight": CUT, "down_proj.weight": CLOSES, "act_fn.alpha_p": PENDING, "act_fn.alpha_n": PENDING},
    ),
    # The indexer scores all tokens by x and by the latent of queries, without a gradient, and gives the best keys.
    "deepseek_v32": (
        block(
            "self_attn",
            "DeepseekV32Attention",
            plain(
                q_a_proj=(16, 32), q_b_proj=(48, 16), kv_a_proj_with_mqa=(16, 32), kv_b_proj=(64, 12), o_proj=(32, 32)
            )
            | {
                f"indexer.{name}": value
                for name, value in plain(wq_b=(16, 16), wk=(8, 32), weights_proj=(2, 32)).items()
            }
            | {f"indexer.k_norm.{leaf}": ((8,), "LayerNorm") for leaf in ("weight", "bias")}
            | {"q_a_layernorm.weight": ((16,), "DeepseekV32RMSNorm")}
            | {"kv_a_layernorm.weight": ((12,), "DeepseekV32RMSNorm")},
            indexer="DeepseekV32Indexer",
            **LATENT,
        ),
        {f"indexer.{name}.weight": WHOLE for name in ("wq_b", "wk", "weights_proj", "k_norm")}
        | {"indexer.k_norm.bias": WHOLE, "q_b_proj.weight": CUT, "kv_b_proj.weight": CUT, "o_proj.weight": CLOSES}
        | {f"{name}.weight": PENDING for name in ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")},
    ),
}


@pytest.mark.parametrize("family", MODELS)
def test_every_parameter_is_placed_as_its_code_uses_it(family):
    model, expected = MODELS[family]
    place = model.parameters[0].name.split(".")[2]
    assert placed(model) == {f"layers.0.{place}.{name}": code for name, code in expected.items()}


def boundary(plan: hp.ShardingPlan, module: str) -> BoundaryPlan:
    return next(each for each in plan.boundaries if each.module == f"layers.0.{module}")


def test_a_mixer_gets_all_that_its_projections_give_and_closes_with_its_own_part():
    plan = hp.plan(QWEN3_NEXT, TENSOR)
    mixer, opens, closes = (boundary(plan, f"linear_attn{each}") for each in ("", ".in_proj_ba", ".out_proj"))
    assert mixer.kind == "mixer"
    assert sides(mixer.outputs[0]) == ("partial", "shard(1)")
    assert (opens.outputs[0].name, sides(opens.outputs[0])) == ("features", ("shard(2)", "replicate"))
    assert (closes.inputs[0].name, sides(closes.inputs[0])) == ("features", ("replicate", "shard(2)"))
    # Hidden states get a part of their gradient from each projection of each rank; features get all of it on each.
    assert str(opens.inputs[0].source_gradient["tensor"]) == "partial"
    assert opens.outputs[0].gradient.get("tensor", hp.Replicate()) == hp.Replicate()


def test_a_norm_at_the_end_of_a_block_of_experts_gets_whole_sums():
    model, _ = MODELS["axk1"]
    plan = hp.plan(model, TENSOR)
    norm, around = boundary(plan, "mlp.post_mlp_layernorm"), boundary(plan, "mlp")
    assert (norm.kind, sides(norm.inputs[0])) == ("sum_norm", ("partial", "replicate"))
    assert sides(norm.outputs[0]) == ("replicate", "partial")  # all of it on one rank
    assert sides(around.outputs[0]) == ("partial", "shard(1)")
    whole = hp.plan(model, TENSOR, {"parameters": {"layers.0.mlp.**": {"placements": {"tensor": "replicate"}}}})
    assert all(each.is_trivial for each in boundary(whole, "mlp.post_mlp_layernorm").inputs)


def test_over_context_a_mixer_hands_on_what_it_knows_by_itself():
    plan = hp.plan(QWEN3_NEXT, hp.DeviceMesh((2, 2), ("context", "tensor")))
    mixer = boundary(plan, "linear_attn")
    assert (mixer.region, mixer.note) == ("opaque", "what a mixer knows of the tokens before is handed on over context")


def test_more_ranks_than_rows_of_a_small_projection():
    plan = hp.plan(QWEN3_NEXT, hp.DeviceMesh((16,), ("tensor",)))
    assert plan["layers.0.linear_attn.in_proj_ba.weight"].local_shape == (1, 32)


FEW_GROUPS = block(
    "self_attention",
    "FalconAttention",
    plain(query_key_value=(64, 32), dense=(32, 32)),
    new_decoder_architecture=True,
    num_kv_heads=2,
)


def test_as_many_keys_as_there_are_rows_for():
    plan = hp.plan(MODELS["mimo_v2_flash"][0], hp.DeviceMesh((4,), ("tensor",)))
    assert plan["layers.0.self_attn.k_proj.weight"].local_shape == (8, 32)
    assert plan["layers.0.self_attn.v_proj.weight"].local_shape == (4, 32)


def test_fewer_groups_of_heads_than_ranks_are_gathered():
    for ranks, gathers in ((2, False), (4, True)):
        plan = hp.plan(FEW_GROUPS, hp.DeviceMesh((ranks,), ("tensor",)))
        fused = plan["layers.0.self_attention.query_key_value.weight"]
        assert fused.local_shape == (64 // ranks, 32)
        note = "2 groups of heads for 4 tensor ranks: cut as one, and its output is gathered"
        assert fused.notes == ((note,) if gathers else ())
        assert any(each.module.endswith("query_key_value") for each in plan.boundaries) == gathers


REFUSED: dict[str, tuple[ModelDescription, str]] = {
    "a mixer of a class that is not known": (
        block("linear_attn", "OwnDeltaNet", plain(in_proj_qkvz=(96, 32), out_proj=(32, 32))),
        "no rule knows 'in_proj_qkvz.weight', [96, 32] of a Linear in a OwnDeltaNet",
    ),
    "a norm over a sum in a block of a class that is not known": (
        block(
            "mlp",
            "OwnMoE",
            {
                "experts.gate_up_proj": ((4, 48, 32), "AXK1Experts"),
                "experts.down_proj": ((4, 32, 24), "AXK1Experts"),
                "gate.weight": ((4, 32), "AXK1TopkRouter"),
                "post_mlp_layernorm.weight": ((32,), "AXK1RMSNorm"),
            },
        ),
        "no rule knows 'post_mlp_layernorm.weight', [32] of a AXK1RMSNorm in a OwnMoE; 'mlp' is cut around it",
    ),
    "a mixer that nothing closes": (
        block("linear_attn", "Qwen3NextGatedDeltaNet", plain(in_proj_qkvz=(96, 32)) | DELTA_NET),
        "'layers.0.linear_attn': expected one mixer_output that closes the cut, found 0",
    ),
    "as many gates as neither heads nor features": (
        block("self_attn", "LagunaAttention", attention(g_proj=(6, 32))),
        "layers.0.self_attn.g_proj.weight [6, 32] has 6 gates; expected one for each of 4 heads, or for each of their "
        "8 features",
    ),
    "heads of another size than this layer's": (
        block("self_attn", "OwnAttention", attention(), per_layer_config={"0": {"head_dim": 4}}),
        "dim 0 of layers.0.self_attn.q_proj.weight [32, 32] is 32, expected 16: 4 heads of 4 (num_attention_heads, "
        "num_key_value_heads, per_layer_config.0.head_dim)",
    ),
    "other heads in this layer than it has features for": (
        block("self_attn", "LagunaAttention", attention(), num_attention_heads_per_layer=[8, 4]),
        "expected 64: 8 heads of 8 (num_attention_heads_per_layer[0], num_key_value_heads, head_dim)",
    ),
    "a number for each inner feature": (
        block(
            "mlp",
            "ApertusMLP",
            plain(up_proj=(48, 32), down_proj=(32, 48)) | {"act_fn.alpha_p": ((48,), "XIELUActivation")},
        ),
        "layers.0.mlp.act_fn.alpha_p [48] has 48 elements, not one",
    ),
    "an index of a class that is not known": (
        block("self_attn", "OwnAttention", attention() | {"indexer.wk.weight": ((8, 32), "Linear")}, "OwnIndexer"),
        "no rule knows 'wk.weight', [8, 32] of a Linear in a OwnIndexer; 'self_attn' is cut around it",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_only_looks_alike_is_refused(case):
    model, message = REFUSED[case]
    with pytest.raises(PlanError) as refused:
        hp.plan(model, TENSOR)
    assert message in str(refused.value)


TWO = {"tensor": 2}


NEEDED = {
    "post_mlp_layernorm": ("axk1", "mlp", "sum from (tensor: partial) to (tensor: replicate)"),
    "in_proj_ba": ("qwen3_next", "linear_attn", "features from (tensor: shard(2)) to (tensor: replicate)"),
    "out_proj": ("qwen3_next", "linear_attn", "features from (tensor: replicate) to (tensor: shard(2))"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_a_boundary_that_gathers_or_sums_up_is_taken_away(name):
    family, around, needed = NEEDED[name]
    module = f"layers.0.{around}.{name}"
    (found,) = mended(MODELS[family][0], TWO, {"boundaries": {module: {"type": "none"}}})
    assert (found.rule, found.line) == ("contract", f"{module}: {{type: auto}}")
    assert found.message == (f"is none, and so nothing is done there inside of layers.0.{around}; needed is: {needed}")


def test_a_projection_that_is_kept_whole_in_a_cut_mixer():
    name = "layers.0.linear_attn.in_proj_ba.weight"
    asked = {"parameters": {name: {"placements": {"tensor": "replicate"}}}}
    (found,) = mended(QWEN3_NEXT, TWO, asked)
    assert (found.rule, found.line) == ("consistent", f"{name}: {{placements: {{tensor: auto}}}}")
    assert found.message == (
        "is whole over tensor, while layers.0.linear_attn.in_proj_qkvz.weight, which works on the same, is cut"
    )


def test_a_projection_of_a_cut_mixer_keeps_its_role():
    name = "layers.0.linear_attn.in_proj_ba.weight"
    (found,) = mended(QWEN3_NEXT, TWO, {"parameters": {name: {"role": "none"}}})
    assert (found.rule, found.line) == ("consistent", f"{name}: {{role: auto}}")
    assert "stays whole with role: none, while layers.0.linear_attn." in found.message


def test_what_an_override_keeps_whole_in_a_cut_mixer():
    name = "layers.0.linear_attn.conv1d.weight"
    (found,) = mended(QWEN3_NEXT, TWO, {"parameters": {name: {"role": "none"}}})
    assert (found.rule, found.line) == ("consistent", "layers.0.linear_attn.**: {role: none}")
    assert found.message == (
        "stays whole with role: none, and stands in the mixer layers.0.linear_attn, whose projections of hidden states "
        "are cut"
    )


def test_a_parameter_more_in_a_mixer_that_is_known():
    parameters = plain(in_proj_qkvz=(96, 32), in_proj_ba=(8, 32), out_proj=(32, 32), router=(4, 32)) | DELTA_NET
    (found,) = mended(block("linear_attn", "Qwen3NextGatedDeltaNet", parameters), TWO)
    assert (found.rule, found.line) == ("unknown", "layers.0.linear_attn.**: {role: none}")
    assert found.message == (
        "no rule knows 'router.weight', [4, 32] of a Linear in a Qwen3NextGatedDeltaNet; 'linear_attn' is cut around "
        "it, so it may be kept whole only if it mixes no heads or inner features; it stands in the mixer "
        "layers.0.linear_attn, whose projections of hidden states are cut"
    )


def test_a_whole_mixer_without_roles_runs_on_every_rank():
    plan = hp.plan(QWEN3_NEXT, TENSOR, {"parameters": {"layers.0.linear_attn.**": {"role": "none"}}})
    assert (
        boundary(plan, "linear_attn").kind == "whole"
        if len(plan.boundaries) > 1
        else plan.boundaries[0].kind == "whole"
    )
