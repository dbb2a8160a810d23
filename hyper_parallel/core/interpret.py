"""Transitions without devices: the programs of all ranks, replayed in step on numpy arrays."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided

from hyper_parallel.core.backend import Move
from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.program import Stage
from hyper_parallel.core.regions import chunk_bounds
from hyper_parallel.core.transition import Transition
from hyper_parallel.core.wire import Step

Locals = dict[int, np.ndarray]
"""The flat local array of each rank."""


@dataclass
class Traffic:
    """Elements that crossed from one rank to another, by `(sender, receiver)`."""

    elements: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))

    def add(self, sender: int, receiver: int, count: int) -> None:
        """Count what one rank sent to another; what it keeps is free."""
        if sender != receiver:
            self.elements[sender, receiver] += count

    @property
    def total(self) -> int:
        """Elements that crossed in all."""
        return sum(self.elements.values())


def interpret(
    transition: Transition, locals_: Sequence[np.ndarray], traffic: Traffic | None = None
) -> list[np.ndarray]:
    """Replay a transition on the local arrays of all ranks.

    Args:
        transition: what to replay.
        locals_: in the order of the source mesh's ranks, each of its local shape.
        traffic: counts what crosses between ranks.

    Returns:
        The local arrays of the target, in the order of the target mesh's ranks.

    Raises:
        LayoutError: a local array is missing or of another shape.
    """
    results, _ = _forward(transition, locals_, traffic or Traffic())
    return results


def interpret_gradient(
    transition: Transition,
    locals_: Sequence[np.ndarray],
    gradients: Sequence[np.ndarray],
    traffic: Traffic | None = None,
) -> list[np.ndarray]:
    """The gradients of `locals_`, from those of the results in the order of the target mesh's ranks."""
    _, shares = _forward(transition, locals_, Traffic())
    target, source = transition.target, transition.source
    held = _checked(target.gradient, gradients)
    stages = {rank: list(transition.program(rank).backward) for rank in held}
    held = _replay(transition.gradient_steps, stages, held, traffic or Traffic(), shares)
    return [held[rank].reshape(source.local_shape(rank)) for rank in source.mesh.ranks]


def _forward(
    transition: Transition, locals_: Sequence[np.ndarray], traffic: Traffic
) -> tuple[list[np.ndarray], Locals]:
    held = _checked(transition.source, locals_)
    stages = {rank: list(transition.program(rank).forward) for rank in held}
    shares: Locals = {}
    held = _replay(transition.steps, stages, held, traffic, shares, keep=True)
    target = transition.target
    return [held[rank].reshape(target.local_shape(rank)) for rank in target.mesh.ranks], shares


def _checked(layout, locals_: Sequence[np.ndarray]) -> Locals:
    if len(locals_) != layout.mesh.size:
        raise LayoutError(f"the mesh {layout.mesh} has {layout.mesh.size} ranks, found {len(locals_)} local arrays")
    for rank, local in zip(layout.mesh.ranks, locals_):
        if np.shape(local) != layout.local_shape(rank):
            raise LayoutError(
                f"rank {rank} holds a local array of shape {layout.local_shape(rank)} by {layout}, "
                f"found {np.shape(local)}"
            )
    return {rank: np.ascontiguousarray(local).reshape(-1) for rank, local in zip(layout.mesh.ranks, locals_)}


def _replay(
    steps: Sequence[Step],
    stages: dict[int, list[Stage]],
    held: Locals,
    traffic: Traffic,
    shares: Locals,
    keep: bool = False,
) -> Locals:
    """One step after the other on all ranks. `shares` are written in forward and read in backward."""
    for place in range(len(steps)):
        now = {rank: queue.pop(0) if queue and queue[0].step == place else None for rank, queue in stages.items()}
        sent = {rank: _sent(stage, held[rank], shares.get(rank)) for rank, stage in now.items() if stage}
        received = {rank: _collective(stage, rank, now, sent, traffic) for rank, stage in now.items() if stage}
        for rank, stage in now.items():
            if stage is not None:
                held[rank] = _finish(stage, rank, held[rank], received[rank], shares, keep)
    return held


def _sent(stage: Stage, held: np.ndarray, shares: np.ndarray | None) -> np.ndarray:
    if stage.kind == "share":
        if stage.pack is not None:
            held = _moved(np.zeros_like(held), held, stage.pack)
        rows = shares * held
        return rows.reshape(-1) if stage.row is None else rows[stage.row]
    if stage.pack is None:
        return held
    return _moved(_unwritten(stage.sent, held.dtype), held, stage.pack)


def _collective(stage: Stage, rank: int, stages: dict[int, Stage], sent: Locals, traffic: Traffic) -> np.ndarray:
    group = stage.group
    place = group.index(rank) if group else 0
    if stage.collective is None:
        return sent[rank]
    if stage.collective == "all_gather":
        for member in group:
            traffic.add(member, rank, sent[member].size)
        return np.concatenate([sent[member] for member in group])
    if stage.collective == "all_to_all":
        parts = []
        for member, expected in zip(group, stage.output_splits):
            splits = stages[member].input_splits
            start = sum(splits[:place])
            parts.append(sent[member][start : start + splits[place]])
            if parts[-1].size != expected:
                raise RuntimeError(f"rank {member} sends {parts[-1].size} elements, rank {rank} expects {expected}")
            traffic.add(member, rank, expected)
        return np.concatenate(parts)
    total = np.add.reduce([sent[member] for member in group], dtype=sent[rank].dtype)
    chunks = [chunk_bounds(total.size, len(group), each) for each in range(len(group))]
    for member, (start, stop) in zip(group, chunks):
        again = stop - start if stage.collective == "all_reduce" else 0
        traffic.add(member, rank, chunks[place][1] - chunks[place][0] + again)
    return total if stage.collective == "all_reduce" else total[slice(*chunks[place])]


def _finish(stage: Stage, rank: int, held: np.ndarray, received: np.ndarray, shares: Locals, keep: bool) -> np.ndarray:
    if stage.reduction is not None:
        rows = received.reshape(stage.reduction.rows, -1)
        received = _REDUCE[stage.reduction.op](rows, axis=0)
        if keep and stage.reduction.op != "sum":
            equal = (rows == received) | (np.isnan(rows) & np.isnan(received))
            shares[rank] = equal / np.maximum(equal.sum(axis=0), 1)
    if stage.collective is not None or stage.kind == "share":
        output = received
        if stage.unpack is not None:
            output = _moved(_output(stage, held.dtype), received, stage.unpack)
            output = _moved(output, held, stage.keep)
    elif stage.kind == "scale":
        output = held
    else:
        output = _moved(_output(stage, held.dtype), held, stage.keep)
    if stage.factor == stage.divisor == 1:
        return output
    return (output * stage.factor / stage.divisor).astype(held.dtype)


def _output(stage: Stage, dtype: np.dtype) -> np.ndarray:
    return np.zeros(stage.numel, dtype) if stage.zero else _unwritten(stage.numel, dtype)


def _unwritten(numel: int, dtype: np.dtype) -> np.ndarray:
    """A buffer with anything in it: an element that a program forgets to write is wrong every time."""
    return np.full(numel, 113).astype(dtype)


_REDUCE = {"sum": np.sum, "max": np.max, "min": np.min}


def _moved(target: np.ndarray, source: np.ndarray, moves: Sequence[Move]) -> np.ndarray:
    for move in moves:
        into = as_strided(target[move.target_start :], move.sizes, [s * target.itemsize for s in move.target_strides])
        into[...] = as_strided(
            source[move.source_start :], move.sizes, [s * source.itemsize for s in move.source_strides]
        )
    return target
