"""Elements and rows that travel between the ranks along one axis of a mesh, differentiably."""

from __future__ import annotations

from math import prod
from typing import Sequence

import numpy as np

from hyper_parallel.core.backend import Backend, Group, Tensor
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.peers import group_along


class Travel:
    """What a rank sends to each of the others along an axis, and gets from each. All of them call together.

    An exchange is one operation of autograd, so it has to be recorded on every rank or on none. Where no row comes
    there is one of zeros: what follows always has something to run on, and its gradient comes back.
    """

    def __init__(self, backend: Backend, mesh: DeviceMesh):
        self._backend = backend
        self._mesh = mesh
        self._groups: dict[str, Group] = {}

    def counts(self, sent: Sequence[int], axis: str) -> list[int]:
        """How many rows come from each rank, when this one sends `sent[r]` to rank r. Read on the host."""
        tensors = self._backend.tensors
        told, heard = tensors.from_numpy(np.array(sent, "int64")), tensors.zeros((len(sent),), "int64")
        self._backend.collectives.all_to_all(heard, told, self._group(axis))
        return tensors.to_numpy(heard).tolist()

    def rows(self, rows: Tensor, axis: str, sent: Sequence[int], received: Sequence[int], name: str = "") -> Tensor:
        """Rows of equal length, sorted by destination, for those that come from each rank; a row of zeros where none
        comes. One that stands for none is not sent. The gradient of a row goes back to where it came from."""
        width = tuple(int(size) for size in rows.shape[1:])
        going, coming = ([int(count) * prod(width) for count in counts] for counts in (sent, received))
        return self.elements(rows, axis, (sum(received) or 1, *width), going, coming, name)

    def elements(
        self,
        tensor: Tensor,
        axis: str,
        shape: tuple[int, ...],
        going: Sequence[int],
        coming: Sequence[int],
        name: str = "",
    ) -> Tensor:
        """A tensor of `shape` of what comes: `coming[r]` elements from rank r, for `going[r]` of `tensor`'s to it."""
        before = tuple(int(size) for size in tensor.shape)
        return self._backend.autograd.differentiable(
            tensor,
            lambda local: (self._travel(local, axis, shape, going, coming), None),
            lambda gradient, _: self._travel(gradient, axis, before, coming, going),
            name,
        )

    def _travel(
        self, tensor: Tensor, axis: str, shape: tuple[int, ...], going: Sequence[int], coming: Sequence[int]
    ) -> Tensor:
        tensors, count = self._backend.tensors, sum(coming)
        outgoing = tensors.alias(tensors.flat(tensor), 0, (sum(going),))  # not the row of zeros
        arrived = tensors.buffer(tensor, prod(shape), zero=not count)
        into = tensors.alias(arrived, 0, (count,))
        self._backend.collectives.all_to_all(into, outgoing, self._group(axis), list(coming), list(going))
        return tensors.alias(arrived, 0, shape)

    def _group(self, axis: str) -> Group:
        """The ranks along an axis; made when they first meet."""
        if axis not in self._groups:
            self._groups[axis] = group_along(self._backend.collectives, self._mesh, [axis])
        return self._groups[axis]
