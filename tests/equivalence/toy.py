"""A toy model with every awkward thing in it, the same in both frameworks, with numbers from numpy.

Odd dims, a scalar, tied weights, a block called several times, frozen and unused parameters: each by configuration.
"""

import importlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ToyConfig:
    inputs: int = 5
    width: int = 3
    hidden: int = 7
    blocks: int = 2
    calls: tuple = (0, 1)
    tied: bool = False
    shared: bool = False
    use_extra: bool = True
    frozen: tuple = ()
    dtype: str = "float64"


def build(backend, config):
    """The toy model and its loss function in the backend's framework, with fixed values."""
    module = importlib.import_module(f"tests.equivalence.toy_{backend.name}")
    model = module.Toy(config)
    values = {}
    for use in backend.modules.parameter_uses(model):
        seed = sum(use.name.encode())
        values[use.name] = np.random.default_rng(seed).normal(size=tuple(use.parameter.shape)).astype(config.dtype)
    if config.tied:
        del values["head.weight"]
    backend.modules.load_parameters(model, values)
    return model, lambda x: module.loss(model, x)


def batch(backend, config, index):
    """Inputs number `index`: [4, inputs]."""
    array = np.random.default_rng(1000 + index).normal(size=(4, config.inputs)).astype(config.dtype)
    return backend.tensors.from_numpy(array)
