"""What mccl lacks on a CPU, made of its messages and its gather: data as bytes, sums in rank order."""

from __future__ import annotations

from typing import Sequence

import mindspore as ms
import numpy as np
from mindspore.mint import distributed as dist

from hyper_parallel.backends.mindspore.tensors import memory, wide
from hyper_parallel.core.job import RankGroup

_BLOCK = 1 << 16  # elements that are summed and scaled while they are in a core's cache
_SUMS = ("float32", "int8", "int16", "int32", "int64")  # dtypes that mccl sums exactly


def as_bytes(tensor: ms.Tensor) -> np.ndarray:
    return memory(tensor).view(np.uint8)


def send_bytes(data: np.ndarray, destination: int, group: RankGroup) -> None:
    dist.isend(ms.from_numpy(data), destination, group.handle)


def receive_bytes(into: np.ndarray, source: int, group: RankGroup) -> None:
    dist.irecv(ms.from_numpy(into), source, group.handle)


def gather_bytes(output: np.ndarray, input: np.ndarray, group: RankGroup) -> None:
    parts = [ms.from_numpy(part) for part in np.split(output, group.size)]
    dist.all_gather(parts, ms.from_numpy(input), group.handle)


def sum_in_place(elements: np.ndarray, group: RankGroup) -> None:
    if elements.dtype.name in _SUMS:
        dist.all_reduce(ms.from_numpy(elements), group=group.handle)
    elif (widened := wide(elements)) is not elements and group.size == 2:
        other = np.empty_like(elements)  # half the bytes that float32 would take
        peer = group.ranks[1 - group.index]
        send_bytes(elements.view(np.uint8), peer, group)
        receive_bytes(other.view(np.uint8), peer, group)
        elements[...] = widened + wide(other)
    elif widened is not elements:
        dist.all_reduce(ms.from_numpy(widened), group=group.handle)
        elements[...] = widened
    else:
        everyone = np.empty((group.size, elements.size), elements.dtype)
        gather_bytes(everyone.reshape(-1).view(np.uint8), elements.view(np.uint8), group)
        elements[...] = everyone.sum(axis=0, dtype=elements.dtype)


def gather_pieces(output: ms.Tensor, input: ms.Tensor, pieces: Sequence[int], group: RankGroup) -> None:
    """A gather of pieces of different sizes: every rank sends its own to each other."""
    places = np.split(as_bytes(output), np.cumsum(pieces)[:-1] * output.itemsize)
    own = as_bytes(input)
    _swap([own] * group.size, places, group)
    places[group.index][...] = own


def exchange_and_sum(
    output: np.ndarray, input: np.ndarray, counts: Sequence[int], scale: float, group: RankGroup
) -> None:
    """Every rank sends each piece to the rank that sums it, which does so in rank order."""
    if input.itemsize > output.itemsize:
        input = input.astype(output.dtype)
    sent = np.split(input, np.cumsum(counts)[:-1])
    rows = [np.empty(output.size, input.dtype) for _ in sent]
    _swap([each.view(np.uint8) for each in sent], [each.view(np.uint8) for each in rows], group)
    own = sent[group.index]
    rows[group.index] = own.copy() if np.may_share_memory(own, output) else own
    _sum_rows(output, rows, scale)


def _sum_rows(target: np.ndarray, rows: Sequence[np.ndarray], scale: float) -> None:
    """`target` becomes the sum of several rows, one after the other, times `scale`; half precision in float32."""
    precision = wide(target[:0]).dtype
    for start in range(0, target.size, _BLOCK):
        first, second, *others = (wide(row[start : start + _BLOCK]) for row in rows)
        part = target[start : start + _BLOCK]
        total = part if part.dtype == precision else np.empty(part.size, precision)
        np.add(first, second, out=total, dtype=precision)
        for row in others:
            total += row
        if scale != 1.0:
            total *= precision.type(scale)
        if total is not part:
            part[...] = total


def exchange(
    output: ms.Tensor, input: ms.Tensor, output_splits: list[int], input_splits: list[int], group: RankGroup
) -> None:
    sent = np.split(as_bytes(input), np.cumsum(input_splits)[:-1] * input.itemsize)
    received = np.split(as_bytes(output), np.cumsum(output_splits)[:-1] * output.itemsize)
    _swap(sent, received, group)
    received[group.index][...] = sent[group.index]


def _swap(sent: Sequence[np.ndarray], received: Sequence[np.ndarray], group: RankGroup) -> None:
    """Bytes to and from each other place of the group, where there are any; from the next place on, so that the ranks
    do not all send to the same one first."""
    others = [(group.index + distance) % group.size for distance in range(1, group.size)]
    for member in others:
        if sent[member].size:
            send_bytes(sent[member], group.ranks[member], group)
    for member in others:
        if received[member].size:
            receive_bytes(received[member], group.ranks[member], group)
