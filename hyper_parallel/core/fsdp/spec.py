"""Sizes of one fully sharded parameter: what a rank keeps, what it sends, and where the pieces of the others go."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from hyper_parallel.core.backend import Move
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement import Shard


@dataclass(frozen=True)
class ShardSpec:
    """One parameter's split over the shard axis, as rank `rank` sees it.

    Pieces travel flat, one after the other. Where a collective takes pieces of different sizes (`exact`), each is as
    long as it is; else all have `piece_numel` elements, as the largest of any rank has, and smaller ones have their
    padding at the tail. So, for a leading-dim shard, all pieces together begin with the full parameter.
    """

    name: str
    layout: Layout
    rank: int
    dtype: str

    @cached_property
    def dim(self) -> int | None:
        """The sharded tensor dim; None when the parameter is whole on every rank (a 0-d tensor)."""
        placement = self.layout.placement("shard")
        return placement.dim if isinstance(placement, Shard) else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The full shape."""
        return self.layout.shape

    @property
    def numel(self) -> int:
        """Number of elements of the full parameter."""
        return prod(self.shape)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what this rank keeps."""
        return self.layout.local_shape(self.rank)

    @cached_property
    def piece_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of what each member of this rank's shard group keeps, in group order."""
        return tuple(self.layout.local_shape(rank) for rank in self.layout.mesh.group_of(self.rank, ("shard",)))

    @property
    def pieces(self) -> int:
        """Number of members of the shard group."""
        return len(self.piece_shapes)

    @cached_property
    def piece_numels(self) -> tuple[int, ...]:
        """Elements of what each member keeps."""
        return tuple(map(prod, self.piece_shapes))

    @cached_property
    def local_numel(self) -> int:
        """Elements of what this rank keeps."""
        return prod(self.local_shape)

    @cached_property
    def piece_numel(self) -> int:
        """Elements of every piece in transit, padding included, where all are alike."""
        return max(self.piece_numels)

    @cached_property
    def is_even(self) -> bool:
        """All pieces have as many elements."""
        return len(set(self.piece_numels)) == 1

    def own_numel(self, exact: bool) -> int:
        """Elements of this rank's piece in transit."""
        return self.local_numel if exact else self.piece_numel

    def sent_numel(self, exact: bool) -> int:
        """Elements of all pieces in transit."""
        return self.numel if exact else self.pieces * self.piece_numel

    def received_numel(self, exact: bool) -> int:
        """Elements that a gather brings this rank from the others."""
        return self.sent_numel(exact) - self.own_numel(exact)

    def sent_pieces(self, exact: bool) -> tuple[int, ...] | None:
        """Elements of each piece in transit, for a collective that has to be told; None where all are alike."""
        return self.piece_numels if exact and not self.is_even else None

    def put_together(self, exact: bool) -> list[Move]:
        """The moves from pieces in transit into the full parameter."""
        outer, inner = prod(self.shape[: self.dim]), prod(self.shape[self.dim + 1 :])
        row = self.shape[self.dim] * inner
        moves, target, source = [], 0, 0
        for shape, numel in zip(self.piece_shapes, self.piece_numels):
            part = shape[self.dim] * inner
            moves.append(Move((outer, part), target, (row, 1), source, (part, 1)))
            target, source = target + part, source + (numel if exact else self.piece_numel)
        return moves

    def take_apart(self, exact: bool) -> list[Move]:
        """The moves from the full parameter, or its gradient, into pieces in transit."""
        return [
            Move(move.sizes, move.source_start, move.source_strides, move.target_start, move.target_strides)
            for move in self.put_together(exact)
        ]

    @property
    def is_whole(self) -> bool:
        """The local tensor is the full parameter: nothing to gather."""
        return self.dim is None or self.pieces == 1
