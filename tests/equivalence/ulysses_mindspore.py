"""The decoder with attention that trades tokens for heads by itself, in MindSpore. See `region_bodies.py`."""

import hyper_parallel as hp
from hyper_parallel.models.mindspore_decoder import Attention, Decoder, rotate, swap_heads


class UlyssesAttention(Attention):
    """Part of the tokens in, with all heads; the same out. In between all tokens, with some heads."""

    def construct(self, hidden, tables):
        ranks = hp.collectives(self)
        batch, part, _ = hidden.shape
        length = sum(ranks.counts([part] * ranks.size("tensor"), "tensor"))
        shape = (batch, part, -1, self.head_dim)
        q, k = self.q_norm(self.q_proj(hidden).reshape(shape)), self.k_norm(self.k_proj(hidden).reshape(shape))
        v = self.v_proj(hidden).reshape(shape)
        q, k, v = (ranks.all_to_all(x, "tensor", 2, 1, length=length) for x in (q, k, v))
        tables = tables(batch, length, q.shape[2], k.shape[2], hidden.dtype)
        q, k = rotate(q, tables.query_cos, tables.query_sin), rotate(k, tables.key_cos, tables.key_sin)
        k, v = swap_heads(k), swap_heads(v)
        q = swap_heads(q).reshape(batch, k.shape[1], -1, self.head_dim)
        mixed = self.product(self.softmax(self.product_transposed(q, k) + tables.mask), v)
        mixed = swap_heads(mixed.reshape(batch, -1, length, self.head_dim))
        return self.o_proj(ranks.all_to_all(mixed, "tensor", 1, 2, uneven=True).reshape(batch, part, -1))


def with_ulysses(decoder: Decoder) -> Decoder:
    """The decoder whose attention is this one."""
    for layer in decoder.model.layers:
        layer.self_attn.__class__ = UlyssesAttention
    return decoder
