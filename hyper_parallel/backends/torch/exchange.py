"""What gloo lacks on a CPU: a reduce-scatter that sends no more than it has to, an all-gather that sends and receives
at once, and tensors as it can move them."""

from __future__ import annotations

from functools import partial
from typing import Callable, Sequence

import torch
import torch.distributed as dist

from hyper_parallel.backends.torch.tensors import wide
from hyper_parallel.core.job import RankGroup

HALF = (torch.float16, torch.bfloat16)
_EXCHANGE_TAG = 1  # keeps the messages of a composed collective apart from those of `send`
_BLOCK = 1 << 16  # elements that are summed and scaled while they are in a core's cache
# What every communication library moves; anything else travels as bytes.
_MOVABLE = {torch.float32, torch.float64, *HALF, torch.int32, torch.int64, torch.int8, torch.uint8, torch.bool}


def exchange_and_sum(
    target: torch.Tensor,
    source: torch.Tensor,
    pieces: Sequence[int] | None,
    scale: float,
    group: RankGroup,
    overlapped: bool,
) -> tuple[Callable[[], list[dist.Work | None]], Callable[[], None]]:
    """A reduce-scatter between 1-D tensors in which every rank sends each piece straight to the rank that sums it, in
    rank order: what starts it, and what is left to do when all of that has come to an end.

    Where it is `overlapped` with other work receives are posted first: gloo's notice that one is ready would queue up
    behind what is being sent. Where it is waited for at once, a single all-to-all takes less of the processor."""
    if source.element_size() > target.element_size():
        source = source.to(target.dtype)
    if not overlapped:
        everything = torch.empty((group.size, target.numel()), dtype=source.dtype)
        arriving = None if pieces is None else [target.numel()] * group.size
        start = partial(send_pieces, everything, source, arriving, pieces, group)
        return start, lambda: _sum_rows(target, everything, scale)
    sent = list(torch.split(source, list(pieces or [target.numel()] * group.size)))
    own = sent.pop(group.index)
    if _overlap(own, target):
        own = own.clone()
    received = list(torch.empty((group.size - 1, target.numel()), dtype=source.dtype))
    others = [rank for rank in group.ranks if rank != group.ranks[group.index]]

    def start() -> list[dist.Work]:
        how = {"group": group.handle, "tag": _EXCHANGE_TAG}
        receives = [dist.irecv(movable(row), rank, **how) for row, rank in zip(received, others) if row.numel()]
        return receives + [dist.isend(movable(row), rank, **how) for row, rank in zip(sent, others) if row.numel()]

    rows = [*received[: group.index], own, *received[group.index :]]
    return start, lambda: _sum_rows(target, rows, scale)


def gather_pieces(
    target: torch.Tensor, source: torch.Tensor, pieces: Sequence[int], group: RankGroup
) -> list[dist.Work]:
    """An all-gather between 1-D tensors in which every rank sends its own piece straight to each other, for what runs
    beside other work, and for pieces of different sizes. `source` may be its own place in `target`."""
    places = list(torch.split(target, list(pieces)))
    own, how = places.pop(group.index), {"group": group.handle, "tag": _EXCHANGE_TAG}
    others = [rank for rank in group.ranks if rank != group.ranks[group.index]]
    works = [dist.irecv(place, rank, **how) for place, rank in zip(places, others) if place.numel()]
    if source.numel():
        works += [dist.isend(source, rank, **how) for rank in others]
        own.copy_(source)
    return works


def send_pieces(
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    group: RankGroup,
    async_op: bool = False,
) -> list[dist.Work | None]:
    """Every rank gets its piece of what each rank sends. Splits are element counts, equal when not given."""
    target, source = movable(output), movable(input)
    scale = input.element_size() // source.element_size()  # 1, or bytes
    splits = [
        None if counts is None else [count * scale for count in counts] for counts in (output_splits, input_splits)
    ]
    return [dist.all_to_all_single(target, source, *splits, group=group.handle, async_op=async_op)]


def swap_and_sum(target: torch.Tensor, group: RankGroup) -> tuple[Callable[[], list[dist.Work]], Callable[[], None]]:
    """An all-reduce of a 1-D tensor between two ranks: each sends all of it to the other, in one message, and both sum.
    That is as much as any all-reduce sends, and no part of it waits until another has been summed."""
    other = torch.empty_like(target)
    peer = group.ranks[1 - group.index]

    def start() -> list[dist.Work]:
        how = {"group": group.handle, "tag": _EXCHANGE_TAG}
        return [dist.irecv(movable(other), peer, **how), dist.isend(movable(target), peer, **how)]

    return start, lambda: _sum_rows(target, [target, other][:: -1 if group.index else 1], 1.0)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    start, stop = other.data_ptr(), other.data_ptr() + other.nbytes
    return one.data_ptr() < stop and start < one.data_ptr() + one.nbytes


def _sum_rows(target: torch.Tensor, rows: Sequence[torch.Tensor], scale: float) -> None:
    """`target` becomes the sum of several rows, one after the other, times `scale`; half precision in float32."""
    precision = wide(target.dtype)
    for start in range(0, target.numel(), _BLOCK):
        first, second, *others = (row[start : start + _BLOCK] for row in rows)
        part = target[start : start + _BLOCK]
        total = part if part.dtype == precision else torch.empty_like(part, dtype=precision)
        torch.add(first.to(precision), _addable(second, precision), out=total)
        for row in others:
            total += _addable(row, precision)
        if scale != 1.0:
            total *= scale
        if total is not part:
            part.copy_(total)


def _addable(row: torch.Tensor, precision: torch.dtype) -> torch.Tensor:
    """What PyTorch adds to a sum of `precision`: it promotes half precision on the way, and not every other dtype."""
    return row if row.dtype in HALF else row.to(precision)


def flat_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor: 1-D over the same memory, without history."""
    return tensor.data if tensor.dim() == 1 else tensor.data.view(-1)


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as `flat_memory` gives them, or their bytes."""
    flat = flat_memory(tensor)
    return flat if flat.dtype in _MOVABLE else flat.view(torch.uint8)
