"""A step of Muon on real ranks: a rank's program, replayed on local tensors."""

from __future__ import annotations

from collections import Counter
from typing import Callable, Collection, Iterator, Mapping

from hyper_parallel.core.backend import Backend, Group, Tensor, Work
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.muon.plan import MuonPlan
from hyper_parallel.core.muon.program import (
    ARRIVALS,
    COPIES,
    MATRICES,
    PIECES,
    RESULTS,
    SLICES,
    Feed,
    Part,
    Program,
    Publication,
    RankBatch,
)
from hyper_parallel.core.muon.schedule import events
from hyper_parallel.core.muon.spans import turned

Compute = Callable[[RankBatch, Tensor], Tensor]
"""`compute(batch, matrices)`: the results, of the shape [k, m, n] and dtype of the matrices, which it may change."""


class Replay:
    """The program of this rank, ready to run: process groups are made here, by all ranks of the plan together, and
    buffers at the first step; both are used again in every step."""

    def __init__(self, backend: Backend, plan: MuonPlan):
        self.plan = plan
        self.program: Program = plan.program(backend.collectives.rank())
        self.backend = backend
        self._batches = {batch.number: batch for batch in self.program.batches}
        self._groups: dict[tuple[int, ...], Group] = {}
        for batch in self.program.batches:  # in the same order on all ranks
            for each in (*batch.hops, *batch.publications):
                if each.group not in self._groups:
                    self._groups[each.group] = backend.collectives.groups([each.group])
        self.buffers: dict[tuple[str, str, int], Tensor] = {}
        """By name, dtype and turn; there from the first step on."""
        self.uses = Counter(feed.kept for batch in self.program.batches for feed in batch.feeds)
        """In how many batches there are matrices of what is kept."""

    def updates(
        self,
        inputs: Mapping[int, Tensor],
        compute: Compute,
        shards: Mapping[int, Tensor],
        skipped: Collection[int] = (),
    ) -> Iterator[tuple[int, Tensor]]:
        """One step: `(number, update)` of everything that this rank keeps, when it is complete. Called by all ranks of
        the plan, and gone through to its end.

        Args:
            inputs: by the number of what is kept, of its `local_shape` and of any floating dtype: what is to be
                orthogonalized. Each is asked for once, when the first batch with a matrix of it sets out, so that a
                mapping can make them one after the other.
            compute: orthogonalizes a batch. Factors of logical matrices are its caller's: here they are whole.
            shards: by parameter, its contiguous local tensor. An update is applied to it before the next one is asked
                for; replicas are then sent the result, and overwrite their shards.
            skipped: parameters that stay as they are, the same on all ranks. They have no inputs and no updates.

        Yields:
            The number of what is kept, and its update, of its `local_shape` and in the dtype of the orthogonalization,
            good until the next one is asked for.

        Raises:
            ConfigError: `compute` returns another shape or dtype.
        """
        step = _Step(self, inputs, compute, shards, frozenset(skipped))
        for what, number in events(self.program.count):
            batch = self._batches.get(number)
            if what == "settle":
                step.settle()
            elif batch is not None and what == "apply":
                yield from step.finished(batch)
            elif batch is not None:
                with self.backend.autograd.no_grad():
                    step.do[what](batch)

    def group(self, ranks: tuple[int, ...]) -> Group:
        """The process group of a hop or a publication."""
        return self._groups[ranks]

    def buffer(self, name: str, dtype: str, numel: int, turn: int = 0) -> Tensor:
        """The first elements of a buffer that is there for all batches."""
        key = (name, dtype, turn)
        tensors = self.backend.tensors
        if key not in self.buffers:
            self.buffers[key] = tensors.empty((self.program.capacities[name, dtype],), dtype)
        return tensors.alias(self.buffers[key], 0, (numel,))


class _Step:
    """What is on its way in one step."""

    def __init__(
        self,
        replay: Replay,
        inputs: Mapping[int, Tensor],
        compute: Compute,
        shards: Mapping[int, Tensor],
        skipped: frozenset[int],
    ):
        self._replay = replay
        self._kept = replay.program.kept
        self._tensors = replay.backend.tensors
        self._collectives = replay.backend.collectives
        self._no_grad = replay.backend.autograd.no_grad
        self._inputs = inputs
        self._orthogonalize = compute
        self._shards = shards
        self._skipped = skipped
        self._matrices: Tensor = None
        self._outcome: Tensor = None
        self._coming: Work | None = None
        self._returning: Work | None = None
        self._published: tuple[RankBatch, list[Work]] | None = None
        self._updates: dict[int, Tensor] = {}
        self._needed = dict(replay.uses)
        self._held: dict[int, Tensor] = {}
        self.do = {
            "send": self._send,
            "receive": self._receive,
            "compute": self._compute,
            "land": self._land,
            "return": self._return,
            "publish": self._publish,
        }

    # Pieces to owners

    def _send(self, batch: RankBatch) -> None:
        """All hops but the last, which is the slowest, are waited for; that one goes on while another batch is
        computed."""
        for number, hop in enumerate(batch.hops):
            pieces = self._buffer(PIECES, batch, hop.sent)
            if number:
                arrived = self._buffer(ARRIVALS, batch, batch.hops[number - 1].received)
                self._tensors.move_(pieces, arrived, hop.repack)
            else:
                self._fill(batch, pieces)
            self._coming = self._collectives.all_to_all(
                self._buffer(ARRIVALS, batch, hop.received),
                pieces,
                self._replay.group(hop.group),
                hop.output_splits,
                hop.input_splits,
                async_op=number == len(batch.hops) - 1,
            )

    def _receive(self, batch: RankBatch) -> None:
        if batch.hops:
            self._coming.wait()
            self._matrices = self._buffer(MATRICES, batch, batch.numel)
            self._tensors.move_(self._matrices, self._buffer(ARRIVALS, batch, batch.hops[-1].received), batch.unpack)
            return
        self._matrices = self._as_it_is(batch)
        if self._matrices is None:
            self._matrices = self._buffer(MATRICES, batch, batch.numel)
            self._fill(batch, self._matrices)

    def _as_it_is(self, batch: RankBatch) -> Tensor | None:
        """The one input of a batch, where it is all of its matrices already, in their dtype."""
        if len(batch.feeds) != 1 or batch.feeds[0].whole != 0:
            return None
        kept = self._kept[batch.feeds[0].kept]
        if kept.numel != batch.numel or kept.index in self._skipped:
            return None
        return self._cast(self._input(batch.feeds[0].kept), batch.settings.wire_dtype)

    def _input(self, number: int) -> Tensor:
        """What is to be orthogonalized of what is kept, which is held until the last batch with a part of it."""
        given = self._held.pop(number) if number in self._held else self._inputs[number]
        self._needed[number] -= 1
        if self._needed[number]:
            self._held[number] = given
        return given

    def _fill(self, batch: RankBatch, target: Tensor) -> None:
        """What is kept, cast, to where its pieces are read from; zeros of what is skipped."""
        for feed in batch.feeds:
            kept = self._kept[feed.kept]
            if kept.index in self._skipped:
                source = self._tensors.zeros((kept.numel,), batch.settings.wire_dtype)
            else:
                source = self._input(feed.kept)
            if feed.whole is not None:
                self._tensors.copy_(self._tensors.alias(target, feed.whole, (kept.numel,)), source)
            else:
                self._tensors.move_(target, self._cast(source, batch.settings.wire_dtype), feed.moves)

    def _cast(self, tensor: Tensor, dtype: str) -> Tensor:
        if self._tensors.dtype_name(tensor) == dtype:
            return self._tensors.flat(tensor)
        made = self._tensors.empty(tuple(tensor.shape), dtype)
        self._tensors.copy_(made, tensor)
        return self._tensors.flat(made)

    # Results back

    def _compute(self, batch: RankBatch) -> None:
        self._outcome, self._matrices = self._matrices, None
        if all(slot.index in self._skipped for slot in batch.slots):
            return
        shape = (len(batch.slots), *batch.shape)
        made = self._orthogonalize(batch, self._tensors.alias(self._outcome, 0, shape))
        found = (tuple(made.shape), self._tensors.dtype_name(made))
        if found != (shape, batch.settings.wire_dtype):
            raise ConfigError(
                f"batch {batch.number} of Muon: orthogonalizing {len(batch.slots)} matrices of {list(batch.shape)} in "
                f"{batch.settings.wire_dtype} gave a tensor of shape {list(found[0])} in {found[1]}; return one like "
                "the argument"
            )
        self._outcome = self._tensors.flat(made)

    def _return(self, batch: RankBatch) -> None:
        outcome, self._outcome = self._outcome, None
        if not batch.hops:
            self._hand_in(batch, outcome)
            return
        slices = self._buffer(SLICES, batch, batch.hops[-1].received)
        self._tensors.move_(slices, outcome, turned(batch.unpack))
        self._send_back(batch, len(batch.hops) - 1, slices, async_op=True)

    def _land(self, batch: RankBatch) -> None:
        if not batch.hops:
            return
        for hop in reversed(range(len(batch.hops))):
            self._returning.wait()
            results = self._buffer(RESULTS, batch, batch.hops[hop].sent)
            if hop:
                slices = self._buffer(SLICES, batch, batch.hops[hop - 1].received)
                self._tensors.move_(slices, results, turned(batch.hops[hop].repack))
                self._send_back(batch, hop - 1, slices, async_op=False)
        self._hand_in(batch, results)

    def _send_back(self, batch: RankBatch, hop: int, slices: Tensor, async_op: bool) -> None:
        step = batch.hops[hop]
        self._returning = self._collectives.all_to_all(
            self._buffer(RESULTS, batch, step.sent),
            slices,
            self._replay.group(step.group),
            step.input_splits,
            step.output_splits,
            async_op=async_op,
        )

    def _hand_in(self, batch: RankBatch, source: Tensor) -> None:
        """Slices of results, to the updates that they belong to; where one lies as it is, it is read there."""
        for feed in batch.feeds:
            self._updates[feed.kept] = self._update(feed, batch, source)

    def _update(self, feed: Feed, batch: RankBatch, source: Tensor) -> Tensor:
        kept = self._kept[feed.kept]
        if feed.whole is not None:
            return self._tensors.alias(source, feed.whole, kept.local_shape)
        update = self._updates.get(feed.kept)
        if update is None:
            update = self._tensors.empty(kept.local_shape, batch.settings.wire_dtype)
        self._tensors.move_(self._tensors.flat(update), source, turned(feed.moves))
        return update

    # To the caller, and to replicas

    def finished(self, batch: RankBatch) -> Iterator[tuple[int, Tensor]]:
        """What is complete with a batch."""
        for number in batch.finished:
            update = self._updates.pop(number)
            if self._kept[number].index not in self._skipped:
                yield number, update

    def _publish(self, batch: RankBatch) -> None:
        self.settle()
        works, at = [], 0
        for each in batch.publications:
            copies = self._copies(each, at)
            for part in each.sent:
                self._tensors.copy_(self._tensors.alias(copies, part.place, (part.numel,)), self._shard(part))
            group, start = self._replay.group(each.group), 0
            for member, count in zip(each.group, each.pieces):
                piece = self._tensors.alias(copies, start, (count,))
                works.append(self._collectives.broadcast(piece, member, group, async_op=True))
                start += count
            at += start
        self._published = (batch, works)

    def settle(self) -> None:
        """Wait for what replicas have sent, if anything is coming, and overwrite the shards with it."""
        if self._published is None:
            return
        (batch, works), self._published = self._published, None
        for work in works:
            work.wait()
        at = 0
        with self._no_grad():
            for each in batch.publications:
                copies = self._copies(each, at)
                for part in each.received:
                    if part.index not in self._skipped:
                        self._tensors.copy_(self._shard(part), self._tensors.alias(copies, part.place, (part.numel,)))
                at += sum(each.pieces)

    def _copies(self, publication: Publication, at: int) -> Tensor:
        """The part of the buffer that a publication uses."""
        numel = sum(publication.pieces)
        whole = self._replay.buffer(COPIES, publication.dtype, at + numel)
        return self._tensors.alias(whole, at, (numel,))

    def _shard(self, part: Part) -> Tensor:
        """The elements of a part of a local shard, over the shard's memory."""
        return self._tensors.alias(self._tensors.flat(self._shards[part.index]), part.start, (part.numel,))

    def _buffer(self, name: str, batch: RankBatch, numel: int) -> Tensor:
        return self._replay.buffer(name, batch.settings.wire_dtype, numel, batch.number % 2 if name == RESULTS else 0)
