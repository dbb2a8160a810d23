"""What the ranks do in `test_averages.py`."""

from __future__ import annotations

import numpy as np

from hyper_parallel import DeviceMesh, Layout, Partial, Replicate, Shard
from hyper_parallel.core.backend import Backend
from hyper_parallel.core.replay import redistribution


def averages(backend: Backend, values: np.ndarray, dtype: str, scattered: bool) -> np.ndarray:
    """The average of equal values on every rank."""
    mesh = DeviceMesh((backend.collectives.world_size(),), ("tensor",))
    source = Layout(mesh, [Partial("avg")], values.shape)
    target = source.with_placements([Shard(0) if scattered else Replicate()])
    local = backend.tensors.from_numpy(values, dtype)
    return backend.tensors.to_numpy(redistribution(backend, source, target).run(local))


def accumulated(backend: Backend, steps: int) -> list[np.ndarray]:
    """The gradients of two summands after several backwards; PyTorch only."""
    import torch

    mesh = DeviceMesh((backend.collectives.world_size(),), ("tensor",))
    source = Layout(mesh, [Partial()], (4,))
    whole = redistribution(backend, source, source.with_placements([Replicate()]))
    leaves = [torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)]
    for _ in range(steps):
        total = whole(leaves[0]) + whole(leaves[1])  # both get the same gradient
        (total * torch.arange(4.0)).sum().backward()
    return [leaf.grad.numpy() for leaf in leaves]
