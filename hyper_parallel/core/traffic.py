"""How many elements a step sends between ranks, on each tier: counted from the layouts, without making a move."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Iterable, Iterator, Sequence

import numpy as np

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement import Partial, Replicate
from hyper_parallel.core.regions import Piece, chunk_bounds, intersection, sizes_of
from hyper_parallel.core.topology import FAST, SLOW, Topology
from hyper_parallel.core.wire import Step, is_silent


def elements(step: Step, topology: Topology | None = None) -> dict[str, int]:
    """Elements that cross between ranks on each tier, over all ranks; without a topology all is fast.

    An all-reduce counts as a reduce-scatter and an all-gather of flat ceil-chunks, every piece sent straight to where
    it is needed.
    """
    return dict(_elements(step, topology))


@lru_cache(maxsize=4096)
def _elements(step: Step, topology: Topology | None) -> tuple[tuple[str, int], ...]:
    total = fast = 0
    if step.travels:
        count = _COUNTS.get(step.kind, _exchanged)
        for inside, in_all in count(step, topology):
            fast += inside
            total += in_all
    return (FAST, total if topology is None else fast), (SLOW, 0 if topology is None else total - fast)


Counts = Iterator[tuple[int, int]]
"""Elements inside supernodes, and in all, of one group or one receiver after the other."""


def _all_reduced(step: Step, topology: Topology | None) -> Counts:
    for group in step.groups():
        numel = step.before.local_numel(group[0])
        chunks = [stop - start for start, stop in (chunk_bounds(numel, len(group), i) for i in range(len(group)))]
        fast = sum(2 * size * (near - 1) for size, near in zip(chunks, _near(group, topology)))
        yield fast, 2 * numel * (len(group) - 1)


def _reduced(step: Step, topology: Topology | None) -> Counts:
    """Every member gets one contribution to its piece from each of the others."""
    for group in step.groups():
        for rank, near in zip(group, _near(group, topology)):
            own = volume(step.after.pieces(rank), step.before.pieces(rank))
            yield own * (near - 1), own * (len(group) - 1)


def _shared(step: Step, topology: Topology | None) -> Counts:
    """The way back: every member sends its piece's share to each of the others."""
    for group in step.groups():
        for rank, near in zip(group, _near(group, topology)):
            own = step.before.local_numel(rank)
            yield own * (near - 1), own * (len(group) - 1)


def _near(group: Sequence[int], topology: Topology | None) -> list[int]:
    """For each member the number of members in its supernode, itself included."""
    if topology is None:
        return [len(group)] * len(group)
    homes = [topology.supernodes[rank] for rank in group]
    sizes = {home: homes.count(home) for home in set(homes)}
    return [sizes[home] for home in homes]


def _exchanged(step: Step, topology: Topology | None) -> Counts:
    """Every receiver gets what it lacks."""
    if topology is None and not _becomes_partial(step):
        ranks, times = _representatives(step)
        for rank in ranks:
            lacking = step.after.local_numel(rank) - volume(step.after.pieces(rank), step.before.pieces(rank))
            yield times * lacking, times * lacking
        return
    for group in step.groups():
        holdings = _Holdings(step.before, group)
        homes = None if topology is None else np.array([topology.supernodes[rank] for rank in group])
        for rank in group:
            if is_silent(step, rank):
                continue
            counts = holdings.overlaps(step.after.pieces(rank))
            if step.between_meshes:
                counts = np.where([step.sends_to(sender, rank) for sender in group], counts, 0)
            own = counts[holdings.place[rank]]
            in_all = int(counts.sum() - own)
            inside = in_all if homes is None else int(counts[homes == homes[holdings.place[rank]]].sum() - own)
            yield inside, in_all


class _Holdings:
    """What the members of a group hold, as arrays."""

    def __init__(self, layout: Layout, group: Sequence[int]):
        self.place = {rank: place for place, rank in enumerate(group)}
        pieces = [(place, piece) for rank, place in self.place.items() for piece in layout.pieces(rank)]
        self._dims = len(layout.shape)
        # Counts beyond 64 bits are Python's own.
        self._dtype = np.int64 if prod(layout.shape) < 2**62 else object
        self._owners = np.array([place for place, _ in pieces], dtype=np.int64)
        bounds = [[(part.start, part.stop) for part in piece.box] for _, piece in pieces]
        self._bounds = np.array(bounds, dtype=self._dtype).reshape(len(pieces), self._dims, 2)

        self._known: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def overlaps(self, pieces: Iterable[Piece]) -> np.ndarray:
        """For each member the number of elements of `pieces` that it holds."""
        wanted = tuple((part.start, part.stop) for piece in pieces for part in piece.box)
        if wanted not in self._known:  # many ranks want the same
            self._known[wanted] = self._count(wanted) if wanted or not self._dims else self._zeros()
        return self._known[wanted]

    def _count(self, wanted: Sequence[tuple[int, int]]) -> np.ndarray:
        counts = self._zeros()
        boxes = len(wanted) // self._dims if self._dims else 1
        for box in np.array(wanted, dtype=self._dtype).reshape(boxes, self._dims, 2):
            lengths = np.minimum(self._bounds[:, :, 1], box[:, 1]) - np.maximum(self._bounds[:, :, 0], box[:, 0])
            np.add.at(counts, self._owners, np.maximum(lengths, 0).prod(axis=1))
        return counts

    def _zeros(self) -> np.ndarray:
        return np.zeros(len(self.place), dtype=self._dtype)


def volume(wanted: Sequence[Piece], held: Sequence[Piece]) -> int:
    """Number of elements in both."""
    shared = (intersection(one.box, other.box) for one in wanted for other in held)
    return sum(prod(sizes_of(box)) for box in shared if box is not None)


def _becomes_partial(step: Step) -> bool:
    """Along some axis the tensor becomes a pending sum, so that not every rank gets all of its part."""
    stays = () if step.between_meshes else step.before.placements
    return any(
        placement == Partial() and stays[axis : axis + 1] != (placement,)
        for axis, placement in enumerate(step.after.placements)
    )


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


_COUNTS = {"all_reduce": _all_reduced, "reduce_scatter": _reduced, "share": _shared}
