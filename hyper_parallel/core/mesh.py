"""Device meshes: named axes over ranks, as pure data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Iterable, Mapping, Sequence

import numpy as np

from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.placement import whole_numbers

AXES = ("pipeline", "replicate", "shard", "expert", "context", "tensor")
"""Every axis name there is, outermost first."""

BATCH_AXES = ("replicate", "shard", "expert")
"""Axes whose ranks see different samples."""

MODEL_AXES = ("expert", "context", "tensor")
"""Axes that cut parameters and activations; along `replicate` and `shard` whole models work side by side."""


@dataclass(frozen=True, init=False, repr=False)
class DeviceMesh:
    """Ranks arranged along named axes.

    `DeviceMesh((2, 4), ("replicate", "shard"))` places ranks 0..7 in row-major order: the last axis varies fastest.
    Another order, or a part of a job, is given by `ranks`. An axis that is absent behaves exactly like an axis of
    size one, so every question about axes accepts all names in `AXES`.

    Args:
        shape: size of every axis, each at least 1.
        names: axis names out of `AXES`, outermost first as in `AXES`.
        ranks: global ranks in row-major order, distinct; `range(prod(shape))` when not given.

    Raises:
        LayoutError: names unknown, repeated or out of order; sizes or ranks that do not fit.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    ranks: tuple[int, ...]

    def __init__(self, shape: Sequence[int], names: Sequence[str], ranks: Sequence[int] | None = None):
        shape, names = whole_numbers(shape, "the sizes of a mesh are whole numbers"), _listed_names(names)
        ranks = whole_numbers(range(prod(shape)) if ranks is None else ranks, "the ranks of a mesh are whole numbers")
        _check_mesh(shape, names, ranks)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "ranks", ranks)

    @classmethod
    def from_sizes(cls, sizes: Mapping[str, int]) -> DeviceMesh:
        """A mesh from `{axis name: size}` in any order; ranks are contiguous."""
        known = [name for name in AXES if name in sizes]
        unknown = [name for name in sizes if name not in AXES]
        return cls([sizes[name] for name in known + unknown], known + unknown)

    def __str__(self) -> str:
        return self._axes if self._is_counted else f"{self._axes} over the ranks {_short(self.ranks)}"

    def __repr__(self) -> str:
        ranks = "" if self._is_counted else f", ranks={self.ranks}"
        return f"DeviceMesh({self.shape}, {self.names}{ranks})"

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple:
        return DeviceMesh, (self.shape, self.names, self.ranks)  # a hash of text differs from process to process

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.names, self.ranks))

    @property
    def _axes(self) -> str:
        return "x".join(f"{name}={size}" for name, size in zip(self.names, self.shape)) or "one rank"

    @cached_property
    def _is_counted(self) -> bool:
        """Tell whether the ranks are 0, 1, ... in order, as they are where nothing else is said."""
        return self.ranks == tuple(range(len(self.ranks)))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @cached_property
    def _grid(self) -> np.ndarray:
        return np.array(self.ranks, dtype=np.int64).reshape(self.shape)

    @cached_property
    def _position(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}

    def axis_size(self, name: str) -> int:
        """Size of an axis; 1 when the mesh does not have it."""
        self._check_axes((name,))
        return self.shape[self.names.index(name)] if name in self.names else 1

    def position(self, rank: int) -> int:
        """The place of a global rank in `ranks`.

        Raises:
            LayoutError: the rank is not in the mesh.
        """
        if rank not in self._position:
            raise LayoutError(
                f"rank {rank} is not in the mesh {self._axes}, which holds the ranks {_short(self.ranks)}"
            )
        return self._position[rank]

    def place(self, rank: int) -> tuple[int, ...]:
        """The coordinates of a global rank, one for each axis in order; see `position` for errors."""
        position, place = self.position(rank), []
        for size in reversed(self.shape):
            position, coordinate = divmod(position, size)
            place.append(coordinate)
        return tuple(reversed(place))

    def coordinates(self, rank: int) -> dict[str, int]:
        """`{axis name: coordinate}` of a global rank.

        Raises:
            LayoutError: the rank is not in the mesh.
        """
        return dict(zip(self.names, self.place(rank)))

    def coordinate(self, rank: int, axis: str) -> int:
        """Coordinate of a global rank along one axis; 0 along an axis that the mesh does not have."""
        self._check_axes((axis,))
        return self.coordinates(rank).get(axis, 0)

    def rank_at(self, **coordinates: int) -> int:
        """The global rank at the given coordinates; an axis that is not named counts as 0."""
        self._check_axes(coordinates)
        for name, value in coordinates.items():
            if not 0 <= value < self.axis_size(name):
                raise LayoutError(f"coordinate {name}={value} is outside the mesh {self}")
        return int(self._grid[tuple(coordinates.get(name, 0) for name in self.names)])

    def groups(self, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ only along `axes`: a partition of the mesh.

        Groups come in row-major order of the other axes, and ranks inside a group in row-major order of `axes` as the
        mesh has them. Along axes of size one (or none at all) every rank is a group of its own.
        """
        self._check_axes(axes)
        inside = [place for place, name in enumerate(self.names) if name in axes]
        outside = [place for place in range(len(self.names)) if place not in inside]
        width = prod(self.shape[place] for place in inside)
        rows = self._grid.transpose(outside + inside).reshape(-1, width)
        return tuple(tuple(int(rank) for rank in row) for row in rows)

    def group_of(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The group along `axes` that holds a global rank."""
        here = self.coordinates(rank)
        self._check_axes(axes)
        along = tuple(slice(None) if name in axes else here[name] for name in self.names)
        return tuple(int(each) for each in np.atleast_1d(self._grid[along]).reshape(-1))

    def submesh(self, axes: Sequence[str], rank: int) -> DeviceMesh:
        """The part of the mesh along `axes` that holds a global rank."""
        self._check_axes(axes)
        kept = [name for name in self.names if name in axes]
        return DeviceMesh([self.axis_size(name) for name in kept], kept, self.group_of(rank, axes))

    def _check_axes(self, names) -> None:
        unknown = [name for name in names if name not in AXES]
        if unknown:
            raise LayoutError(f"unknown mesh axis {unknown[0]!r}; the axes are {', '.join(AXES)}")


def _check_mesh(shape: tuple[int, ...], names: tuple[str, ...], ranks: tuple[int, ...]) -> None:
    if len(shape) != len(names):
        raise LayoutError(f"a mesh needs one name an axis, found shape {shape} and names {names}")
    unknown = [name for name in names if name not in AXES]
    if unknown:
        raise LayoutError(f"unknown mesh axis {unknown[0]!r}; the axes are {', '.join(AXES)}")
    if list(names) != [name for name in AXES if name in names]:
        raise LayoutError(f"mesh axes {names} must be distinct and in the order {', '.join(AXES)}")
    for name, size in zip(names, shape):
        if size < 1:
            raise LayoutError(f"mesh axis {name!r} has size {size}; the least is 1")
    if len(ranks) != prod(shape):
        raise LayoutError(f"a mesh of shape {shape} holds {prod(shape)} ranks, found {len(ranks)}: {_short(ranks)}")
    if len(set(ranks)) != len(ranks) or min(ranks) < 0:
        raise LayoutError(f"ranks of a mesh are distinct and not negative, found {_short(ranks)}")


def _listed_names(names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise LayoutError(f"the names of a mesh are a list, one for each axis, found {names!r}")
    return tuple(names)


def _short(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown}, ... ({len(ranks)} in all)" if len(ranks) > 8 else shown
