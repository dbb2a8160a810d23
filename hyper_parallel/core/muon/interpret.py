"""A step of Muon without devices: the programs of all ranks, replayed in step on numpy arrays.

What is in flight can't be touched: who sends may not write, who receives may neither read nor write, until it is there.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
from numpy.lib.stride_tricks import as_strided

from hyper_parallel.core.backend import Move
from hyper_parallel.core.moves import check_move
from hyper_parallel.core.muon.plan import MuonPlan
from hyper_parallel.core.muon.program import (
    ARRIVALS,
    BUFFERS,
    COPIES,
    MATRICES,
    PIECES,
    RESULTS,
    SLICES,
    Part,
    Program,
    Publication,
    RankBatch,
)
from hyper_parallel.core.muon.schedule import events
from hyper_parallel.core.muon.spans import turned
from hyper_parallel.core.plan.model import ITEM_BYTES
from hyper_parallel.core.topology import Topology

Inputs = Mapping[int, Mapping[int, np.ndarray]]
"""For each rank: what is to be orthogonalized, by the number of what is kept."""
Compute = Callable[[int, RankBatch, np.ndarray], np.ndarray]
"""`compute(rank, batch, matrices)`: the results [k, m, n]."""
Apply = Callable[[int, int, np.ndarray], None]
"""`apply(rank, number, update)`: called when an update is complete."""


@dataclass
class Traffic:
    """What crossed between ranks: bytes by `(axis, tier)`, and elements by `(axis, sender, receiver)`."""

    bytes: dict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    elements: dict[tuple[str, int, int], int] = field(default_factory=lambda: defaultdict(int))
    computed: dict[tuple[int, int, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    """For each (parameter, matrix, plane) the ranks that orthogonalized it."""

    def add(self, axis: str, topology: Topology, sender: int, receiver: int, count: int, dtype: str) -> None:
        """Count what one rank sent to another; what it keeps is free."""
        if sender != receiver and count:
            self.elements[axis, sender, receiver] += count
            self.bytes[axis, topology.tier((sender, receiver))] += count * ITEM_BYTES[dtype]


def interpret(
    plan: MuonPlan,
    inputs: Inputs,
    compute: Compute,
    apply: Apply,
    shards: Mapping[int, Mapping[int, np.ndarray]],
    skipped: Collection[int] = (),
) -> Traffic:
    """One step on all ranks.

    Args:
        plan: what to replay.
        inputs: for each rank, by the number of what is kept, of its local shape.
        compute: how a batch is orthogonalized.
        apply: is to apply each update to the rank's shards, before it returns.
        shards: for each rank the contiguous local array of each parameter; those of replicas are overwritten.
        skipped: parameters that stay as they are.

    Raises:
        RuntimeError: the programs of two ranks don't fit, or touch what is in flight.
    """
    traffic = Traffic()
    ranks = {rank: _Rank(plan.program(rank), inputs[rank], shards[rank], skipped) for rank in plan.ranks}
    step = _Step(plan.topology, ranks, compute, apply, traffic)
    for event in events(len(plan.assignment.batches)):
        step.do(event.what, event.batch)
    return traffic


class _Buffer:
    """Flat memory of a rank that knows what is in flight."""

    def __init__(self, numel: int):
        self._array = np.full(numel, np.nan)
        self.sending = self.receiving = False

    def read(self, numel: int) -> np.ndarray:
        """The first elements."""
        if self.receiving:
            raise RuntimeError("a buffer is read before what it receives is there")
        return self._array[:numel]

    def write(self, numel: int) -> np.ndarray:
        """The first elements, to be overwritten; they hold nothing now."""
        if self.sending or self.receiving:
            raise RuntimeError("a buffer is overwritten while it is in flight")
        self._array[:numel] = np.nan
        return self._array[:numel]

    def arrive(self, numel: int) -> np.ndarray:
        """The first elements, for a collective to write to."""
        return self._array[:numel]


class _Rank:
    """One rank in a step: its program, its memory, and what it has to hand out."""

    def __init__(
        self,
        program: Program,
        inputs: Mapping[int, np.ndarray],
        shards: Mapping[int, np.ndarray],
        skipped: Collection[int],
    ):
        self.program = program
        self.batches = {batch.number: batch for batch in program.batches}
        self.inputs = inputs
        self.shards = shards
        self.skipped = skipped
        self.updates: dict[int, np.ndarray] = {}
        self.outcome: np.ndarray | None = None
        sizes: dict[str, int] = defaultdict(int)
        for (name, _), numel in program.capacities.items():
            sizes[name] = max(sizes[name], numel)
        self._buffers = {name: _Buffer(sizes[name]) for name in BUFFERS}
        self._buffers[RESULTS, 1] = _Buffer(sizes[RESULTS])

    def buffer(self, name: str, batch: RankBatch | None = None) -> _Buffer:
        """A buffer by its name; those of results take turns."""
        if name == RESULTS and batch.number % 2:
            return self._buffers[RESULTS, 1]
        return self._buffers[name]

    def part(self, part: Part) -> np.ndarray:
        """A part of a shard, over its memory."""
        return self.shards[part.index].reshape(-1)[part.start : part.start + part.numel]

    def fill(self, batch: RankBatch, target: np.ndarray) -> None:
        """What is kept, to where its pieces are read from; zeros of what is skipped."""
        for feed in batch.feeds:
            kept = self.program.kept[feed.kept]
            if kept.index in self.skipped:
                source = np.zeros(kept.numel)
            else:
                source = np.ascontiguousarray(self.inputs[feed.kept]).reshape(-1)
            move(target, source, feed.moves)

    def hand_in(self, batch: RankBatch, source: np.ndarray) -> None:
        """Slices of results, to the updates that they belong to."""
        for feed in batch.feeds:
            update = self.updates.setdefault(feed.kept, np.full(self.program.kept[feed.kept].numel, np.nan))
            move(update, source, turned(feed.moves))


class _Step:
    """All ranks, event by event."""

    def __init__(
        self,
        topology: Topology,
        ranks: Mapping[int, _Rank],
        orthogonalize: Compute,
        hand_out: Apply,
        traffic: Traffic,
    ):
        self._topology = topology
        self._ranks = ranks
        self._orthogonalize = orthogonalize
        self._hand_out = hand_out
        self._traffic = traffic
        self._published: int | None = None

    def do(self, what: str, number: int) -> None:
        """Do one event on all ranks that take part in the batch."""
        getattr(self, "_return" if what == "return" else what)(number)

    def _members(self, number: int) -> Iterator[tuple[_Rank, RankBatch]]:
        for rank in self._ranks.values():
            if number in rank.batches:
                yield rank, rank.batches[number]

    def _travelling(self, number: int) -> list[tuple[_Rank, RankBatch]]:
        return [(rank, batch) for rank, batch in self._members(number) if batch.hops]

    def _hops(self, number: int) -> int:
        return max((len(batch.hops) for _, batch in self._members(number)), default=0)

    # Pieces to owners

    def send(self, number: int) -> None:
        for hop in range(self._hops(number)):
            going_on = [each for each in self._travelling(number) if hop < len(each[1].hops)]
            if hop:
                self._exchange(going_on, hop - 1, (PIECES, ARRIVALS), back=False)
            for rank, batch in going_on:
                pieces = rank.buffer(PIECES).write(batch.hops[hop].sent)
                if hop:
                    move(pieces, rank.buffer(ARRIVALS).read(batch.hops[hop - 1].received), batch.hops[hop].repack)
                else:
                    rank.fill(batch, pieces)
                self._complete(rank, number, pieces)
                rank.buffer(PIECES).sending = rank.buffer(ARRIVALS).receiving = True

    def receive(self, number: int) -> None:
        for hop in range(self._hops(number)):
            last = [each for each in self._travelling(number) if len(each[1].hops) == hop + 1]
            self._exchange(last, hop, (PIECES, ARRIVALS), back=False)
        for rank, batch in self._members(number):
            matrices = rank.buffer(MATRICES).write(batch.numel)
            if batch.hops:
                move(matrices, rank.buffer(ARRIVALS).read(batch.hops[-1].received), batch.unpack)
            else:
                rank.fill(batch, matrices)
            self._complete(rank, number, matrices)

    def compute(self, number: int) -> None:
        for rank, batch in self._members(number):
            matrices = rank.buffer(MATRICES).read(batch.numel).reshape(len(batch.slots), *batch.shape)
            for slot in batch.slots:
                self._traffic.computed[slot.index, slot.matrix, slot.plane].append(rank.program.rank)
            made = self._orthogonalize(rank.program.rank, batch, matrices.copy()) if batch.slots else matrices
            rank.outcome = np.ascontiguousarray(made).reshape(-1)

    # Slices of results back

    def _return(self, number: int) -> None:
        for rank, batch in self._members(number):
            if not batch.hops:
                rank.hand_in(batch, rank.outcome)
        for rank, batch in self._travelling(number):
            last = batch.hops[-1]
            slices = rank.buffer(SLICES).write(last.received)
            move(slices, rank.outcome, turned(batch.unpack))
            self._complete(rank, number, slices)
            self._set_out(rank, batch)

    def land(self, number: int) -> None:
        for hop in reversed(range(self._hops(number))):
            coming = [each for each in self._travelling(number) if hop < len(each[1].hops)]
            self._exchange(coming, hop, (SLICES, RESULTS), back=True)
            for rank, batch in self._travelling(number):
                if 0 < hop < len(batch.hops):
                    held = rank.buffer(RESULTS, batch).read(batch.hops[hop].sent).copy()
                    slices = rank.buffer(SLICES).write(batch.hops[hop - 1].received)
                    move(slices, held, turned(batch.hops[hop].repack))
                    self._set_out(rank, batch)
        for rank, batch in self._travelling(number):
            rank.hand_in(batch, rank.buffer(RESULTS, batch).read(batch.hops[0].sent))

    def _set_out(self, rank: _Rank, batch: RankBatch) -> None:
        rank.buffer(SLICES).sending = rank.buffer(RESULTS, batch).receiving = True

    def _exchange(
        self, members: Sequence[tuple[_Rank, RankBatch]], hop: int, names: tuple[str, str], back: bool
    ) -> None:
        """The all-to-all of a hop, on all these ranks."""
        taking_part = {rank.program.rank: (rank, batch) for rank, batch in members}
        for rank, batch in members:
            if not rank.buffer(names[0]).sending:
                raise RuntimeError(f"rank {rank.program.rank} waits in batch {batch.number} for what has not set out")
        for receiver, (rank, batch) in taking_part.items():
            step, parts = batch.hops[hop], []
            for member, expected in zip(step.group, step.input_splits if back else step.output_splits):
                peer, theirs = taking_part[member][0], taking_part[member][1].hops[hop]
                if theirs.group != step.group:
                    raise RuntimeError(f"ranks {receiver} and {member} meet in other groups in batch {batch.number}")
                splits = theirs.output_splits if back else theirs.input_splits
                place = step.group.index(receiver)
                start = sum(splits[:place])
                part = peer.buffer(names[0]).arrive(sum(splits))[start : start + splits[place]]
                if part.size != expected:
                    raise RuntimeError(f"rank {member} sends {part.size} elements, rank {receiver} expects {expected}")
                parts.append(part.copy())
                self._traffic.add(step.axis, self._topology, member, receiver, part.size, batch.settings.wire_dtype)
            buffer = rank.buffer(names[1], batch)
            received = np.concatenate(parts)
            buffer.arrive(received.size)[...] = received
        for rank, batch in taking_part.values():
            rank.buffer(names[0]).sending = rank.buffer(names[1], batch).receiving = False

    # What is complete, to the caller and to replicas

    def apply(self, number: int) -> None:
        for rank, batch in self._members(number):
            for kept in batch.finished:
                update, part = rank.updates.pop(kept), rank.program.kept[kept]
                self._complete(rank, number, update)
                if part.index not in rank.skipped:
                    self._hand_out(rank.program.rank, kept, update.reshape(part.local_shape))

    def publish(self, number: int) -> None:
        self.settle(number)
        for rank, batch in self._members(number):
            copies, start = rank.buffer(COPIES).write(sum(sum(each.pieces) for each in batch.publications)), 0
            for each in batch.publications:
                for part in each.sent:
                    copies[start + part.place :][: part.numel] = rank.part(part)
                start += sum(each.pieces)
            if batch.publications:
                rank.buffer(COPIES).receiving = True
        self._published = number

    def settle(self, number: int) -> None:
        if self._published is None:
            return
        members = {rank.program.rank: (rank, batch) for rank, batch in self._members(self._published)}
        arrived = {
            receiver: [self._gathered(members, receiver, each) for each in batch.publications]
            for receiver, (_, batch) in members.items()
        }
        for receiver, (rank, batch) in members.items():
            for each, copies in zip(batch.publications, arrived[receiver]):
                for part in each.received:
                    if part.index not in rank.skipped:
                        rank.part(part)[...] = copies[part.place : part.place + part.numel]
            rank.buffer(COPIES).receiving = False
        self._published = None

    def _gathered(
        self, members: Mapping[int, tuple[_Rank, RankBatch]], receiver: int, publication: Publication
    ) -> np.ndarray:
        """The pieces of all replicas."""
        pieces = []
        for member, expected in zip(publication.group, publication.pieces):
            pieces.append(self._piece(*members[member], publication))
            if pieces[-1].size != expected:
                raise RuntimeError(f"rank {member} has {pieces[-1].size} elements, rank {receiver} expects {expected}")
            self._traffic.add(publication.axis, self._topology, member, receiver, expected, publication.dtype)
        return np.concatenate(pieces)

    def _piece(self, rank: _Rank, batch: RankBatch, publication: Publication) -> np.ndarray:
        """What a rank has for the others of a publication."""
        start = 0
        for each in batch.publications:
            if (each.group, each.dtype) == (publication.group, publication.dtype):
                place = each.group.index(rank.program.rank)
                start += sum(each.pieces[:place])
                piece = rank.buffer(COPIES).arrive(start + each.pieces[place])[start:]
                self._complete(rank, batch.number, piece)
                return piece.copy()
            start += sum(each.pieces)
        raise RuntimeError(f"rank {rank.program.rank} has nothing for the replicas {publication.group}")

    def _complete(self, rank: _Rank, number: int, elements: np.ndarray) -> None:
        if np.isnan(elements).any():
            raise RuntimeError(f"rank {rank.program.rank}: batch {number} leaves elements out")


def move(target: np.ndarray, source: np.ndarray, moves: Sequence[Move]) -> None:
    """Copy boxes of elements between flat arrays.

    Raises:
        LayoutError: a box leaves an array.
    """
    for each in moves:
        check_move(each, target.size, source.size)
        into = as_strided(target[each.target_start :], each.sizes, [s * target.itemsize for s in each.target_strides])
        into[...] = as_strided(
            source[each.source_start :], each.sizes, [s * source.itemsize for s in each.source_strides]
        )
