"""HyperParallel on PyTorch."""

from hyper_parallel.backends.torch import (
    autograd,
    collectives,
    interception,
    modules,
    muon,
    optimizer,
    randomness,
    tensors,
    training,
)
from hyper_parallel.core.backend import Backend

BACKEND = Backend(
    name="torch",
    tensors=tensors,
    collectives=collectives,
    autograd=autograd,
    modules=modules,
    training=training,
    interception=interception,
    randomness=randomness,
    muon=muon,
    optimizer=optimizer,
)
