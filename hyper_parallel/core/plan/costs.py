"""What a plan costs: memory of every rank, and what a step moves between ranks.

Traffic is what the rank with the most receives in one step. In a group of k ranks that is `(k-1)/k` of what is
gathered, scattered or exchanged, and twice that for an all-reduce. Recomputation is not counted, nor what opaque
regions exchange by themselves: keys and values over `context`, tokens over `expert`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil, prod
from typing import Iterator

import numpy as np

from hyper_parallel.core.fsdp.schedule import Settings
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Placement, Replicate, Shard
from hyper_parallel.core.plan.contracts import ByAxis, Contract
from hyper_parallel.core.plan.plan import ShardingPlan
from hyper_parallel.core.topology import FAST, Topology
from hyper_parallel.core.transition import Transition, lower
from hyper_parallel.core.wire import Step

MOMENTS = 2
"""States that AdamW keeps for an element of a parameter, in the parameter's dtype."""
BACKWARD_BEGINS_WITH = 1 + Settings.backward_prefetch_depth
"""Units: the last one of the model, and those that are fetched ahead of it."""


@dataclass(frozen=True)
class Flow:
    """Bytes that one rank receives in a step: for `parameters` (with their gradients) or at `boundaries`, by the kind
    of collective, the mesh axes that its groups run along, and the tier that they live on."""

    what: str
    kind: str
    axes: tuple[str, ...]
    tier: str
    bytes: int


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that holds the most. `whole` are those of all parameters, `gathered` what the largest unit
    takes while it is gathered. `even` says that every rank holds the same."""

    rank: int
    parameters: int
    gradients: int
    optimizer: int
    whole: int
    gathered: int
    even: bool


def memory(plan: ShardingPlan) -> Memory:
    """Add up what ranks keep between steps, with gradients and AdamW's moments in the dtypes of the parameters."""
    counted = Counter(
        (each.shape, tuple(each.placements.items()), each.item_bytes, each.trainable) for each in plan.parameters
    )
    kept, trained, even = np.zeros((1,) * len(plan.mesh.shape), dtype=object), 0, True
    for (shape, placements, size, trainable), count in counted.items():
        numel, exact = _numel_by_place(Layout(plan.mesh, dict(placements), shape))
        kept = kept + numel * (size * count)
        trained = trained + numel * (size * count * trainable)
        even = even and exact
    totals = kept + (1 + MOMENTS) * trained
    place = np.unravel_index(int(np.argmax(totals)), totals.shape)
    parameters, gradients = (int(np.broadcast_to(each, totals.shape)[place]) for each in (kept, trained))
    gathered = _gathered_bytes(plan)
    return Memory(
        rank=plan.mesh.rank_at(**dict(zip(plan.mesh.names, map(int, place)))),
        parameters=parameters,
        gradients=gradients,
        optimizer=MOMENTS * gradients,
        whole=sum(each.numel * each.item_bytes for each in plan.parameters),
        gathered=max(gathered.values(), default=0),
        even=even and len(set(totals.reshape(-1).tolist())) == 1,
    )


def _numel_by_place(layout: Layout) -> tuple[np.ndarray, bool]:
    """Elements of a rank by its coordinates, and whether ranks that differ only along other axes hold as many.

    Of an axis that is cut by ceil-chunk the first rank holds the most, and stands for all; along a ragged one every
    rank counts for itself.
    """
    mesh = layout.mesh
    ragged = {cut.axis for cuts in layout.cuts for cut in cuts if cut.ragged}
    others = {cut.axis for cuts in layout.cuts for cut in cuts} - ragged
    counts = np.empty([size if axis in ragged else 1 for axis, size in enumerate(mesh.shape)], dtype=object)
    for place in np.ndindex(counts.shape):
        counts[place] = layout.local_numel(mesh.rank_at(**dict(zip(mesh.names, place))))
    return counts, counts.sum() * prod(mesh.shape[axis] for axis in others) == prod(layout.shape)


def _gathered_bytes(plan: ShardingPlan) -> Counter:
    """The bytes of each unit while it is gathered, on the first rank."""
    kinds = Counter(
        (each.unit, each.shape, tuple(each.placements.items()), each.item_bytes) for each in plan.parameters
    )
    sizes: dict[tuple, int] = {}
    units: Counter = Counter()
    for (unit, shape, placements, size), count in kinds.items():
        if (shape, placements) not in sizes:
            kept = {axis: each for axis, each in placements if axis != "shard"}
            sizes[shape, placements] = Layout(plan.mesh, kept, shape).local_numel(plan.mesh.ranks[0])
        units[unit] += sizes[shape, placements] * size * count
    return units


# Traffic


def traffic(plan: ShardingPlan, topology: Topology | None = None) -> tuple[Flow, ...]:
    """What a step moves, added up by collective; without a topology everything is fast.

    A step after the first one: what backward begins with, the last unit and the one that it fetches ahead, stays after
    forward; in the first step they are gathered twice, as the others always are (`core.fsdp.schedule`).
    Gradients are reduced over the axes in `pending`: scattered over `shard` first, so that other axes carry the piece.
    Activations count for the global batch `plan.tokens`, in the dtype that most trainable elements have.

    Raises:
        LayoutError: the topology lacks a rank of the mesh.
    """
    if topology is not None:
        topology.tier(plan.mesh.ranks)  # refuses a rank that it does not know
    sums: Counter = Counter()
    for what, flows in (("parameters", _parameter_flows), ("boundaries", _boundary_flows)):
        for kind, axes, tier, count in flows(plan, topology):
            sums[what, kind, axes, tier] += count
    return tuple(Flow(*key, ceil(count)) for key, count in sums.items() if count)


Share = tuple[str, tuple[str, ...], str, Fraction]
"""What one rank receives: the kind of collective, the axes, the tier, and how much."""


def _parameter_flows(plan: ShardingPlan, topology: Topology | None) -> Iterator[Share]:
    gathers = _gathers(plan)
    counted = Counter(
        (each.shape, tuple(each.placements.items()), each.item_bytes, each.trainable, each.pending, gathers[each.unit])
        for each in plan.parameters
    )
    tiers = _Tiers(plan.mesh, topology)
    for (shape, placements, size, trainable, pending, gathered), count in counted.items():
        piece = Layout(plan.mesh, dict(placements), shape).local_numel(plan.mesh.ranks[0]) * size * count
        shards = plan.mesh.axis_size("shard")
        cut = shards > 1 and "shard" in dict(placements)
        if cut:
            yield tiers.flow("all_gather", ("shard",), (shards - 1) * piece * gathered)
        if not trainable:
            continue
        if cut and "shard" in pending:
            yield tiers.flow("reduce_scatter", ("shard",), (shards - 1) * piece)
        apart = ("replicate",) if cut else ("replicate", "shard")  # each by itself; the axes of the model together
        together = tuple(axis for axis in pending if axis not in ("replicate", "shard"))
        for axes in (together, *((axis,) for axis in reversed(apart) if axis in pending)):
            ranks = len(plan.mesh.group_of(plan.mesh.ranks[0], axes))
            yield tiers.flow("all_reduce", axes, Fraction(2 * (ranks - 1) * piece, ranks))


def _gathers(plan: ShardingPlan) -> dict[str, int]:
    """How often a step gathers each unit: for forward, and for backward if it has been freed."""
    last = [unit.name for unit in plan.units if unit.name][-BACKWARD_BEGINS_WITH:]
    return {unit.name: 1 + (unit.reshard_after_forward and unit.name not in last) for unit in plan.units}


class _Tiers:
    """The tier that groups along some axes live on."""

    def __init__(self, mesh: DeviceMesh, topology: Topology | None):
        self._mesh, self._topology = mesh, topology
        self._known: dict[tuple[str, ...], str] = {}

    def flow(self, kind: str, axes: tuple[str, ...], count: int | Fraction) -> Share:
        if axes not in self._known:
            self._known[axes] = FAST if self._topology is None else self._topology.axis_tier(self._mesh, axes)
        return kind, axes, self._known[axes], Fraction(count)


def _boundary_flows(plan: ShardingPlan, topology: Topology | None) -> Iterator[Share]:
    size = activation_bytes(plan)
    crossings = Crossings(plan.mesh, plan.tokens, topology)
    for boundary in plan.boundaries:
        for contract in (*boundary.inputs, *boundary.outputs):
            for kind, axes, tier, count in crossings.of(contract).elements:
                yield kind, axes, tier, count * size


def activation_bytes(plan: ShardingPlan) -> int:
    """Bytes of one element of an activation: that of the dtype which most trainable elements have."""
    sizes: Counter = Counter()
    for each in plan.parameters:
        sizes[each.item_bytes] += each.numel * each.trainable
    return sizes.most_common(1)[0][0] if sizes else 4


@dataclass(frozen=True)
class Crossing:
    """A contract's transition among the ranks that take part in it, and its way back."""

    mesh: DeviceMesh
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    topology: Topology | None = None

    @cached_property
    def elements(self) -> tuple[Share, ...]:
        """Elements that a rank receives in each step, on each tier."""
        return tuple(
            (step.kind, step.axes, tier, Fraction(count, self.mesh.size))
            for step in (*self.forward, *self.backward)
            for tier, count in Transition(step.before, step.after, (step,)).bytes(1, self.topology).items()
        )


class Crossings:
    """The transitions of contracts, each worked out once, among the few ranks that it concerns.

    An axis along which a tensor is cut alike before and after splits the mesh into groups that do not speak with each
    other, so one group stands for all. With a topology it is the one that has the most ranks in other supernodes.
    """

    def __init__(self, mesh: DeviceMesh, tokens: tuple[int, int], topology: Topology | None = None):
        self._mesh, self._tokens, self._topology = mesh, tokens, topology
        self._known: dict[tuple, Crossing] = {}
        self._groups: dict[tuple[str, ...], DeviceMesh] = {}

    def of(self, contract: Contract) -> Crossing:
        """The steps forward and backward of one contract."""
        sides = (contract.before, contract.after, contract.gradient, contract.source_gradient)
        key = (contract.dims, contract.size, *(tuple(side.items()) for side in sides))
        if key not in self._known:
            self._known[key] = self._make(contract)
        return self._known[key]

    def _make(self, contract: Contract) -> Crossing:
        axes = self._concerned(contract)
        mesh = self._group(axes)
        others = {axis: each for axis, each in contract.after.items() if axis not in axes}
        whole = (*self._tokens, contract.size)[: contract.dims]
        shape = Layout(self._mesh, others, whole).local_shape(self._mesh.ranks[0])
        layouts = [
            Layout(mesh, _along(axes, side), shape, gradient=_along(axes, gradient, side))
            for side, gradient in ((contract.before, contract.source_gradient), (contract.after, contract.gradient))
        ]
        found = lower(*layouts, self._topology)
        return Crossing(mesh, found.steps, found.gradient_steps, self._topology)

    def _concerned(self, contract: Contract) -> tuple[str, ...]:
        """The axes along which something changes, and those that cut on what such an axis has cut before."""
        sides = (contract.before, contract.after, contract.source_gradient, contract.gradient)
        axes: list[str] = []
        dims: set[int | None] = set()
        for axis, size in zip(self._mesh.names, self._mesh.shape):
            found = {side.get(axis, Replicate()) for side in sides}
            same = len(found) == 1 and isinstance(next(iter(found)), (Replicate, Shard))
            cut = {getattr(each, "dim", None) for each in found} - {None}
            if size > 1 and (not same or dims & cut):
                axes.append(axis)
                dims |= cut
        return tuple(axes)

    def _group(self, axes: tuple[str, ...]) -> DeviceMesh:
        """The sub-mesh along the axes whose ranks sit in the most supernodes."""
        if axes not in self._groups:
            firsts = [group[0] for group in self._mesh.groups(axes)]
            if self._topology is not None:
                homes = self._topology.supernodes
                firsts.sort(key=lambda rank: -len({homes[each] for each in self._mesh.group_of(rank, axes)}))
            self._groups[axes] = self._mesh.submesh(axes, firsts[0])
        return self._groups[axes]


def _along(axes: tuple[str, ...], placements: ByAxis, chosen_by: ByAxis | None = None) -> dict[str, Placement]:
    """The placements along some axes; of a gradient only where the tensor is replicated: only there it is a choice."""
    return {
        axis: placements[axis]
        for axis in axes
        if axis in placements and (chosen_by is None or chosen_by.get(axis, Replicate()) == Replicate())
    }
