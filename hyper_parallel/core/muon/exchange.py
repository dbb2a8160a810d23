"""From what is decided for all to what one rank does: buffers, splits and moves."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Iterator, NamedTuple, Sequence

from hyper_parallel.core.backend import Move
from hyper_parallel.core.muon.batches import Assignment, Batch, Block
from hyper_parallel.core.muon.domains import Cell
from hyper_parallel.core.muon.kinds import Kind, Seat
from hyper_parallel.core.muon.owners import Unit
from hyper_parallel.core.muon.parameters import MuonParameter
from hyper_parallel.core.muon.program import Feed, Hop, Kept, Part, Program, Publication, RankBatch, Slot
from hyper_parallel.core.muon.relay import Relay, relay_of
from hyper_parallel.core.muon.spans import Span, joined, spans_of
from hyper_parallel.core.topology import Topology


def program_of(
    rank: int,
    assignment: Assignment,
    kinds: Sequence[Kind],
    kind_of: Sequence[int],
    parameters: Sequence[MuonParameter],
    topology: Topology,
) -> Program:
    """What a rank does."""
    compiler = _Compiler(rank, assignment, kinds, kind_of, parameters, topology)
    return Program(rank, tuple(compiler.kept), tuple(compiler.batches()), len(assignment.batches))


class _Parcel(NamedTuple):
    """The piece of a block that rank `origin` of the group holds, on its way to the block's owner."""

    block: int
    origin: int


class _Compiler:
    """What is known while one rank's program is made. Units and batches count as the assignment has them."""

    def __init__(
        self,
        rank: int,
        assignment: Assignment,
        kinds: Sequence[Kind],
        kind_of: Sequence[int],
        parameters: Sequence[MuonParameter],
        topology: Topology,
    ):
        self._rank = rank
        self._assignment = assignment
        self._parameters = parameters
        self._topology = topology
        self._kind_seats = [kind.seats.get(rank) for kind in kinds]
        self._kinds = [kinds[kind] for kind in kind_of]
        self._seats = [self._kind_seats[kind] for kind in kind_of]
        self.kept: list[Kept] = []
        self._number: dict[int, int] = {}  # unit -> its number among what is kept
        for unit, each in enumerate(assignment.units):
            if self._is_here(each) and self._seat(each).copy == each.copy and self._held(each):
                self._number[unit] = len(self.kept)
                self.kept.append(self._part(each))

    def batches(self) -> Iterator[RankBatch]:
        """Those that this rank takes part in."""
        last = self._last_batches()
        published = self._publications(last)
        finished: dict[int, list[int]] = {}
        for unit, number in last.items():
            if unit in self._number:
                finished.setdefault(number, []).append(self._number[unit])
        for number, batch in enumerate(self._assignment.batches):
            seat = self._kind_seats[batch.kind]
            blocks, publications = batch.of(seat), published.get(number, ())
            if blocks or publications:
                yield self._batch(number, batch, seat, blocks, tuple(finished.get(number, ())), publications)

    # What is kept

    def _is_here(self, unit: Unit) -> bool:
        seat = self._seats[unit.index]
        return seat is not None and seat.cluster.cell == unit.cell

    def _seat(self, unit: Unit) -> Seat:
        return self._seats[unit.index]

    def _cell(self, unit: Unit) -> Cell:
        return self._kinds[unit.index].cells[unit.cell]

    def _held(self, unit: Unit) -> int:
        """How many elements of a unit lie at this rank's place."""
        return int(self._cell(unit).counts[self._seat(unit).place, unit.first : unit.last].sum())

    def _part(self, unit: Unit) -> Kept:
        """A unit as a part of this rank's local shard, or of that of a rank at the same place of another copy."""
        kind, cell = self._kinds[unit.index], self._cell(unit)
        shape, planes = kind.layout.local_shape(self._rank), len(cell.planes)
        if (unit.first, unit.last) == (0, planes):
            return Kept(unit.index, range(planes), 0, shape)
        own = shape[len(shape) - len(kind.view.shape) + kind.view.lead :]
        return Kept(unit.index, range(unit.first, unit.last), unit.first * prod(own), (unit.last - unit.first, *own))

    # When it is complete, and who hears of it

    def _last_batches(self) -> dict[int, int]:
        """For each unit at this rank's seats, in whichever copy, the number of the last batch with a piece that lies at
        this rank's place."""
        last: dict[int, int] = {}
        for number, batch in enumerate(self._assignment.batches):
            for blocks in batch.blocks.values():
                for block in blocks:
                    unit = self._assignment.units[block.unit]
                    if self._is_here(unit) and self._holds(unit, block):
                        last[block.unit] = number
        return last

    def _holds(self, unit: Unit, block: Block) -> bool:
        return bool(self._cell(unit).held(block.matrix, block.first, block.last)[self._seat(unit).place])

    def _publications(self, last: dict[int, int]) -> dict[int, tuple[Publication, ...]]:
        """By the number of the batch that they follow: what replicas send each other."""
        found: dict[tuple, list[int]] = {}
        for unit, number in last.items():
            each = self._assignment.units[unit]
            copies = self._seat(each).cluster.copies
            if len(copies) > 1:
                place = self._seat(each).place
                group = tuple(sorted(ranks[place] for ranks in copies))
                axis = " x ".join(self._kinds[each.index].domain.replicas)
                found.setdefault((number, group, self._parameters[each.index].dtype, axis), []).append(unit)
        made: dict[int, list[Publication]] = {}
        for (number, group, dtype, axis), units in sorted(found.items()):
            made.setdefault(number, []).append(self._publication(axis, group, dtype, sorted(units)))
        return {number: tuple(each) for number, each in made.items()}

    def _publication(self, axis: str, group: tuple[int, ...], dtype: str, units: Sequence[int]) -> Publication:
        by_sender: dict[int, list[Kept]] = {rank: [] for rank in group}
        for each in (self._assignment.units[unit] for unit in units):
            seat = self._seat(each)
            by_sender[seat.cluster.copies[each.copy][seat.place]].append(self._part(each))
        pieces = tuple(sum(part.numel for part in parts) for parts in by_sender.values())
        sent: tuple[Part, ...] = ()
        received: list[Part] = []
        for (sender, parts), start in zip(by_sender.items(), accumulate(pieces, initial=0)):
            if sender == self._rank:
                sent = tuple(_placed(parts, start))
            else:
                received += _placed(parts, start)
        return Publication(axis, group, dtype, pieces, sent, tuple(received))

    # One batch

    def _batch(
        self,
        number: int,
        batch: Batch,
        seat: Seat | None,
        blocks: tuple[Block, ...],
        finished: tuple[int, ...],
        publications: tuple[Publication, ...],
    ) -> RankBatch:
        shape, settings = batch.alike.shape, batch.alike.settings
        slots, starts = self._slots(blocks, seat.place if blocks else 0)
        upright = sum(not slot.flipped for slot in slots)
        if batch.alike.is_cut and blocks:
            feeds, hops, unpack = self._exchange(batch, seat, blocks, starts)
        else:
            feeds, hops, unpack = self._at_home(blocks, starts), (), ()
        return RankBatch(number, shape, settings, slots, upright, feeds, hops, unpack, finished, publications)

    def _slots(self, blocks: Sequence[Block], place: int) -> tuple[tuple[Slot, ...], dict[int, int]]:
        """The matrices that this rank computes, those that are not flipped first, and for each of its blocks the
        element where it begins."""
        own = [number for number, block in enumerate(blocks) if block.owner == place]
        own.sort(key=lambda number: self._is_flipped(blocks[number]))
        slots: list[Slot] = []
        starts = {}
        for number in own:
            block = blocks[number]
            unit = self._assignment.units[block.unit]
            matrix = self._kinds[unit.index].view.matrices[block.matrix]
            starts[number] = len(slots) * prod(matrix.core_shape)
            for plane in self._cell(unit).planes[block.first : block.last]:
                slots.append(Slot(unit.index, block.matrix, plane, self._is_flipped(block)))
        return tuple(slots), starts

    def _is_flipped(self, block: Block) -> bool:
        """Tell whether the rows of the logical matrix are columns in the batch."""
        matrix = self._kinds[self._assignment.units[block.unit].index].view.matrices[block.matrix]
        rows, columns = matrix.stored_shape
        return (rows > columns) != matrix.transposed

    def _spans(self, block: Block, rank: int) -> tuple[Span, ...]:
        unit = self._assignment.units[block.unit]
        return spans_of(self._kinds[unit.index], unit.cell, rank, block.matrix, block.first, block.last)

    def _at_home(self, blocks: Sequence[Block], starts: dict[int, int]) -> tuple[Feed, ...]:
        """Of complete matrices nothing travels: from what is kept to the batch."""
        moves: dict[int, list[Move]] = {}
        for number, block in enumerate(blocks):
            kept = self._number[block.unit]
            for span in self._spans(block, self._rank):
                moves.setdefault(kept, []).append(span.straight(starts[number], self.kept[kept].start))
        return tuple(self._feed(kept, each) for kept, each in moves.items())

    def _exchange(
        self, batch: Batch, seat: Seat, blocks: Sequence[Block], starts: dict[int, int]
    ) -> tuple[tuple[Feed, ...], tuple[Hop, ...], tuple[Move, ...]]:
        """All hops of a batch: what is sent lies by receivers, what is received by senders, in the order of blocks."""
        sizes = tuple(batch.alike.mesh.axis_size(axis) for axis in batch.alike.axes)
        relay = relay_of(seat.cluster.copies[seat.copy], batch.alike.axes, sizes, self._topology)
        place = seat.place
        hops: list[Hop] = []
        feeds: tuple[Feed, ...] = ()
        arrived: dict[_Parcel, int] = {}
        for hop, axis in enumerate(relay.axes):
            line = relay.line(place, hop)
            sent, input_splits = self._laid(blocks, relay, place, hop, line, hop + 1)
            repack: list[Move] = []
            if hop:
                for parcel, at in sent.items():
                    numel = self._numel(blocks, parcel)
                    repack.append(Move((numel,), at, (1,), arrived[parcel], (1,)))
            else:
                feeds = self._feeds(blocks, sent)
            arrived, output_splits = self._laid(blocks, relay, place, hop + 1, line, hop)
            hops.append(Hop(axis, line, input_splits, output_splits, joined(repack)))
        unpack = [
            move
            for parcel, at in arrived.items()
            for move in self._unpacked(blocks[parcel.block], relay.ranks[parcel.origin], starts[parcel.block], at)
        ]
        return feeds, tuple(hops), joined(unpack)

    def _laid(
        self, blocks: Sequence[Block], relay: Relay, place: int, hop: int, line: tuple[int, ...], other: int
    ) -> tuple[dict[_Parcel, int], tuple[int, ...]]:
        """Where each parcel that is at this rank before a hop lies in a buffer, and the elements of each rank of the
        line: that at which the parcel is before the hop `other`."""
        by_peer: dict[int, list[_Parcel]] = {rank: [] for rank in line}
        for number, block in enumerate(blocks):
            unit = self._assignment.units[block.unit]
            counts = self._cell(unit).held(block.matrix, block.first, block.last)
            for origin in relay.origins(hop, block.owner, place):
                if counts[origin]:
                    peer = relay.ranks[relay.at(origin, block.owner, other)]
                    by_peer[peer].append(_Parcel(number, origin))
        places: dict[_Parcel, int] = {}
        splits, at = [], 0
        for parcels in by_peer.values():
            start = at
            for parcel in parcels:
                places[parcel] = at
                at += self._numel(blocks, parcel)
            splits.append(at - start)
        return places, tuple(splits)

    def _numel(self, blocks: Sequence[Block], parcel: _Parcel) -> int:
        block = blocks[parcel.block]
        unit = self._assignment.units[block.unit]
        return self._cell(unit).held(block.matrix, block.first, block.last)[parcel.origin]

    def _feeds(self, blocks: Sequence[Block], sent: dict[_Parcel, int]) -> tuple[Feed, ...]:
        moves: dict[int, list[Move]] = {}
        for parcel, at in sent.items():
            block = blocks[parcel.block]
            kept = self._number[block.unit]
            for span in self._spans(block, self._rank):
                moves.setdefault(kept, []).append(span.to_buffer(at, self.kept[kept].start))
                at += span.numel
        return tuple(self._feed(kept, each) for kept, each in moves.items())

    def _feed(self, kept: int, moves: Sequence[Move]) -> Feed:
        moves, numel = joined(moves), self.kept[kept].numel
        is_whole = len(moves) == 1 and moves[0] == Move((numel,), moves[0].target_start, (1,), 0, (1,))
        return Feed(kept, moves, moves[0].target_start if is_whole else None)

    def _unpacked(self, block: Block, rank: int, slot: int, at: int) -> Iterator[Move]:
        for span in self._spans(block, rank):
            yield span.to_slot(slot, at)
            at += span.numel


def _placed(parts: Sequence[Kept], at: int) -> list[Part]:
    placed = []
    for part in parts:
        placed.append(Part(part.index, part.start, part.numel, at))
        at += part.numel
    return placed
