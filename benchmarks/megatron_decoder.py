"""Our decoder with tensor parallelism written into it by hand, as in Megatron-LM: the peer of `tensor_parallel.py`.

It is `hyper_parallel.models.torch_decoder` operator for operator, with the same parameter names, and knows nothing of
HyperParallel. Linears that read hidden states are cut by columns, those that write them by rows, the embedding and the
head along the vocabulary. Between blocks every rank holds all hidden states or, with sequence parallelism, its part of
the sequence. The four collectives below, two pairs of conjugates, are all that happens at the borders of a block.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from hyper_parallel.models.torch_decoder import RMSNorm, rotary_table, rotate

# The newer name first: torch 2.13 warns about the older one.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def summed(tensor: Tensor) -> Tensor:
    """The sum over ranks, in place: nothing else reads what comes out of a matrix product."""
    tensor = tensor.contiguous()
    dist.all_reduce(tensor)
    return tensor


def gathered(part: Tensor) -> Tensor:
    """The parts [B, T/k, H] of all ranks, one after the other."""
    ranks, (batch, length, features) = dist.get_world_size(), part.shape
    flat = part.new_empty((ranks * batch, length, features))
    all_gather_single(flat, part.contiguous())
    return flat.view(ranks, batch, length, features).transpose(0, 1).reshape(batch, ranks * length, features)


def summed_part(whole: Tensor) -> Tensor:
    """This rank's part [B, T/k, H] of the sum over ranks."""
    ranks, (batch, length, features) = dist.get_world_size(), whole.shape
    parts = whole.view(batch, ranks, length // ranks, features).transpose(0, 1).contiguous()
    part = whole.new_empty((batch, length // ranks, features))
    reduce_scatter_single(part, parts.view(ranks * batch, length // ranks, features))
    return part


class Copy(Function):
    """Into a block: nothing; the gradient is the sum of what the ranks computed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return summed(gradient)


class Reduce(Function):
    """Out of a block: the sum of what the ranks computed; nothing for the gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return summed(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Gather(Function):
    """Into a block with sequence parallelism."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return gathered(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return summed_part(gradient)


class ReduceScatter(Function):
    """Out of a block with sequence parallelism."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return summed_part(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gathered(gradient)


class CrossEntropy(Function):
    """The mean cross entropy of logits [N, V/k] for targets [N] of the whole vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        largest = logits.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        shifted = logits - largest[:, None]
        places = targets - dist.get_rank() * logits.shape[1]
        elsewhere = (places < 0) | (places >= logits.shape[1])
        places = places.masked_fill(elsewhere, 0)
        chosen = shifted.gather(1, places[:, None])[:, 0].masked_fill_(elsewhere, 0)
        dist.all_reduce(chosen)
        exponentials = shifted.exp_()
        sums = exponentials.sum(1)
        dist.all_reduce(sums)
        exponentials.div_(sums[:, None])
        ctx.save_for_backward(exponentials, places, elsewhere)
        return (sums.log() - chosen).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        softmax, places, elsewhere = ctx.saved_tensors
        softmax.scatter_add_(1, places[:, None], (elsewhere.to(softmax.dtype) - 1)[:, None])
        return softmax.mul_(gradient / softmax.shape[0]), None


def mark_partial(norm: RMSNorm) -> RMSNorm:
    """A norm of a part of the heads or of the sequence: each rank computes a part of its gradient."""
    norm.weight.partial = True
    return norm


class Attention(nn.Module):
    """Causal grouped-query attention of this rank's heads."""

    def __init__(self, config: Any, enter: type[Function], leave: type[Function]) -> None:
        super().__init__()
        ranks = dist.get_world_size()
        self.enter, self.leave = enter, leave
        self.head_dim = config.head_dim
        self.groups = config.num_heads // config.num_kv_heads
        queries, keys = (heads * config.head_dim // ranks for heads in (config.num_heads, config.num_kv_heads))
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = mark_partial(RMSNorm(config.head_dim, config.rms_norm_eps))
        self.k_norm = mark_partial(RMSNorm(config.head_dim, config.rms_norm_eps))

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = self.enter.apply(hidden)
        batch, length, _ = hidden.shape
        heads = (batch, length, -1, self.head_dim)
        queries = rotate(self.q_norm(self.q_proj(hidden).view(heads)).transpose(1, 2), cos, sin)
        keys = rotate(self.k_norm(self.k_proj(hidden).view(heads)).transpose(1, 2), cos, sin)
        values = self.v_proj(hidden).view(heads).transpose(1, 2)
        keys = keys.repeat_interleave(self.groups, dim=1)
        values = values.repeat_interleave(self.groups, dim=1)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.leave.apply(self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1)))


class SwiGLU(nn.Module):
    """This rank's part of the gated feed-forward layer."""

    def __init__(self, config: Any, enter: type[Function], leave: type[Function]) -> None:
        super().__init__()
        inner = config.intermediate_size // dist.get_world_size()
        self.enter, self.leave = enter, leave
        self.gate_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.enter.apply(hidden)
        return self.leave.apply(self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden)))


class DecoderLayer(nn.Module):
    """Attention and SwiGLU, each behind a norm and beside a residual path."""

    def __init__(self, config: Any, enter: type[Function], leave: type[Function]) -> None:
        super().__init__()
        self.self_attn = Attention(config, enter, leave)
        self.mlp = SwiGLU(config, enter, leave)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Embedding(nn.Module):
    """This rank's rows of the table."""

    def __init__(self, config: Any, leave: type[Function]) -> None:
        super().__init__()
        self.leave = leave
        self.weight = nn.Parameter(torch.empty(config.vocab_size // dist.get_world_size(), config.hidden_size))

    def forward(self, input_ids: Tensor) -> Tensor:
        places = input_ids - dist.get_rank() * self.weight.shape[0]
        elsewhere = (places < 0) | (places >= self.weight.shape[0])
        found = F.embedding(places.masked_fill(elsewhere, 0), self.weight)
        return self.leave.apply(found.masked_fill(elsewhere[..., None], 0))


class Backbone(nn.Module):
    """Token ids [B, T] to hidden states [B, T, hidden_size], or [B, T/k, hidden_size] with sequence parallelism."""

    def __init__(self, config: Any, enter: type[Function], leave: type[Function]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config, leave)
        self.layers = nn.ModuleList(DecoderLayer(config, enter, leave) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        cos, sin = rotary_table(config.max_position_embeddings, config.head_dim, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        hidden = self.embed_tokens(input_ids)
        cos, sin = self.cos[:length].to(hidden.dtype), self.sin[:length].to(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return self.norm(hidden)


class MegatronDecoder(nn.Module):
    """Token ids [B, T] to this rank's logits [B, T, vocab_size/k]; every size that is cut is a multiple of k.

    Call `finish_gradients` after backward.
    """

    def __init__(self, config: Any, sequence_parallel: bool) -> None:
        super().__init__()
        self.enter, leave = (Gather, ReduceScatter) if sequence_parallel else (Copy, Reduce)
        self.model = Backbone(config, self.enter, leave)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size // dist.get_world_size(), bias=False)
        if sequence_parallel:
            for name, module in self.named_modules():
                if name.endswith("layernorm") or name == "model.norm":
                    mark_partial(module)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.lm_head(self.enter.apply(self.model(input_ids)))

    def load_whole(self, values: dict[str, Tensor]) -> None:
        """Take this rank's part of every parameter of the whole decoder."""
        for name, parameter in self.named_parameters():
            parameter.data.copy_(part_of(name, values[name]))

    def finish_gradients(self) -> None:
        """Sum up the gradients of which each rank has a part, in one collective."""
        gradients = [each.grad for each in self.parameters() if getattr(each, "partial", False)]
        flat = torch.cat([each.flatten() for each in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients])):
            gradient.copy_(part.view_as(gradient))


def part_of(name: str, whole: Tensor) -> Tensor:
    """This rank's part of a parameter of the whole decoder."""
    if whole.dim() == 1:
        return whole
    dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
    return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]
