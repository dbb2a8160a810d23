"""Who keeps, and who orthogonalizes: greedy by counted FLOPs, largest first, then by bytes of state (paper §6.4, 6.5).

Everything is decided in positions of a component's ranks, so that components in which the same is to be done share one
decision, and in an order that names and shapes alone give.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Iterator, NamedTuple, Sequence

import numpy as np

from hyper_parallel.core.muon.components import Component, Kind
from hyper_parallel.core.muon.domains import Cell
from hyper_parallel.core.muon.newton_schulz import NewtonSchulz
from hyper_parallel.core.muon.parameters import MuonParameter
from hyper_parallel.core.plan.model import ITEM_BYTES

NEAR = 0.5
"""Two loads are near each other if they differ by less than this share of what is to be given away."""


class Unit(NamedTuple):
    """Planes `[first, last)`, by their place in the cell, of parameter `index` in a cluster, and the copy that keeps
    them."""

    index: int
    cluster: int
    first: int
    last: int
    copy: int


class Share(NamedTuple):
    """What one plane of a cell takes, or, of one whose planes are not alike, all of it."""

    largest: int
    """FLOPs of its largest matrix."""
    flops: tuple[float, ...]
    """FLOPs of each rank, where those of cut matrices are shared out evenly."""
    elements: tuple[float, ...]
    """Elements that each rank holds."""
    planes: int
    """How many planes this is."""


@dataclass
class Loads:
    """What has been given to the ranks of a component, by position."""

    flops: list[float]
    state: list[float]

    @classmethod
    def none(cls, ranks: int) -> Loads:
        """Nothing yet."""
        return cls([0] * ranks, [0] * ranks)


def costs_of(kind: Kind, settings: NewtonSchulz) -> tuple[int, ...]:
    """FLOPs of orthogonalizing each matrix of a plane."""
    return tuple(settings.flops(*matrix.core_shape) for matrix in kind.view.matrices)


def share_of(cell: Cell, costs: Sequence[int]) -> Share:
    """What is to be given away of a cell."""
    planes = 1 if cell.uniform else len(cell.planes)
    counts, holders = cell.counts[:, :planes], cell.holders[:planes]
    weights = np.where(holders > 0, costs, 0)
    own = ((counts > 0) & (holders == 1)) * weights
    shared = (weights * (holders > 1)).sum() / len(counts)
    return Share(
        int(weights.max(initial=0)),
        tuple((own.sum(axis=(1, 2)) + shared).tolist()),
        tuple(counts.sum(axis=(1, 2)).tolist()),
        planes,
    )


class _Open(NamedTuple):
    """Planes that no copy keeps yet; the largest come first, then names decide."""

    largest: int
    flops: float
    index: int
    cluster: int
    first: int
    last: int


def replica_owners(
    component: Component, parameters: Sequence[MuonParameter], kind_of: Sequence[int], shares: dict[tuple, Share]
) -> list[Unit]:
    """The units of a component, in the order of parameters. `kind_of` tells the kind of each parameter, `shares` what
    there is for each (kind, cluster, settings)."""
    positions = [
        [[[component.position[rank] for rank in ranks] for ranks in cluster.copies] for cluster in clusters]
        for clusters in component.clusters
    ]
    loads, units = Loads.none(len(component.ranks)), []
    for each in sorted(_open(component, parameters, kind_of, shares)):
        parameter, kind = parameters[each.index], kind_of[each.index]
        copies, share = positions[kind][each.cluster], shares[kind, each.cluster, parameter.settings]
        times = (each.last - each.first) / share.planes
        copy = _least_loaded(copies, loads, sum(share.flops) * times)
        size = ITEM_BYTES[parameter.state_dtype]
        for position, flops, elements in zip(copies[copy], share.flops, share.elements):
            loads.flops[position] += flops * times
            loads.state[position] += elements * times * size
        units.append(Unit(each.index, each.cluster, each.first, each.last, copy))
    return sorted(units)


def _open(
    component: Component, parameters: Sequence[MuonParameter], kind_of: Sequence[int], shares: dict[tuple, Share]
) -> Iterator[_Open]:
    for index, parameter in enumerate(parameters):
        kind = component.kinds[kind_of[index]]
        for number, cluster in enumerate(component.clusters[kind_of[index]]):
            cell, share = kind.domain.cells[cluster.cell], shares[kind_of[index], number, parameter.settings]
            for first, last in _ranges(cell, len(cluster.copies)):
                flops = sum(share.flops) * (last - first) / share.planes
                yield _Open(-share.largest, -flops, index, number, first, last)


def _ranges(cell: Cell, copies: int) -> list[tuple[int, int]]:
    """The planes of a cell in as many contiguous ranges as there are copies, if they can be shared at all."""
    planes = len(cell.planes)
    if not planes:
        return []
    parts = min(copies, planes) if cell.uniform else 1
    return [(planes * part // parts, planes * (part + 1) // parts) for part in range(parts)]


def _least_loaded(copies: Sequence[Sequence[int]], loads: Loads, flops: float) -> int:
    """The copy with the fewest FLOPs, or of those near it the one with the least state."""
    if len(copies) == 1:
        return 0
    totals = [sum(loads.flops[position] for position in copy) for copy in copies]
    near = min(totals) + NEAR * flops
    state = [sum(loads.state[position] for position in copy) for copy in copies]
    return min((state[copy], copy) for copy, total in enumerate(totals) if total <= near)[1]


def deal(count: int, ranks: Sequence[int], flops: list[float], cost: int, held: Sequence[int]) -> list[int]:
    """How many of `count` equal matrices each of `ranks` gets, each the one with the fewest FLOPs so far, or of several
    the one that holds most of it. `flops` grows by what they get."""
    taken = [0] * len(ranks)
    heap = [(flops[position], -held[place], place) for place, position in enumerate(ranks)]
    heapify(heap)
    for _ in range(count):
        load, preference, place = heappop(heap)
        taken[place] += 1
        heappush(heap, (load + cost, preference, place))
    for place, position in enumerate(ranks):
        flops[position] += cost * taken[place]
    return taken
