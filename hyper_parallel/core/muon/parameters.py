"""What Muon is told: parameters as data, and what may be decided about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hyper_parallel.core.errors import ConfigError, LayoutError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.muon.matrices import MatrixView
from hyper_parallel.core.placement import Partial

if TYPE_CHECKING:
    from hyper_parallel.core.muon.newton_schulz import NewtonSchulz

SLOW_SHARD = ("refuse", "hierarchical")
REPLICAS = ("owner", "everywhere")


@dataclass(frozen=True)
class MuonParameter:
    """One parameter: where it lies, what matrices it holds, how they are orthogonalized.

    Args:
        name: qualified name; distinct among the parameters of a plan.
        layout: mesh, placements and global shape. A plain parameter lies on a mesh of one rank, or replicated.
        view: its matrices, of the same global shape.
        dtype: of the local shards, by its numpy spelling: what replicas send each other.
        settings: of the orthogonalization; updates and pieces travel in its `wire_dtype`.
        state_dtype: of the momentum, for the count of bytes.

    Raises:
        ConfigError: the view is of another shape.
        LayoutError: a pending reduction is no place for a parameter.
    """

    name: str
    layout: Layout
    view: MatrixView
    dtype: str
    settings: NewtonSchulz
    state_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.layout.shape != self.view.shape:
            raise ConfigError(
                f"{self.name}: its matrices are those of a tensor of shape {list(self.view.shape)}, but the parameter "
                f"is {list(self.layout.shape)}; give a MatrixView of its global shape"
            )
        for axis, size, placement in zip(self.layout.mesh.names, self.layout.mesh.shape, self.layout.placements):
            if size > 1 and isinstance(placement, Partial):
                raise LayoutError(
                    f"{self.name}: {placement} along {axis!r} of the mesh {self.layout.mesh}; a parameter has values, "
                    "not contributions: write Replicate() or Shard(dim)"
                )


@dataclass(frozen=True)
class MuonPolicy:
    """What may be decided about a plan.

    Args:
        slow_shard: what to do where pieces of a matrix lie in several supernodes: "refuse", or "hierarchical", each
            piece crosses once on its way to the owner and each slice of the result once on its way back.
        replicas: "owner", one of the replicas in a supernode keeps momentum and computes; or "everywhere".
        batch_elements: the most elements of the matrices of one batch in a shard group, so that each of its ranks has
            to hold the part of them that the group's size leaves; a matrix is never divided.

    Raises:
        ConfigError: an unknown value.
    """

    slow_shard: str = "refuse"
    replicas: str = "owner"
    batch_elements: int = 2**29

    def __post_init__(self) -> None:
        for name, value, known in (
            ("slow_shard", self.slow_shard, SLOW_SHARD),
            ("replicas", self.replicas, REPLICAS),
        ):
            if value not in known:
                raise ConfigError(f"{name} is {value!r}; write one of {', '.join(map(repr, known))}")
        if not isinstance(self.batch_elements, int) or self.batch_elements < 1:
            raise ConfigError(f"batch_elements is {self.batch_elements!r}; write a whole number, at least 1")
