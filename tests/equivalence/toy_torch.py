"""The toy model in plain PyTorch. See `toy.py`."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, hidden, dtype):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(width, dtype=dtype))
        self.up = nn.Parameter(torch.zeros(hidden, width, dtype=dtype))
        self.down = nn.Parameter(torch.zeros(width, hidden, dtype=dtype))

    def forward(self, x):
        return x + F.linear(torch.tanh(F.linear(x * self.scale, self.up)), self.down)


class Head(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return F.linear(x, self.weight)


class Toy(nn.Module):
    def __init__(self, config):
        super().__init__()
        dtype = getattr(torch, config.dtype)
        self.calls = config.calls
        self.use_extra = config.use_extra
        self.embed = nn.Parameter(torch.zeros(config.inputs, config.width, dtype=dtype))
        self.layers = nn.ModuleList(Block(config.width, config.hidden, dtype) for _ in range(config.blocks))
        self.again = self.layers[0] if config.shared else None
        self.temperature = nn.Parameter(torch.zeros((), dtype=dtype))
        self.extra = nn.Parameter(torch.zeros(config.width, dtype=dtype))
        self.head = Head(
            self.embed if config.tied else nn.Parameter(torch.zeros(config.inputs, config.width, dtype=dtype))
        )
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not any(part in name for part in config.frozen))

    def forward(self, x):
        x = x @ self.embed
        for index in self.calls:
            x = self.layers[index](x)
        if self.again is not None:
            x = self.again(x)
        if self.use_extra:
            x = x * self.extra
        return self.head(x) * self.temperature


def loss(model, x):
    y = model(x)
    return (y * y).mean()
