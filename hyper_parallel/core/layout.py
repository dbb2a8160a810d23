"""Layout: how one global tensor lies on a mesh. Exact for every rank, and an oracle on numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Mapping, Sequence

import numpy as np

from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Partial, Placement, Replicate, Shard


def chunk_bounds(length: int, pieces: int, index: int) -> tuple[int, int]:
    """Start and stop of piece `index` when `length` is split by ceil-chunk into `pieces`; may be empty."""
    chunk = -(-length // pieces)
    return min(index * chunk, length), min((index + 1) * chunk, length)


@dataclass(frozen=True, init=False)
class Layout:
    """A mesh, a placement for each of its axes, and a global shape.

    Two axes that shard one tensor dim split it left to right: the outer axis first, the inner one inside each piece.

    Args:
        mesh: the device mesh.
        placements: one per mesh axis in order, or `{axis name: placement}` where what is not named is replicated.
        shape: the global shape; sizes of zero and 0-d tensors are fine.

    Raises:
        LayoutError: an axis that the mesh lacks, a dim that the tensor lacks, or a wrong number of placements.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]

    def __init__(
        self, mesh: DeviceMesh, placements: Sequence[Placement] | Mapping[str, Placement], shape: Sequence[int]
    ):
        shape = tuple(int(size) for size in shape)
        if isinstance(placements, Mapping):
            placements = _by_axis(mesh, placements)
        placements = tuple(placements)
        if len(placements) != len(mesh.names):
            raise LayoutError(f"the mesh {mesh} needs {len(mesh.names)} placements, found {len(placements)}")
        resolved = tuple(_resolve(placement, axis, shape) for placement, axis in zip(placements, mesh.names))
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "placements", resolved)
        object.__setattr__(self, "shape", shape)

    def __str__(self) -> str:
        on_axes = ", ".join(f"{axis}: {placement}" for axis, placement in zip(self.mesh.names, self.placements))
        return f"{list(self.shape)} on ({on_axes})"

    def placement(self, axis: str) -> Placement:
        """The placement along a mesh axis; replicated along an axis that the mesh does not have."""
        if axis in self.mesh.names:
            return self.placements[self.mesh.names.index(axis)]
        self.mesh.axis_size(axis)  # refuses a name that is no axis
        return Replicate()

    def slices(self, rank: int) -> tuple[slice, ...]:
        """The global slices, one per tensor dim, of what a rank holds. Their sizes are the local shape."""
        here = self.mesh.coordinates(rank)
        bounds = [(0, size) for size in self.shape]
        for axis, size, placement in zip(self.mesh.names, self.mesh.shape, self.placements):
            if isinstance(placement, Shard):
                start, stop = bounds[placement.dim]
                first, last = chunk_bounds(stop - start, size, here[axis])
                bounds[placement.dim] = (start + first, start + last)
        return tuple(slice(start, stop) for start, stop in bounds)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of what a rank holds."""
        return tuple(part.stop - part.start for part in self.slices(rank))

    def copies(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same elements of the same summand as `rank`, itself included."""
        axes = [axis for axis, placement in zip(self.mesh.names, self.placements) if isinstance(placement, Replicate)]
        return self.mesh.group_of(rank, axes)

    def shard(self, array: np.ndarray, rank: int) -> np.ndarray:
        """What a rank holds of a global array; of a partial value the first rank of the axis holds all, others zero.

        Raises:
            LayoutError: the array is not of the global shape.
        """
        if array.shape != self.shape:
            raise LayoutError(f"this layout is of shape {self.shape}, found an array of shape {array.shape}")
        local = array[self.slices(rank)].copy()
        here = self.mesh.coordinates(rank)
        pending = [here[axis] for axis, each in zip(self.mesh.names, self.placements) if isinstance(each, Partial)]
        return np.zeros_like(local) if any(pending) else local

    def assemble(self, locals_: Sequence[np.ndarray]) -> np.ndarray:
        """The global array from what every rank holds, in the order of `mesh.ranks`; partial summands are added.

        Raises:
            LayoutError: a local array is missing or has the wrong shape.
        """
        if len(locals_) != self.mesh.size:
            raise LayoutError(f"the mesh {self.mesh} has {self.mesh.size} ranks, found {len(locals_)} local arrays")
        result = np.zeros(self.shape, dtype=np.asarray(locals_[0]).dtype)
        seen = set()
        for rank, local in zip(self.mesh.ranks, locals_):
            if local.shape != self.local_shape(rank):
                raise LayoutError(
                    f"rank {rank} holds a local array of shape {self.local_shape(rank)} by {self}, found {local.shape}"
                )
            if self.copies(rank)[0] not in seen:
                seen.add(self.copies(rank)[0])
                result[self.slices(rank)] += local
        return result

    def local_numel(self, rank: int) -> int:
        """Number of elements that a rank holds."""
        return prod(self.local_shape(rank))


def _by_axis(mesh: DeviceMesh, placements: Mapping[str, Placement]) -> list[Placement]:
    for axis in placements:
        if axis not in mesh.names:
            raise LayoutError(f"a placement names the axis {axis!r}, which the mesh {mesh} does not have")
    return [placements.get(axis, Replicate()) for axis in mesh.names]


def _resolve(placement: Placement, axis: str, shape: tuple[int, ...]) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
    if not 0 <= dim < len(shape):
        raise LayoutError(f"axis {axis!r}: {placement} names a dim that a tensor of shape {list(shape)} does not have")
    return Shard(dim)
