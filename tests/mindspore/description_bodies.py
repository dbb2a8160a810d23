"""What ranks do in `test_description.py`."""

import numpy as np

import hyper_parallel as hp

SHAPES = {"0.weight": (5, 4), "1.weight": (4,), "1.bias": (4,), "2.weight": (3, 4), "2.bias": (3,)}
VALUES = {name: np.full(shape, number, np.float32) for number, (name, shape) in enumerate(SHAPES.items())}


def shard_own_layers(backend):
    """The local shapes by name, and the parameters when every rank has put its shards together."""
    from mindspore import nn

    model = nn.SequentialCell(nn.Embedding(5, 4), nn.LayerNorm((4,)), nn.Dense(4, 3))
    backend.modules.load_parameters(model, VALUES)
    hp.parallelize(model, hp.plan(model, hp.DeviceMesh((2,), ("shard",))))
    local = {name: tuple(parameter.shape) for name, parameter in hp.trainable_parameters(model)}
    return local, hp.full_parameters(model)
