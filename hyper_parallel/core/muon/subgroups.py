"""Which replicas share work: those whose ranks lie in the same supernodes, by the topology as it is (paper §6.5)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Sequence

from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.muon.domains import Cell, Domain
from hyper_parallel.core.muon.parameters import MuonParameter, MuonPolicy
from hyper_parallel.core.topology import FAST, Topology


@dataclass(frozen=True)
class Cluster:
    """The copies of one cell that share work: `copies[c][d]` is the global rank at place `d` of copy `c`.

    Ranks at the same place of all copies hold the same elements and are of one supernode. `cell` counts the domain's
    cells.
    """

    cell: int
    copies: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=1024)
def clusters_of(domain: Domain, topology: Topology, replicas: str) -> tuple[Cluster, ...]:
    """All clusters of a domain, which together hold each of its ranks once.

    Two copies may share work where at every place their ranks are of the same supernode: the finest partition that is
    common to all ranks of the shard group. Clusters are parts of these, all of one size, the largest that divides them
    all: so all have the same owners and the same batches, and what is computed again is the same bit for bit. With
    `replicas="everywhere"` each copy is a cluster of its own.
    """
    near = _near(domain, topology)
    size = gcd(*(len(copies) for _, copies in near)) if replicas == "owner" else 1
    return tuple(
        Cluster(cell, tuple(copies[start : start + size]))
        for cell, copies in near
        for start in range(0, len(copies), size)
    )


def _near(domain: Domain, topology: Topology) -> list[tuple[int, list[tuple[int, ...]]]]:
    """For each cell the copies that are near each other."""
    near = []
    for cell, copies in enumerate(domain.grid.tolist()):
        alike: dict[tuple, list[tuple[int, ...]]] = {}
        for ranks in map(tuple, copies):
            alike.setdefault(tuple(topology.supernodes[rank] for rank in ranks), []).append(ranks)
        near += [(cell, each) for each in alike.values()]
    return near


def most_near(domain: Domain, topology: Topology) -> int:
    """How many copies are near each other where most are."""
    return max(len(copies) for _, copies in _near(domain, topology))


def check_shard_groups(
    parameter: MuonParameter, domain: Domain, clusters: Sequence[Cluster], topology: Topology, policy: MuonPolicy
) -> None:
    """Refuse matrices whose pieces lie in several supernodes, unless the policy has a way for them.

    Raises:
        ConfigError: says which, where, and what to write instead.
    """
    if policy.slow_shard != "refuse":
        return
    for cluster in clusters:
        cell: Cell = domain.cells[cluster.cell]
        for ranks in cluster.copies if cell.is_cut else ():
            if topology.tier(ranks) != FAST:
                raise ConfigError(
                    f"{parameter.name}: its matrices are cut along {_named(domain.axes)} of the mesh "
                    f"{parameter.layout.mesh}, and the ranks {_short(ranks)} that hold pieces of one lie in the "
                    f"supernodes {_short(sorted({topology.supernodes[rank] for rank in ranks}))} ({topology}), so "
                    "that every matrix would travel over slow links in each step. Shard inside supernodes and "
                    'replicate between them, or write slow_shard="hierarchical": each piece then crosses once on its '
                    "way to be orthogonalized and once on its way back. If those links are fast, tell so: "
                    "initialize(topology=...)"
                )


def _named(axes: Sequence[str]) -> str:
    return " and ".join(map(repr, axes))


def _short(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown}, ... ({len(numbers)} in all)" if len(numbers) > 8 else shown
