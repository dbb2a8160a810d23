"""Who sends what to whom when a tensor changes its layout: one step of a transition, element by element."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Iterator, Sequence

from hyper_parallel.core.backend import Move
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement import Partial, Replicate
from hyper_parallel.core.regions import Piece, chunk_bounds, intersection, offset_in, sizes_of
from hyper_parallel.core.topology import FAST, SLOW, Topology

LOCAL = ("slice", "pad", "scale")
"""Kinds of steps in which nothing travels."""

EXCHANGES = ("all_gather", "all_to_all", "ragged_exchange", "redistribute")
"""Kinds of steps in which elements travel as they are."""


@dataclass(frozen=True)
class Step:
    """One collective, or one local move, of a transition.

    `kind` is one of `slice` (keep a part), `pad` (the part becomes a summand, zeros around it), `scale`, `all_gather`,
    `all_to_all` (plain shards), `ragged_exchange` (ragged ones take part), `redistribute` (any other exchange, also
    between meshes), `reduce_scatter`, `all_reduce`, and `share`, which hands the gradient of a maximum or minimum to
    the ranks that held it.

    `axes` are the mesh axes along which the groups communicate; between two meshes all ranks are one group. `op` is
    what a reduction does ("sum", "max", "min"); the result is multiplied by `factor`. `topology` decides which of
    several copies is the near one when meshes differ.
    """

    kind: str
    axes: tuple[str, ...]
    before: Layout
    after: Layout
    op: str = "sum"
    factor: float = 1.0
    topology: Topology | None = None

    def __str__(self) -> str:
        along = f" along {', '.join(self.axes)}" if self.axes else ""
        extra = f" {self.op}" if self.op != "sum" else ""
        extra += f" times {self.factor:g}" if self.factor != 1.0 else ""
        return f"{self.kind}{extra}{along}: {self.before} -> {self.after}"

    @property
    def between_meshes(self) -> bool:
        """The step leads from one mesh to another."""
        return self.before.mesh != self.after.mesh

    def group(self, rank: int) -> tuple[int, ...]:
        """The global ranks, ascending, that communicate with `rank`, itself included."""
        if self.between_meshes and self.kind not in LOCAL:
            return tuple(sorted(self.before.mesh.ranks))
        return tuple(sorted(self.before.mesh.group_of(rank, self.axes)))

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

    def received(self, rank: int) -> dict[int, int]:
        """Elements that a rank receives from each other rank. An all-reduce counts as a reduce-scatter and an
        all-gather of flat ceil-chunks."""
        if not self.travels:
            return {}
        others = [(place, each) for place, each in enumerate(self.group(rank)) if each != rank]
        if self.kind == "all_reduce":
            numel, size = self.before.local_numel(rank), len(others) + 1
            chunks = [stop - start for start, stop in (chunk_bounds(numel, size, place) for place in range(size))]
            own = chunks[self.group(rank).index(rank)]
            return {each: own + chunks[place] for place, each in others}
        if self.kind == "share":  # the way back of the reduction's pieces
            return {each: self.sends(each, rank) for _, each in others}
        if self.kind == "reduce_scatter":
            own = self.sends(rank, rank)
            return {each: own for _, each in others}
        counts = {each: self.sends(each, rank) for _, each in others}
        return {each: count for each, count in counts.items() if count}

    def elements(self, topology: Topology | None = None) -> dict[str, int]:
        """Elements that cross between ranks on each tier, over all ranks; without a topology all is fast."""
        return dict(_elements(self, topology))


class _Wire:
    """The moves between pairs of ranks, worked out once for both ends."""

    def __init__(self, step: Step):
        self._step = step
        self._moves: dict[tuple[int, int], tuple[Move, ...]] = {}

    def moves(self, sender: int, receiver: int) -> tuple[Move, ...]:
        key = (sender, receiver)
        if key not in self._moves:
            self._moves[key] = tuple(self._make(sender, receiver)) if self._asked(sender, receiver) else ()
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

    def _asked(self, sender: int, receiver: int) -> bool:
        """Tell whether the receiver takes what it needs from this sender."""
        step = self._step
        if step.kind in ("reduce_scatter", "share"):
            return True
        if _is_silent(step, receiver):
            return False
        if not step.between_meshes:
            return sender == receiver or sender in step.group(receiver)
        copies = step.before.copies(sender)
        if receiver in copies:
            return sender == receiver
        near = copies
        if step.topology is not None:
            near = [each for each in copies if step.topology.tier((each, receiver)) == FAST] or copies
        return sender == near[step.after.mesh.position(receiver) % len(near)]


def _is_silent(step: Step, rank: int) -> bool:
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
                yield _simplified(
                    sizes_of(box), offset_in(target, box), target.strides, offset_in(source, box), source.strides
                )


def _simplified(
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


@lru_cache(maxsize=4096)
def _elements(step: Step, topology: Topology | None) -> tuple[tuple[str, int], ...]:
    counts = {FAST: 0, SLOW: 0}
    if not step.travels:
        return tuple(counts.items())
    if topology is None:
        ranks, times = _representatives(step)
        counts[FAST] = times * sum(_received_in_all(step, rank) for rank in ranks)
    else:
        for rank in step.before.mesh.ranks:
            for sender, count in step.received(rank).items():
                counts[topology.tier((sender, rank))] += count
    return tuple(counts.items())


def _received_in_all(step: Step, rank: int) -> int:
    """The sum of `step.received(rank)`, without asking every sender where the layouts tell it."""
    stays = () if step.between_meshes else step.before.placements
    becomes_partial = any(
        placement == Partial() and stays[axis : axis + 1] != (placement,)
        for axis, placement in enumerate(step.after.placements)
    )
    if step.kind in EXCHANGES and not becomes_partial:
        return step.after.local_numel(rank) - step.sends(rank, rank)
    return sum(step.received(rank).values())


def _representatives(step: Step) -> tuple[list[int], int]:
    """Ranks such that every rank does what one of them does, and how many each stands for."""
    before, after, mesh = step.before, step.after, step.before.mesh
    if step.between_meshes:
        return list(mesh.ranks), 1
    still = [
        axis
        for axis, one, other in zip(mesh.names, before.placements, after.placements)
        if isinstance(one, Replicate) and isinstance(other, Replicate)
    ]
    return [group[0] for group in mesh.groups(still)], prod(mesh.axis_size(axis) for axis in still)
