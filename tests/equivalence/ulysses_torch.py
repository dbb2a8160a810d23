"""The decoder with attention that trades tokens for heads by itself, in PyTorch. See `region_bodies.py`."""

from torch.nn.functional import scaled_dot_product_attention

import hyper_parallel as hp
from hyper_parallel.models.torch_decoder import Attention, Decoder, rotate


class UlyssesAttention(Attention):
    """Part of the tokens in, with all heads; the same out. In between all tokens, with some heads."""

    def forward(self, hidden, cos, sin):
        ranks, length = hp.collectives(self), cos.shape[0]
        keys = self.k_proj.out_features // self.head_dim
        q = self.q_norm(self.q_proj(hidden).unflatten(-1, (keys * self.groups, self.head_dim)))
        k = self.k_norm(self.k_proj(hidden).unflatten(-1, (keys, self.head_dim)))
        v = self.v_proj(hidden).unflatten(-1, (keys, self.head_dim))
        q, k, v = (ranks.all_to_all(x, "tensor", 2, 1, length=length).transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(self.groups, dim=1) for x in (rotate(k, cos, sin), v))
        mixed = scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        return self.o_proj(ranks.all_to_all(mixed.transpose(1, 2), "tensor", 1, 2, uneven=True).flatten(2))


def with_ulysses(decoder: Decoder) -> Decoder:
    """The decoder whose attention is this one."""
    for layer in decoder.model.layers:
        layer.self_attn.__class__ = UlyssesAttention
    return decoder
