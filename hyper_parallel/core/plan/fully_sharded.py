"""The plan of fully sharded parameters: one unit for each repeated block, the model itself for what is left."""

from __future__ import annotations

from typing import Iterable, Iterator

from hyper_parallel.core.errors import PlanError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Placement, Shard
from hyper_parallel.core.plan.model import ModelDescription, ParameterDescription
from hyper_parallel.core.plan.names import block_around
from hyper_parallel.core.plan.plan import ParameterPlan, ShardingPlan, UnitPlan

ROOT = ""
"""Qualified name of the model itself."""


def plan_fully_sharded(model: ModelDescription, mesh: DeviceMesh) -> ShardingPlan:
    """Shard every parameter along its first dim over the `shard` axis, replicated over `replicate`.

    A unit is a repeated block: the outermost module on a path whose last segment is a number, as the elements of a
    list of layers are; but no expert, which not every rank calls. Parameters outside of blocks, and those tied across
    units, belong to the model itself, which stays gathered from forward to backward.

    Raises:
        PlanError: the mesh has an axis that this plan gives nothing to do.
    """
    idle = [axis for axis, size in zip(mesh.names, mesh.shape) if axis not in ("replicate", "shard") and size > 1]
    if idle:
        raise PlanError(
            f"the mesh {mesh} has the axis {idle[0]!r}, and a plan of fully sharded parameters uses only "
            f"'replicate' and 'shard'; give {idle[0]!r} the size 1 or leave it out"
        )
    unit_of = units_by_parameter(model)
    parameters = tuple(_plan_parameter(each, mesh, unit_of[each.name]) for each in model.parameters)
    units = units_of(model, parameters)
    notes = tuple(notes_on_shards(parameters, mesh))
    return ShardingPlan(model.class_name, mesh, units, parameters, dict(model.tied), notes)


def units_of(model: ModelDescription, parameters: Iterable[ParameterPlan]) -> tuple[UnitPlan, ...]:
    """The units that parameters name, inner ones first, the model itself last."""
    used = {parameter.unit for parameter in parameters} | {ROOT}
    blocks = [name for name in model.modules if name in used and name != ROOT]
    return tuple(UnitPlan(name, reshard_after_forward=True) for name in blocks) + (UnitPlan(ROOT, False),)


def units_by_parameter(model: ModelDescription) -> dict[str, str]:
    """The unit of each parameter: its block, or the model itself."""
    units = {each.name: block_around(each.name) or ROOT for each in model.parameters}
    for other, first in model.tied.items():
        if block_around(other) != units[first]:
            units[first] = ROOT
    return units


def _plan_parameter(parameter: ParameterDescription, mesh: DeviceMesh, unit: str) -> ParameterPlan:
    split = mesh.axis_size("shard") > 1 and parameter.shape
    placements: dict[str, Placement] = {"shard": Shard(0)} if split else {}
    return ParameterPlan(
        parameter.name,
        parameter.shape,
        parameter.dtype,
        parameter.trainable,
        placements,
        unit,
        pending=tuple(axis for axis in ("replicate", "shard") if mesh.axis_size(axis) > 1),
        local_shape=Layout(mesh, placements, parameter.shape).local_shape(mesh.ranks[0]),
    )


def notes_on_shards(parameters: Iterable[ParameterPlan], mesh: DeviceMesh) -> Iterator[str]:
    """What `shard` splits so that some ranks hold nothing, or does not split at all: a sentence for each kind."""
    size = mesh.axis_size("shard")
    if size == 1:
        return
    kinds: dict[str, list[str]] = {}
    for each in parameters:
        if not each.shape:
            kinds.setdefault("a scalar, which every rank keeps whole", []).append(each.name)
            continue
        rows = each.shape[0]
        empty = size - -(-rows // -(-rows // size)) if rows else size  # pieces of ceil(rows / size) rows
        if empty:
            kind = (
                f"{rows} row{'' if rows == 1 else 's'} for a shard axis of {size}: {empty} of {size} ranks hold nothing"
            )
            kinds.setdefault(kind, []).append(each.name)
    for kind, names in kinds.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{names[0]}{others}: {kind}."
