"""Where every parameter of the stored models goes over `tensor`, and what crosses boundaries, told from forward code.

A code says how the ranks of `tensor` share a parameter:

| Code | Meaning |
|---|---|
| `cut D` | along dim D; each rank computes all of its part's gradient |
| `blocks D N` | along dim D within each of the N blocks that lie end to end there |
| `few D` | along dim D while each rank gets a key/value head; else whole on each, for the queries of that rank |
| `few norm` | a norm over all key/value heads: whole, on whole heads; with too few each rank uses what it made of one |
| `stream` | whole, acts on hidden states in a block: with sequence parallelism each rank sees a part of the tokens |
| `inside` | whole, acts between cut parameters: each rank computes a part of its gradient |
| `alone` | whole, and every rank computes all of its gradient |
| `+E` | an expert tensor: dim 0 is dealt out over `expert` as well |

Names are written with "*" for the number of a layer, as in `truth.py`.
"""

from __future__ import annotations

Codes = dict[str, str]


def at(place: str, **codes: str) -> Codes:
    """Codes of the parameters `place.name.weight`; "_b" after a name means its bias."""
    return {
        f"{place}.{name[:-2]}.bias" if name.endswith("_b") else f"{place}.{name}.weight": code
        for name, code in codes.items()
    }


def everywhere(place: str, code: str, *names: str) -> Codes:
    """One code for several weights."""
    return {f"{place}.{name}.weight": code for name in names}


LAYER = "model.layers.*"
ATTENTION, MLP = f"{LAYER}.self_attn", f"{LAYER}.mlp"

# F.embedding(tokens, rows of a rank), zero for other tokens, gives a sum; F.linear(h, rows of a rank) gives its logits.
ENDS = {"model.embed_tokens.weight": "cut 0", "model.norm.weight": "alone", "lm_head.weight": "cut 0"}
LLAMA = ENDS | everywhere(LAYER, "stream", "input_layernorm", "post_attention_layernorm")
# q_proj(x).view(.., -1, 8): a contiguous part of the rows is a part of the heads; o_proj takes heads along its columns.
HEADS = at(ATTENTION, q_proj="cut 0", k_proj="few 0", v_proj="few 0", o_proj="cut 1")
# Biases on the way to heads go with their rows; that of o_proj counts once: one rank adds it to its part of the sum.
QKV_BIASES = at(ATTENTION, q_proj_b="cut 0", k_proj_b="few 0", v_proj_b="few 0")
O_BIAS = at(ATTENTION, o_proj_b="inside")
DENSE = at(MLP, gate_proj="cut 0", up_proj="cut 0", down_proj="cut 1")
DENSE_BIASES = at(MLP, gate_proj_b="cut 0", up_proj_b="cut 0", down_proj_b="inside")
SHARED = at(f"{MLP}.shared_experts", gate_proj="cut 0", up_proj="cut 0", down_proj="cut 1")
# q_norm(q.view(.., 8)): each rank norms its own heads with the same weights.
HEAD_NORMS = everywhere(ATTENTION, "inside", "q_norm", "k_norm")
# linear(x, gate_up[e]).chunk(2): a rank needs gates and the ups that belong to them. The router's scores weigh what a
# rank made.
EXPERTS = {
    f"{MLP}.experts.gate_up_proj": "blocks 1 2 +E",
    f"{MLP}.experts.down_proj": "cut 2 +E",
    f"{MLP}.gate.weight": "inside",
}
# The latent and the rotary key are shared by all heads, so each rank makes all of them and uses them for its heads.
LATENT = (
    everywhere(ATTENTION, "inside", "q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
    | everywhere(ATTENTION, "cut 0", "q_b_proj", "kv_b_proj")
    | at(ATTENTION, o_proj="cut 1")
)
DEEPSEEK = LLAMA | LATENT | DENSE | EXPERTS | SHARED
# gate_up_proj(x).chunk(2, -1).
FUSED_MLP = at(MLP, gate_up_proj="blocks 0 2", down_proj="cut 1")
GEMMA = LLAMA | HEADS | DENSE | everywhere(LAYER, "stream", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def with_biases(codes: Codes, *outputs: str) -> Codes:
    """Biases too, along the rows of their weights; one rank adds those of `outputs`."""
    biases = {}
    for name, code in codes.items():
        last = name.split(".")[-2]
        if last in ("wte", "embed_in", "lm_head", "embed_out", "wpe"):
            continue
        biases[name.removesuffix("weight") + "bias"] = "inside" if last in outputs else code
    return codes | biases


BLOCK = "transformer.h.*"
GPT2 = with_biases(
    {"transformer.wte.weight": "cut 0", "lm_head.weight": "cut 0", "transformer.ln_f.weight": "alone"}
    | everywhere(BLOCK, "stream", "ln_1", "ln_2")
    # Every rank looks up all positions and keeps those of its tokens: the gradient is gathered, then whole.
    | {"transformer.wpe.weight": "alone"}
    # x @ weight: outputs are columns. c_attn(x).split(32): a rank needs its heads of each third.
    | at(f"{BLOCK}.attn", c_attn="blocks 1 3", c_proj="cut 0")
    | at(f"{BLOCK}.mlp", c_fc="cut 1", c_proj="cut 0"),
    "c_proj",
) | at(BLOCK, **{"attn.c_attn_b": "blocks 0 3", "mlp.c_fc_b": "cut 0"})

NEOX = "gpt_neox.layers.*"
GPT_NEOX = with_biases(
    {"gpt_neox.embed_in.weight": "cut 0", "lm_head.weight": "cut 0", "gpt_neox.final_layer_norm.weight": "alone"}
    | everywhere(NEOX, "stream", "input_layernorm", "post_attention_layernorm")
    # view(.., 4, 3 * 8).chunk(3, -1): rows are head by head.
    | at(f"{NEOX}.attention", query_key_value="cut 0", dense="cut 1")
    | at(f"{NEOX}.mlp", dense_h_to_4h="cut 0", dense_4h_to_h="cut 1"),
    "dense",
    "dense_4h_to_h",
)

FALCON = (
    {
        "transformer.word_embeddings.weight": "cut 0",
        "lm_head.weight": "cut 0",
        "transformer.ln_f.weight": "alone",
        "transformer.ln_f.bias": "alone",
    }
    | at(BLOCK, input_layernorm="stream", input_layernorm_b="stream")
    # 4 queries, one key and one value end to end: no rank can have its part of each. Rows are cut as they come, made
    # whole after.
    | at(f"{BLOCK}.self_attention", query_key_value="cut 0", dense="cut 1")
    | at(f"{BLOCK}.mlp", dense_h_to_4h="cut 0", dense_4h_to_h="cut 1")
)

GPT_OSS = (
    LLAMA
    | HEADS
    | QKV_BIASES
    | O_BIAS
    | at(f"{LAYER}.mlp", router="inside", router_b="inside")
    | {
        f"{ATTENTION}.sinks": "cut 0",
        # x @ gate_up[e], gates at even places: neighbours stay together in an even cut of the columns.
        f"{MLP}.experts.gate_up_proj": "cut 2 +E",
        f"{MLP}.experts.gate_up_proj_bias": "cut 1 +E",
        f"{MLP}.experts.down_proj": "cut 1 +E",
        # (.. @ down[e] + bias[e]) * weight, then the sum over ranks: each rank adds a share.
        f"{MLP}.experts.down_proj_bias": "inside +E",
    }
)

OLMO2 = (
    ENDS
    | HEADS
    | DENSE
    | everywhere(LAYER, "stream", "post_attention_layernorm", "post_feedforward_layernorm")
    # q_norm(q_proj(x)) before heads are told apart: a mean over the features of all ranks.
    | at(ATTENTION, q_norm="alone", k_norm="few norm")
)

# qkv[..., :32], [..., 32:48], [..., 48:]: blocks that differ in size are cut as one and made whole after.
PHI3 = LLAMA | at(ATTENTION, qkv_proj="cut 0", o_proj="cut 1") | FUSED_MLP

PLACES: dict[str, Codes] = {
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "falcon": FALCON,
    "gemma2": GEMMA,
    "gemma3": GEMMA | HEAD_NORMS,
    "glm4": LLAMA
    | HEADS
    | QKV_BIASES
    | FUSED_MLP
    | everywhere(LAYER, "stream", "post_self_attn_layernorm", "post_mlp_layernorm"),
    "glm4_moe": LLAMA | HEADS | HEAD_NORMS | DENSE | EXPERTS | SHARED,
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "gpt_oss": GPT_OSS,
    "llama": LLAMA | HEADS | DENSE,
    "llama_bias": LLAMA | HEADS | QKV_BIASES | O_BIAS | DENSE | DENSE_BIASES,
    "llama_tied": LLAMA | HEADS | DENSE,
    "mistral": LLAMA | HEADS | DENSE,
    "mixtral": LLAMA | HEADS | EXPERTS,
    "olmo2": OLMO2,
    "phi3": PHI3,
    "qwen2": LLAMA | HEADS | QKV_BIASES | DENSE,
    "qwen3": LLAMA | HEADS | HEAD_NORMS | DENSE,
    "qwen3_moe": LLAMA | HEADS | HEAD_NORMS | EXPERTS,
}

KEY_VALUE_HEADS = 2
"""Of every stored model with `few` in its table."""

# Boundaries.

Kinds = dict[str, str]

_LLAMA_KINDS = {
    "model.embed_tokens": "embedding",
    f"{LAYER}.input_layernorm": "norm",
    ATTENTION: "reads and writes",
    f"{LAYER}.post_attention_layernorm": "norm",
    MLP: "reads and writes",
    "model.norm": "last norm",
    "lm_head": "head",
}
_EXPERT_KINDS = {f"{MLP}.gate": "router", f"{MLP}.experts": "part of a block"}
_SHARED_KINDS = {f"{MLP}.shared_experts": "part of a block"}
_GEMMA_KINDS = _LLAMA_KINDS | {
    f"{LAYER}.pre_feedforward_layernorm": "norm",
    f"{LAYER}.post_feedforward_layernorm": "norm",
}
_DEEPSEEK_KINDS = _LLAMA_KINDS | _EXPERT_KINDS | _SHARED_KINDS

KINDS: dict[str, Kinds] = {
    "deepseek_v2": _DEEPSEEK_KINDS,
    "deepseek_v3": _DEEPSEEK_KINDS,
    "falcon": {
        "transformer.word_embeddings": "embedding",
        f"{BLOCK}.input_layernorm": "norm",
        f"{BLOCK}.self_attention": "reads and writes",
        f"{BLOCK}.self_attention.query_key_value": "makes whole",
        f"{BLOCK}.self_attention.dense": "takes its part",
        f"{BLOCK}.mlp": "reads and writes",
        "transformer.ln_f": "last norm",
        "lm_head": "head",
    },
    "gemma2": _GEMMA_KINDS,
    "gemma3": _GEMMA_KINDS,
    "glm4": _LLAMA_KINDS | {f"{LAYER}.post_self_attn_layernorm": "norm", f"{LAYER}.post_mlp_layernorm": "norm"},
    "glm4_moe": _DEEPSEEK_KINDS,
    "gpt2": {
        "transformer.wte": "embedding",
        "transformer.wpe": "positions",
        f"{BLOCK}.ln_1": "norm",
        f"{BLOCK}.attn": "reads and writes",
        f"{BLOCK}.ln_2": "norm",
        f"{BLOCK}.mlp": "reads and writes",
        "transformer.ln_f": "last norm",
        "lm_head": "head",
    },
    "gpt_neox": {
        "gpt_neox.embed_in": "embedding",
        f"{NEOX}.input_layernorm": "norm",
        f"{NEOX}.post_attention_layernorm": "norm",
        f"{NEOX}.attention": "reads and writes",
        f"{NEOX}.mlp": "reads and writes",
        "gpt_neox.final_layer_norm": "last norm",
        "lm_head": "head",
    },
    "gpt_oss": _LLAMA_KINDS | {f"{MLP}.router": "router", f"{MLP}.experts": "part of a block"},
    "llama": _LLAMA_KINDS,
    "llama_bias": _LLAMA_KINDS,
    "llama_tied": _LLAMA_KINDS,
    "mistral": _LLAMA_KINDS,
    "mixtral": _LLAMA_KINDS | _EXPERT_KINDS,
    "olmo2": {name: kind for name, kind in _GEMMA_KINDS.items() if "input_l" not in name and "pre_" not in name}
    | {f"{ATTENTION}.q_norm": "all heads", f"{ATTENTION}.k_norm": "all key heads"},
    "phi3": _LLAMA_KINDS | {f"{ATTENTION}.qkv_proj": "makes whole", f"{ATTENTION}.o_proj": "takes its part"},
    "qwen2": _LLAMA_KINDS,
    "qwen3": _LLAMA_KINDS,
    "qwen3_moe": _LLAMA_KINDS | _EXPERT_KINDS,
}
"""What each boundary's module does with hidden states, where no layer differs from the others in kind."""

SIDES: dict[str, tuple[str, str]] = {
    # Input, output: how the tensor lies before > after, the gradient of the latter, and that of the former. S: as
    # hidden states lie in blocks; R: the same on all ranks; P: a sum over ranks; F: features are cut.
    "embedding": ("R > R: R, R", "P > R: R, R"),
    "positions": ("R > R: R, R", "R > R: R, R"),
    "norm": ("S > S: S, S", "S > S: S, S"),
    "last norm": ("R > R: R, R", "R > R: R, R"),
    "reads and writes": ("S > R: P, S", "P > S: S, R"),
    "part of a block": ("R > R: P, P", "P > P: R, R"),
    "router": ("R > R: P, P", "R > R: P, P"),
    "head": ("R > R: P, R", "F > F: F, F"),
    "makes whole": ("R > R: P, P", "F > R: R, F"),
    "takes its part": ("R > F: F, R", "P > P: R, R"),
    "all heads": ("F > R: R, F", "R > F: F, R"),
    "too few heads": ("R > R: P, P", "R > R: P, P"),
}
