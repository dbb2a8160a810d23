"""What parameters of one layout and one view have in common, and where each rank sits in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.muon.domains import Cell, Domain
from hyper_parallel.core.muon.matrices import MatrixView
from hyper_parallel.core.muon.subgroups import Cluster


class Seat(NamedTuple):
    """Where a rank sits: in which cluster, in which of its copies, at which place of that."""

    cluster: Cluster
    copy: int
    place: int


@dataclass(frozen=True, eq=False)
class Kind:
    """Parameters of one layout and one view. What is decided about a cell is decided for all of its clusters alike, so
    that all compute the same in the same batches."""

    layout: Layout
    view: MatrixView
    domain: Domain
    clusters: tuple[Cluster, ...]

    @cached_property
    def seats(self) -> dict[int, Seat]:
        """The seat of every rank of the mesh."""
        return {
            rank: Seat(cluster, copy, place)
            for cluster in self.clusters
            for copy, ranks in enumerate(cluster.copies)
            for place, rank in enumerate(ranks)
        }

    @cached_property
    def grids(self) -> tuple[np.ndarray, ...]:
        """For each cell int64 [clusters, copies, places]: the global ranks."""
        grids: list[list[tuple[tuple[int, ...], ...]]] = [[] for _ in self.domain.cells]
        for cluster in self.clusters:
            grids[cluster.cell].append(cluster.copies)
        return tuple(np.array(each, dtype=np.int64) for each in grids)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Those of the domain."""
        return self.domain.cells

    def clusters_of(self, cell: int) -> list[Cluster]:
        """Those of one cell."""
        return [cluster for cluster in self.clusters if cluster.cell == cell]
