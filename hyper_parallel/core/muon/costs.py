"""What a plan costs: bytes by axis and tier, and how often matrices are orthogonalized."""

from __future__ import annotations

from typing import Sequence

from hyper_parallel.core.muon.batches import Assignment
from hyper_parallel.core.muon.components import Component
from hyper_parallel.core.muon.parameters import MuonParameter
from hyper_parallel.core.muon.relay import Relay, relay_of
from hyper_parallel.core.plan.model import ITEM_BYTES
from hyper_parallel.core.topology import Topology

Bytes = dict[tuple[str, str], int]
"""By axis and tier."""


def bytes_of(
    component: Component, assignment: Assignment, parameters: Sequence[MuonParameter], kind_of: Sequence[int]
) -> Bytes:
    """Bytes that cross between the ranks of a component in a step. What a rank keeps is free."""
    total: Bytes = {}
    _add_exchanges(total, component, assignment, kind_of)
    for unit in assignment.units:
        kind = component.kinds[kind_of[unit.index]]
        cluster = component.clusters[kind_of[unit.index]][unit.cluster]
        if len(cluster.copies) > 1:
            counts = kind.domain.cells[cluster.cell].counts[:, unit.first : unit.last].sum(axis=(1, 2)).tolist()
            size = ITEM_BYTES[parameters[unit.index].dtype] * (len(cluster.copies) - 1)
            for place, count in enumerate(counts):
                tier = component.topology.tier([ranks[place] for ranks in cluster.copies])
                _add(total, " x ".join(kind.domain.replicas), tier, count * size)
    return {key: count for key, count in total.items() if count}


def _add_exchanges(total: Bytes, component: Component, assignment: Assignment, kind_of: Sequence[int]) -> None:
    """Each piece travels to its matrix's owner, and as much travels back."""
    for batch in assignment.batches:
        if not batch.alike.axes:
            continue
        sizes = tuple(batch.alike.mesh.axis_size(axis) for axis in batch.alike.axes)
        size = 2 * ITEM_BYTES[batch.alike.settings.wire_dtype]
        for gathering in batch.groups:
            ranks = tuple(component.ranks[position] for position in gathering.ranks)
            relay = relay_of(ranks, batch.alike.axes, sizes, component.topology)
            ways: dict[tuple[int, int], list[tuple[str, str]]] = {}
            for block in gathering.blocks:
                unit = assignment.units[block.unit]
                cluster = component.clusters[kind_of[unit.index]][unit.cluster]
                cell = component.kinds[kind_of[unit.index]].domain.cells[cluster.cell]
                for origin, count in enumerate(cell.held(block.matrix, block.first, block.last)):
                    if (origin, block.owner) not in ways:
                        ways[origin, block.owner] = _way(relay, origin, block.owner, component.topology)
                    for axis, tier in ways[origin, block.owner]:
                        _add(total, axis, tier, count * size)


def _way(relay: Relay, origin: int, owner: int, topology: Topology) -> list[tuple[str, str]]:
    """Axis and tier of each hop of a piece that leaves a rank."""
    way = []
    for hop, axis in enumerate(relay.axes):
        ends = [relay.ranks[relay.at(origin, owner, each)] for each in (hop, hop + 1)]
        if ends[0] != ends[1]:
            way.append((axis, topology.tier(ends)))
    return way


def _add(total: Bytes, axis: str, tier: str, count: int) -> None:
    total[axis, tier] = total.get((axis, tier), 0) + count


def computations_of(assignment: Assignment, count: int) -> list[int]:
    """For each of `count` parameters how many matrices the ranks of a component orthogonalize."""
    made = [0] * count
    for batch in assignment.batches:
        for gathering in batch.groups:
            for block in gathering.blocks:
                made[assignment.units[block.unit].index] += block.last - block.first
    return made
