"""Which axes cut the matrices of a parameter, and which ranks hold pieces of one (paper §6.3).

The matrix-plane predicate: does a mesh axis cut rows or columns of a logical matrix? It is asked of the elements that
ranks hold, so it has one answer for every layout: plain, uneven, strided, ragged, over several axes, or empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Sequence

import numpy as np

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.muon.matrices import MatrixView, Ranges
from hyper_parallel.core.placement import RaggedShard, Replicate

Bounds = tuple[tuple[int, int], ...]
"""Start and stop along some dims."""


@dataclass(frozen=True, eq=False)
class Domain:
    """How the matrices of all parameters of one layout and one view are cut.

    Every rank has a place along `axes`, along `replicas` and along `spread`.
    """

    axes: tuple[str, ...]
    """Mesh axes along which ranks hold pieces of the same matrix."""
    replicas: tuple[str, ...]
    """Mesh axes along which ranks hold the same."""
    spread: tuple[str, ...]
    """Mesh axes along which ranks hold other matrices."""
    grid: np.ndarray
    """int64 [spread, replicas, axes]: the global ranks."""
    counts: np.ndarray
    """int64 [spread, axes, planes, matrices]: how many elements of each matrix a rank holds."""
    shares_planes: bool
    """The planes that a rank holds are the leading dims of its local tensor, so that some of them are a part of it."""

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """What the ranks at each place along `spread` hold together."""
        return tuple(_cell(counts, self.shares_planes) for counts in self.counts)


@dataclass(frozen=True, eq=False)
class Cell:
    """The matrices that one shard group holds. Planes and ranks count by their place in it."""

    planes: tuple[int, ...]
    """The global number of each plane."""
    counts: np.ndarray
    """int64 [ranks, planes, matrices]: how many elements of each matrix a rank holds."""
    uniform: bool
    """All planes are cut alike, and a rank that holds anything has all planes as leading dims."""

    @cached_property
    def signature(self) -> tuple:
        """Equal where two cells are cut alike, whatever planes they hold."""
        return len(self.planes), self.uniform, self.counts.shape, self.counts.tobytes()

    def held(self, matrix: int, first: int, last: int) -> list[int]:
        """How many elements each rank holds of a matrix of the planes `[first, last)`."""
        key = (matrix, first, last)
        if key not in self._held:
            self._held[key] = self.counts[:, first:last, matrix].sum(axis=1).tolist()
        return self._held[key]

    @cached_property
    def _held(self) -> dict[tuple[int, int, int], list[int]]:
        return {}

    @cached_property
    def holders(self) -> np.ndarray:
        """int64 [planes, matrices]: how many ranks hold some of each matrix."""
        return (self.counts > 0).sum(axis=0)

    @cached_property
    def is_cut(self) -> bool:
        """Some matrix lies on several ranks."""
        return bool((self.holders > 1).any())


def _cell(counts: np.ndarray, shares_planes: bool) -> Cell:
    planes = np.flatnonzero(counts.any(axis=(0, 2)))
    inside = np.ascontiguousarray(counts[:, planes])
    uniform = shares_planes and bool((inside == inside[:, :1]).all())
    return Cell(tuple(planes.tolist()), inside, uniform)


@lru_cache(maxsize=1024)
def domain_of(layout: Layout, view: MatrixView) -> Domain:
    """The domain of parameters of this layout and this view."""
    mesh = layout.mesh
    replicas, sharding = [], []
    for axis, size, placement in zip(mesh.names, mesh.shape, layout.placements):
        if size > 1:
            (replicas if isinstance(placement, Replicate) else sharding).append(axis)
    held = [elements_held(layout, view, rank) for rank in mesh.group_of(mesh.ranks[0], sharding)]
    sizes = [mesh.axis_size(axis) for axis in sharding]
    counts = np.array(held).reshape(*sizes, view.planes, len(view.matrices))
    axes = [axis for place, axis in enumerate(sharding) if _cuts(counts > 0, place, len(sharding))]
    spread = [axis for axis in sharding if axis not in axes]
    order = [sharding.index(axis) for axis in spread + axes]
    counts = counts.transpose(*order, len(order), len(order) + 1)
    at = {axis: place for place, axis in enumerate(mesh.names)}
    alone = [axis for axis, size in zip(mesh.names, mesh.shape) if size == 1]
    grid = np.array(mesh.ranks).reshape(mesh.shape)
    grid = grid.transpose([at[axis] for axis in (*spread, *replicas, *axes, *alone)])
    lengths = [prod(mesh.axis_size(axis) for axis in some) for some in (spread, replicas, axes)]
    return Domain(
        tuple(axes),
        tuple(replicas),
        tuple(spread),
        grid.reshape(lengths),
        counts.reshape(lengths[0], lengths[2], *counts.shape[len(order) :]),
        _shares_planes(layout, view),
    )


def _cuts(held: np.ndarray, place: int, axes: int) -> bool:
    """Tell whether ranks at different places along an axis hold elements of the same matrix."""
    others = tuple(each for each in range(axes) if each != place)
    return bool((held.any(axis=others).sum(axis=0) > 1).any())


def _shares_planes(layout: Layout, view: MatrixView) -> bool:
    ragged = [
        len(placement.dims)
        for placement, size in zip(layout.placements, layout.mesh.shape)
        if isinstance(placement, RaggedShard) and size > 1
    ]
    return view.lead > 0 and max(ragged, default=0) <= view.lead


def elements_held(layout: Layout, view: MatrixView, rank: int) -> np.ndarray:
    """int64 [planes, matrices]: how many elements of each matrix a rank holds."""
    counts = np.zeros((view.planes, len(view.matrices)), dtype=np.int64)
    for piece in layout.pieces(rank):
        planes, rows, columns = (bounds_of(piece.box[dims]) for dims in parts_of(view))
        held = _side_counts(view, 0, rows) * _side_counts(view, 1, columns)
        counts[flattened(planes, view.shape[: view.lead])] += held
    return counts


def parts_of(view: MatrixView) -> tuple[slice, slice, slice]:
    """The dims of a parameter that count planes, rows and columns."""
    return slice(0, view.lead), slice(view.lead, view.split), slice(view.split, None)


def bounds_of(box: Sequence[slice]) -> Bounds:
    """The bounds of a box, as something that can be looked up."""
    return tuple((part.start, part.stop) for part in box)


@lru_cache(maxsize=4096)
def flattened(bounds: Bounds, sizes: tuple[int, ...]) -> np.ndarray:
    """The numbers, in a flattened tensor of `sizes`, of the elements of a box; one element where there are no dims."""
    numbers = np.zeros(1, dtype=np.int64)
    for (start, stop), size in zip(bounds, sizes):
        numbers = (numbers[:, None] * size + np.arange(start, stop)).reshape(-1)
    return numbers


@lru_cache(maxsize=4096)
def _side_counts(view: MatrixView, side: int, bounds: Bounds) -> np.ndarray:
    """For each matrix how many of these rows (side 0) or columns (side 1) of a plane are its own."""
    dims = parts_of(view)[1 + side]
    numbers = flattened(bounds, view.shape[dims])
    places = (side_places(view, matrix, side) for matrix in range(len(view.matrices)))
    return np.array([np.count_nonzero(each[numbers] >= 0) for each in places], dtype=np.int64)


@lru_cache(maxsize=4096)
def side_places(view: MatrixView, matrix: int, side: int) -> np.ndarray:
    """For each row (side 0) or column (side 1) of a plane its place in a matrix; -1 where it is none of its own."""
    chosen = view.matrices[matrix]
    return _places((chosen.rows, chosen.columns)[side], view.plane[side])


@lru_cache(maxsize=4096)
def _places(ranges: Ranges, length: int) -> np.ndarray:
    places, count = np.full(length, -1, dtype=np.int64), 0
    for each in ranges:
        places[np.arange(each.start, each.stop, each.step)] = np.arange(count, count + len(each))
        count += len(each)
    return places
