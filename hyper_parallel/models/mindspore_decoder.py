"""A decoder language model in plain MindSpore, with the parameter names of Hugging Face's Qwen3.

Matrix products run in two dims, and what would be broadcast in every layer is expanded once: on a CPU MindSpore
spends several times longer on a broadcast or a three-dim product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common.initializer import Normal, initializer


class Decoder(nn.Cell):
    """Token ids [B, T] to logits [B, T, vocab_size].

    `config` has the attributes vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads,
    head_dim, max_position_embeddings, rope_theta, rms_norm_eps, initializer_range and tie_word_embeddings.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, config.initializer_range)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def construct(self, input_ids: Tensor) -> Tensor:
        return self.lm_head(self.model(input_ids))


class Backbone(nn.Cell):
    """Token ids [B, T] to hidden states [B, T, hidden_size]; T may not exceed max_position_embeddings."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, config.initializer_range)
        self.layers = nn.CellList([DecoderLayer(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.tables = TableMaker(config)

    def construct(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, self.tables)
        return self.norm(hidden)


class DecoderLayer(nn.Cell):
    """Attention and SwiGLU, each behind a norm and beside a residual path; [B, T, hidden_size] to the same."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = SwiGLU(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def construct(self, hidden: Tensor, tables: TableMaker) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), tables)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Cell):
    """Causal grouped-query attention with normalised queries and keys; [B, T, hidden_size] to the same.

    The queries that share a key stand one after the other in one matrix, so that keys are never repeated.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, queries, config.initializer_range)
        self.k_proj = Linear(config.hidden_size, keys, config.initializer_range)
        self.v_proj = Linear(config.hidden_size, keys, config.initializer_range)
        self.o_proj = Linear(queries, config.hidden_size, config.initializer_range)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.product = ops.BatchMatMul()
        self.product_transposed = ops.BatchMatMul(transpose_b=True)
        self.softmax = ops.Softmax(-1)

    def construct(self, hidden: Tensor, tables: TableMaker) -> Tensor:
        batch, length, _ = hidden.shape
        heads = (batch, length, -1, self.head_dim)
        queries = self.q_norm(self.q_proj(hidden).reshape(heads))
        keys = self.k_norm(self.k_proj(hidden).reshape(heads))
        tables = tables(batch, length, queries.shape[2], keys.shape[2], hidden.dtype)
        queries = rotate(queries, tables.query_cos, tables.query_sin)
        keys = rotate(keys, tables.key_cos, tables.key_sin)
        keys, values = swap_heads(keys), swap_heads(self.v_proj(hidden).reshape(heads))
        queries = swap_heads(queries).reshape(batch, keys.shape[1], -1, self.head_dim)
        scores = self.softmax(self.product_transposed(queries, keys) + tables.mask)
        mixed = self.product(scores, values).reshape(batch, -1, length, self.head_dim)
        return self.o_proj(swap_heads(mixed).reshape(batch, length, -1))


class SwiGLU(nn.Cell):
    """The gated feed-forward layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, config.initializer_range)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, config.initializer_range)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.initializer_range)

    def construct(self, hidden: Tensor) -> Tensor:
        return self.down_proj(mint.nn.functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Linear(nn.Cell):
    """`x` [..., inputs] times the transposed weight [outputs, inputs], without a bias."""

    def __init__(self, inputs: int, outputs: int, deviation: float) -> None:
        super().__init__()
        self.weight = Parameter(initializer(Normal(deviation), (outputs, inputs), ms.float32), name="weight")
        self.product = ops.MatMul(transpose_b=True)

    def construct(self, x: Tensor) -> Tensor:
        return self.product(x.reshape(-1, x.shape[-1]), self.weight).reshape(*x.shape[:-1], -1)


class Embedding(nn.Cell):
    """Rows of the weight [entries, size] for integer ids of any shape."""

    def __init__(self, entries: int, size: int, deviation: float) -> None:
        super().__init__()
        self.weight = Parameter(initializer(Normal(deviation), (entries, size), ms.float32), name="weight")

    def construct(self, ids: Tensor) -> Tensor:
        return ops.gather(self.weight, ids, 0)


class RMSNorm(nn.Cell):
    """Divide by the root mean square of the last dim, in float32 at least, and scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = Parameter(initializer("ones", (size,), ms.float32), name="weight")
        self.eps = eps

    def construct(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == ms.float64 else x.astype(ms.float32)
        scale = mint.rsqrt(mint.mean(wide * wide, -1, True) + self.eps)
        return self.weight * (wide * scale).astype(x.dtype)


class Tables(NamedTuple):
    """What every layer adds or multiplies: rotary cosines and sines [B, T, heads, head_dim] for `rotate`, those of
    queries times head_dim ** -0.5, and the causal mask [B, key heads, query heads / key heads * T, T], 0 or -inf."""

    query_cos: Tensor
    query_sin: Tensor
    key_cos: Tensor
    key_sin: Tensor
    mask: Tensor


class TableMaker:
    """Makes `Tables` for a batch's shape and a number of heads, and keeps the last ones."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.key: tuple | None = None
        self.tables: Tables | None = None

    def __call__(self, batch: int, length: int, queries: int, keys: int, dtype: Any) -> Tables:
        key = batch, length, queries, keys, dtype
        if self.key != key:
            self.tables = Tables(*(Tensor(table).astype(dtype) for table in self.arrays(batch, length, queries, keys)))
            self.key = key
        return self.tables

    def arrays(self, batch: int, length: int, queries: int, keys: int) -> list[np.ndarray]:
        """The tables in float32."""
        config = self.config
        if length > config.max_position_embeddings:
            limit = config.max_position_embeddings
            raise ValueError(f"{length} tokens in a row, but max_position_embeddings is {limit}")
        frequency = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        angle = np.outer(np.arange(length), frequency)[None, :, None]
        waves = [np.tile(np.cos(angle), 2), np.concatenate((-np.sin(angle), np.sin(angle)), -1)]
        tables = [
            np.broadcast_to(wave * scale, (batch, length, heads, config.head_dim))
            for heads, scale in ((queries, config.head_dim**-0.5), (keys, 1.0))
            for wave in waves
        ]
        mask = np.tile(np.triu(np.full((length, length), -np.inf), 1), (queries // keys, 1))
        tables.append(np.broadcast_to(mask, (batch, keys, *mask.shape)))
        return [np.ascontiguousarray(table, np.float32) for table in tables]


def swap_heads(x: Tensor) -> Tensor:
    """[B, T, heads, head_dim] to [B, heads, T, head_dim], and back."""
    return ops.transpose(x, (0, 2, 1, 3))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of `x` [..., head_dim] by the angles of their positions; the first half
    of `sin` is negated."""
    half = x.shape[-1] // 2
    # Slices, not mint.split: on a CPU the gradient of a split that is joined in another order is silently wrong.
    return x * cos + mint.cat((x[..., half:], x[..., :half]), -1) * sin
