"""A sharding plan as text for people."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Sequence

from hyper_parallel.core.placement import Shard
from hyper_parallel.core.plan.plan import ParameterPlan, ShardingPlan


@dataclass(frozen=True)
class UnitCost:
    """What one unit costs the busiest rank, in bytes.

    Traffic is what the rank sends in one step, per collective, by a ring or a direct exchange: `(k-1)/k` of the buffer
    for a gather or a reduce-scatter, twice that for an all-reduce.
    """

    local: int
    gathered: int
    all_gather: int
    reduce_scatter: int
    all_reduce: int


def unit_cost(plan: ShardingPlan, unit: str, reshard_after_forward: bool) -> UnitCost:
    """Add up a unit. Padding counts: pieces travel with the size of the largest."""
    shards, replicas = plan.mesh.axis_size("shard"), plan.mesh.axis_size("replicate")
    local = gathered = all_gather = reduce_scatter = all_reduce = 0
    for each in plan.members(unit):
        piece = _piece_bytes(plan, each)
        split = isinstance(each.placements.get("shard"), Shard) and shards > 1
        local += piece
        gathered += each.numel * each.item_bytes
        if split:
            all_gather += (shards - 1) * piece * (2 if reshard_after_forward else 1)
        if each.trainable and split:
            reduce_scatter += (shards - 1) * piece
        elif each.trainable:
            all_reduce += _all_reduce_bytes(piece, shards)
        if each.trainable:
            all_reduce += _all_reduce_bytes(piece, replicas)
    return UnitCost(local, gathered, all_gather, reduce_scatter, all_reduce)


def table(plan: ShardingPlan) -> str:
    """All units with their parameters, then the summary."""
    rows = [("parameter", "shape", "dtype", "placement", "local shape", "local bytes")]
    for unit in plan.units:
        free = "freed after forward" if unit.reshard_after_forward else "kept until backward"
        rows.append((f"unit {unit.name or '(the model itself)'}: {free}",))
        rows.extend(_parameter_row(plan, each) for each in plan.members(unit.name))
    return _aligned(rows) + "\n\n" + summary(plan)


def summary(plan: ShardingPlan) -> str:
    """Sizes, memory and traffic of the busiest rank, and the notes."""
    costs = [unit_cost(plan, unit.name, unit.reshard_after_forward) for unit in plan.units]
    numel = sum(each.numel for each in plan.parameters)
    lines = [
        f"{plan.model_class}: {numel:,} parameters in {len(plan.parameters)} tensors, {len(plan.units)} units, "
        f"mesh {plan.mesh}",
        f"each rank keeps {_bytes(sum(cost.local for cost in costs))} of "
        f"{_bytes(sum(cost.gathered for cost in costs))}; "
        f"its largest gathered unit has {_bytes(max(cost.gathered for cost in costs))}",
        f"each rank sends in a step: all-gather {_bytes(sum(cost.all_gather for cost in costs))} and reduce-scatter "
        f"{_bytes(sum(cost.reduce_scatter for cost in costs))} over shard, all-reduce "
        f"{_bytes(sum(cost.all_reduce for cost in costs))} over replicate",
    ]
    return "\n".join(lines + [f"note: {note}" for note in plan.notes])


def _parameter_row(plan: ShardingPlan, each: ParameterPlan) -> tuple[str, ...]:
    local = plan.layout(each.name).local_shape(plan.mesh.ranks[0])
    names = [each.name] + [other for other, first in plan.tied.items() if first == each.name]
    placement = ", ".join(f"{axis}: {value}" for axis, value in each.placements.items()) or "replicate"
    if not each.trainable:
        placement += " (frozen)"
    return (
        "  " + " = ".join(names),
        "x".join(map(str, each.shape)) or "scalar",
        each.dtype,
        placement,
        "x".join(map(str, local)) or "scalar",
        f"{prod(local) * each.item_bytes:,}",
    )


def _piece_bytes(plan: ShardingPlan, each: ParameterPlan) -> int:
    return plan.layout(each.name).local_numel(plan.mesh.ranks[0]) * each.item_bytes


def _all_reduce_bytes(size: int, ranks: int) -> int:
    return -(-2 * (ranks - 1) * size // ranks)


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    columns = len(rows[0])
    widths = [max(len(row[index]) for row in rows if len(row) == columns) for index in range(columns)]
    lines = []
    for row in rows:
        if len(row) < columns:
            lines.append(row[0])
            continue
        cells = [
            cell.rjust(width) if index == columns - 1 else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
