"""What parameters are called, and what follows: the roles, the rule table and the words it is written in. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.core.plan.architectures import INDEXES, MIXERS, NORM_OF_SUM


@dataclass(frozen=True)
class RoleKind:
    """What a role means to the passes that follow.

    `boundary` is the kind of boundary that a parameter of this role belongs to. `tensor` says what the `tensor` axis
    does to it: "vocabulary" (cut along `vocab_dim`), "output" (along `output_dim`), "heads" (the same, whole heads
    only), "gathered" (along `output_dim`, and every rank gets all that the ranks compute), "input" (along `input_dim`;
    what has none, as a bias, stays whole and one rank adds it), "whole". `pending`:
    kept whole, but used between parameters that are cut, so that each rank of the axis computes only a part of its
    gradient.
    """

    description: str
    boundary: str
    tensor: str
    pending: bool = False


ROLES: dict[str, RoleKind] = {
    "embedding": RoleKind("a row for each token of the vocabulary", "embedding", "vocabulary"),
    "position_embedding": RoleKind("a row for each position", "embedding", "whole"),
    "projection": RoleKind("between the width of the embedding and that of the hidden states", "projection", "whole"),
    "head": RoleKind("hidden states to logits", "head", "vocabulary"),
    "norm": RoleKind("a norm over the hidden states", "norm", "whole"),
    "head_norm": RoleKind("a norm of queries or keys over one head, shared by all heads", "attention", "whole", True),
    "wide_norm": RoleKind("a norm of queries or keys over all heads at once", "wide_norm", "whole"),
    "per_head_norm": RoleKind("a norm of queries or keys with weights of its own for each head", "attention", "heads"),
    "query": RoleKind("hidden states to queries", "attention", "heads"),
    "key": RoleKind("hidden states to keys", "attention", "heads"),
    "value": RoleKind("hidden states to values", "attention", "heads"),
    "qkv": RoleKind("hidden states to queries, keys and values", "attention", "heads"),
    "attention_output": RoleKind("mixed values of all heads to hidden states", "attention", "input"),
    "attention_gate": RoleKind("hidden states to gates on the mixed values", "attention", "heads"),
    "latent": RoleKind("hidden states to the latent that all heads share", "attention", "whole", True),
    "latent_norm": RoleKind("a norm over the latent", "attention", "whole", True),
    "query_up": RoleKind("latent to queries", "attention", "heads"),
    "key_value_up": RoleKind("latent to keys and values", "attention", "heads"),
    "sink": RoleKind("a logit for each head that takes attention away", "attention", "heads"),
    "index": RoleKind("chooses the keys that attention looks at, and gets no gradient", "attention", "whole"),
    "mixer_input": RoleKind("hidden states to what a mixer of tokens works on", "mixer", "gathered"),
    "mixer_inner": RoleKind("between both, where a mixer has all its features", "mixer", "whole"),
    "mixer_output": RoleKind("mixed features to hidden states", "mixer", "input"),
    "gate": RoleKind("hidden states to gates on the inner features", "mlp", "output"),
    "up": RoleKind("hidden states to the inner features", "mlp", "output"),
    "gate_up": RoleKind("hidden states to gates and inner features", "mlp", "output"),
    "down": RoleKind("inner features to hidden states", "mlp", "input"),
    "activation": RoleKind("one number that bends the activation of all inner features", "mlp", "whole", True),
    "router": RoleKind("hidden states to a score for each expert", "router", "whole", True),
    "router_bias": RoleKind("added to the scores of the experts", "router", "whole", True),
    "router_correction": RoleKind("added to the scores only when experts are chosen", "router", "whole"),
    "shared_expert_gate": RoleKind("hidden states to one gate on the shared expert", "router", "whole", True),
    "expert_gate": RoleKind("`gate` of the experts", "experts", "output"),
    "expert_up": RoleKind("`up` of the experts", "experts", "output"),
    "expert_gate_up": RoleKind("`gate_up` of the experts", "experts", "output"),
    "expert_down": RoleKind("`down` of the experts", "experts", "input"),
    "sum_norm": RoleKind("a norm over the sum of what experts give", "sum_norm", "whole"),
    "adapter": RoleKind("the factor of a low-rank adapter that no axis cuts", "adapter", "whole", True),
    "whole": RoleKind("kept whole because an override says so", "whole", "whole"),
}
"""Every role by its text form. A bias has the role of its weight where it has no role of its own."""


@dataclass(frozen=True)
class Rule:
    """Parameters whose name ends in `pattern` have `role` if the guards `where` hold and the shape is as `form` says.

    A pattern matches whole segments: names separated by "|", "#" a number, "@kind" a segment of that kind (`KINDS`),
    "*" any one. `form` says how the parameter is laid out, `output` and `input` what its features must amount to (""
    where only the members of its module tell).
    """

    pattern: str
    role: str
    form: str = "linear"
    output: str = ""
    input: str = ""
    where: tuple[str, ...] = ()


LINEAR = "weight|bias"
QUERIES = "q_proj|wq|query|query_proj"
KEYS = "k_proj|wk|key|key_proj"
LOGITS = "lm_head|embed_out|output|output_projection"

RULES: tuple[Rule, ...] = (
    # Vocabulary and positions: outside of the repeated blocks.
    Rule(
        "embed_tokens|wte|word_embeddings|embed_in|embeddings|tok_embeddings|token_embedding|tokens_embed|embed.weight",
        "embedding",
        "lookup",
        where=("in an embedding's class", "outside of repeated blocks"),
    ),
    Rule(
        "wpe|embed_positions|position_embeddings|position_embedding|positions_embed.weight",
        "position_embedding",
        "positions",
        where=("in an embedding's class", "outside of repeated blocks"),
    ),
    Rule(f"project_in.{LINEAR}", "projection", output="hidden", where=("outside of repeated blocks",)),
    Rule(f"project_out.{LINEAR}", "projection", input="hidden", where=("outside of repeated blocks",)),
    Rule(
        f"{LOGITS}.{LINEAR}",
        "head",
        output="vocabulary",
        where=("outside of repeated blocks",),
    ),
    # Mixers of tokens that are no softmax attention, of classes that are known: before attention, whose names they use.
    Rule(
        "@mixer.in_proj|in_proj_qkv|in_proj_qkvz|in_proj_z|in_proj_a|in_proj_b|in_proj_ba.weight|bias",
        "mixer_input",
        input="hidden",
    ),
    Rule(
        "@mixer.q_proj|k_proj|v_proj|qkv_proj|a_proj|b_proj|g_proj|g_a_proj|output_gate.weight",
        "mixer_input",
        input="hidden",
    ),
    Rule("@mixer.forget_gate.f_proj|f_a_proj.weight", "mixer_input", input="hidden"),
    Rule(f"@mixer.out_proj|o_proj.{LINEAR}", "mixer_output", output="hidden"),
    Rule("@mixer.conv|conv1d|norm|o_norm|g_b_proj.weight|bias", "mixer_inner", "any"),
    Rule("@mixer.A_log|dt_bias", "mixer_inner", "any"),
    Rule("@mixer.forget_gate.A_log|dt_bias", "mixer_inner", "any"),
    Rule("@mixer.forget_gate.f_b_proj.weight", "mixer_inner", "any"),
    # Attention.
    Rule("@attention.@index.wq_b|wk|weights_proj|k_norm.weight|bias", "index", "any"),
    Rule(f"@attention.{QUERIES}.{LINEAR}", "query", output="query", input="hidden"),
    Rule(f"@attention.{KEYS}.{LINEAR}", "key", output="key", input="hidden"),
    Rule(f"@attention.v_proj|wv|value|value_proj.{LINEAR}", "value", output="value", input="hidden"),
    Rule(f"@attention.o_proj|out_proj|wo|dense|c_proj.{LINEAR}", "attention_output", output="hidden", input="mixed"),
    Rule("@attention.dense_bias", "attention_output", "vector", output="hidden"),
    Rule(f"@attention.gate_proj.{LINEAR}", "attention_gate", output="mixed", input="hidden"),
    Rule("@attention.gate_bias", "attention_gate", "heads"),
    Rule("@attention.g_proj.weight", "attention_gate", "gate", input="hidden"),
    Rule(f"@attention.qkv_proj|query_key_value|c_attn|Wqkv.{LINEAR}", "qkv", "fused attention", input="hidden"),
    Rule(f"@attention.q_a_proj.{LINEAR}", "latent", output="query latent", input="hidden"),
    Rule(f"@attention.kv_a_proj_with_mqa.{LINEAR}", "latent", output="latent and rope", input="hidden"),
    Rule(f"@attention.q_a_layernorm|q_a_norm.{LINEAR}", "latent_norm", "vector", output="query latent"),
    Rule(f"@attention.kv_a_layernorm|kv_a_norm.{LINEAR}", "latent_norm", "vector", output="latent"),
    Rule(f"@attention.q_b_proj.{LINEAR}", "query_up", output="query", input="query latent"),
    Rule(f"@attention.kv_b_proj.{LINEAR}", "key_value_up", output="key and value", input="latent"),
    Rule(f"@attention.q_norm|q_layernorm|query_layernorm.{LINEAR}", "head_norm", "query norm"),
    Rule(f"@attention.k_norm|k_layernorm|key_layernorm.{LINEAR}", "head_norm", "key norm"),
    Rule("@attention.sinks", "sink", "heads"),
    # Routers: before the feed-forward layers, whose gate has the same name.
    Rule(f"@mlp.gate|router.{LINEAR}", "router", "router", where=("beside experts",)),
    Rule(f"@mlp.gate|router.layer|gate|wg.{LINEAR}", "router", "router"),
    Rule("@mlp.gate|router.e_score_correction_bias", "router_correction", "correction"),
    Rule("@mlp.gate|router.moe_statics.e_score_correction_bias", "router_correction", "correction"),
    Rule("@mlp.moe_statics.e_score_correction_bias", "router_correction", "correction"),
    Rule("@mlp.expert_bias|e_score_correction_bias", "router_correction", "correction", where=("beside experts",)),
    Rule(f"@mlp.shared_expert_gate.{LINEAR}", "shared_expert_gate", output="one", input="hidden"),
    Rule("@closed.post_mlp_layernorm.weight", "sum_norm", "vector", output="hidden"),
    # Experts in one tensor, and one by one.
    Rule("experts.gate_up_proj", "expert_gate_up", "packed"),
    Rule("experts.gate_up_proj_bias", "expert_gate_up", "packed bias"),
    Rule("experts.down_proj", "expert_down", "packed"),
    Rule("experts.down_proj_bias", "expert_down", "packed bias"),
    Rule("@mlp.input_linear.weight", "expert_gate_up", "packed", where=("with three dims",)),
    Rule("@mlp.output_linear.weight", "expert_down", "packed", where=("with three dims",)),
    Rule("@mlp.input_linear.weight", "gate_up", "fused gate and up", input="hidden"),
    Rule("@mlp.output_linear.weight", "down", output="hidden"),
    Rule(f"experts.#.gate_proj.{LINEAR}", "expert_gate", input="hidden"),
    Rule(f"experts.#.up_proj.{LINEAR}", "expert_up", input="hidden"),
    Rule(f"experts.#.down_proj.{LINEAR}", "expert_down", output="hidden"),
    Rule(f"experts.#.w1.{LINEAR}", "expert_gate", input="hidden", where=("beside a w3",)),
    Rule(f"experts.#.w3.{LINEAR}", "expert_up", input="hidden"),
    Rule(f"experts.#.w2.{LINEAR}", "expert_down", output="hidden"),
    # Feed-forward layers.
    Rule(f"@mlp.gate_proj|gate.{LINEAR}", "gate", input="hidden", where=("where no experts are beside it",)),
    Rule(f"@mlp.up_proj|up|c_fc|fc1|fc_in|dense_h_to_4h.{LINEAR}", "up", input="hidden"),
    Rule(f"@mlp.down_proj|down|c_proj|fc2|fc_out|dense_4h_to_h.{LINEAR}", "down", output="hidden"),
    Rule(f"@mlp.gate_up_proj.{LINEAR}", "gate_up", "fused gate and up", input="hidden"),
    Rule(f"@mlp.w1.{LINEAR}", "gate", input="hidden", where=("beside a w3",)),
    Rule(f"@mlp.w3.{LINEAR}", "up", input="hidden"),
    Rule(f"@mlp.w2.{LINEAR}", "down", output="hidden"),
    Rule(f"#.fc1.{LINEAR}", "up", input="hidden"),
    Rule(f"#.fc2.{LINEAR}", "down", output="hidden"),
    Rule("@mlp.act_fn.alpha_p|alpha_n", "activation", "one number"),
    # Norms go by their class: their names are many.
    Rule(
        f"*.{LINEAR}",
        "norm",
        "vector",
        output="hidden",
        where=("in a norm's class", "directly in a block or outside of all"),
    ),
)
"""The first rule that fits decides."""

KINDS: dict[str, tuple[frozenset[str], tuple[str, ...]]] = {
    "attention": (
        frozenset({"self_attn", "attn", "attention", "self_attention"}),
        ("*Attention", "*Attention2"),
    ),
    "mlp": (
        frozenset(
            {
                "mlp",
                "ffn",
                "feed_forward",
                "feedforward",
                "block_sparse_moe",
                "moe",
                "shared_expert",
                "shared_experts",
                "shared_mlp",
            }
        ),
        ("*MLP", "*Mlp", "*FeedForward", "*FFN", "*MoE", "*Moe", "*MoeBlock", "*MoEBlock"),
    ),
    "mixer": (frozenset(), MIXERS),
    "index": (frozenset(), INDEXES),
    "closed": (frozenset(), NORM_OF_SUM),
}
"""Kinds of modules: by their usual names, or by their class."""

INSIDE = frozenset({"act_fn", "forget_gate", "indexer"})
"""Modules whose parameters act in the one around them."""

OTHER_ATTENTION = frozenset(
    {
        "attn2",
        "attention2",
        "context_attn",
        "cross",
        "cross_attention",
        "cross_attn",
        "crossattention",
        "crossattn",
        "enc_attn",
        "enc_dec_attn",
        "encdec_attn",
        "encoder_attention",
        "encoder_attn",
        "encoder_decoder_attention",
        "inter_attention",
        "memory_attn",
        "multihead_attn",
        "src_attn",
        "x_attn",
        "xattn",
    }
)
"""Attention to something else than the tokens before: not planned, whatever its class."""

OTHER_ATTENTION_CLASSES = ("*Cross*Attention*", "*Cross*Attn*", "*EncDec*Attention*", "*EncoderDecoder*Attention*")
"""The same by class, whatever its name."""

NORM_CLASSES = ("*Norm", "*RMSNorm*", "*LayerNorm*")
TOKEN_MIXING_NORM_CLASSES = ("*BatchNorm*", "*InstanceNorm*", "*GroupNorm*")
"""Norms whose statistics run over tokens: with a part of the sequence on each rank they would be others."""
EMBEDDING_CLASSES = ("*Embedding", "*Embeddings", "*EmbeddingTable")
LINEAR_CLASSES = (
    "Linear",
    "Dense",
    "NonDynamicallyQuantizableLinear",
    "BitLinear",
    "AutoBitLinear",
    "FP8Linear",
    "FbgemmFp8Linear",
    "Float8Linear",
    "Linear4bit",
    "Linear8bitLt",
    "LoRALinear",
    "EsmFoldLinear",
    "FalconLinear",
    "KyutaiSpeechToTextLinear",
    "MoshiLinear",
    "*ClippableLinear",
)
"""Linears whose weight is [out, in]. Others may say so by their shape only: a name that ends alike promises nothing."""
TRANSPOSED_CLASSES = ("Conv1D",)
"""Linears whose weight is [in, out]."""

PRELUDES = frozenset(
    {
        "embeddings",
        "embed_tokens",
        "embed_norm",
        "word_embeddings_layernorm",
        "layernorm_embedding",
        "layer_norm_emb",
        "layer_norm_embedding",
    }
)
"""What holds, or is, a norm between tokens and the first block."""

BASE_MODELS = ("?*Model", "*For[A-Z]*")
"""Models of Hugging Face, of which those in `LANGUAGE_MODELS` give logits over the vocabulary."""

LANGUAGE_MODELS = ("*LM", "*LMModel", "*LMHeadModel", "*LMHead", "*ForMaskedLM", "*ForPreTraining", "*Generation")

LIST_CLASSES = frozenset({"ModuleList", "ModuleDict", "CellList", "CellDict"})
"""Containers that are never called."""

LEAVES = {"embedding_table": "weight", "gamma": "weight", "beta": "bias"}
"""Other names of a module's own parameters."""

WRAPPERS = frozenset(
    {
        "_orig_mod",
        "module",
        "_fsdp_wrapped_module",
        "_checkpoint_wrapped_module",
        "base_layer",
        "linear",
        "original",
        "original_layer",
        "original_module",
    }
)
"""Modules that hold another and call it as it is."""

NAMED_WRAPPERS = frozenset({"modules_to_save"})
"""The same, with a name of the user's between them and what they hold."""

ADAPTERS = {
    "lora_A": "in",
    "lora_a": "in",
    "lora_down": "in",
    "lora_B": "out",
    "lora_b": "out",
    "lora_up": "out",
    "lora_magnitude_vector": "magnitude",
    "lora_embedding_A": "an adapter of an embedding",
    "lora_embedding_B": "an adapter of an embedding",
}
"""Parts of a low-rank adapter around a linear: `out(in(x))` is added to what the linear gives."""

CONFIG_KEYS: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "vocabulary": ("vocab_size",),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"),
    "key/value heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    "head": ("head_dim",),
    "embedding": ("word_embed_proj_dim", "embedding_size"),
    "latent": ("kv_lora_rank",),
    "query latent": ("q_lora_rank",),
}
"""Where a model's configuration writes its sizes."""
