"""The transformer that is trained on the test bed. Its blocks compute, or sleep as long as a device would take."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Size:
    """Of the transformer, and of what a rank computes in a step."""

    width: int
    layers: int
    vocabulary: int
    tokens: int
    gigaflops: float | None
    """Of the device that a block sleeps for; None to compute."""


class Clock:
    """What the step's thread has slept so far, in seconds."""

    slept = 0.0

    @classmethod
    def sleep(cls, seconds: float) -> None:
        start = time.perf_counter()
        time.sleep(seconds)
        cls.slept += time.perf_counter() - start


class Asleep(torch.autograd.Function):
    """A block on a device that computes elsewhere: takes time, twice that in backward, and has made-up gradients."""

    @staticmethod
    def forward(context: Any, input: Tensor, seconds: float, *parameters: Tensor) -> Tensor:
        Clock.sleep(seconds)
        context.seconds, context.shapes = seconds, [each.shape for each in parameters]
        return input * 1.0

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple:
        Clock.sleep(2 * context.seconds)
        return gradient, None, *(torch.full(shape, 1e-3) for shape in context.shapes)


class Block(nn.Module):
    """Attention and a feed-forward network with four times the width between."""

    def __init__(self, size: Size):
        super().__init__()
        width = size.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.seconds = None
        if size.gigaflops is not None:
            self.seconds = 2 * size.tokens * sum(each.numel() for each in self.parameters()) / (size.gigaflops * 1e9)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.seconds is not None:
            linears = (self.norm1, self.norm2, self.qkv, self.out, self.up, self.down)
            return Asleep.apply(hidden, self.seconds, *(each for one in linears for each in (one.weight, one.bias)))
        query, key, value = self.qkv(self.norm1(hidden)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.norm2(hidden))))


class Transformer(nn.Module):
    """From tokens and targets to the mean cross entropy."""

    def __init__(self, size: Size):
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), targets.flatten())
