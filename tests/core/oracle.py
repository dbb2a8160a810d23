"""What layouts mean, worked out the slow way from the definitions in `core/placement.py`.

Nothing here asks a `Layout` where anything lies: the numbers of all global elements are cut up, axis by axis, and every
rank looks what it got. Values are arrays of the global shape, one for each contribution of a partial tensor.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import permutations, product
from math import prod
from typing import Callable, Collection, Mapping, Sequence

import numpy as np

from hyper_parallel import DeviceMesh, Layout, Partial, Replicate, Shard
from hyper_parallel.core.placement import RaggedShard, StridedShard

Place = tuple[int, ...]
"""Coordinates along some axes of a mesh."""


def place_of(layout: Layout, rank: int) -> Place:
    """The coordinates of a rank: ranks fill the mesh in row-major order."""
    return _places(layout.mesh)[rank]


@lru_cache(maxsize=64)
def _places(mesh: DeviceMesh) -> dict[int, Place]:
    return dict(zip(mesh.ranks, product(*map(range, mesh.shape))))


def chunk(length: int, pieces: int, piece: int) -> list[int]:
    """The rows of one piece by ceil-chunk: row after row is dealt to the piece whose turn it is."""
    size = -(-length // pieces)
    return [row for row in range(length) if row // size == piece]


def chunk_of_blocks(length: int, blocks: int, pieces: int, piece: int) -> list[int]:
    """The rows of one piece when every block is cut for itself."""
    rows = []
    for block in range(blocks):
        inside = chunk(length, blocks, block)
        rows += [inside[row] for row in chunk(len(inside), pieces, piece)]
    return rows


def ragged(length: int, units: Sequence[int], piece: int) -> list[int]:
    """The elements of one piece: units of equal size are dealt out in order, to each as many as it has."""
    owners = [owner for owner, count in enumerate(units) for _ in range(count)]
    size = -(-length // len(owners))
    return [element for element in range(length) if owners[element // size] == piece]


def cutting_order(layout: Layout, dim: int) -> list[int]:
    """The axes that shard a dim, in the order in which they cut it.

    A shard comes before every axis to its right; a strided shard after those to its right whose sizes multiply to its
    split factor. That leaves one order, which is looked for among all.
    """
    sizes, placements = layout.mesh.shape, layout.placements
    cutting = [
        axis
        for axis, placement in enumerate(placements)
        if isinstance(placement, (Shard, StridedShard)) and placement.dim == dim and sizes[axis] > 1
    ]

    def fits(order: Sequence[int]) -> bool:
        for place, axis in enumerate(order):
            earlier = prod(sizes[other] for other in order[:place] if other > axis)
            if earlier != (1 if blocks_of(layout, axis) > 1 else getattr(placements[axis], "split_factor", 1)):
                return False
        return True

    (order,) = filter(fits, permutations(cutting))
    return list(order)


def blocks_of(layout: Layout, axis: int) -> int:
    """How many blocks a strided shard makes itself, because no axis to its right cuts its dim."""
    placement = layout.placements[axis]
    if not isinstance(placement, StridedShard):
        return 1
    for right in range(axis + 1, len(layout.placements)):
        if getattr(layout.placements[right], "dim", None) == placement.dim and layout.mesh.shape[right] > 1:
            return 1
    return placement.split_factor


def indices(layout: Layout, rank: int) -> np.ndarray:
    """The numbers of the global elements that a rank holds, as its local tensor."""
    return _indices(layout, place_of(layout, rank))


@lru_cache(maxsize=4096)
def _indices(layout: Layout, place: Place) -> np.ndarray:
    local = np.arange(prod(layout.shape)).reshape(layout.shape)
    for dim in range(len(layout.shape)):
        for axis in cutting_order(layout, dim):
            blocks, pieces = blocks_of(layout, axis), layout.mesh.shape[axis]
            local = local.take(chunk_of_blocks(local.shape[dim], blocks, pieces, place[axis]), axis=dim)
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, RaggedShard) and layout.mesh.shape[axis] > 1:
            flat = len(placement.dims)
            local = local.reshape(prod(local.shape[:flat]), *local.shape[flat:])
            local = local.take(ragged(local.shape[0], placement.local_units, place[axis]), axis=0)
    return local


def axes_of(layout: Layout, *kinds: type) -> tuple[int, ...]:
    """The axes with placements of some kinds."""
    return tuple(axis for axis, placement in enumerate(layout.placements) if isinstance(placement, kinds))


def coordinates(layout: Layout, rank: int, axes: Sequence[int]) -> Place:
    """The coordinates of a rank along some axes."""
    place = place_of(layout, rank)
    return tuple(place[axis] for axis in axes)


def contributions(layout: Layout, make: Callable[[], np.ndarray]) -> dict[Place, np.ndarray]:
    """One global array from `make()` for each place along the partial axes."""
    axes = axes_of(layout, Partial)
    return {place: make() for place in product(*(range(layout.mesh.shape[axis]) for axis in axes))}


def local(layout: Layout, parts: Mapping[Place, np.ndarray], rank: int) -> np.ndarray:
    """The local array of a rank, of a tensor with these contributions."""
    held = indices(layout, rank)
    return parts[coordinates(layout, rank, axes_of(layout, Partial))].reshape(-1)[held].reshape(held.shape)


def spread(layout: Layout, parts: Mapping[Place, np.ndarray]) -> list[np.ndarray]:
    """The local arrays of all ranks, in the order of the mesh."""
    return [local(layout, parts, rank) for rank in layout.mesh.ranks]


def collect(layout: Layout, locals_: Sequence[np.ndarray], apart: Sequence[int] = ()) -> dict[Place, np.ndarray]:
    """The contributions that local arrays hold: a global array for each place along the partial axes and those that are
    looked at `apart`. Copies must agree."""
    axes = tuple(sorted({*axes_of(layout, Partial), *apart}))
    parts: dict[Place, np.ndarray] = {}
    written: dict[Place, np.ndarray] = {}
    for rank, local in zip(layout.mesh.ranks, locals_):
        place, held = coordinates(layout, rank, axes), indices(layout, rank)
        assert local.shape == held.shape, f"rank {rank}: {local.shape} instead of {held.shape}"
        if place not in parts:
            parts[place] = np.zeros(prod(layout.shape), local.dtype)
            written[place] = np.zeros(prod(layout.shape), bool)
        again = written[place][held]
        np.testing.assert_array_equal(
            local[again], parts[place][held][again], err_msg=f"rank {rank} holds another copy"
        )
        parts[place][held] = local
        written[place][held] = True
    assert all(each.all() for each in written.values()), "nobody holds some elements"
    return {place: part.reshape(layout.shape) for place, part in parts.items()}


def reduced(layout: Layout, parts: Mapping[Place, np.ndarray], apart: Sequence[int] = ()) -> dict[Place, np.ndarray]:
    """The values of contributions, for each place along the axes that stay `apart`; one axis is reduced at a time."""
    axes = sorted({*axes_of(layout, Partial), *apart})
    for axis in [axis for axis in axes if axis not in apart]:
        at = axes.index(axis)
        rows: dict[Place, list[np.ndarray]] = {}
        for place, part in sorted(parts.items()):
            rows.setdefault(place[:at] + place[at + 1 :], []).append(part)
        parts = {place: REDUCE[layout.placements[axis].op](np.stack(each), axis=0) for place, each in rows.items()}
        axes.remove(axis)
    return dict(parts)


REDUCE = {"sum": np.sum, "avg": np.mean, "max": np.max, "min": np.min}


def value(layout: Layout, locals_: Sequence[np.ndarray]) -> np.ndarray:
    """The global array that local arrays of all ranks stand for."""
    return reduced(layout, collect(layout, locals_))[()]


def lacking(source: Layout, target: Layout, receivers: Sequence[int], apart: bool = True) -> int:
    """How many elements `receivers` need by `target` and don't hold by `source`: each by itself, or together."""
    needed = [set(indices(target, rank).flat) for rank in receivers]
    held = [set(indices(source, rank).flat) for rank in receivers]
    if apart:
        return sum(len(need - have) for need, have in zip(needed, held))
    return len(set().union(*needed) - set().union(*held))


def gathering_everything(source: Layout, axes: Collection[str]) -> dict[tuple[int, int], int]:
    """Elements by (sender, receiver) when, along `axes`, every rank receives the local tensor of every other one."""
    still = [axis for axis, name in enumerate(source.mesh.names) if name not in axes]
    groups: dict[Place, list[int]] = {}
    for rank in source.mesh.ranks:
        groups.setdefault(coordinates(source, rank, still), []).append(rank)
    return {
        (sender, receiver): indices(source, sender).size
        for group in groups.values()
        for sender, receiver in permutations(group, 2)
    }


def logical_copies(layout: Layout) -> int:
    """How often a tuple of local arrays, times one of gradients, counts every element: once for each copy whose
    gradient is a copy too."""
    return prod(
        size
        for size, placement, gradient in zip(layout.mesh.shape, layout.placements, layout.gradient_placements)
        if placement == Replicate() and gradient == Replicate()
    )
