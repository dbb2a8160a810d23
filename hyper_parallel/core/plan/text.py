"""A sharding plan as text for people."""

from __future__ import annotations

import textwrap
from math import prod
from typing import Iterator, Sequence

from hyper_parallel.core.placement import Placement, RaggedShard, Replicate
from hyper_parallel.core.plan.blocks import EDGES
from hyper_parallel.core.plan.contracts import BoundaryPlan, ByAxis, Contract, active
from hyper_parallel.core.plan.costs import Crossings, Flow, activation_bytes, memory, traffic
from hyper_parallel.core.plan.folding import fold
from hyper_parallel.core.plan.placing import DATA_PARALLEL
from hyper_parallel.core.plan.plan import ParameterPlan, ShardingPlan
from hyper_parallel.core.topology import Topology
from hyper_parallel.core.wire import Step

ROOT = "(the model itself)"

WIDTH = 120
"""Columns that sentences are wrapped at."""


def table(plan: ShardingPlan, topology: Topology | None = None, full: bool = False) -> str:
    """All boundaries, all units with their parameters, and the summary. Modules that are alike are shown once, by their
    range, unless `full`."""
    parts = [boundary_table(plan, topology, full)] if plan.boundaries else []
    return "\n\n".join([*parts, parameter_table(plan, full), summary(plan, topology)])


def summary(plan: ShardingPlan, topology: Topology | None = None) -> str:
    """Sizes, memory and traffic of the busiest rank, and the notes."""
    numel, held = sum(each.numel for each in plan.parameters), memory(plan)
    whose = "each rank" if held.even else f"rank {held.rank}, which holds the most,"
    lines = [
        f"{plan.model_class}: {_count(numel, 'parameter')} in {_count(len(plan.parameters), 'tensor')}, "
        f"{_count(len(plan.units), 'unit')}, mesh {plan.mesh}",
        f"{whose} keeps {_bytes(held.parameters)} of {_bytes(held.whole)} of parameters, {_bytes(held.gradients)} of "
        f"gradients and {_bytes(held.optimizer)} of optimizer state with AdamW (two moments in the dtype of the "
        f"parameters); the largest gathered unit has {_bytes(held.gathered)}",
    ]
    flows = traffic(plan, topology)
    if flows:
        lines += ["each rank receives in a step:", *_traffic_table(flows).splitlines()]
    if plan.boundaries:
        sequences, length = plan.tokens
        lines.append(
            f"activations are counted for {_count(sequences, 'sequence')} of {_count(length, 'token')}, "
            f"{activation_bytes(plan)} bytes an element; recomputation and what opaque regions exchange is not"
        )
    lines += [f"note: {note}" for note in plan.notes]
    return "\n".join(part for line in lines for part in _wrapped(line, "  "))


def _traffic_table(flows: Sequence[Flow]) -> str:
    rows = [
        (f"  {flow.what}", flow.kind, f"over {', '.join(flow.axes)}", flow.tier, _bytes(flow.bytes)) for flow in flows
    ]
    return _aligned(rows, right=4)


# Boundaries


def boundary_table(plan: ShardingPlan, topology: Topology | None = None, full: bool = False) -> str:
    """Every boundary with its contracts, one line for each tensor, and the steps that its transition takes."""
    crossings = Crossings(plan.mesh, plan.tokens, topology)
    entries = [(each, tuple(_boundary_lines(each, crossings))) for each in plan.boundaries]
    lines = [f"boundaries: {_stream_text(plan)}"]
    for module, (head, *contracts) in [(each.module, told) for each, told in entries] if full else _folded(entries):
        lines.append(f"  {module or ROOT}: {head}")
        lines.extend(f"    {each}" for each in contracts)
    return "\n".join(lines)


def _folded(entries: Sequence[tuple[BoundaryPlan, tuple[str, ...]]]) -> list[tuple[str, tuple[str, ...]]]:
    """Blocks that are alike as one; what begins and ends them stands around all of them."""
    folded = fold([(each.module, told) for each, told in entries if each.kind not in EDGES])
    for each, told in entries:
        if each.kind in EDGES:
            blocks = f"{each.module.rpartition('.')[0]}." if "." in each.module else ""
            inside = [place for place, (module, _) in enumerate(folded) if module.startswith(blocks)] or [len(folded)]
            folded.insert(inside[0] if each.kind == "entry" else inside[-1] + 1, (each.module, told))
    return folded


def _stream_text(plan: ShardingPlan) -> str:
    """The axes whose placements are alike everywhere, so that contracts need not repeat them."""
    axes = [axis for axis in active(plan.mesh) if axis != "tensor"]
    texts = [f"{axis} cuts {'the sequence' if axis == 'context' else 'the batch'}" for axis in axes]
    if "tensor" in active(plan.mesh):
        texts.append(f"sequence parallelism over tensor is {'on' if plan.sequence_parallel else 'off'}")
    return ", ".join(texts)


def _boundary_lines(boundary: BoundaryPlan, crossings: Crossings) -> Iterator[str]:
    region = "" if boundary.region == "checked" else f", {boundary.region}"
    yield f"{boundary.kind}{region}{f' ({boundary.note})' if boundary.note else ''}"
    for side, contracts in (("in ", boundary.inputs), ("out", boundary.outputs)):
        for each in contracts:
            yield f"{side} {contract_text(each, crossings)}"


def contract_text(contract: Contract, crossings: Crossings) -> str:
    """`hidden: shard(1) -> replicate on tensor: all_gather | gradient partial -> shard(1): reduce_scatter`.

    Only axes along which something changes are named; of a tensor that crosses as it is, that over `tensor`.
    """
    found = crossings.of(contract)
    axes = [
        axis
        for axis in dict.fromkeys((*contract.before, *contract.after, *contract.gradient))
        if axis == "tensor" or _differs(axis, contract.before, contract.after)
    ]
    forward = _side(axes, contract.before, contract.after, found.forward)
    backward = _side(axes, contract.gradient, contract.source_gradient, found.backward)
    return f"{contract.name}: {forward} | gradient {backward}" if axes else f"{contract.name}: as it lies"


def _differs(axis: str, one: ByAxis, other: ByAxis) -> bool:
    return one.get(axis, Replicate()) != other.get(axis, Replicate())


def _side(axes: Sequence[str], before: ByAxis, after: ByAxis, steps: Sequence[Step]) -> str:
    changes = ", ".join(
        f"{before.get(axis, Replicate())} -> {after.get(axis, Replicate())} on {axis}"
        if _differs(axis, before, after)
        else f"{before.get(axis, Replicate())} on {axis}"
        for axis in axes
    )
    return changes + (f": {', '.join(step.kind for step in steps)}" if steps else "")


# Parameters


def parameter_table(plan: ShardingPlan, full: bool = False) -> str:
    """Every unit with its parameters, a line each, and lines below for what else is worth knowing of it. Where modules
    are folded, names are those below the unit. Roles have a column where the plan knows of them, dtypes where they
    differ."""
    axes = [axis for axis in active(plan.mesh) if axis != "replicate"]
    roles, dtypes = any(each.role for each in plan.parameters), {each.dtype for each in plan.parameters}
    columns = {"shape": True, "dtype": len(dtypes) > 1, "role": roles, " | ".join(axes) or "placement": True}
    head = ("parameter", *(name for name, shown in columns.items() if shown), "local", "bytes")
    remarks = _remarks(plan)
    entries = [
        (
            each.name,
            (
                unit.name.count(".") + 1 if unit.name else 0,
                unit.reshard_after_forward,
                remarks[each.name],
                tuple(cell for cell, shown in zip(_cells(each, axes), (*columns.values(), True, True)) if shown),
            ),
        )
        for unit in plan.units
        for each in plan.members(unit.name)
    ]
    rows: list[tuple[str, ...]] = [head]
    known = None
    for name, (depth, reshard, told, cells) in entries if full else fold(entries):
        unit, below = ".".join(name.split(".")[:depth]), ".".join(name.split(".")[depth:])
        if (unit, depth) != known:
            known = (unit, depth)
            rows.append((f"unit {unit or ROOT}: {'freed after forward' if reshard else 'kept until backward'}",))
        rows.append((f"  {name if full else below}", *cells))
        rows.extend((line,) for remark in told for line in _wrapped(f"    {remark}", "      "))
    return f"{_legend(plan, dtypes, axes, roles)}\n{_aligned(rows, right=len(head) - 1)}"


def _legend(plan: ShardingPlan, dtypes: set[str], axes: Sequence[str], roles: bool) -> str:
    """What the columns hold."""
    dtype = f" ({next(iter(dtypes))})" if len(dtypes) == 1 else ""
    over = f"over {' | '.join(axes)}; -: whole" if axes else "whole"
    pending = "; pending: whole, its gradient a partial sum" if roles else ""
    return f"parameters{dtype}: {over}{pending}; local: on rank {plan.mesh.ranks[0]}"


def _remarks(plan: ShardingPlan) -> dict[str, tuple[str, ...]]:
    """The further names and the notes of every parameter."""
    found = {each.name: [] for each in plan.parameters}
    for other, first in plan.tied.items():
        found[first].append(f"= {other}")
    return {each.name: (*found[each.name], *each.notes) for each in plan.parameters}


def _cells(each: ParameterPlan, axes: Sequence[str]) -> Iterator[str]:
    """A cell for each column but the first."""
    yield "x".join(map(str, each.shape)) or "scalar"
    yield each.dtype
    yield each.role
    lies = " | ".join(_along(axis, each) for axis in axes) or "whole"
    yield lies if each.trainable else f"{lies} (frozen)"
    yield "x".join(map(str, each.local_shape)) or "scalar"
    yield f"{prod(each.local_shape) * each.item_bytes:,}"


def _along(axis: str, each: ParameterPlan) -> str:
    """How a parameter lies along one axis. The gradient is pending along data axes always, so this is not told."""
    placement = each.placements.get(axis, Replicate())
    if placement != Replicate():
        return _short(placement)
    return "pending" if each.trainable and axis in each.pending and axis not in DATA_PARALLEL else "-"


def _short(placement: Placement) -> str:
    """The text form, or, of a ragged shard that gives all to one rank, which one it is."""
    if isinstance(placement, RaggedShard) and sum(map(bool, placement.local_units)) == 1:
        units = placement.local_units
        return f"all on {units.index(max(units))} of {len(units)}"
    return str(placement)


def _aligned(rows: Sequence[tuple[str, ...]], right: int) -> str:
    """Columns of one width each; a row of one cell is a heading. Column `right` is set to the right."""
    columns = len(rows[0])
    widths = [max(len(row[index]) for row in rows if len(row) == columns) for index in range(columns)]
    lines = []
    for row in rows:
        if len(row) < columns:
            lines.append(row[0])
            continue
        cells = [
            cell.rjust(width) if index == right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _wrapped(line: str, indent: str) -> list[str]:
    """The line in lines of at most `WIDTH`, the further ones indented."""
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
