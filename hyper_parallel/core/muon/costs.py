"""What a plan costs: bytes by axis and tier, and how often matrices are orthogonalized."""

from __future__ import annotations

from typing import Sequence

from hyper_parallel.core.muon.batches import Assignment, Block
from hyper_parallel.core.muon.kinds import Kind
from hyper_parallel.core.muon.parameters import MuonParameter
from hyper_parallel.core.muon.relay import Relay, relay_of
from hyper_parallel.core.plan.model import ITEM_BYTES
from hyper_parallel.core.topology import FAST, Topology

Bytes = dict[tuple[str, str], int]
"""By axis and tier."""


def bytes_of(
    assignment: Assignment,
    kinds: Sequence[Kind],
    kind_of: Sequence[int],
    parameters: Sequence[MuonParameter],
    topology: Topology,
) -> Bytes:
    """Bytes that cross between ranks in a step, over all ranks. What a rank keeps is free."""
    total: Bytes = {}
    _add_exchanges(total, assignment, kinds, kind_of, topology)
    for unit in assignment.units:
        kind = kinds[kind_of[unit.index]]
        clusters, copies, _ = kind.grids[unit.cell].shape
        count = int(kind.cells[unit.cell].counts[:, unit.first : unit.last].sum())
        size = ITEM_BYTES[parameters[unit.index].dtype] * (copies - 1) * clusters
        _add(total, " x ".join(kind.domain.replicas), FAST, count * size)  # replicas share work inside supernodes only
    return {key: count for key, count in total.items() if count}


def _add_exchanges(
    total: Bytes, assignment: Assignment, kinds: Sequence[Kind], kind_of: Sequence[int], topology: Topology
) -> None:
    """Each piece travels to its matrix's owner, and as much travels back, in every cluster."""
    for batch in assignment.batches:
        if not batch.alike.is_cut:
            continue
        sizes = tuple(batch.alike.mesh.axis_size(axis) for axis in batch.alike.axes)
        size = 2 * ITEM_BYTES[batch.alike.settings.wire_dtype]
        for where, blocks in batch.blocks.items():
            sent = _sent(assignment, kinds, kind_of, blocks)
            ways: dict[tuple, Bytes] = {}
            for cluster in kinds[batch.kind].clusters_of(where.cell):
                ranks = cluster.copies[where.copy]
                homes = _numbered([topology.supernodes[rank] for rank in ranks])
                if homes not in ways:  # clusters that lie alike send alike
                    ways[homes] = _along(relay_of(ranks, batch.alike.axes, sizes, topology), sent, topology)
                for (axis, tier), count in ways[homes].items():
                    _add(total, axis, tier, count * size)


def _sent(
    assignment: Assignment, kinds: Sequence[Kind], kind_of: Sequence[int], blocks: Sequence[Block]
) -> dict[tuple[int, int], int]:
    """Elements by the place that holds them and that of their matrix's owner."""
    sent: dict[tuple[int, int], int] = {}
    for block in blocks:
        unit = assignment.units[block.unit]
        cell = kinds[kind_of[unit.index]].cells[unit.cell]
        for origin, count in enumerate(cell.held(block.matrix, block.first, block.last)):
            sent[origin, block.owner] = sent.get((origin, block.owner), 0) + count
    return sent


def _along(relay: Relay, sent: dict[tuple[int, int], int], topology: Topology) -> Bytes:
    """Elements that cross between ranks on their way."""
    total: Bytes = {}
    for (origin, owner), count in sent.items():
        for hop, axis in enumerate(relay.axes):
            ends = [relay.ranks[relay.at(origin, owner, each)] for each in (hop, hop + 1)]
            if ends[0] != ends[1]:
                _add(total, axis, topology.tier(ends), count)
    return total


def _numbered(homes: Sequence[int]) -> tuple[int, ...]:
    """Every home's number, counted in the order in which they first appear."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(home, len(numbers)) for home in homes)


def _add(total: Bytes, axis: str, tier: str, count: int) -> None:
    total[axis, tier] = total.get((axis, tier), 0) + count


def computations_of(assignment: Assignment, kinds: Sequence[Kind], kind_of: Sequence[int]) -> list[int]:
    """For each parameter how many matrices are orthogonalized, over all ranks."""
    made = [0] * len(kind_of)
    for batch in assignment.batches:
        for where, blocks in batch.blocks.items():
            clusters = len(kinds[batch.kind].grids[where.cell])
            for block in blocks:
                made[assignment.units[block.unit].index] += (block.last - block.first) * clusters
    return made
