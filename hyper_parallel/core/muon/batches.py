"""Matrices of one core shape, one orthogonalization and one domain are batches; their order; who computes what in each
(paper §6.6)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Iterator, NamedTuple, Sequence

from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.muon.components import Component
from hyper_parallel.core.muon.newton_schulz import NewtonSchulz
from hyper_parallel.core.muon.owners import Share, Unit, costs_of, deal, replica_owners, share_of
from hyper_parallel.core.muon.parameters import MuonParameter
from hyper_parallel.core.plan.model import ITEM_BYTES


class Alike(NamedTuple):
    """What the matrices of a batch have in common. Those that are complete where they are have no axes and no mesh."""

    shape: tuple[int, int]
    settings: NewtonSchulz
    axes: tuple[str, ...] = ()
    mesh: DeviceMesh | None = None

    @property
    def order(self) -> tuple:
        """Sorts batches: the largest matrices first, then as their texts do."""
        return -prod(self.shape), self.shape, repr(self.settings), self.axes, repr(self.mesh)


class Run(NamedTuple):
    """Matrix `matrix` of planes `[first, last)`, by their place in the cell, of a unit."""

    unit: int
    matrix: int
    first: int
    last: int


class Block(NamedTuple):
    """A run, and the place in the group of the rank that orthogonalizes it."""

    unit: int
    matrix: int
    first: int
    last: int
    owner: int


class Gathering(NamedTuple):
    """One group's part of a batch: the positions of its ranks, and its blocks in their order."""

    ranks: tuple[int, ...]
    blocks: tuple[Block, ...]


class Batch(NamedTuple):
    """Groups that share no rank. Complete matrices have groups of one rank."""

    alike: Alike
    groups: tuple[Gathering, ...]


@dataclass(frozen=True)
class Assignment:
    """All that is decided for a component, in positions of its ranks. `flops` and `state` (bytes) are by position."""

    units: tuple[Unit, ...]
    batches: tuple[Batch, ...]
    flops: tuple[int, ...]
    state: tuple[int, ...]


def assign(
    component: Component, parameters: Sequence[MuonParameter], kind_of: Sequence[int], batch_elements: int
) -> Assignment:
    """Decide who keeps and who computes what, and in which batches."""
    shares: dict[tuple, Share] = {}
    costs = {
        (kind, each.settings): costs_of(component.kinds[kind], each.settings) for kind, each in zip(kind_of, parameters)
    }
    for (kind, settings), cost in costs.items():
        for number, cluster in enumerate(component.clusters[kind]):
            shares[kind, number, settings] = share_of(component.kinds[kind].domain.cells[cluster.cell], cost)
    units = replica_owners(component, parameters, kind_of, shares)
    work = _Work(component, parameters, kind_of, units)
    chunks = {alike: _chunks(alike, groups, batch_elements) for alike, groups in work.alike().items()}
    flops = [0] * len(component.ranks)
    for alike, parts in chunks.items():
        if not alike.axes:
            for ranks, runs in (each for part in parts for each in part):
                flops[ranks[0]] += alike.settings.flops(*alike.shape) * sum(run.last - run.first for run in runs)
    made = {}
    for alike in sorted(chunks, key=lambda each: (-each.settings.flops(*each.shape), each.order)):
        made[alike] = [
            Batch(alike, tuple(Gathering(ranks, tuple(work.blocks(alike, ranks, runs, flops))) for ranks, runs in part))
            for part in chunks[alike]
        ]
    return Assignment(tuple(units), tuple(_in_order(made)), tuple(flops), tuple(work.state()))


def _in_order(made: dict[Alike, list[Batch]]) -> list[Batch]:
    """The largest first. Of the complete ones, in which nothing travels, one comes before the others, so that the first
    pieces travel meanwhile, and the rest behind them, as do the last slices."""
    cut = [batch for alike in sorted(made, key=lambda each: each.order) if alike.axes for batch in made[alike]]
    complete = [batch for alike in sorted(made, key=lambda each: each.order) if not alike.axes for batch in made[alike]]
    return complete[:1] + cut + complete[1:]


Groups = dict[tuple[int, ...], list[Run]]
"""For each group of ranks, by position, its matrices."""


def _chunks(alike: Alike, groups: Groups, batch_elements: int) -> list[list[tuple[tuple[int, ...], list[Run]]]]:
    """The matrices of each group in batches of bounded size: for each batch its groups, and their runs."""
    most = max(1, batch_elements // prod(alike.shape))
    chunks: list[list[tuple[tuple[int, ...], list[Run]]]] = []
    for ranks in sorted(groups):
        for number, runs in enumerate(_cut_up(groups[ranks], most)):
            if number == len(chunks):
                chunks.append([])
            chunks[number].append((ranks, runs))
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
    """The matrices of a component's units: which lie whole on a rank, which are cut, and who gets those."""

    def __init__(
        self,
        component: Component,
        parameters: Sequence[MuonParameter],
        kind_of: Sequence[int],
        units: Sequence[Unit],
    ):
        self._component = component
        self._parameters = parameters
        self._kind_of = kind_of
        self._units = units

    def alike(self) -> dict[Alike, Groups]:
        """All matrices, by what they have in common and by the ranks that hold pieces of them."""
        found: dict[Alike, Groups] = {}
        known: dict[tuple, tuple[Alike, Alike]] = {}
        for number, unit in enumerate(self._units):
            kind, settings = self._kind_of[unit.index], self._parameters[unit.index].settings
            ranks = self._ranks(unit)
            for matrix, first, last, holder in self._matrices(unit):
                if (kind, settings, matrix) not in known:
                    known[kind, settings, matrix] = self._both(kind, settings, matrix)
                cut, complete = known[kind, settings, matrix]
                group, alike = (ranks, cut) if holder is None else ((ranks[holder],), complete)
                found.setdefault(alike, {}).setdefault(group, []).append(Run(number, matrix, first, last))
        return found

    def _both(self, kind: int, settings: NewtonSchulz, matrix: int) -> tuple[Alike, Alike]:
        made = self._component.kinds[kind]
        shape = made.view.matrices[matrix].core_shape
        return Alike(shape, settings, made.domain.axes, made.layout.mesh), Alike(shape, settings)

    def _matrices(self, unit: Unit) -> Iterator[tuple[int, int, int, int | None]]:
        """`(matrix, first, last, holder)`: its holder's place in the group, None where there are several."""
        cell = self._cell(unit)
        steps = [(unit.first, unit.last)] if cell.uniform else [(at, at + 1) for at in range(unit.first, unit.last)]
        for matrix in range(cell.counts.shape[2]):
            for first, last in steps:
                holders = int(cell.holders[first, matrix])
                if holders:
                    yield matrix, first, last, int(cell.counts[:, first, matrix].argmax()) if holders == 1 else None

    def blocks(self, alike: Alike, ranks: tuple[int, ...], runs: Sequence[Run], flops: list[int]) -> Iterator[Block]:
        """The runs of one group's part of a batch, dealt out to its ranks."""
        cost = alike.settings.flops(*alike.shape)
        for run in runs:
            if not alike.axes:
                yield Block(*run, 0)
                continue
            held = self._cell(self._units[run.unit]).held(run.matrix, run.first, run.first + 1)
            first = run.first
            for owner, count in enumerate(deal(run.last - run.first, ranks, flops, cost, held)):
                if count:
                    yield Block(run.unit, run.matrix, first, first + count, owner)
                    first += count

    def state(self) -> list[int]:
        """Bytes of momentum, by position."""
        state = [0] * len(self._component.ranks)
        for unit in self._units:
            size = ITEM_BYTES[self._parameters[unit.index].state_dtype]
            elements = self._cell(unit).counts[:, unit.first : unit.last].sum(axis=(1, 2)).tolist()
            for position, count in zip(self._ranks(unit), elements):
                state[position] += count * size
        return state

    def _cell(self, unit: Unit):
        kind = self._kind_of[unit.index]
        return self._component.kinds[kind].domain.cells[self._component.clusters[kind][unit.cluster].cell]

    def _ranks(self, unit: Unit) -> tuple[int, ...]:
        cluster = self._component.clusters[self._kind_of[unit.index]][unit.cluster]
        return tuple(self._component.position[rank] for rank in cluster.copies[unit.copy])
