"""Ranks that are linked by work they share. What is decided for them depends on nobody else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Sequence

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.muon.domains import Domain
from hyper_parallel.core.muon.matrices import MatrixView
from hyper_parallel.core.muon.subgroups import Cluster
from hyper_parallel.core.topology import Topology


@dataclass(frozen=True, eq=False)
class Kind:
    """What parameters of one layout and one view have in common."""

    layout: Layout
    view: MatrixView
    domain: Domain
    clusters: tuple[Cluster, ...]


class Seat(NamedTuple):
    """Where a rank is in the clusters of a kind: which of its component, which copy, which place."""

    cluster: int
    copy: int
    place: int


@dataclass(frozen=True, eq=False)
class Component:
    """Ranks, ascending, and for each kind of parameters their clusters, all of whose ranks are among them."""

    ranks: tuple[int, ...]
    kinds: tuple[Kind, ...]
    clusters: tuple[tuple[Cluster, ...], ...]
    topology: Topology

    @cached_property
    def position(self) -> dict[int, int]:
        """The place of each global rank in `ranks`."""
        return {rank: position for position, rank in enumerate(self.ranks)}

    @cached_property
    def signature(self) -> tuple:
        """Equal for two components in which the same is to be done by ranks at the same positions."""
        homes: dict[int, int] = {}
        numbers = tuple(homes.setdefault(self.topology.supernodes[rank], len(homes)) for rank in self.ranks)
        parts = []
        for kind, clusters in zip(self.kinds, self.clusters):
            for cluster in clusters:
                copies = tuple(tuple(self.position[rank] for rank in ranks) for ranks in cluster.copies)
                parts.append((copies, kind.domain.cells[cluster.cell].signature))
            parts.append(None)
        return numbers, tuple(parts)

    def seats(self, rank: int) -> list[Seat | None]:
        """The seat of a rank for each kind; None where it has no part in the kind's mesh."""
        return [
            next(
                (
                    Seat(number, copy, ranks.index(rank))
                    for number, cluster in enumerate(clusters)
                    for copy, ranks in enumerate(cluster.copies)
                    if rank in ranks
                ),
                None,
            )
            for clusters in self.clusters
        ]


def components_of(kinds: Sequence[Kind], topology: Topology) -> tuple[Component, ...]:
    """The components of all ranks that hold parameters, in the order of their first ranks."""
    root: dict[int, int] = {}

    def find(rank: int) -> int:
        while root.setdefault(rank, rank) != rank:
            root[rank] = root[root[rank]]
            rank = root[rank]
        return rank

    for kind in kinds:
        for cluster in kind.clusters:
            linked = [rank for ranks in cluster.copies for rank in ranks]
            first = min(find(rank) for rank in linked)
            for rank in linked:
                root[find(rank)] = first
    members: dict[int, list[int]] = {}
    for rank in sorted(root):
        members.setdefault(find(rank), []).append(rank)
    clusters: dict[int, list[list[Cluster]]] = {first: [[] for _ in kinds] for first in members}
    for number, kind in enumerate(kinds):
        for cluster in kind.clusters:
            clusters[find(cluster.copies[0][0])][number].append(cluster)
    return tuple(
        Component(tuple(ranks), tuple(kinds), tuple(map(tuple, clusters[first])), topology)
        for first, ranks in members.items()
    )
