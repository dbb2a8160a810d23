"""Who sends what to whom when a tensor changes its layout: one step of a transition, element by element."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Iterator, Sequence

from hyper_parallel.core.backend import Move
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement import Partial, Replicate
from hyper_parallel.core.regions import Piece, intersection, offset_in, sizes_of
from hyper_parallel.core.topology import FAST, Topology

LOCAL = ("slice", "pad", "scale")
"""Kinds of steps in which nothing travels."""


@dataclass(frozen=True)
class Step:
    """One collective, or one local move, of a transition.

    `kind` is one of `slice` (keep a part), `pad` (the part becomes a summand, zeros around it), `scale`, `all_gather`,
    `all_to_all` (plain shards), `ragged_exchange` (ragged ones take part), `redistribute` (any other exchange, also
    between meshes), `reduce_scatter`, `all_reduce`, and `share`, which hands the gradient of a maximum or minimum to
    the ranks that held it.

    `axes` are the mesh axes along which the groups communicate; between two meshes all ranks are one group. `op` is
    what a reduction does ("sum", "max", "min"); the result is multiplied by `factor`
    and divided by `divisor`. `topology` decides which of
    several copies is the near one when meshes differ.
    """

    kind: str
    axes: tuple[str, ...]
    before: Layout
    after: Layout
    op: str = "sum"
    factor: int = 1
    divisor: int = 1
    topology: Topology | None = None

    def __str__(self) -> str:
        along = f" along {', '.join(self.axes)}" if self.axes else ""
        extra = f" {self.op}" if self.op != "sum" else ""
        extra += f" times {self.factor}" if self.factor != 1 else ""
        extra += f" over {self.divisor}" if self.divisor != 1 else ""
        return f"{self.kind}{extra}{along}: {self.before} -> {self.after}"

    @property
    def between_meshes(self) -> bool:
        """The step leads from one mesh to another."""
        return self.before.mesh != self.after.mesh

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of global ranks, each ascending, that communicate."""
        return tuple(dict.fromkeys(self._groups.values()))

    def group(self, rank: int) -> tuple[int, ...]:
        """The group that a global rank is in."""
        return self._groups[rank]

    @cached_property
    def _groups(self) -> dict[int, tuple[int, ...]]:
        mesh = self.before.mesh
        made = (mesh.ranks,) if self.between_meshes and self.kind not in LOCAL else mesh.groups(self.axes)
        return {rank: group for group in map(tuple, map(sorted, made)) for rank in group}

    @property
    def travels(self) -> bool:
        """Something may cross between ranks. The shares of an extremum that every rank has taken do not."""
        if self.kind == "share":
            return not all(isinstance(self.before.placement(axis), Replicate) for axis in self.axes)
        return self.kind not in LOCAL

    @cached_property
    def _wire(self) -> _Wire:
        return _Wire(self)

    def moves(self, sender: int, receiver: int) -> tuple[Move, ...]:
        """What goes from the local tensor of `sender` to that of `receiver`, in the order in which it travels."""
        return self._wire.moves(sender, receiver)

    def sends(self, sender: int, receiver: int) -> int:
        """Number of elements that go from `sender` to `receiver`; to itself too."""
        return self._wire.numel(sender, receiver)

    def sends_to(self, sender: int, receiver: int) -> bool:
        """Tell whether the receiver takes what it needs of what the sender holds from the sender, not from a copy."""
        return self._wire.asked(sender, receiver)


class _Wire:
    """The moves between pairs of ranks, worked out once for both ends."""

    def __init__(self, step: Step):
        self._step = step
        self._moves: dict[tuple[int, int], tuple[Move, ...]] = {}

    def moves(self, sender: int, receiver: int) -> tuple[Move, ...]:
        key = (sender, receiver)
        if key not in self._moves:
            self._moves[key] = tuple(self._make(sender, receiver)) if self.asked(sender, receiver) else ()
        return self._moves[key]

    def numel(self, sender: int, receiver: int) -> int:
        return sum(prod(move.sizes) for move in self.moves(sender, receiver))

    def _make(self, sender: int, receiver: int) -> Iterator[Move]:
        step = self._step
        if step.kind == "share":  # from who reduced a piece back to who contributed to it
            for move in _between(step.before.pieces(sender), step.after.pieces(receiver)):
                yield Move(move.sizes, move.source_start, move.source_strides, move.target_start, move.target_strides)
        else:
            yield from _between(step.after.pieces(receiver), step.before.pieces(sender))

    def asked(self, sender: int, receiver: int) -> bool:
        """Tell whether the receiver takes what it needs from this sender."""
        step = self._step
        if step.kind in ("reduce_scatter", "share"):
            return True
        if is_silent(step, receiver):
            return False
        if not step.between_meshes:
            return sender == receiver or step.group(sender) is step.group(receiver)
        copies = step.before.copies(sender)
        if receiver in copies:
            return sender == receiver
        near = copies
        if step.topology is not None:
            near = [each for each in copies if step.topology.tier((each, receiver)) == FAST] or copies
        return sender == near[step.after.mesh.position(receiver) % len(near)]


def is_silent(step: Step, rank: int) -> bool:
    """Along an axis that becomes a pending sum of one value, only the first rank holds the value."""
    after = step.after
    for axis, (place, placement) in enumerate(zip(after.mesh.place(rank), after.placements)):
        if placement == Partial() and place:
            if step.between_meshes or isinstance(step.before.placements[axis], Replicate):
                return True
    return False


def _between(targets: Sequence[Piece], sources: Sequence[Piece]) -> Iterator[Move]:
    for target in targets:
        for source in sources:
            box = intersection(target.box, source.box)
            if box is not None:
                yield simplified(
                    sizes_of(box), offset_in(target, box), target.strides, offset_in(source, box), source.strides
                )


def simplified(
    sizes: Sequence[int],
    target_start: int,
    target_strides: Sequence[int],
    source_start: int,
    source_strides: Sequence[int],
) -> Move:
    """The same move with as few dims as can be."""
    dims: list[list[int]] = []
    for size, to, of in zip(sizes, target_strides, source_strides):
        if size == 1:
            continue
        if dims and dims[-1][1] == to * size and dims[-1][2] == of * size:
            dims[-1] = [dims[-1][0] * size, to, of]
        else:
            dims.append([size, to, of])
    if not dims:
        dims = [[1, 1, 1]]
    return Move(
        tuple(each[0] for each in dims),
        target_start,
        tuple(each[1] for each in dims),
        source_start,
        tuple(each[2] for each in dims),
    )
