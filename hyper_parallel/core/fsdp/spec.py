"""Sizes of one fully sharded parameter: what a rank keeps, what it sends, and where the pieces of the others go."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement import Shard


@dataclass(frozen=True)
class ShardSpec:
    """One parameter's split over the shard axis, as rank `rank` sees it.

    All pieces travel as flat pieces of equal length `piece_numel`: the largest piece of any rank. A smaller one has its
    padding at the tail, so for a leading-dim shard the full parameter is a prefix of the gathered buffer.
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
    def piece_numel(self) -> int:
        """Elements of every piece in transit, padding included."""
        return max(prod(shape) for shape in self.piece_shapes)

    @property
    def gathered_numel(self) -> int:
        """Elements of all pieces, padding included."""
        return self.pieces * self.piece_numel

    @property
    def is_whole(self) -> bool:
        """The local tensor is the full parameter: nothing to gather."""
        return self.dim is None or self.pieces == 1
