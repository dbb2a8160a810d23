"""The toy model in plain MindSpore. See `toy.py`."""

import mindspore as ms
import numpy as np
from mindspore import mint, nn
from mindspore.mint.nn.functional import linear


def _zeros(shape, dtype, name):
    return ms.Parameter(ms.Tensor(np.zeros(shape, dtype)), name=name)


class Block(nn.Cell):
    def __init__(self, width, hidden, dtype):
        super().__init__()
        self.scale = _zeros((width,), dtype, "scale")
        self.up = _zeros((hidden, width), dtype, "up")
        self.down = _zeros((width, hidden), dtype, "down")

    def construct(self, x):
        return x + linear(mint.tanh(linear(x * self.scale, self.up)), self.down)


class Head(nn.Cell):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def construct(self, x):
        return linear(x, self.weight)


class Toy(nn.Cell):
    def __init__(self, config):
        super().__init__()
        self.calls = config.calls
        self.use_extra = config.use_extra
        self.embed = _zeros((config.inputs, config.width), config.dtype, "embed")
        self.layers = nn.CellList([Block(config.width, config.hidden, config.dtype) for _ in range(config.blocks)])
        self.again = self.layers[0] if config.shared else None
        self.temperature = _zeros((), config.dtype, "temperature")
        self.extra = _zeros((config.width,), config.dtype, "extra")
        self.head = Head(self.embed if config.tied else _zeros((config.inputs, config.width), config.dtype, "head"))
        for name, parameter in self.parameters_and_names():
            parameter.requires_grad = not any(part in name for part in config.frozen)

    def construct(self, x):
        x = mint.matmul(x, self.embed)
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
