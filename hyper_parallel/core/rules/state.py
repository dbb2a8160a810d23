"""How one tensor lies along one mesh axis while the model runs: its placement, and what is known of its gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Iterable, Sequence

from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.placement import Partial, Placement, Replicate, Shard, StridedShard


@dataclass(frozen=True)
class State:
    """The state of a local tensor along one mesh axis.

    `placement` counts dims of the local tensor from the front:

    - `Replicate()`: every rank holds the same elements. With `pending` each rank computes only a part of the gradient
      ("copied"); without, each computes all of it ("whole").
    - `Shard(dim)`, or `StridedShard(dim, blocks)` where the dim consists of `blocks` equal parts, each of them cut.
    - `Partial()`: the ranks' tensors add up to the value; the gradient is whole.

    `same` names dims along which a replicated tensor repeats itself, as behind `expand`: along those it may be read
    as cut. `zero` says that all elements are zero (or undefined): such a tensor may also be read as a pending sum.
    `unit` counts the elements along a cut dim that belong together, such as one head's features; 1 where nothing is
    known.

    Raises:
        LayoutError: the placement is one that the rules don't follow, or a field contradicts it.
    """

    placement: Placement = Replicate()
    pending: bool = False
    same: tuple[int, ...] = ()
    zero: bool = False
    unit: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.placement, StridedShard) and self.placement.split_factor == 1:
            object.__setattr__(self, "placement", Shard(self.placement.dim))
        self._check()
        fields = (self.placement, self.pending, self.same, self.zero, self.unit)
        object.__setattr__(self, "_hash", hash(fields))  # states are looked up for every operator

    def __hash__(self) -> int:
        return self._hash

    def _check(self) -> None:
        placement = self.placement
        if not isinstance(placement, (Replicate, Shard, StridedShard)) and placement != Partial():
            raise LayoutError(
                f"a tensor that the rules follow is replicate, shard, strided_shard or partial, found {placement}"
            )
        if (self.pending or self.same or self.zero) and not self.is_replicate:
            raise LayoutError(f"only a replicated tensor is pending, the same along a dim, or zero; found {placement}")
        if self.cut is not None and self.cut < 0:
            raise LayoutError(f"the dim of a state counts from the front, found {placement}")
        if self.unit < 1 or (self.unit > 1 and self.cut is None):
            raise LayoutError(f"a unit is at least 1 and belongs to a cut dim, found {self.unit} on {placement}")

    @property
    def is_replicate(self) -> bool:
        """Every rank holds the same elements."""
        return isinstance(self.placement, Replicate)

    @property
    def is_partial(self) -> bool:
        """The value is the sum over the ranks."""
        return isinstance(self.placement, Partial)

    @property
    def cut(self) -> int | None:
        """The dim that is cut, or None."""
        return self.placement.dim if isinstance(self.placement, (Shard, StridedShard)) else None

    @property
    def blocks(self) -> int:
        """The number of parts of the cut dim that are each cut; 1 where nothing is cut."""
        return self.placement.split_factor if isinstance(self.placement, StridedShard) else 1

    def at(self, dim: int) -> State:
        """The same cut along another dim."""
        return cut(dim, self.blocks, self.unit)

    def __str__(self) -> str:
        if self.is_replicate:
            return "replicate, its gradient partial" if self.pending else "replicate"
        return str(self.placement)


def cut(dim: int, blocks: int = 1, unit: int = 1) -> State:
    """A state that is cut along `dim`, in each of `blocks` parts."""
    return State(StridedShard(dim, blocks), unit=unit)


def constant(dims: int, zero: bool = False) -> State:
    """The state of a tensor with `dims` dims and one value everywhere."""
    return State(same=tuple(range(dims)), zero=zero)


def repeated_dims(shape: Sequence[int], strides: Iterable[int]) -> tuple[int, ...]:
    """The dims along which a tensor repeats itself because their stride is 0: for the `same` of a state."""
    return tuple(dim for dim, (size, stride) in enumerate(zip(shape, strides)) if stride == 0 and size > 1)


def without_gradient(state: State) -> State:
    """The state of the same values cut off from autograd."""
    return replace(state, pending=False) if state.pending else state


def gradient_of(state: State) -> State:
    """The state of the gradient of a tensor in this state."""
    if state.is_partial:
        return WHOLE
    return PARTIAL if state.pending else WHOLE if state.is_replicate else state


WHOLE = State()
"""The same on every rank, and its gradient too."""

COPIED = State(pending=True)
"""The same on every rank, each of which computes a part of the gradient."""

PARTIAL = State(Partial())
"""A pending sum."""
