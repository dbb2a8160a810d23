"""Regions of a tensor as data: intervals of one dim, boxes, and where a box lies in a contiguous local tensor."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Iterator, NamedTuple, Sequence

Interval = tuple[int, int]
"""Start and stop along one tensor dim."""

Box = tuple[slice, ...]
"""One slice for each tensor dim, each with start and stop."""


class Piece(NamedTuple):
    """A box of the global tensor and its place in a local one.

    Global element `box.start + (i, j, ...)` is element `start + i * strides[0] + j * strides[1] + ...` of the flattened
    local tensor.
    """

    box: Box
    start: int
    strides: tuple[int, ...]


def chunk_bounds(length: int, pieces: int, index: int) -> Interval:
    """Start and stop of piece `index` when `length` is split by ceil-chunk into `pieces`; may be empty."""
    chunk = -(-length // pieces)
    return min(index * chunk, length), min((index + 1) * chunk, length)


def total(intervals: Sequence[Interval]) -> int:
    """Number of elements in the intervals."""
    return sum(stop - start for start, stop in intervals)


def take(intervals: Sequence[Interval], first: int, last: int) -> list[Interval]:
    """The elements `[first, last)` of the intervals laid end to end; one empty interval when there are none."""
    if len(intervals) == 1:
        start = intervals[0][0]
        return [(start + first, start + last)]
    taken, position = [], 0
    for start, stop in intervals:
        low, high = max(first - position, 0), min(last - position, stop - start)
        if low < high:
            taken.append((start + low, start + high))
        position += stop - start
    return taken or [(intervals[-1][1], intervals[-1][1])]


def take_of_blocks(intervals: Sequence[Interval], blocks: int, pieces: int, index: int) -> list[Interval]:
    """Piece `index` of `pieces` of each of `blocks`, all by ceil-chunk; intervals that touch are joined."""
    length = total(intervals)
    taken: list[Interval] = []
    for block in range(blocks):
        low, high = chunk_bounds(length, blocks, block)
        first, last = chunk_bounds(high - low, pieces, index)
        for start, stop in take(intervals, low + first, low + last) if first < last else ():
            if taken and taken[-1][1] == start:
                taken[-1] = (taken[-1][0], stop)
            else:
                taken.append((start, stop))
    return taken or take(intervals, length, length)


def boxes_of_range(start: int, stop: int, sizes: Sequence[int]) -> Iterator[tuple[Interval, ...]]:
    """The boxes, in row-major order, that make up elements `[start, stop)` of a tensor of `sizes`, flattened."""
    if start >= stop:
        return
    inner = prod(sizes[1:])
    first, skipped = divmod(start, inner)
    last, rest = divmod(stop, inner)
    if len(sizes) == 1:
        yield ((start, stop),)
    elif first == last:
        yield from _in_row(first, skipped, rest, sizes)
    else:
        if skipped:
            yield from _in_row(first, skipped, inner, sizes)
            first += 1
        if first < last:
            yield ((first, last), *((0, size) for size in sizes[1:]))
        yield from _in_row(last, 0, rest, sizes)


def _in_row(row: int, start: int, stop: int, sizes: Sequence[int]) -> Iterator[tuple[Interval, ...]]:
    for box in boxes_of_range(start, stop, sizes[1:]):
        yield ((row, row + 1), *box)


def row_major(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def pieces_of(intervals: Sequence[Sequence[Interval]]) -> list[Piece]:
    """The pieces of a local tensor that holds, along each dim, the given intervals end to end; no piece when empty."""
    sizes = [total(each) for each in intervals]
    if 0 in sizes:
        return []
    strides = row_major(sizes)
    if all(len(each) == 1 for each in intervals):
        return [Piece(tuple(slice(*each[0]) for each in intervals), 0, strides)]
    return [
        Piece(
            tuple(slice(low, high) for low, high, _ in parts),
            sum(offset * stride for (_, _, offset), stride in zip(parts, strides)),
            strides,
        )
        for parts in product(*(_with_offsets(each) for each in intervals))
    ]


def pieces_of_range(
    start: int, stop: int, sizes: Sequence[int], intervals: Sequence[Sequence[Interval]]
) -> list[Piece]:
    """As `pieces_of`, where leading dims of `sizes`, flattened, hold `[start, stop)`, and the others `intervals`."""
    width = prod(total(each) for each in intervals)
    lead_strides = row_major(sizes)
    others = pieces_of(intervals)
    pieces = []
    for lead in boxes_of_range(start, stop, sizes):
        offset = sum(low * stride for (low, _), stride in zip(lead, lead_strides)) - start
        for other in others:
            pieces.append(
                Piece(
                    tuple(slice(*each) for each in lead) + other.box,
                    offset * width + other.start,
                    tuple(stride * width for stride in lead_strides) + other.strides,
                )
            )
    return pieces


def _with_offsets(intervals: Sequence[Interval]) -> list[tuple[int, int, int]]:
    placed, offset = [], 0
    for start, stop in intervals:
        placed.append((start, stop, offset))
        offset += stop - start
    return placed


def sizes_of(box: Box) -> tuple[int, ...]:
    """Shape of a box."""
    return tuple(part.stop - part.start for part in box)


def intersection(one: Box, other: Box) -> Box | None:
    """What two boxes share; None when that is nothing."""
    shared = []
    for left, right in zip(one, other):
        start, stop = max(left.start, right.start), min(left.stop, right.stop)
        if start >= stop:
            return None
        shared.append(slice(start, stop))
    return tuple(shared)


def offset_in(piece: Piece, box: Box) -> int:
    """Where the first element of `box`, which lies in `piece.box`, is in the flattened local tensor."""
    return piece.start + sum(
        (part.start - whole.start) * stride for part, whole, stride in zip(box, piece.box, piece.strides)
    )
