"""Where the elements of a logical matrix lie in a local tensor, and where in the batch that orthogonalizes it."""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from math import prod
from typing import Iterator, NamedTuple, Sequence

import numpy as np

from hyper_parallel.core.backend import Move
from hyper_parallel.core.muon.domains import Bounds, bounds_of, flattened, parts_of, side_places
from hyper_parallel.core.muon.kinds import Kind
from hyper_parallel.core.muon.matrices import MatrixView
from hyper_parallel.core.regions import row_major
from hyper_parallel.core.wire import simplified


class Span(NamedTuple):
    """A box of elements: where its first one lies in the local tensor and in the batch, and the strides of each."""

    sizes: tuple[int, ...]
    local: int
    local_strides: tuple[int, ...]
    slot: int
    slot_strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def to_buffer(self, at: int, local: int) -> Move:
        """From a part of a local tensor, which begins at element `local` of it, to a buffer, row by row."""
        return simplified(self.sizes, at, row_major(self.sizes), self.local - local, self.local_strides)

    def to_slot(self, slot: int, at: int) -> Move:
        """From a buffer to the batch, in which the first matrix begins at element `slot`."""
        return simplified(self.sizes, slot + self.slot, self.slot_strides, at, row_major(self.sizes))

    def straight(self, slot: int, local: int) -> Move:
        """From a part of a local tensor to the batch."""
        return simplified(self.sizes, slot + self.slot, self.slot_strides, self.local - local, self.local_strides)


@lru_cache(maxsize=1 << 16)
def spans_of(kind: Kind, cell: int, rank: int, matrix: int, first: int, last: int) -> tuple[Span, ...]:
    """What a rank holds of a matrix of the planes `[first, last)` of a cell, in the order in which it travels. In the
    batch the matrices of these planes follow each other from element 0 on, each with its shorter side first."""
    view, spans = kind.view, []
    rows, columns = view.matrices[matrix].stored_shape
    steps = (columns, 1) if rows <= columns else (1, rows)
    for piece in kind.layout.pieces(rank):
        parts = [(bounds_of(piece.box[dims]), piece.strides[dims]) for dims in parts_of(view)]
        sides = (
            _plane_runs(view, kind.domain.cells[cell].planes, first, last, *parts[0]),
            _side_runs(view, matrix, 0, *parts[1]),
            _side_runs(view, matrix, 1, *parts[2]),
        )
        for runs in product(*sides):
            units = (rows * columns, *steps)
            dims = [(level, unit) for run, unit in zip(runs, units) for level in run.levels]
            spans.append(
                Span(
                    tuple(level.count for level, _ in dims),
                    piece.start + sum(run.offset for run in runs),
                    tuple(level.offset_step for level, _ in dims),
                    sum(run.place * unit for run, unit in zip(runs, units)),
                    tuple(level.step * unit for level, unit in dims),
                )
            )
    return tuple(spans)


class _Level(NamedTuple):
    """Things whose places, and whose offsets in the local tensor, are each evenly apart."""

    count: int
    step: int
    offset_step: int


class _Run(NamedTuple):
    """Rows, columns or planes that one move can copy: those of one level, or such in groups that are alike, as the rows
    of each head are."""

    levels: tuple[_Level, ...]
    place: int
    offset: int


@lru_cache(maxsize=4096)
def _plane_runs(
    view: MatrixView, planes: tuple[int, ...], first: int, last: int, bounds: Bounds, strides: tuple[int, ...]
) -> tuple[_Run, ...]:
    places = np.full(view.planes, -1, dtype=np.int64)
    places[list(planes[first:last])] = np.arange(last - first)
    return _runs(places, view.shape[: view.lead], bounds, strides)


@lru_cache(maxsize=4096)
def _side_runs(view: MatrixView, matrix: int, side: int, bounds: Bounds, strides: tuple[int, ...]) -> tuple[_Run, ...]:
    return _runs(side_places(view, matrix, side), view.shape[parts_of(view)[1 + side]], bounds, strides)


def _runs(places: np.ndarray, sizes: tuple[int, ...], bounds: Bounds, strides: Sequence[int]) -> tuple[_Run, ...]:
    """Runs of the elements of a box that have a place."""
    own = places[flattened(bounds, sizes)]
    offsets = np.zeros(1, dtype=np.int64)
    for (start, stop), stride in zip(bounds, strides):
        offsets = (offsets[:, None] + np.arange(stop - start) * stride).reshape(-1)
    chosen = own >= 0
    own, offsets = own[chosen], offsets[chosen]
    steps = np.stack([np.diff(own), np.diff(offsets)])
    changes = np.flatnonzero((np.diff(steps) != 0).any(axis=0)) + 1
    runs, start = [], 0
    while start < len(own):
        later = changes[np.searchsorted(changes, start + 1) :]
        stop = int(later[0]) + 1 if len(later) else len(own)
        if stop - start > 1 and steps[0, start] < 0:
            stop = start + 1  # rows in an order of the view's own, which no move follows backwards
        step, offset_step = (int(each) for each in steps[:, start]) if stop - start > 1 else (1, 1)
        runs.append(_Run((_Level(stop - start, step, offset_step),), int(own[start]), int(offsets[start])))
        start = stop
    return tuple(_grouped(runs))


def _grouped(runs: Sequence[_Run]) -> Iterator[_Run]:
    """The same, those that follow each other at even distances and are alike as one."""
    start = 0
    while start < len(runs):
        first, stop, apart = runs[start], start + 1, None
        while stop < len(runs) and runs[stop].levels == first.levels:
            found = runs[stop].place - runs[stop - 1].place, runs[stop].offset - runs[stop - 1].offset
            if found[0] < 0 or apart not in (None, found):
                break
            apart, stop = found, stop + 1
        yield first._replace(levels=(_Level(stop - start, *apart), *first.levels)) if apart else first
        start = stop


def joined(moves: Sequence[Move]) -> tuple[Move, ...]:
    """The same moves, those that follow each other on both sides as one."""
    made: list[Move] = []
    for move in moves:
        if made and _is_row(move) and _is_row(made[-1]) and _follows(made[-1], move):
            made[-1] = made[-1]._replace(sizes=(made[-1].sizes[0] + move.sizes[0],))
        else:
            made.append(move)
    return tuple(made)


def _is_row(move: Move) -> bool:
    return len(move.sizes) == 1 and move.target_strides == move.source_strides == (1,)


def _follows(one: Move, other: Move) -> bool:
    numel = one.sizes[0]
    return (one.target_start + numel, one.source_start + numel) == (other.target_start, other.source_start)


def turned(moves: Sequence[Move]) -> tuple[Move, ...]:
    """The way back: from the targets to the sources."""
    return tuple(
        Move(move.sizes, move.source_start, move.source_strides, move.target_start, move.target_strides)
        for move in moves
    )
