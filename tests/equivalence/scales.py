"""A model of products and sums of equal shapes, which both frameworks compute alike to the last bit, also in half
precision; MindSpore has no more than that for bfloat16 on a CPU."""

import numpy as np

SHAPE = (5, 3)


def values(name, seed=0):
    """Numbers for a parameter or a batch."""
    return np.random.default_rng([*name.encode(), seed]).normal(size=SHAPE).astype("float32")


def build(backend, blocks=2):
    """`x -> x * weight + bias`, several times; returns the model and its loss, a weighted sum in float32. The loss
    writes the dtypes of what the model took and gave to `model.seen`."""
    make = _torch if backend.name == "torch" else _mindspore
    model, loss = make(blocks)
    names = [use.name for use in backend.modules.parameter_uses(model)]
    backend.modules.load_parameters(model, {name: values(name) for name in names})
    return model, loss


def _torch(blocks):
    import torch

    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(SHAPE))
            self.bias = torch.nn.Parameter(torch.zeros(SHAPE))
            self.seen = None

        def forward(self, x):
            self.seen = str(x.dtype), str(self.weight.dtype)
            return x * self.weight + self.bias

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Scale() for _ in range(blocks))
            self.last = torch.nn.Parameter(torch.zeros(SHAPE))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x * self.last

    model = Model()
    return model, lambda x: (model(x).float() * torch.from_numpy(values("c"))).sum()


def _mindspore(blocks):
    import mindspore as ms
    from mindspore import nn

    def parameter(name):
        return ms.Parameter(ms.Tensor(np.zeros(SHAPE, "float32")), name=name)

    class Scale(nn.Cell):
        def __init__(self):
            super().__init__()
            self.weight = parameter("weight")
            self.bias = parameter("bias")
            self.seen = None

        def construct(self, x):
            self.seen = str(x.dtype), str(self.weight.dtype)
            return x * self.weight + self.bias

    class Model(nn.Cell):
        def __init__(self):
            super().__init__()
            self.layers = nn.CellList([Scale() for _ in range(blocks)])
            self.last = parameter("last")

        def construct(self, x):
            for layer in self.layers:
                x = layer(x)
            return x * self.last

    model = Model()
    return model, lambda x: (model(x).astype(ms.float32) * ms.Tensor(values("c"))).sum()
