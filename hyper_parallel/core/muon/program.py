"""What one rank does in a step of Muon: kept parts, batches, sizes and moves, with nothing left to decide.

Parameters count as `MuonPlan.parameters` has them: sorted by name. An engine drives a program through
`core.muon.replay.Replay`:

    plan = make_plan(parameters, topology, policy)         # core.muon.plan; equal on all ranks
    replay = Replay(backend, plan)                         # called by all ranks of the plan: it makes process groups
    for number, update in replay.updates(inputs, compute, shards, skipped):
        ...                                                # apply `update` to the part of the shard that is `number`

`inputs[number]` is what is to be orthogonalized of `replay.program.kept[number]`, of its `local_shape` and of any
floating dtype; it is asked for once, when the first batch with a matrix of it sets out. `compute(batch, X)`
gets a `RankBatch` and its matrices [k, m, n] in `batch.settings.wire_dtype`, and returns the results, of the same
shape and dtype; a factor of a logical matrix is its caller's, who sees the matrices whole there. `update` is of
the part's `local_shape` and in that dtype, and good until the next one is asked for. `shards[index]` is the local
tensor of parameter `index`, contiguous; what has been yielded is applied to it when the iteration goes on, and is
then sent to replicas, whose shards are overwritten in place. `skipped`, the same on all ranks, are parameters that stay
as they are: they have no inputs and no updates. All is done when the iteration ends; a rank that stops before leaves
the others waiting.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from hyper_parallel.core.backend import Move

if TYPE_CHECKING:
    from hyper_parallel.core.muon.newton_schulz import NewtonSchulz


class Kept(NamedTuple):
    """A part of a parameter's local shard that this rank answers for: here and on no replica near by momentum exists
    and updates are made. What a rank holds nothing of it does not keep.

    The part is the elements `[start, start + numel)` of the flattened local shard: all of it, or, for packed experts
    that replicas share, the planes `planes` of those that the rank holds, counted as they lie there.
    """

    index: int
    """The parameter."""
    planes: range
    start: int
    local_shape: tuple[int, ...]
    """Shape of the part: the shard's own if it is all of it, else the planes as one dim before the others."""

    @property
    def numel(self) -> int:
        """Elements of the part."""
        return prod(self.local_shape)


class Slot(NamedTuple):
    """One matrix of a batch: matrix `matrix` of the view of parameter `index`, in plane `plane` of the whole parameter.

    Batches hold matrices with the shorter side first. `flipped` says that the rows of the logical matrix, [out, in],
    are the columns there.
    """

    index: int
    matrix: int
    plane: int
    flipped: bool


class Feed(NamedTuple):
    """Moves from what is kept under a number to a flat buffer; the way back is the same, turned round. `whole` tells
    where in the buffer all of it lies as it is, if it does."""

    kept: int
    moves: tuple[Move, ...]
    whole: int | None = None


class Hop(NamedTuple):
    """One all-to-all over the ascending ranks `group`, along `axis`: what is sent lies in the order of the group.

    `repack` are the moves from what the hop before has received to what is sent, if there is one before. Slices of the
    result go the same way back: what was received is sent, and what was sent is received.
    """

    axis: str
    group: tuple[int, ...]
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]
    repack: tuple[Move, ...] = ()

    @property
    def sent(self) -> int:
        """Elements that the rank sends, its own included."""
        return sum(self.input_splits)

    @property
    def received(self) -> int:
        """Elements that the rank receives, its own included."""
        return sum(self.output_splits)


class Part(NamedTuple):
    """A part of a shard as replicas exchange it: `numel` elements of the flattened local shard of parameter `index`
    from `start` on, at `place` of a flat buffer."""

    index: int
    start: int
    numel: int
    place: int


class Publication(NamedTuple):
    """An exchange of updated shards along `axis` between the replicas `group`, ascending: each has a piece for all
    others, of so many elements.

    All pieces, in order, make up a flat buffer, in which the parts `sent`, of this rank, and `received` lie.
    """

    axis: str
    group: tuple[int, ...]
    dtype: str
    pieces: tuple[int, ...]
    sent: tuple[Part, ...]
    received: tuple[Part, ...]


@dataclass(frozen=True)
class RankBatch:
    """One batch on one rank: matrices of one core shape [m, n], m <= n, that are orthogonalized alike.

    1. `feeds`: from what is kept to what the first hop sends, or, where nothing travels (`hops` is empty), to the
       batch's own matrices; 2. `hops`; 3. `unpack`: from what the last hop received to the matrices, [k, m, n];
    4. the matrices in `slots` are orthogonalized, of which the first `upright` ones are not flipped; 5. all the way
       back. `finished` are the numbers of what is kept and complete then; `publications` follow once it is applied.
    """

    number: int
    """Its place in the order of all batches that these ranks share."""
    shape: tuple[int, int]
    settings: NewtonSchulz
    slots: tuple[Slot, ...]
    upright: int
    feeds: tuple[Feed, ...]
    hops: tuple[Hop, ...]
    unpack: tuple[Move, ...]
    finished: tuple[int, ...]
    publications: tuple[Publication, ...]

    @property
    def numel(self) -> int:
        """Elements of the matrices that this rank orthogonalizes."""
        return len(self.slots) * prod(self.shape)


PIECES, ARRIVALS, MATRICES, SLICES, RESULTS = "pieces", "arrivals", "matrices", "slices", "results"
COPIES = "copies"
BUFFERS = (PIECES, ARRIVALS, MATRICES, SLICES, RESULTS, COPIES)
"""The buffers of a rank: sent to owners, received by owners, put together; sent back, received back (two of these take
turns); updated shards, of replicas and for them."""


@dataclass(frozen=True)
class Program:
    """What one rank does in each step. `count` is the number of batches in the order that it shares with others; it
    takes part in `batches`."""

    rank: int
    kept: tuple[Kept, ...]
    batches: tuple[RankBatch, ...]
    count: int

    @cached_property
    def capacities(self) -> dict[tuple[str, str], int]:
        """Elements of each buffer that a step needs, by name and dtype: enough for every batch."""
        most: dict[tuple[str, str], int] = {}

        def fit(name: str, dtype: str, numel: int) -> None:
            most[name, dtype] = max(most.get((name, dtype), 0), numel)

        for batch in self.batches:
            dtype = batch.settings.wire_dtype
            fit(MATRICES, dtype, batch.numel)
            for hop in batch.hops:
                fit(PIECES, dtype, hop.sent)
                fit(ARRIVALS, dtype, hop.received)
                fit(SLICES, dtype, hop.received)
                fit(RESULTS, dtype, hop.sent)
            for dtype in {each.dtype for each in batch.publications}:
                alike = [each for each in batch.publications if each.dtype == dtype]
                fit(COPIES, dtype, sum(sum(each.pieces) for each in alike))
        return most
