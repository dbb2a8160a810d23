"""Elementwise arithmetic on distributed tensors: how both sides must lie, how the result lies, and what is refused.

Along each mesh axis the result takes the placement that costs nothing: a replicated side is cut to the other's shard,
or becomes a pending sum whose first rank holds everything, so that it is counted once. Of two different shards the
left one stays. Nothing here knows a tensor.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard

LINEAR = ("sum", "avg")


class Arrangement(NamedTuple):
    """The layouts to bring both sides to, and that of the result of the operation on local tensors."""

    left: Layout
    right: Layout
    result: Layout


@lru_cache(maxsize=4096)
def arrange(symbol: str, left: Layout, right: Layout) -> Arrangement:
    """The arrangement of `left symbol right`, where `symbol` is "+", "-", "*" or "/". Shapes broadcast as usual.

    A side that is repeated along a dim that the result shards sees a part of the loss on each rank: there the gradient
    of that side is a partial sum. The same holds for the factor of a pending sum.

    Raises:
        LayoutError: two meshes, shapes that don't broadcast, or an operation that a pending reduction does not allow.
    """
    if left.mesh != right.mesh:
        raise LayoutError(
            f"{symbol} needs both sides on one mesh, found {left.mesh} and {right.mesh}; redistribute one of them"
        )
    _refuse_nonlinear(symbol, left, right)
    shape = _broadcast(symbol, left.shape, right.shape)
    sides = _Side(left, shape), _Side(right, shape)
    placements = _merge(left, shape, *(side.outward() for side in sides))
    gradient = {
        axis: Partial()
        for place, axis in enumerate(left.mesh.names)
        if placements[place] == Replicate() and all(side.pending_gradient(place) for side in sides)
    }
    result = Layout(left.mesh, placements, shape, gradient)
    return Arrangement(*(side.inward(symbol, result) for side in sides), result)


def refuse_nonlinear_scalar(symbol: str, layout: Layout, scalar_first: bool) -> None:
    """Raise `LayoutError` where a pending reduction does not allow the operation with a number."""
    _refuse_extremum(symbol, layout)
    if symbol == "/" and scalar_first:
        _refuse_pending_divisor(layout)


def counts(layout: Layout, rank: int) -> bool:
    """Tell whether what a rank adds is counted: of ranks that hold pending sums only the first adds a number."""
    return not any(
        placement == Partial() and coordinate
        for placement, coordinate in zip(layout.placements, layout.mesh.place(rank))
    )


def _refuse_nonlinear(symbol: str, left: Layout, right: Layout) -> None:
    _refuse_extremum(symbol, left)
    _refuse_extremum(symbol, right)
    if symbol == "/":
        _refuse_pending_divisor(right)
    others = dict(_pending(right))
    for axis, placement in _pending(left) if symbol == "*" else ():
        if axis in others:
            raise LayoutError(
                f"axis {axis!r}: {placement} * {others[axis]} can't be computed from the parts, since a product of "
                "sums is no sum of products; redistribute one side to replicate or shard first"
            )


def _refuse_extremum(symbol: str, layout: Layout) -> None:
    for axis, placement in _pending(layout):
        if placement.op not in LINEAR:
            raise LayoutError(
                f"axis {axis!r}: {symbol} is not defined while {placement} is pending in {layout}; redistribute it to "
                "replicate or shard first"
            )


def _refuse_pending_divisor(layout: Layout) -> None:
    for axis, placement in _pending(layout):
        raise LayoutError(
            f"axis {axis!r}: nothing can be divided by a value that is still pending as {placement} in {layout}; "
            "redistribute it to replicate or shard first"
        )


def _pending(layout: Layout) -> list[tuple[str, Partial]]:
    """Axes along which a reduction is pending."""
    return [
        (axis, placement)
        for axis, placement in zip(layout.mesh.names, _placements(layout))
        if isinstance(placement, Partial)
    ]


def _placements(layout: Layout) -> list[Placement]:
    """The placements; an axis of size one behaves like an absent one."""
    return [Replicate() if size == 1 else each for size, each in zip(layout.mesh.shape, layout.placements)]


def _broadcast(symbol: str, left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    ndim = max(len(left), len(right))
    sizes = [(1,) * (ndim - len(shape)) + shape for shape in (left, right)]
    if any(one != other and 1 not in (one, other) for one, other in zip(*sizes)):
        raise LayoutError(f"{symbol}: the shapes {list(left)} and {list(right)} do not fit each other")
    return tuple(other if one == 1 else one for one, other in zip(*sizes))


def _merge(left: Layout, shape: tuple[int, ...], ours: list[Placement], theirs: list[Placement]) -> list[Placement]:
    """The placements of the result. Shards that can't stand together give way, those of the right side first."""
    ours_pending, theirs_pending = map(_only_pending, (ours, theirs))
    for one, other in ((ours, theirs), (ours, theirs_pending)):
        merged = list(map(_winner, one, other))
        if _is_legal(left, merged, shape):
            return merged
    return list(map(_winner, ours_pending, theirs_pending))


def _only_pending(placements: list[Placement]) -> list[Placement]:
    return [each if isinstance(each, Partial) else Replicate() for each in placements]


def _is_legal(layout: Layout, placements: list[Placement], shape: tuple[int, ...]) -> bool:
    try:
        Layout(layout.mesh, placements, shape)
    except LayoutError:
        return False
    return True


def _winner(ours: Placement, theirs: Placement) -> Placement:
    """Of two placements the one that the other side can be brought to for free; ours when neither is."""
    for kind in (Partial, Shard | StridedShard | RaggedShard):
        for placement in (ours, theirs):
            if isinstance(placement, kind):
                return placement
    return Replicate()


class _Side:
    """One side of an operation, and where its dims lie in the result."""

    def __init__(self, layout: Layout, shape: tuple[int, ...]):
        self._layout = layout
        self._shape = shape
        self._offset = len(shape) - len(layout.shape)
        self._placements = _placements(layout)

    def pending_gradient(self, place: int) -> bool:
        """Tell whether this side is replicated along an axis with a gradient that is a partial sum."""
        return self._placements[place] == Replicate() and self._layout.gradient_placements[place] == Partial()

    def outward(self) -> list[Placement]:
        """The placements in dims of the result; a shard of a dim along which this side is repeated is none of it."""
        return [self._outward(placement) for placement in self._placements]

    def _outward(self, placement: Placement) -> Placement:
        if isinstance(placement, RaggedShard) and self._offset:
            return Replicate()  # its dims are not the first ones of the result
        moved = _shifted(placement, self._offset)
        return moved if self._spans(moved) else Replicate()

    def inward(self, symbol: str, result: Layout) -> Layout:
        """The layout to bring this side to, so that the operation on local tensors gives the result."""
        placements, gradient = [], {}
        for place, (axis, wanted) in enumerate(zip(result.mesh.names, result.placements)):
            here: Placement = Replicate()
            if isinstance(wanted, Partial):
                own = isinstance(self._placements[place], Partial)
                here = wanted if own or symbol in "+-" else here
            elif self._spans(wanted):
                here = _shifted(wanted, -self._offset)
            self._refuse_unfolded(symbol, axis, wanted, here)
            placements.append(here)
            if here == Replicate() and (wanted != here or result.gradient_placements[place] == Partial()):
                gradient[axis] = Partial()
        return Layout(result.mesh, placements, self._layout.shape, gradient)

    def _spans(self, placement: Placement) -> bool:
        """Tell whether this side has all dims that a placement of the result shards in full."""
        return all(
            dim >= self._offset and self._layout.shape[dim - self._offset] == self._shape[dim]
            for dim in _dims(placement)
        )

    def _refuse_unfolded(self, symbol: str, axis: str, wanted: Placement, here: Placement) -> None:
        """A ragged shard flattens dims; a tensor that has some of them, but not in full, can't be repeated there."""
        if not isinstance(wanted, RaggedShard) or here == wanted:
            return
        if len(wanted.dims) > 1 and self._offset < len(wanted.dims):
            raise LayoutError(
                f"axis {axis!r}: {symbol} can't repeat a tensor of shape {list(self._layout.shape)} along the dims "
                f"that {wanted} flattens; redistribute the other side to shard or replicate first"
            )


def _dims(placement: Placement) -> tuple[int, ...]:
    if isinstance(placement, RaggedShard):
        return placement.dims
    return (placement.dim,) if isinstance(placement, (Shard, StridedShard)) else ()


def _shifted(placement: Placement, by: int) -> Placement:
    """The placement with its dims counted from elsewhere."""
    if isinstance(placement, Shard):
        return Shard(placement.dim + by)
    if isinstance(placement, StridedShard):
        return StridedShard(placement.dim + by, placement.split_factor)
    return placement
