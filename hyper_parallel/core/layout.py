"""Layout: how one global tensor lies on a mesh. Exact for every rank, and an oracle on numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided

from hyper_parallel.core.cuts import Cut, cuts_of
from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import (
    PLACEMENTS,
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    whole_numbers,
)
from hyper_parallel.core.regions import (
    Box,
    Interval,
    Piece,
    chunk_bounds,
    pieces_of,
    pieces_of_range,
    sizes_of,
    take,
    take_of_blocks,
    total,
)

Placements = Sequence[Placement] | Mapping[str, Placement]
"""One placement for each mesh axis in order, or `{axis name: placement}` where what is not named is replicated."""


WHOLE = Replicate()
"""Where nothing is said."""


@dataclass(frozen=True, init=False, eq=False)
class Layout:
    """A mesh, a placement for each of its axes, and a global shape.

    Axes that shard one tensor dim split it left to right: the outer axis first, the inner one inside each piece.
    `StridedShard` says that an axis comes later than its place in the mesh. An axis of size one splits nothing.

    A layout also says how the tensor's gradient lies. By default the gradient of a replicated tensor is replicated,
    that of a shard is the same shard, and that of a partial sum is replicated; of an average, a maximum or a minimum
    every rank gets its share, so the gradient is a partial sum. A replicated tensor whose ranks each see only a part of
    the loss (the input of a column-parallel linear) has a partial sum for its gradient:
    `gradient={"tensor": Partial()}`.

    Args:
        mesh: the device mesh.
        placements: one per mesh axis in order, or `{axis name: placement}` where what is not named is replicated.
        shape: the global shape; sizes of zero and 0-d tensors are fine.
        gradient: `{axis name: Replicate() or Partial()}` for replicated axes, the default above where not named; or
            the placements of the gradient for all axes in order.

    Raises:
        LayoutError: an axis that the mesh lacks, a dim that the tensor lacks, a wrong number of placements, or a
            combination that has no meaning; the message names the axis and the dim.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    gradient_placements: tuple[Placement, ...]

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: Placements,
        shape: Sequence[int],
        gradient: Placements | None = None,
    ):
        if not isinstance(mesh, DeviceMesh):
            raise LayoutError(f"a layout needs a hyper_parallel.DeviceMesh, found {mesh!r}")
        shape = _checked_shape(shape)
        resolved = _resolved(mesh, in_order(mesh, placements), shape)
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "placements", resolved)
        object.__setattr__(self, "shape", shape)
        _check_partial(self)
        object.__setattr__(self, "cuts", cuts_of(mesh, resolved, shape))
        object.__setattr__(self, "gradient_placements", _gradient_placements(self, gradient))
        object.__setattr__(self, "_hash", hash((mesh, resolved, shape, self.gradient_placements)))
        object.__setattr__(self, "_pieces", {})

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout) or self._hash != other._hash:
            return False
        return (self.placements, self.shape, self.gradient_placements, self.mesh) == (
            other.placements,
            other.shape,
            other.gradient_placements,
            other.mesh,
        )

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple:
        return Layout, (self.mesh, self.placements, self.shape, dict(zip(self.mesh.names, self.gradient_placements)))

    def __str__(self) -> str:
        text = f"{list(self.shape)} on ({_on_axes(self.mesh, self.placements)})"
        usual = tuple(map(usual_gradient, self.placements))
        if self.gradient_placements == usual:
            return text
        return f"{text} with gradient on ({_on_axes(self.mesh, self.gradient_placements)})"

    @cached_property
    def gradient(self) -> Layout:
        """The layout of the gradient."""
        return Layout(self.mesh, self.gradient_placements, self.shape)

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """The mesh axes whose ranks hold different elements."""
        axes = zip(self.mesh.names, self.mesh.shape, self.placements)
        return tuple(axis for axis, size, placement in axes if size > 1 and placement != WHOLE)

    def placement(self, axis: str) -> Placement:
        """The placement along a mesh axis; replicated along an axis that the mesh does not have."""
        if axis in self.mesh.names:
            return self.placements[self.mesh.names.index(axis)]
        self.mesh.axis_size(axis)  # refuses a name that is no axis
        return Replicate()

    def with_placements(self, placements: Placements) -> Layout:
        """The same shape on the same mesh with other placements, and the usual gradient."""
        return Layout(self.mesh, placements, self.shape)

    def pieces(self, rank: int) -> list[Piece]:
        """The boxes that a rank holds and where each lies in its local tensor, in the order of the local tensor. Empty
        where it holds nothing. One box, except after a ragged shard of several dims or a strided shard in blocks."""
        if rank not in self._pieces:
            self._pieces[rank] = self._make_pieces(self.mesh.place(rank))
        return self._pieces[rank]

    def boxes(self, rank: int) -> list[Box]:
        """The global slices, one per tensor dim, of each box that a rank holds."""
        return [piece.box for piece in self.pieces(rank)]

    def slices(self, rank: int) -> Box:
        """The global slices, one per tensor dim, of what a rank holds, if that is one box; empty if it is nothing.

        Raises:
            LayoutError: the rank holds several boxes; `boxes` gives them all.
        """
        pieces = self.pieces(rank)
        if len(pieces) > 1:
            raise LayoutError(f"rank {rank} holds {len(pieces)} boxes of {self}; use boxes(rank)")
        if pieces:
            return pieces[0].box
        if self._ragged:
            return (slice(0, 0),) * len(self.shape)
        place = self.mesh.place(rank)
        return tuple(slice(*self._intervals(dim, place)[0]) for dim in range(len(self.shape)))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of what a rank holds. Dims that a ragged shard flattens are one dim of it."""
        place, ragged = self.mesh.place(rank), self._ragged
        start, stop = self._range(place) if ragged else (0, 0)
        first = len(ragged.ragged.dims) if ragged else 0
        others = tuple(total(self._intervals(dim, place)) for dim in range(first, len(self.shape)))
        return (stop - start, *others) if ragged else others

    def local_numel(self, rank: int) -> int:
        """Number of elements that a rank holds."""
        return prod(self.local_shape(rank))

    def copies(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same elements of the same contribution as `rank`, itself included."""
        axes = [axis for axis, placement in zip(self.mesh.names, self.placements) if isinstance(placement, Replicate)]
        return self.mesh.group_of(rank, axes)

    def fill(self, rank: int, make: Callable[[Box], np.ndarray]) -> np.ndarray:
        """The local array of a rank, from `make(box)`, which gives an array of the box's shape for each of its boxes.

        A rank that holds nothing asks for one empty box, to learn the dtype.
        """
        pieces, shape = self.pieces(rank), self.local_shape(rank)
        if len(pieces) <= 1:
            box = pieces[0].box if pieces else (slice(0, 0),) * len(self.shape)
            return np.ascontiguousarray(make(box)).reshape(shape)
        local = None
        for piece in pieces:
            part = make(piece.box)
            local = np.empty(shape, part.dtype) if local is None else local
            _view(local, piece)[...] = part
        return local

    def shard(self, array: np.ndarray, rank: int) -> np.ndarray:
        """What a rank holds of a global array. Of a partial sum the first rank of the axis holds all and the others
        zeros; of another partial value every rank holds all.

        Raises:
            LayoutError: the array is not of the global shape.
        """
        array = np.asarray(array)
        if array.shape != self.shape:
            raise LayoutError(f"this layout is of shape {self.shape}, found an array of shape {array.shape}")
        local = self.fill(rank, lambda box: array[box].copy())
        pending = [
            place
            for place, placement in zip(self.mesh.place(rank), self.placements)
            if placement == Partial() and place
        ]
        return np.zeros_like(local) if pending else local

    def assemble(self, locals_: Sequence[np.ndarray]) -> np.ndarray:
        """The global array from what every rank holds, in the order of `mesh.ranks`. Pending reductions are carried
        out; of replicated elements the first copy counts.

        Raises:
            LayoutError: a local array is missing or has the wrong shape.
        """
        if len(locals_) != self.mesh.size:
            raise LayoutError(f"the mesh {self.mesh} has {self.mesh.size} ranks, found {len(locals_)} local arrays")
        held = {rank: np.asarray(local) for rank, local in zip(self.mesh.ranks, locals_)}
        for rank, local in held.items():
            if local.shape != self.local_shape(rank):
                raise LayoutError(
                    f"rank {rank} holds a local array of shape {self.local_shape(rank)} by {self}, found {local.shape}"
                )
        partial = [
            axis
            for axis, size, each in zip(self.mesh.names, self.mesh.shape, self.placements)
            if size > 1 and isinstance(each, Partial)
        ]
        result = np.zeros(self.shape, dtype=held[self.mesh.ranks[0]].dtype)
        for group in self.mesh.groups(partial):
            if self.copies(group[0])[0] == group[0]:
                value = self._reduced([held[rank] for rank in group], partial)
                for piece in self.pieces(group[0]):
                    result[piece.box] = _view(value, piece)
        return result

    def _reduced(self, contributions: list[np.ndarray], axes: Sequence[str]) -> np.ndarray:
        """The value of the contributions of a group along partial axes, which are linear or all of one kind."""
        if len(contributions) == 1:
            return contributions[0]
        ops = [self.placement(axis).op for axis in axes]
        if ops[0] in ("max", "min"):
            return (np.maximum if ops[0] == "max" else np.minimum).reduce(contributions)
        count = prod(self.mesh.axis_size(axis) for axis, op in zip(axes, ops) if op == "avg")
        if count == 1:
            return np.add.reduce(contributions)
        dtype = contributions[0].dtype
        if not np.issubdtype(dtype, np.inexact):
            return np.add.reduce(contributions) // count
        wide = np.promote_types(dtype, np.longdouble)  # so that the average of equal numbers is that number
        return (np.add.reduce([each.astype(wide) for each in contributions]) / count).astype(dtype)

    @cached_property
    def _ragged(self) -> Cut | None:
        """The ragged cut, if there is one."""
        first = self.cuts[0] if self.cuts else ()
        return first[0] if first and first[0].ragged else None

    def _range(self, place: Sequence[int]) -> Interval:
        """What the ragged cut leaves of the flattened leading dims."""
        cut = self._ragged
        return cut.ragged.bounds(prod(self.shape[: len(cut.ragged.dims)]), place[cut.axis])

    def _intervals(self, dim: int, place: Sequence[int]) -> list[Interval]:
        """The intervals of a dim, in local order, at given coordinates."""
        intervals: list[Interval] = [(0, self.shape[dim])]
        for axis, blocks, _ in self.cuts[dim]:
            size = self.mesh.shape[axis]
            if blocks == 1:
                intervals = take(intervals, *chunk_bounds(total(intervals), size, place[axis]))
            else:
                intervals = take_of_blocks(intervals, blocks, size, place[axis])
        return intervals

    def _make_pieces(self, place: Sequence[int]) -> list[Piece]:
        first = len(self._ragged.ragged.dims) if self._ragged else 0
        others = [self._intervals(dim, place) for dim in range(first, len(self.shape))]
        if not self._ragged:
            return pieces_of(others)
        return pieces_of_range(*self._range(place), self.shape[:first], others)


def usual_gradient(placement: Placement) -> Placement:
    """What the gradient of a tensor is along an axis, where nothing else is said."""
    if isinstance(placement, Partial):
        return Replicate() if placement.op == "sum" else Partial()
    return placement


def _view(local: np.ndarray, piece: Piece) -> np.ndarray:
    """The elements of a piece inside a contiguous local array."""
    flat = local.reshape(-1)
    return as_strided(flat[piece.start :], sizes_of(piece.box), [stride * flat.itemsize for stride in piece.strides])


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = whole_numbers(shape, "a shape is a list of whole numbers")
    if min(sizes, default=0) < 0:
        raise LayoutError(f"a tensor can't have the shape {list(sizes)}; the least size is 0")
    return sizes


def in_order(mesh: DeviceMesh, placements: Placements, unnamed: Placement | None = WHOLE) -> tuple:
    """The placements of the axes of a mesh, in order; `unnamed` where placements by name leave an axis out.

    Raises:
        LayoutError: they are none, or not those of this mesh.
    """
    if isinstance(placements, Mapping):
        for axis in placements:
            if axis not in mesh.names:
                raise LayoutError(f"a placement names the axis {axis!r}, which the mesh {mesh} does not have")
        found = [placements.get(axis, unnamed) for axis in mesh.names]
    elif isinstance(placements, (str, bytes, *PLACEMENTS)) or not isinstance(placements, Iterable):
        raise LayoutError(
            f"placements are a list with one for each axis, or {{axis: placement}}, found {placements!r}; write for "
            "example [Shard(0)]"
        )
    else:
        found = list(placements)
    if len(found) != len(mesh.names):
        raise LayoutError(f"the mesh {mesh} needs {len(mesh.names)} placements, found {len(found)}")
    for axis, placement in zip(mesh.names, found):
        if placement is not unnamed and not isinstance(placement, PLACEMENTS):
            raise LayoutError(
                f"axis {axis!r}: {placement!r} is no placement; write for example Shard(0) or Replicate(), or "
                'parse_placement("shard(0)")'
            )
    return tuple(found)


def _resolved(mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...]) -> tuple[Placement, ...]:
    return tuple(
        _resolve(placement, axis, size, shape) for placement, axis, size in zip(placements, mesh.names, mesh.shape)
    )


def _resolve(placement: Placement, axis: str, size: int, shape: tuple[int, ...]) -> Placement:
    """The placement with dims counted from the start."""
    if isinstance(placement, Shard):
        return Shard(_dim(placement.dim, placement, axis, shape))
    if isinstance(placement, StridedShard):
        return StridedShard(_dim(placement.dim, placement, axis, shape), placement.split_factor)
    if isinstance(placement, RaggedShard):
        dims = tuple(_dim(dim, placement, axis, shape) for dim in placement.dims)
        if dims != tuple(range(len(dims))):
            raise LayoutError(
                f"axis {axis!r}: {placement} flattens the dims {list(dims)}; they must be the first ones in order, "
                f"{list(range(len(dims)))}"
            )
        if len(placement.local_units) != size:
            raise LayoutError(
                f"axis {axis!r}: {placement} on dim 0 gives units for {len(placement.local_units)} ranks, "
                f"but the axis has {size}"
            )
        return RaggedShard(dims, placement.local_units)
    return placement


def _dim(dim: int, placement: Placement, axis: str, shape: tuple[int, ...]) -> int:
    resolved = dim + len(shape) if dim < 0 else dim
    if not 0 <= resolved < len(shape):
        raise LayoutError(
            f"axis {axis!r}: {placement} names dim {dim}, which a tensor of shape {list(shape)} does not have"
        )
    return resolved


def _check_partial(layout: Layout) -> None:
    """Pending reductions along several axes must not depend on their order."""
    pending = [
        (axis, placement)
        for axis, size, placement in zip(layout.mesh.names, layout.mesh.shape, layout.placements)
        if isinstance(placement, Partial) and size > 1
    ]
    kinds = {"linear" if placement.op in ("sum", "avg") else placement.op for _, placement in pending}
    if len(kinds) > 1:
        found = " and ".join(f"{placement} on axis {axis!r}" for axis, placement in pending)
        raise LayoutError(
            f"{found} can't be pending together: the value depends on which is done first; "
            "redistribute one of them before"
        )


def _gradient_placements(layout: Layout, gradient: Placements | None) -> tuple[Placement, ...]:
    usual = tuple(map(usual_gradient, layout.placements))
    if gradient is None:
        return usual
    for axis in gradient if isinstance(gradient, Mapping) else ():
        if axis not in layout.mesh.names:
            raise LayoutError(f"a gradient names the axis {axis!r}, which the mesh {layout.mesh} does not have")
    placements = []
    for axis, size, placement, default, asked in zip(
        layout.mesh.names, layout.mesh.shape, layout.placements, usual, in_order(layout.mesh, gradient, unnamed=None)
    ):
        asked = default if asked is None else _resolve(asked, axis, size, layout.shape)
        free = isinstance(placement, Replicate) and asked in (Replicate(), Partial())
        if asked != default and not free:
            raise LayoutError(
                f"axis {axis!r}: the gradient of {placement} is {default}, found {asked}; "
                "only a replicated tensor has a choice, replicate or partial"
            )
        placements.append(asked)
    return tuple(placements)


def _on_axes(mesh: DeviceMesh, placements: Sequence[Placement]) -> str:
    return ", ".join(f"{axis}: {placement}" for axis, placement in zip(mesh.names, placements))
