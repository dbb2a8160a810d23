"""Matrices of one core shape, one orthogonalization and one domain are batches; their order; who computes what in each
(paper §6.6)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Iterator, NamedTuple, Sequence

import numpy as np

from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.muon.domains import Cell
from hyper_parallel.core.muon.kinds import Kind, Seat
from hyper_parallel.core.muon.newton_schulz import NewtonSchulz
from hyper_parallel.core.muon.owners import Unit, deal, replica_owners
from hyper_parallel.core.muon.parameters import MuonParameter
from hyper_parallel.core.plan.model import ITEM_BYTES


class Alike(NamedTuple):
    """What the matrices of a batch have in common: `is_cut` along `axes`, or complete.

    Along `replicas` the same is computed again. That it is computed in the same batches, and so is the same bit for
    bit, a batch holds nothing that lies otherwise along the mesh.
    """

    shape: tuple[int, int]
    settings: NewtonSchulz
    mesh: DeviceMesh
    replicas: tuple[str, ...]
    axes: tuple[str, ...]
    is_cut: bool

    @property
    def order(self) -> tuple:
        """Sorts batches: the largest matrices first, then as their texts do."""
        return -prod(self.shape), self.shape, repr(self.settings), repr(self.mesh), self.replicas, self.axes


class Run(NamedTuple):
    """Matrix `matrix` of planes `[first, last)`, by their place in the cell, of a unit."""

    unit: int
    matrix: int
    first: int
    last: int


class Block(NamedTuple):
    """A run, and the place in the copy of the rank that orthogonalizes it."""

    unit: int
    matrix: int
    first: int
    last: int
    owner: int


class Where(NamedTuple):
    """The ranks that take part in something: those of a copy in each cluster of a cell, or, where matrices are
    complete, those at one of its places."""

    cell: int
    copy: int
    place: int = -1


@dataclass(frozen=True)
class Batch:
    """Blocks by the ranks that take part, which all sit in the clusters of `kind`."""

    alike: Alike
    kind: int
    blocks: dict[Where, tuple[Block, ...]]

    def of(self, seat: Seat | None) -> tuple[Block, ...]:
        """Those that a rank takes part in."""
        if seat is None:
            return ()
        where = Where(seat.cluster.cell, seat.copy, -1 if self.alike.is_cut else seat.place)
        return self.blocks.get(where, ())


@dataclass(frozen=True)
class Assignment:
    """All that is decided. `flops` and `state` (bytes) are by global rank."""

    units: tuple[Unit, ...]
    batches: tuple[Batch, ...]
    flops: dict[int, int]
    state: dict[int, int]


def assign(
    kinds: Sequence[Kind], kind_of: Sequence[int], parameters: Sequence[MuonParameter], batch_elements: int
) -> Assignment:
    """Decide who keeps and who computes what, and in which batches."""
    ranks = sorted({rank for kind in kinds for rank in kind.seats})
    count = max(ranks, default=-1) + 1
    units = replica_owners(kinds, kind_of, parameters, count)
    work = _Work(kinds, kind_of, parameters, units)
    flops = np.zeros(count, dtype=np.int64)
    groups = work.groups()
    chunks = {alike: _chunks(alike, runs, batch_elements) for alike, (_, runs) in groups.items()}
    made: dict[Alike, list[Batch]] = {}
    # Complete matrices have no choice, so they come first here.
    for alike in sorted(chunks, key=lambda each: (each.is_cut, -each.settings.flops(*each.shape), each.order)):
        kind = groups[alike][0]
        made[alike] = [
            Batch(
                alike,
                kind,
                {where: tuple(work.blocks(alike, kind, where, runs, flops)) for where, runs in part.items()},
            )
            for part in chunks[alike]
        ]
    state = work.state(count)
    return Assignment(
        tuple(units),
        tuple(_in_order(made)),
        {rank: int(flops[rank]) for rank in ranks},
        {rank: int(state[rank]) for rank in ranks},
    )


def _in_order(made: dict[Alike, list[Batch]]) -> list[Batch]:
    """The largest first. Of the complete ones, in which nothing travels, one comes before the others, so that the first
    pieces travel meanwhile, and the rest behind them, as do the last slices."""
    ordered = [batch for alike in sorted(made, key=lambda each: each.order) for batch in made[alike]]
    cut = [batch for batch in ordered if batch.alike.is_cut]
    complete = [batch for batch in ordered if not batch.alike.is_cut]
    return complete[:1] + cut + complete[1:]


Groups = dict[Where, list[Run]]
"""For each group of ranks its matrices."""


def _chunks(alike: Alike, groups: Groups, batch_elements: int) -> list[Groups]:
    """The matrices of each group in batches of bounded size."""
    most = max(1, batch_elements // prod(alike.shape))
    chunks: list[Groups] = []
    for where in sorted(groups):
        for number, runs in enumerate(_cut_up(groups[where], most)):
            if number == len(chunks):
                chunks.append({})
            chunks[number][where] = runs
    return chunks


def _cut_up(runs: Sequence[Run], most: int) -> Iterator[list[Run]]:
    """The runs in lists of at most `most` matrices."""
    taken: list[Run] = []
    room = most
    for run in runs:
        first = run.first
        while first < run.last:
            last = min(run.last, first + room)
            taken.append(run._replace(first=first, last=last))
            room -= last - first
            first = last
            if not room:
                yield taken
                taken, room = [], most
    if taken:
        yield taken


class _Work:
    """The matrices of a plan's units: which lie whole on a rank, which are cut, and who gets those."""

    def __init__(
        self,
        kinds: Sequence[Kind],
        kind_of: Sequence[int],
        parameters: Sequence[MuonParameter],
        units: Sequence[Unit],
    ):
        self._kinds = kinds
        self._kind_of = kind_of
        self._parameters = parameters
        self._units = units

    def groups(self) -> dict[Alike, tuple[int, Groups]]:
        """All matrices, by what they have in common and by the ranks that hold pieces of them; and the kind of the
        first."""
        found: dict[Alike, tuple[int, Groups]] = {}
        known: dict[tuple, tuple[Alike, Alike]] = {}
        for number, unit in enumerate(self._units):
            kind, settings = self._kind_of[unit.index], self._parameters[unit.index].settings
            for matrix, first, last, holder in self._matrices(unit):
                if (kind, settings, matrix) not in known:
                    known[kind, settings, matrix] = self._both(kind, settings, matrix)
                cut, complete = known[kind, settings, matrix]
                alike, place = (cut, -1) if holder is None else (complete, holder)
                _, groups = found.setdefault(alike, (kind, {}))
                groups.setdefault(Where(unit.cell, unit.copy, place), []).append(Run(number, matrix, first, last))
        return found

    def _both(self, kind: int, settings: NewtonSchulz, matrix: int) -> tuple[Alike, Alike]:
        made = self._kinds[kind]
        shape, domain = made.view.matrices[matrix].core_shape, made.domain
        cut = Alike(shape, settings, made.layout.mesh, domain.replicas, domain.axes, True)
        return cut, cut._replace(is_cut=False)

    def _matrices(self, unit: Unit) -> Iterator[tuple[int, int, int, int | None]]:
        """`(matrix, first, last, holder)`: its holder's place in the copy, None where there are several."""
        cell = self._cell(unit)
        steps = [(unit.first, unit.last)] if cell.uniform else [(at, at + 1) for at in range(unit.first, unit.last)]
        for matrix in range(cell.counts.shape[2]):
            for first, last in steps:
                holders = int(cell.holders[first, matrix])
                if holders:
                    yield matrix, first, last, int(cell.counts[:, first, matrix].argmax()) if holders == 1 else None

    def blocks(
        self, alike: Alike, kind: int, where: Where, runs: Sequence[Run], flops: np.ndarray
    ) -> tuple[Block, ...]:
        """The runs of one group's part of a batch, dealt out to its places."""
        return tuple(self._dealt(alike, kind, where, runs, flops))

    def _dealt(self, alike: Alike, kind: int, where: Where, runs: Sequence[Run], flops: np.ndarray) -> Iterator[Block]:
        cost, ranks = alike.settings.flops(*alike.shape), self._kinds[kind].grids[where.cell][:, where.copy]
        for run in runs:
            if not alike.is_cut:
                flops[ranks[:, where.place]] += cost * (run.last - run.first)
                yield Block(*run, where.place)
                continue
            held = self._cell(self._units[run.unit]).held(run.matrix, run.first, run.first + 1)
            first = run.first
            for owner, count in enumerate(deal(run.last - run.first, ranks, flops, cost, held)):
                if count:
                    yield Block(run.unit, run.matrix, first, first + count, owner)
                    first += count

    def state(self, count: int) -> np.ndarray:
        """Bytes of momentum, by global rank."""
        state = np.zeros(count, dtype=np.int64)
        for unit in self._units:
            elements = self._cell(unit).counts[:, unit.first : unit.last].sum(axis=(1, 2))
            grid = self._kinds[self._kind_of[unit.index]].grids[unit.cell]
            state[grid[:, unit.copy]] += elements * ITEM_BYTES[self._parameters[unit.index].state_dtype]
        return state

    def _cell(self, unit: Unit) -> Cell:
        return self._kinds[self._kind_of[unit.index]].cells[unit.cell]
