"""What only a model's own code tells: how fused parameters are laid out, architecture by architecture. Data only.

An entry holds for a module of one of its classes, and for any module of a model whose configuration has one of its
model types.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping


@dataclass(frozen=True)
class FusedAttention:
    """Rows of a fused projection to queries, keys and values.

    "concatenated": all queries, all keys, all values. "grouped": for each key/value head its queries, its key, its
    value, so that a contiguous cut between groups is a cut between heads. "woven": in an order that no cut respects, or
    whose cut the module's code would not follow. `key_value_heads` is "one", "each" (as many
    as query heads) or the configuration's key that holds the number. `when` are configuration values without which the
    entry does not hold. `sliced`: the code takes the features apart where the configuration's number of heads says,
    and that can't be told another number.
    """

    order: str
    key_value_heads: str
    classes: tuple[str, ...]
    model_types: tuple[str, ...]
    when: Mapping[str, object] = field(default_factory=dict)
    sliced: bool = False


_FALCON = ("FalconAttention", "FalconFlashAttention2")
_BIGCODE = ("GPTBigCodeAttention", "GPTBigCodeFlashAttention2", "GPTBigCodeSdpaAttention")

FUSED_ATTENTION: tuple[FusedAttention, ...] = (
    FusedAttention("concatenated", "each", ("GPT2Attention", "GPT2SdpaAttention", "GPT2FlashAttention2"), ("gpt2",)),
    FusedAttention(
        "concatenated",
        "num_key_value_heads",
        ("Phi3Attention", "Phi3SdpaAttention", "Phi3FlashAttention2"),
        ("phi3",),
        sliced=True,
    ),
    FusedAttention("concatenated", "each", ("MptAttention",), ("mpt",)),
    FusedAttention("concatenated", "each", (), ("openai-gpt",)),
    FusedAttention(
        "grouped", "each", ("GPTNeoXAttention", "GPTNeoXSdpaAttention", "GPTNeoXFlashAttention2"), ("gpt_neox",)
    ),
    FusedAttention("grouped", "each", ("GPTNeoXJapaneseAttention",), ("gpt_neox_japanese",)),
    FusedAttention("grouped", "each", ("BloomAttention",), ("bloom",)),
    FusedAttention("grouped", "each", ("PersimmonAttention",), ("persimmon",)),
    FusedAttention("grouped", "num_kv_heads", _FALCON, ("falcon",), {"new_decoder_architecture": True}),
    FusedAttention(
        "concatenated", "one", _FALCON, ("falcon",), {"new_decoder_architecture": False, "multi_query": True}
    ),
    FusedAttention("grouped", "each", _FALCON, ("falcon",), {"new_decoder_architecture": False, "multi_query": False}),
    # Four groups of queries, values and keys, and a number of groups that is fixed in the code.
    FusedAttention("woven", "each", ("CodeGenAttention",), ("codegen",)),
    FusedAttention("concatenated", "one", _BIGCODE, ("gpt_bigcode",), {"multi_query": True}),
    FusedAttention("grouped", "each", _BIGCODE, ("gpt_bigcode",), {"multi_query": False}),
)


@dataclass(frozen=True)
class SlicedWeights:
    """Classes that do not call their last linear, but multiply by slices of its weight, where the configuration has
    more than one under the first of `keys` and true under the others."""

    classes: tuple[str, ...]
    keys: tuple[str, ...]


SLICED_WEIGHTS: tuple[SlicedWeights, ...] = (
    SlicedWeights(("BloomAttention", "BloomMLP"), ("pretraining_tp", "slow_but_exact")),
)


@dataclass(frozen=True)
class FusedGate:
    """Gate rows, then up rows, in one `gate_up` projection of a feed-forward layer."""

    classes: tuple[str, ...]
    model_types: tuple[str, ...]


FUSED_GATES: tuple[FusedGate, ...] = (
    FusedGate(("Phi3MLP", "GlmMLP", "Glm4MLP"), ("phi3", "glm", "glm4")),
    FusedGate(("MiniMaxM3VLDenseMLP",), ()),
    FusedGate(("GraniteMoeHybridMLP", "GraniteMoeSharedMLP"), ()),
)


@dataclass(frozen=True)
class PackedExperts:
    """Experts in one tensor with a leading dim over them.

    `transposed`: [experts, in, out], else [experts, out, in]. `interleaved`: 2 where gate and up features alternate, 1
    where all gates stand before all ups.
    """

    classes: tuple[str, ...]
    transposed: bool = False
    interleaved: int = 1


PACKED_EXPERTS: tuple[PackedExperts, ...] = (
    PackedExperts(
        (
            "AfmoeExperts",
            "AXK1Experts",
            "AXK2Experts",
            "BailingHybridExperts",
            "BeamExperts",
            "Cohere2MoeExperts",
            "DeepseekV2Experts",
            "DeepseekV32Experts",
            "DeepseekV3Experts",
            "DeepseekV4Experts",
            "Dots1Experts",
            "Dots3NoteExperts",
            "Ernie4_5_MoeExperts",
            "ExaoneMoeExperts",
            "FlexOlmoExperts",
            "FlintExperts",
            "Gemma4TextExperts",
            "Glm4MoeExperts",
            "Glm4MoeLiteExperts",
            "Glm5NextTextExperts",
            "GlmMoeDsaExperts",
            "GraniteMoeExperts",
            "GraniteMoeHybridExperts",
            "GraniteMoeParallelExperts",
            "GraniteMoeSharedExperts",
            "GraniteMoeSharedParallelExperts",
            "GraniteMoeSWAExperts",
            "HunYuanMoEV1Experts",
            "HYV3Experts",
            "HYV4Experts",
            "JambaExperts",
            "KimiLinearExperts",
            "Kolibri1Experts",
            "LagunaExperts",
            "LaraMiniExperts",
            "Lfm2MoeExperts",
            "MellumExperts",
            "MiMoV2FlashExperts",
            "MiniMaxExperts",
            "MiniMaxM2Experts",
            "MiniMaxM3VLExperts",
            "Mistral4Experts",
            "MixtralExperts",
            "OlmoeExperts",
            "PhimoeExperts",
            "Qwen2MoeExperts",
            "Qwen3_5MoeExperts",
            "Qwen3MoeExperts",
            "Qwen3NextExperts",
            "Qwen4ExpTextExperts",
            "SolarOpenExperts",
            "Step3p7Experts",
            "ZayaExperts",
        )
    ),
    PackedExperts(("AriaExperts", "Llama4TextExperts"), transposed=True),
    PackedExperts(("GptOssExperts",), transposed=True, interleaved=2),
)

MIXERS: tuple[str, ...] = (
    "BailingHybridDeltaAttention",
    "KimiLinearDeltaAttention",
    "LaraMiniGatedDeltaNet",
    "Lfm2MoeShortConv",
    "Lfm2ShortConv",
    "Lfm3ShortConv",
    "MiniMaxLightningAttention",
    "OlmoHybridGatedDeltaNet",
    "Qwen3_5GatedDeltaNet",
    "Qwen3_5MoeGatedDeltaNet",
    "Qwen3NextGatedDeltaNet",
)
"""Mixers of tokens that call their linears as modules, so that what these give can be gathered before all else.

Mamba's are none of them: their kernels take the weight of the last linear, and no boundary lies before that."""

INDEXES: tuple[str, ...] = ("DeepseekV32Indexer", "GlmMoeDsaIndexer")
"""Modules inside of attention that only choose keys, from hidden states and latents that every rank has, without a
gradient."""

GATED_QUERIES: frozenset[str] = frozenset({"Qwen3NextAttention", "Qwen3_5Attention", "Qwen3_5MoeAttention"})
"""Attention whose query projection gives, head by head, a query and a gate of the same size."""

NORM_OF_SUM: tuple[str, ...] = ("AXK1MoE",)
"""Blocks of experts that hand on a norm of what routed and shared experts give together."""

OWN_HEADS: frozenset[str] = frozenset({"MiMoV2FlashAttention"})
"""Attention whose values have `v_head_dim` features each, and whose layers have other numbers of key/value heads than
the configuration says: the rows of `k_proj` tell."""

RESIDUAL_INSIDE: frozenset[str] = frozenset({"BloomAttention", "BloomMLP", "MptMLP"})
"""Modules that add hidden states from outside to their result: only their last linear's output is summed over ranks."""

ALL_TOKENS: frozenset[str] = frozenset({"Llama4TextExperts"})
"""Experts that are all called with all tokens, those of one expert after those of the other: `[experts * tokens,
features]`. Others are called with tokens, the experts chosen for each, and their weights."""
