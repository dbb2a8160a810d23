"""What crosses a boundary: the layouts of activations in and out of a module, and of their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import BATCH_AXES, DeviceMesh
from hyper_parallel.core.placement import Partial, Placement, Replicate, Shard
from hyper_parallel.core.topology import Topology
from hyper_parallel.core.transition import Transition, lower

BATCH, SEQUENCE, FEATURES = 0, 1, 2
"""Dims of an activation: `[batch, sequence, features]`; integer inputs have the first two."""

ByAxis = Mapping[str, Placement]
"""Placements by mesh axis; an axis that is not named replicates."""


@dataclass(frozen=True)
class Contract:
    """One tensor that crosses a boundary.

    `before` is how it lies outside of a module that takes it in, or as the module leaves it behind; `after` is how the
    module wants it, or how it is handed on. `gradient` is how the gradient of `after` lies, and `gradient_before` that
    of `before`, where it is not the usual one: inside of a block whose own boundary sums it up, it goes on as a pending
    sum. `size` is the last dim.
    """

    name: str
    dims: int
    size: int
    before: ByAxis
    after: ByAxis
    gradient: ByAxis
    gradient_before: ByAxis | None = None

    def transition(self, mesh: DeviceMesh, sequences: int, length: int, topology: Topology | None = None) -> Transition:
        """From `before` to `after` for a global batch of `sequences` of `length` tokens."""
        shape = (sequences, length, self.size)[: self.dims]
        before = Layout(mesh, dict(self.before), shape, gradient=_on_copies(self.before, self.gradient_before or {}))
        after = Layout(mesh, dict(self.after), shape, gradient=_on_copies(self.after, self.gradient))
        return lower(before, after, topology)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only."""
        sides = {"before": self.before, "after": self.after, "gradient": self.gradient}
        if self.gradient_before is not None:
            sides["gradient_before"] = self.gradient_before
        texts = {side: {axis: str(each) for axis, each in placements.items()} for side, placements in sides.items()}
        return {"name": self.name, "dims": self.dims, "size": self.size, **texts}

    @property
    def source_gradient(self) -> ByAxis:
        """How the gradient of `before` lies."""
        return gradient_of(self.before, pending=False) if self.gradient_before is None else self.gradient_before

    @property
    def is_trivial(self) -> bool:
        """Nothing has to be done, neither to the tensor nor to its gradient."""
        return dict(self.before) == dict(self.after) and dict(self.source_gradient) == dict(self.gradient)


@dataclass(frozen=True)
class BoundaryPlan:
    """A module whose inputs and outputs carry contracts.

    `kind` is its type, a key of `boundaries.TYPES`. `region` is "checked", or "transparent" or "opaque" for what
    communicates by itself (context-parallel attention, expert dispatch).
    """

    module: str
    kind: str
    inputs: tuple[Contract, ...]
    outputs: tuple[Contract, ...]
    region: str = "checked"
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, without the module, which is the key."""
        return {
            "kind": self.kind,
            "region": self.region,
            "inputs": [each.to_dict() for each in self.inputs],
            "outputs": [each.to_dict() for each in self.outputs],
            "note": self.note,
        }


def possible_gradient(placements: ByAxis, gradient: ByAxis) -> dict[str, Placement]:
    """What a gradient comes to: it is a choice only on axes where the tensor is replicated."""
    return {**gradient_of(placements, pending=False), **_on_copies(placements, gradient)}


def _on_copies(placements: ByAxis, gradient: ByAxis) -> dict[str, Placement]:
    """Of the gradient's placements those on axes where the tensor is replicated: only these are a choice."""
    return {axis: each for axis, each in gradient.items() if placements.get(axis, Replicate()) == Replicate()}


def active(mesh: DeviceMesh) -> tuple[str, ...]:
    """The axes of more than one rank."""
    return tuple(name for name, size in zip(mesh.names, mesh.shape) if size > 1)


def stream(mesh: DeviceMesh, sequence_parallel: bool) -> dict[str, Placement]:
    """How hidden states lie between boundaries: the batch over the data axes, the sequence over `context`, and over
    `tensor` with sequence parallelism; else every tensor rank holds the same."""
    placements: dict[str, Placement] = {axis: Shard(BATCH) for axis in active(mesh) if axis in BATCH_AXES}
    if "context" in active(mesh):
        placements["context"] = Shard(SEQUENCE)
    if "tensor" in active(mesh):
        placements["tensor"] = Shard(SEQUENCE) if sequence_parallel else Replicate()
    return placements


def on_tensor(placements: ByAxis, placement: Placement) -> dict[str, Placement]:
    """The same with another placement over `tensor`, where the mesh has it."""
    return {axis: placement if axis == "tensor" else each for axis, each in placements.items()}


def gradient_of(placements: ByAxis, pending: bool) -> dict[str, Placement]:
    """How the gradient lies: as the tensor, and pending over `tensor` where each rank has computed a part of it."""
    gradient = {axis: Replicate() if isinstance(each, Partial) else each for axis, each in placements.items()}
    if pending and gradient.get("tensor") == Replicate():
        gradient["tensor"] = Partial()
    return gradient
