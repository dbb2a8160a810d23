"""Who keeps, and who orthogonalizes: greedy by counted FLOPs, largest first, then by bytes of state (paper §6.4, 6.5).

It is decided for all clusters of a cell alike, in copies and places, and in an order that names and shapes alone give.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Iterator, NamedTuple, Sequence

import numpy as np

from hyper_parallel.core.muon.domains import Cell
from hyper_parallel.core.muon.kinds import Kind
from hyper_parallel.core.muon.newton_schulz import NewtonSchulz
from hyper_parallel.core.muon.parameters import MuonParameter
from hyper_parallel.core.plan.model import ITEM_BYTES

NEAR = 0.5
"""Two loads are near each other if they differ by less than this share of what is to be given away."""


class Unit(NamedTuple):
    """Planes `[first, last)`, by their place in the cell, of a cell of parameter `index`, and the copy that keeps them
    in every cluster."""

    index: int
    cell: int
    first: int
    last: int
    copy: int


class Share(NamedTuple):
    """What one plane of a cell takes, or, of one whose planes are not alike, all of it."""

    largest: int
    """FLOPs of its largest matrix."""
    flops: np.ndarray
    """float64: FLOPs of each place, where those of cut matrices are shared out evenly."""
    elements: np.ndarray
    """int64: elements that a rank holds at each place."""
    planes: int
    """How many planes this is."""


Shares = dict[tuple[int, int, NewtonSchulz], Share]
"""By the number of a kind, a cell, and settings."""


def shares_of(kinds: Sequence[Kind], kind_of: Sequence[int], parameters: Sequence[MuonParameter]) -> Shares:
    """What there is to be given away."""
    shares: Shares = {}
    for number, settings in dict.fromkeys((kind, each.settings) for kind, each in zip(kind_of, parameters)):
        costs = [settings.flops(*matrix.core_shape) for matrix in kinds[number].view.matrices]
        for cell, each in enumerate(kinds[number].cells):
            shares[number, cell, settings] = _share(each, costs)
    return shares


def _share(cell: Cell, costs: Sequence[int]) -> Share:
    planes = 1 if cell.uniform else len(cell.planes)
    counts, holders = cell.counts[:, :planes], cell.holders[:planes]
    weights = np.where(holders > 0, costs, 0)
    own = ((counts > 0) & (holders == 1)) * weights
    shared = (weights * (holders > 1)).sum() / len(counts)
    flops = own.sum(axis=(1, 2)) + shared
    return Share(int(weights.max(initial=0)), flops, counts.sum(axis=(1, 2)), planes)


class _Open(NamedTuple):
    """Planes that no copy keeps yet; the largest come first, then names decide."""

    largest: int
    flops: float
    index: int
    cell: int
    first: int
    last: int


def replica_owners(
    kinds: Sequence[Kind], kind_of: Sequence[int], parameters: Sequence[MuonParameter], ranks: int
) -> list[Unit]:
    """The units of a plan, in the order of parameters. `kind_of` tells the kind of each; global ranks are below
    `ranks`."""
    shares = shares_of(kinds, kind_of, parameters)
    flops, state, units = np.zeros(ranks), np.zeros(ranks), []
    for each in sorted(_open(kinds, kind_of, parameters, shares)):
        parameter, kind = parameters[each.index], kind_of[each.index]
        grid, share = kinds[kind].grids[each.cell], shares[kind, each.cell, parameter.settings]
        times = (each.last - each.first) / share.planes
        copy = _least_loaded(grid, flops, state, share.flops.sum() * times)
        flops[grid[:, copy]] += share.flops * times
        state[grid[:, copy]] += share.elements * times * ITEM_BYTES[parameter.state_dtype]
        units.append(Unit(each.index, each.cell, each.first, each.last, copy))
    return sorted(units)


def _open(
    kinds: Sequence[Kind], kind_of: Sequence[int], parameters: Sequence[MuonParameter], shares: Shares
) -> Iterator[_Open]:
    for index, parameter in enumerate(parameters):
        kind = kinds[kind_of[index]]
        for number, cell in enumerate(kind.cells):
            share = shares[kind_of[index], number, parameter.settings]
            for first, last in _ranges(cell, kind.grids[number].shape[1]):
                flops = float(share.flops.sum()) * (last - first) / share.planes
                yield _Open(-share.largest, -flops, index, number, first, last)


def _ranges(cell: Cell, copies: int) -> list[tuple[int, int]]:
    """The planes of a cell in as many contiguous ranges as there are copies, if they can be shared at all."""
    planes = len(cell.planes)
    if not planes:
        return []
    parts = min(copies, planes) if cell.uniform else 1
    return [(planes * part // parts, planes * (part + 1) // parts) for part in range(parts)]


def _least_loaded(grid: np.ndarray, flops: np.ndarray, state: np.ndarray, cost: float) -> int:
    """The copy with the fewest FLOPs in all clusters [clusters, copies, places], or of those near it the one with the
    least state."""
    if grid.shape[1] == 1:
        return 0
    loads, held = flops[grid].sum(axis=(0, 2)), state[grid].sum(axis=(0, 2))
    near = loads <= loads.min() + NEAR * cost * len(grid)
    return int(np.where(near, held, np.inf).argmin())


def deal(count: int, ranks: np.ndarray, flops: np.ndarray, cost: int, held: Sequence[int]) -> list[int]:
    """How many of `count` equal matrices each place of `ranks` [clusters, places] gets: each the place with the fewest
    FLOPs so far, or of several the one that holds most of it. `flops` grows by what they get."""
    taken = [0] * ranks.shape[1]
    heap = [(load, -held[place], place) for place, load in enumerate(flops[ranks].sum(axis=0).tolist())]
    heapify(heap)
    for _ in range(count):
        load, preference, place = heappop(heap)
        taken[place] += 1
        heappush(heap, (load + cost * len(ranks), preference, place))
    flops[ranks] += cost * np.array(taken)
    return taken
