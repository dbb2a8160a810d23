"""What every parameter of the stored models is, told from the forward code of each, not from what the planner says.

Names are written with "*" for the number of a layer. Sizes are those of the stored models: hidden 32, 4 heads of 8, 2
key/value heads.
"""

from __future__ import annotations

from typing import NamedTuple


class Truth(NamedTuple):
    """The part of an assignment that the forward code fixes."""

    role: str
    output_dim: int | None = None
    input_dim: int | None = None
    packing: tuple[int, ...] = ()
    heads: int | None = None
    interleaved: int = 1
    expert_dim: int | None = None
    vocab_dim: int | None = None


Table = dict[str, Truth]

NORM = Truth("norm")
UP_WEIGHT, UP_BIAS = Truth("up", 0, 1), Truth("up", 0)
DOWN_WEIGHT, DOWN_BIAS = Truth("down", 0, 1), Truth("down", 0)
EMBEDDING = Truth("embedding", vocab_dim=0)
HEAD = Truth("head", 0, 1, vocab_dim=0)


def ends(embedding: str, norm: str, bias: bool = False) -> Table:
    """The table of tokens, the last norm, and the head `lm_head`: `F.linear(hidden, weight)` to [.., vocabulary]."""
    table = {f"{embedding}.weight": EMBEDDING, f"{norm}.weight": NORM, "lm_head.weight": HEAD}
    return table | ({f"{norm}.bias": NORM} if bias else {})


def norms(block: str, *names: str, bias: bool = False) -> Table:
    """Norms over hidden states in each block."""
    leaves = ("weight", "bias") if bias else ("weight",)
    return {f"{block}.*.{name}.{leaf}": NORM for name in names for leaf in leaves}


def attention(biased: str = "", block: str = "model.layers") -> Table:
    """`q_proj(x).view(.., -1, head_dim)`, the same for k and v, `o_proj` of all heads; `biased`: which have biases."""
    table = {
        "q_proj": Truth("query", 0, 1, heads=4),
        "k_proj": Truth("key", 0, 1, heads=2),
        "v_proj": Truth("value", 0, 1, heads=2),
        "o_proj": Truth("attention_output", 0, 1, heads=4),
    }
    weights = {f"{block}.*.self_attn.{name}.weight": truth for name, truth in table.items()}
    biases = {
        f"{block}.*.self_attn.{name}.bias": truth._replace(
            input_dim=None, heads=None if name == "o_proj" else truth.heads
        )
        for name, truth in table.items()
        if name[0] in biased
    }
    return weights | biases


def head_norms() -> Table:
    """`q_norm(q.view(.., head_dim))`: one head wide, the same weights for each."""
    return {f"model.layers.*.self_attn.{name}.weight": Truth("head_norm") for name in ("q_norm", "k_norm")}


def mlp(place: str = "model.layers.*.mlp", bias: bool = False) -> Table:
    """`down_proj(act(gate_proj(x)) * up_proj(x))`."""
    table = {"gate_proj": Truth("gate", 0, 1), "up_proj": UP_WEIGHT, "down_proj": DOWN_WEIGHT}
    biases = {f"{place}.{name}.bias": truth._replace(input_dim=None) for name, truth in table.items()}
    return {f"{place}.{name}.weight": truth for name, truth in table.items()} | (biases if bias else {})


def experts(inner: int) -> Table:
    """`linear(x, gate_up[e]).chunk(2)` then `linear(.., down[e])`: [experts, out, in], gates first; and a router."""
    place = "model.layers.*.mlp"
    return {
        f"{place}.experts.gate_up_proj": Truth("expert_gate_up", 1, 2, (inner, inner), expert_dim=0),
        f"{place}.experts.down_proj": Truth("expert_down", 1, 2, expert_dim=0),
        f"{place}.gate.weight": Truth("router", 0, 1),
    }


LLAMA = ends("model.embed_tokens", "model.norm") | norms("model.layers", "input_layernorm", "post_attention_layernorm")

LATENT_ATTENTION: Table = {
    # q = q_b(norm(q_a(x))): 4 heads of 8 + 4. kv_a gives the latent of 12 and one rotary key of 4 for all heads.
    "model.layers.*.self_attn.q_a_proj.weight": Truth("latent", 0, 1),
    "model.layers.*.self_attn.q_a_layernorm.weight": Truth("latent_norm"),
    "model.layers.*.self_attn.q_b_proj.weight": Truth("query_up", 0, 1, heads=4),
    "model.layers.*.self_attn.kv_a_proj_with_mqa.weight": Truth("latent", 0, 1),
    "model.layers.*.self_attn.kv_a_layernorm.weight": Truth("latent_norm"),
    "model.layers.*.self_attn.kv_b_proj.weight": Truth("key_value_up", 0, 1, heads=4),
    "model.layers.*.self_attn.o_proj.weight": Truth("attention_output", 0, 1, heads=4),
}

DEEPSEEK = LLAMA | LATENT_ATTENTION | mlp() | experts(24) | mlp("model.layers.*.mlp.shared_experts")

GPT2: Table = (
    ends("transformer.wte", "transformer.ln_f", bias=True)
    | norms("transformer.h", "ln_1", "ln_2", bias=True)
    | {
        "transformer.wpe.weight": Truth("position_embedding"),
        # Conv1D computes x @ weight + bias: [in, out]. c_attn(x).split(32): queries, keys, values.
        "transformer.h.*.attn.c_attn.weight": Truth("qkv", 1, 0, (32, 32, 32), 4),
        "transformer.h.*.attn.c_attn.bias": Truth("qkv", 0, None, (32, 32, 32), 4),
        "transformer.h.*.attn.c_proj.weight": Truth("attention_output", 1, 0, heads=4),
        "transformer.h.*.attn.c_proj.bias": Truth("attention_output", 0),
        "transformer.h.*.mlp.c_fc.weight": Truth("up", 1, 0),
        "transformer.h.*.mlp.c_fc.bias": UP_BIAS,
        "transformer.h.*.mlp.c_proj.weight": Truth("down", 1, 0),
        "transformer.h.*.mlp.c_proj.bias": DOWN_BIAS,
    }
)

GPT_NEOX: Table = (
    ends("gpt_neox.embed_in", "gpt_neox.final_layer_norm", bias=True)
    | norms("gpt_neox.layers", "input_layernorm", "post_attention_layernorm", bias=True)
    | {
        # query_key_value(x).view(.., heads, 3 * 8).chunk(3, -1): each head keeps its query, key and value together.
        "gpt_neox.layers.*.attention.query_key_value.weight": Truth("qkv", 0, 1, heads=4),
        "gpt_neox.layers.*.attention.query_key_value.bias": Truth("qkv", 0, heads=4),
        "gpt_neox.layers.*.attention.dense.weight": Truth("attention_output", 0, 1, heads=4),
        "gpt_neox.layers.*.attention.dense.bias": Truth("attention_output", 0),
        "gpt_neox.layers.*.mlp.dense_h_to_4h.weight": UP_WEIGHT,
        "gpt_neox.layers.*.mlp.dense_h_to_4h.bias": UP_BIAS,
        "gpt_neox.layers.*.mlp.dense_4h_to_h.weight": DOWN_WEIGHT,
        "gpt_neox.layers.*.mlp.dense_4h_to_h.bias": DOWN_BIAS,
    }
)

FALCON: Table = (
    ends("transformer.word_embeddings", "transformer.ln_f", bias=True)
    | norms("transformer.h", "input_layernorm", bias=True)
    | {
        # multi_query: view(.., heads + 2, 8), the last two heads are the only key and the only value.
        "transformer.h.*.self_attention.query_key_value.weight": Truth("qkv", 0, 1, (32, 8, 8), 4),
        "transformer.h.*.self_attention.dense.weight": Truth("attention_output", 0, 1, heads=4),
        "transformer.h.*.mlp.dense_h_to_4h.weight": UP_WEIGHT,
        "transformer.h.*.mlp.dense_4h_to_h.weight": DOWN_WEIGHT,
    }
)

GPT_OSS: Table = (
    LLAMA
    | attention("qkvo")
    | {
        # torch.cat([logits, sinks.reshape(1, -1, 1, 1)]): one a query head.
        "model.layers.*.self_attn.sinks": Truth("sink", 0, heads=4),
        "model.layers.*.mlp.router.weight": Truth("router", 0, 1),
        "model.layers.*.mlp.router.bias": Truth("router_bias", 0),
        # x @ gate_up[e] + bias[e], gates at even places and ups at odd ones; then (..) @ down[e] + bias[e].
        "model.layers.*.mlp.experts.gate_up_proj": Truth("expert_gate_up", 2, 1, interleaved=2, expert_dim=0),
        "model.layers.*.mlp.experts.gate_up_proj_bias": Truth("expert_gate_up", 1, interleaved=2, expert_dim=0),
        "model.layers.*.mlp.experts.down_proj": Truth("expert_down", 2, 1, expert_dim=0),
        "model.layers.*.mlp.experts.down_proj_bias": Truth("expert_down", 1, expert_dim=0),
    }
)

GEMMA2 = LLAMA | attention() | mlp() | norms("model.layers", "pre_feedforward_layernorm", "post_feedforward_layernorm")

OLMO2: Table = (
    ends("model.embed_tokens", "model.norm")
    | norms("model.layers", "post_attention_layernorm", "post_feedforward_layernorm")
    | attention()
    | mlp()
    | {
        # q_norm(q_proj(x)) before the view: one mean over all heads.
        "model.layers.*.self_attn.q_norm.weight": Truth("wide_norm", 0, heads=4),
        "model.layers.*.self_attn.k_norm.weight": Truth("wide_norm", 0, heads=2),
    }
)

PHI3: Table = LLAMA | {
    # qkv[..., :32], [..., 32:48], [..., 48:]: queries, keys, values. gate_up_proj(x).chunk(2): gate, up.
    "model.layers.*.self_attn.qkv_proj.weight": Truth("qkv", 0, 1, (32, 16, 16), 4),
    "model.layers.*.self_attn.o_proj.weight": Truth("attention_output", 0, 1, heads=4),
    "model.layers.*.mlp.gate_up_proj.weight": Truth("gate_up", 0, 1, (48, 48)),
    "model.layers.*.mlp.down_proj.weight": DOWN_WEIGHT,
}

GLM4: Table = (
    LLAMA
    | attention("qkv")
    | norms("model.layers", "post_self_attn_layernorm", "post_mlp_layernorm")
    | {
        "model.layers.*.mlp.gate_up_proj.weight": Truth("gate_up", 0, 1, (48, 48)),
        "model.layers.*.mlp.down_proj.weight": DOWN_WEIGHT,
    }
)

MAMBA: Table = ends("backbone.embeddings", "backbone.norm_f") | norms("backbone.layers", "norm")

TRUTH: dict[str, Table] = {
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "falcon": FALCON,
    "gemma2": GEMMA2,
    "gemma3": GEMMA2 | head_norms(),
    "glm4": GLM4,
    "glm4_moe": LLAMA | attention() | head_norms() | mlp() | experts(24) | mlp("model.layers.*.mlp.shared_experts"),
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "gpt_oss": GPT_OSS,
    "llama": LLAMA | attention() | mlp(),
    "llama_bias": LLAMA | attention("qkvo") | mlp(bias=True),
    "llama_tied": LLAMA | attention() | mlp(),
    "mamba": MAMBA,
    "mistral": LLAMA | attention() | mlp(),
    "mixtral": LLAMA | attention() | experts(48),
    "olmo2": OLMO2,
    "phi3": PHI3,
    "qwen2": LLAMA | attention("qkv") | mlp(),
    "qwen3": LLAMA | attention() | head_norms() | mlp(),
    "qwen3_moe": LLAMA | attention() | head_norms() | experts(24),
}

UNKNOWN: dict[str, set[str]] = {
    "mamba": {
        f"backbone.layers.*.mixer.{name}"
        for name in (
            "A_log",
            "D",
            "conv1d.weight",
            "conv1d.bias",
            "in_proj.weight",
            "x_proj.weight",
            "dt_proj.weight",
            "dt_proj.bias",
            "out_proj.weight",
        )
    }
}
"""Parameters that have no role, since no rule knows what a state-space mixer does."""
