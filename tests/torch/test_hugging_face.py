"""Plans of Hugging Face's models, carried out: ranks run the unmodified forward on their parts; all make the model."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hyper_parallel as hp
from hyper_parallel import PlanError, backends
from hyper_parallel.core.plan.model import describe
from hyper_parallel.core.plan.roles import assign_roles
from tests.torch.all_ranks import double_precision, gradients_of_all_ranks, logits_layout

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEAD = {"head_dim": 8}
EACH = {"num_key_value_heads": 4}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
SHARED = {"n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = EACH | {
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
INDEX = EXPERTS | LATENT | SHARED | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 3}
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 2,
}
KIMI = {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 2, "kda_layers": [1], "full_attn_layers": [2]}
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
BY_LAYER = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
GRANITE = {"shared_intermediate_size": 24, "layer_types": ["attention"] * 2, "mamba_n_heads": 4}
SHARED_EXPERT = {"shared_expert_intermediate_size": 24}
SHORT = EACH | {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "rotary_dim": 4}

FALCON_RW = {"alibi": True, "new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4}

FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", HEAD),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama with tied embeddings": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", HEAD),
    "mixtral": ("mixtral", EXPERTS),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", HEAD),
    "qwen3_moe": ("qwen3_moe", HEAD | EXPERTS),
    "deepseek_v2": ("deepseek_v2", EXPERTS | LATENT | SHARED | {"head_dim": 4}),
    "deepseek_v3": ("deepseek_v3", EXPERTS | LATENT | SHARED),
    "glm4": ("glm4", HEAD | {"attention_bias": True}),
    "glm4_moe": ("glm4_moe", HEAD | EXPERTS | SHARED | {"use_qk_norm": True}),
    "gemma2": ("gemma2", HEAD),
    "gemma3": ("gemma3_text", HEAD),
    "phi3": ("phi3", {}),
    "gpt2": ("gpt2", SHORT),
    "gpt_neox": ("gpt_neox", {}),
    "falcon with one key": ("falcon", {"new_decoder_architecture": False, "multi_query": True, "num_kv_heads": 1}),
    "falcon with groups": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 4}),
    "falcon with fewer groups": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "olmo2": ("olmo2", {}),
    "gpt_oss": ("gpt_oss", HEAD | EXPERTS),
    "apertus": ("apertus", {}),
    "deepseek_v32": ("deepseek_v32", INDEX),
    "qwen3_next": ("qwen3_next", HEAD | EXPERTS | SHARED_EXPERT | DELTA_NET),
    "qwen3_5": ("qwen3_5_text", HEAD | DELTA_NET),
}
"""Those that have to be planned without an override: on two and four ranks, with sequence parallelism and without."""

OTHERS: dict[str, tuple[str, dict]] = {
    name: (name, sizes)
    for sizes, names in (
        (
            {},
            "arcee cohere cohere2 cwm ernie4_5 exaone exaone4 gemma glm granite granite_swa hyperclovax internlm3 "
            "iquestcoder jais2 lfm2 ministral3 nanochat olmo olmo3 persimmon phi seed_oss smollm3 stablelm starcoder2 "
            "vaultgemma",
        ),
        (EACH, "biogpt"),
        (HEAD, "helium hunyuan_v1_dense ministral nemotron"),
        (
            EXPERTS,
            "afmoe aria_text cohere2_moe ernie4_5_moe exaone_moe flex_olmo granitemoe granitemoe_swa granitemoeshared "
            "hy_v3 llama4_text mellum minimax_m2 olmoe phimoe qwen2_moe sarvam_moe solar_open",
        ),
        (EXPERTS | LATENT | SHARED, "axk1 flint glm4_moe_lite sarvam_mla"),
        (LATENT, "minicpm3 youtu"),
        (SHORT, "gpt_bigcode gptj openai-gpt"),
        (EACH | {"num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}, "gpt_neo"),
        (EACH | {"ffn_dim": 48, "word_embed_proj_dim": 32}, "opt"),
        (EACH | {"n_head": 4, "n_layer": 2}, "bloom"),
        (EACH | {"d_model": 32, "n_heads": 4, "n_layers": 2}, "mpt"),
        (HEAD | EXPERTS | SHARED | {"max_window_layers": 2, "sliding_window": None}, "dots1"),
        (HEAD | {"num_experts": 4, "moe_topk": 2}, "hunyuan_v1_moe"),
        (EXPERTS | {"layer_types": ["full_attention"] * 2}, "lfm2_moe"),
        ({}, "apertus1p5_text"),
        (SHORT, "codegen"),
        (EACH | {"intermediate_multiple_size": 2}, "gpt_neox_japanese"),
        (EACH | {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}, "xglm"),
        (EXPERTS | GRANITE, "granitemoehybrid"),
        (HEAD | EXPERTS, "beam"),
        (HEAD | EXPERTS | SHARED_EXPERT, "kolibri1"),
        (HEAD | EXPERTS | {"dense_intermediate_size": 48, "shared_intermediate_size": 24}, "minimax_m3_vl_text"),
        (HEAD | EXPERTS | SHARED_EXPERT | {"num_attention_heads_per_layer": [4, 4]}, "laguna"),
        (INDEX | {"indexer_types": ["full", "shared"]}, "glm_moe_dsa"),
        (HEAD | EXPERTS | SHARED_EXPERT | DELTA_NET, "lara_mini qwen3_5_moe_text"),
        (DELTA_NET, "olmo_hybrid"),
        (EXPERTS | LATENT | SHARED | {"layer_types": DELTA_NET["layer_types"]}, "bailing_hybrid"),
        (EXPERTS | LATENT | SHARED | {"linear_attn_config": KIMI}, "kimi_linear"),
        (HEAD | EXPERTS | {"layer_types": DELTA_NET["layer_types"], "block_size": 4}, "minimax"),
        (HEAD | CONVOLUTION | {"conv_bias": True}, "lfm3"),
        (HEAD | BY_LAYER | {"global_head_dim": 16}, "gemma4_unified_text"),
        (HEAD | EXPERTS | BY_LAYER | {"v_head_dim": 4, "mlp_layer_types": ["dense", "sparse"]}, "mimo_v2_flash"),
    )
    for name in names.split()
} | {
    "laguna with more heads in one layer": (
        "laguna",
        HEAD | EXPERTS | SHARED_EXPERT | {"num_attention_heads_per_layer": [4, 8]},
    ),
    "granitemoehybrid without experts": ("granitemoehybrid", GRANITE | {"num_local_experts": 0}),
    "granitemoeshared with a shared expert": ("granitemoeshared", EXPERTS | {"shared_intermediate_size": 24}),
    "phi3 with as many keys as queries": ("phi3", EACH),
    "gpt_bigcode with as many keys as queries": ("gpt_bigcode", SHORT | {"multi_query": False}),
    "mpt with clipped projections": (
        "mpt",
        EACH | {"d_model": 32, "n_heads": 4, "n_layers": 2, "attn_config": {"clip_qkv": 0.1}},
    ),
    "opt with narrower embeddings": ("opt", EACH | {"ffn_dim": 48, "word_embed_proj_dim": 16}),
    "falcon with slopes": ("falcon", FALCON_RW | {"bias": True}),
    "falcon with slopes and one key": ("falcon", FALCON_RW | {"multi_query": True}),
    "ernie4_5_moe with biases": ("ernie4_5_moe", EXPERTS | {"use_bias": True}),
    "deepseek_v2 with biases": ("deepseek_v2", EXPERTS | LATENT | SHARED | {"head_dim": 4, "mlp_bias": True}),
    "hy_v3 with biases": ("hy_v3", EXPERTS | {"mlp_bias": True}),
    "aria_text with biases": ("aria_text", EXPERTS | {"mlp_bias": True}),
    "lfm2 with convolutions": ("lfm2", CONVOLUTION),
    "lfm2_moe with convolutions": ("lfm2_moe", EXPERTS | CONVOLUTION),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread_for_each_rank():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(model_type: str, sizes: dict) -> torch.nn.Module:
    config = AutoConfig.for_model(model_type, **(SIZES | sizes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    if any("experts" in name for name, _ in model.named_modules()):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1)  # norms and biases too: none may look like another
    return model


def inputs_for(model: torch.nn.Module) -> dict:
    """Tokens only: positions and masks are the model's own."""
    return {"input_ids": torch.randint(1, 96, (2, 8)), "use_cache": False}


def hold_against_the_model(model_type: str, sizes: dict, ranks: int, sequence_parallel: bool) -> None:
    with double_precision():
        model = build(model_type, sizes)
        plan = hp.plan(model, hp.DeviceMesh.from_sizes({"tensor": ranks}), {"sequence_parallel": sequence_parallel})
        inputs, weights = inputs_for(model), torch.randn(2, 8, 96)
        logits = model(**inputs).logits
        (logits * weights).sum().backward()
        for rank, (found, gradients) in enumerate(gradients_of_all_ranks(model, plan, inputs, weights)):
            assert close(found, logits.detach(), logits_layout(plan, logits.shape), rank), f"rank {rank}: logits"
            for name, parameter in model.named_parameters():
                whole = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                assert close(gradients[name], whole, plan.layout(name), rank), f"rank {rank}: gradient of {name}"


def close(found: torch.Tensor | None, whole: torch.Tensor, layout: hp.Layout, rank: int) -> bool:
    """Within 1e-10 of the largest element of the whole: far above float64's rounding in a few sums of a few hundred
    terms (some 1e-15), far below anything that is cut wrongly or counted twice."""
    expected = torch.from_numpy(layout.shard(whole.numpy(), rank))
    found = torch.zeros_like(expected) if found is None else found
    scale = max(whole.abs().max().item(), 1e-3)
    return found.shape == expected.shape and bool(((found - expected).abs() <= 1e-10 * scale).all())


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_ranks_together_are_the_model(family, ranks, sequence_parallel):
    hold_against_the_model(*FAMILIES[family], ranks, sequence_parallel)


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_too(name):
    hold_against_the_model(*OTHERS[name], ranks=2, sequence_parallel=True)


# Every type there is.

NOT_RUN = {
    "emu3": "its images' tokenizer is made at full size",
    "gemma4_unified": "its text model is gemma4_unified_text",
    "gpt-sw3": "is gpt2",
    "llama4": "its text model is llama4_text",
    "qwen3_5": "its text model is qwen3_5_text",
    "qwen3_5_moe": "its text model is qwen3_5_moe_text",
}
"""Types that are planned, and not carried out here: why not."""

MADE_BY_NO_DEFAULT = set(
    "cohere_compass_text dbrx dots1 gemma3n gemma4_assistant hunyuan_v1_dense hunyuan_v1_moe lfm2_moe ministral "
    "musicgen "
    "musicgen_melody nemotron prophetnet qwen4_exp qwen4_exp_text reformer".split()
)
"""Types whose default configuration, made shallow, makes no model."""

WHOLE = {
    "position_embedding",
    "projection",
    "norm",
    "head_norm",
    "wide_norm",
    "latent",
    "latent_norm",
    "router",
    "router_bias",
    "router_correction",
    "shared_expert_gate",
    "index",
    "mixer_inner",
    "sum_norm",
    "activation",
}
"""Roles that `tensor` leaves whole; of others only biases are, behind a weight that is cut along its inputs."""


def shallow(model_type: str) -> torch.nn.Module | None:
    """The model of a default configuration with a few layers, without values; None where that makes none."""
    try:
        config = AutoConfig.for_model(model_type)
        for each in (config, getattr(config, "text_config", None) or config):
            if getattr(each, "num_hidden_layers", 0) > 8 and getattr(each, "layer_types", None) is None:
                each.num_hidden_layers = 8
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except Exception:  # a configuration fails wherever the model's code first stumbles over it
        return None


def numberless(text: str) -> str:
    return re.sub(r"\.\d+(?=\.)", ".*", text)


@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_type_is_planned_as_proven_or_refused_by_name(model_type):
    model = shallow(model_type)
    if model is None:
        assert model_type in MADE_BY_NO_DEFAULT
        return
    description = describe(model, backends.load("torch"))
    try:
        plan = hp.plan(description, hp.DeviceMesh((2,), ("tensor",)))
    except PlanError as error:
        told = numberless(str(error))  # names that differ in numbers only are told once
        assert [name for name in assign_roles(description).unknown if numberless(name) not in told] == []
        return
    assert model_type in {kind for kind, _ in (*FAMILIES.values(), *OTHERS.values())} | set(NOT_RUN)
    for each in plan.parameters:
        assert each.placements or each.role in WHOLE or each.name.endswith("bias"), each.name
