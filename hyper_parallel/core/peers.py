"""The ranks that share something with this one, and small things that they tell each other."""

from __future__ import annotations

from typing import Sequence

import numpy as np

from hyper_parallel.core.backend import Backend, Collectives, Group
from hyper_parallel.core.mesh import DeviceMesh


def group_along(collectives: Collectives, mesh: DeviceMesh, axes: Sequence[str]) -> Group:
    """The ranks, in ascending order, that differ from this one along `axes` only. Called by all of them."""
    return collectives.groups([sorted(mesh.group_of(collectives.rank(), axes))])


def gathered(backend: Backend, own: np.ndarray, group: Group) -> np.ndarray:
    """What every rank of a group has, row by row; `own` is one-dimensional, of the same length and dtype on each."""
    tensors = backend.tensors
    with backend.autograd.no_grad():
        sent = tensors.from_numpy(own)
        received = tensors.buffer(sent, group.size * own.size)
        backend.collectives.all_gather(received, sent, group)
    return tensors.to_numpy(received).reshape(group.size, own.size)
