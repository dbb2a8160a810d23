"""What names, classes and forward code tell of matrices, beyond what the planner knows. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FusedRows:
    """Linears whose outputs are several things, taken apart by the module around them.

    `groups` times over, the outputs are `parts`, one below the other. A size is a product of numbers and keys of the
    configuration, divided by others: "head_dim", "2 * linear_value_head_dim / linear_num_key_heads". "" is an equal
    share of what the other parts leave.
    """

    classes: tuple[str, ...]
    linears: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]
    groups: str = "1"


_VALUES_OF_A_KEY_HEAD = "linear_value_head_dim * linear_num_value_heads / linear_num_key_heads"
_KEYS = "linear_key_head_dim * linear_num_key_heads"

FUSED_ROWS: tuple[FusedRows, ...] = (
    FusedRows(("CodeGenAttention",), ("qkv_proj",), (("query", ""), ("value", ""), ("key", "")), groups="4"),
    FusedRows(
        ("Qwen3NextGatedDeltaNet",),
        ("in_proj_qkvz",),
        (
            ("query", "linear_key_head_dim"),
            ("key", "linear_key_head_dim"),
            ("value", _VALUES_OF_A_KEY_HEAD),
            ("gate", _VALUES_OF_A_KEY_HEAD),
        ),
        groups="linear_num_key_heads",
    ),
    FusedRows(
        ("Qwen3NextGatedDeltaNet",), ("in_proj_ba",), (("beta", ""), ("decay", "")), groups="linear_num_key_heads"
    ),
    FusedRows(
        ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "LaraMiniGatedDeltaNet", "Qwen4ExpTextGatedDeltaNet"),
        ("in_proj_qkv",),
        (("query", _KEYS), ("key", _KEYS), ("value", "")),
    ),
    FusedRows(
        ("MiniMaxLightningAttention",),
        ("qkv_proj",),
        (("query", ""), ("key", ""), ("value", "")),
        groups="num_attention_heads",
    ),
    FusedRows(
        ("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"),
        ("in_proj",),
        (("gate before", ""), ("gate after", ""), ("input", "")),
    ),
    FusedRows(
        ("MambaMixer", "FalconMambaMixer", "JambaMambaMixer"),
        ("in_proj",),
        (("input", ""), ("gate", "")),
    ),
    *(
        FusedRows((owner,), ("in_proj",), (("gate", ""), ("input", ""), ("B", part), ("C", part), ("step", heads)))
        for owner, part, heads in (
            ("Mamba2Mixer", "n_groups * state_size", "num_heads"),
            ("BambaMixer", "mamba_n_groups * mamba_d_state", "mamba_n_heads"),
            ("FalconH1Mixer", "mamba_n_groups * mamba_d_state", "mamba_n_heads"),
            ("GraniteMoeHybridMambaLayer", "mamba_n_groups * mamba_d_state", "mamba_n_heads"),
            ("NemotronHMamba2Mixer", "n_groups * ssm_state_size", "mamba_num_heads"),
            ("Zamba2MambaMixer", "mamba_ngroups * mamba_d_state", "n_mamba_heads"),
        )
    ),
    FusedRows(("MultiheadAttention",), ("in_proj_weight",), (("query", ""), ("key", ""), ("value", ""))),
    FusedRows(("Phi4MultimodalAttention",), ("qkv_proj",), (("query", "hidden_size"), ("key", ""), ("value", ""))),
    FusedRows(("JetMoeAttention",), ("kv_proj",), (("key", ""), ("value", ""))),
    FusedRows(("Phi4MultimodalMLP", "Zamba2MLP"), ("gate_up_proj",), (("gate", ""), ("up", ""))),
    FusedRows(("Phi4MultimodalAudioMLP",), ("gate_up_proj",), (("up", ""), ("gate", ""))),
    FusedRows(("ModernBertDecoderMLP", "ModernBertMLP"), ("Wi",), (("gate", ""), ("up", ""))),
    FusedRows(("JetMoeMoE",), ("input_linear",), (("gate", ""), ("up", ""))),
    FusedRows(
        ("InklingExperts", "Inkling2Experts", "Inkling2LoopExperts", "LongcatFlashExperts"),
        ("gate_up_proj",),
        (("gate", ""), ("up", "")),
    ),
)
"""An entry holds for linears, or bare parameters, of these names in modules of these classes."""

LATENT_ROLES: dict[str, str] = {
    "q_b_proj": "query_up",
    "kv_b_proj": "key_value_up",
    "kv_a_proj_with_mqa": "latent",
}
"""Names of latent attention that mean one thing wherever the configuration's sizes fit, planned or not."""

NO_MATRIX_ROLES: dict[str, str] = {
    "embedding": "an embedding: its rows are looked up, and a step touches few of them",
    "position_embedding": "an embedding of positions: its rows are looked up",
    "head": "an output head",
    "adapter": "a factor of a low-rank adapter",
}
"""Roles of matrices that go to AdamW all the same, and why."""

BY_ELEMENT_ROLES: dict[str, str] = {
    "norm": "a norm",
    "head_norm": "a norm",
    "wide_norm": "a norm",
    "per_head_norm": "a norm",
    "latent_norm": "a norm",
    "sum_norm": "a norm",
    "sink": "a logit for each head",
    "router_bias": "a bias",
    "router_correction": "a bias",
    "activation": "a number of an activation",
}
"""Roles of what is used element by element, whatever its shape."""

CONVOLUTIONS = ("Conv[123]d", "*Conv[123]d", "Conv[123]dTranspose", "ConvTranspose[123]d")
"""Classes whose weight is [out, in, *kernel]; [in, out, *kernel] where "Transpose" is in the name."""

INPUT_NAMES = ("*embed*", "wte", "wpe", "stem", "*pos_emb*")
"""Modules, and bare parameters, outside of repeated blocks that make hidden states of what comes in."""

HEAD_NAMES = (
    *("lm_head", "embed_out", "output", "output_projection", "head", "heads", "*_head", "classifier", "score"),
    *("qa_outputs", "cls", "logits", "final_proj"),
)
"""Modules outside of repeated blocks that make what comes out."""

BY_ELEMENT_NAMES = (
    *("A_log", "D", "dt_bias", "*_bias", "bias", "*_scale", "scale", "lambda*", "gamma", "*_gamma", "beta", "ls[12]"),
    *("layer_scale*", "time_mix*"),
)
"""Bare parameters that are used element by element, however many dims they have."""

LOOKED_UP_NAMES = ("*embed*", "*pos_emb*", "rel_pos*", "*_token", "*_tokens", "*_table", "conv_weight")
"""Bare parameters that are looked up, or added to hidden states."""

NAMES_OF_SEVERAL = (
    *("qkv", "Wqkv", "qkv_proj", "query_key_value", "c_attn", "in_proj", "in_proj_weight", "kv_proj", "kv"),
    *("gate_up_proj", "gate_up", "w12", "w13", "Wi", "qkv_linear"),
)
"""Names of linears that hold several matrices as a rule. Where nothing tells which, they are taken as one."""

NORMS_WITHOUT_WEIGHTS: dict[str, str] = {"NanoChatAttention": "", "Llama4TextAttention": "use_qk_norm"}
"""Attention that norms queries and keys and has no parameter for it; where the configuration's key, if any, is true."""
