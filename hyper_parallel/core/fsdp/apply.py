"""Apply a sharding plan to the model that it was made for: exactly what it says, or not at all."""

from __future__ import annotations

from typing import Iterator

from hyper_parallel.core.backend import Backend, Module, ParameterUse
from hyper_parallel.core.errors import ConfigError, PlanError
from hyper_parallel.core.fsdp.build import check_parameters, make_unit, usable_mesh
from hyper_parallel.core.fsdp.unit import units_of
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Shard
from hyper_parallel.core.plan.plan import ParameterPlan, ShardingPlan


def apply_plan(backend: Backend, model: Module, plan: ShardingPlan) -> None:
    """Make the units that a plan names.

    Raises:
        PlanError: the plan does not fit the model, lists every reason; then nothing is changed.
        ConfigError: the mesh has an axis that can be planned and not yet run.
        ConfigError, LayoutError: as `fully_shard`, likewise.
    """
    _check_axes(plan.mesh)
    usable_mesh(backend, plan.mesh)
    wrong = list(_violations(backend, model, plan))
    if wrong:
        more = [f"and {len(wrong) - 8} more"] if len(wrong) > 8 else []
        raise PlanError(f"this plan for {plan.model_class} does not fit the model: " + "; ".join(wrong[:8] + more))
    modules = dict(backend.modules.named_modules(model))
    members = {unit.name: _members(backend, model, plan, unit.name) for unit in plan.units}
    for unit in plan.units:
        check_parameters(backend, model, members[unit.name])
    for unit in plan.units:
        make_unit(
            backend,
            unit.name,
            modules[unit.name],
            members[unit.name],
            lambda use: plan[use.name].placements.get("shard"),
            plan.mesh,
            unit.reshard_after_forward,
        )


def _check_axes(mesh: DeviceMesh) -> None:
    more = [axis for axis, size in zip(mesh.names, mesh.shape) if axis not in ("replicate", "shard") and size > 1]
    if more:
        raise ConfigError(
            f"parallelize: this plan is for the mesh {mesh}, and running the axes {', '.join(more)} is not offered "
            "yet; such a plan can be printed, explained and saved. To run, plan on a mesh in which only "
            "replicate and shard "
            "have more than one rank"
        )


def _members(backend: Backend, model: Module, plan: ShardingPlan, unit: str) -> list[list[ParameterUse]]:
    """Every use of each parameter of a unit, wherever in the model it stands."""
    uses: dict[str, list[ParameterUse]] = {}
    for use in backend.modules.parameter_uses(model):
        if plan[use.name].unit == unit:
            uses.setdefault(plan[use.name].name, []).append(use)
    return list(uses.values())


def _violations(backend: Backend, model: Module, plan: ShardingPlan) -> Iterator[str]:
    if next(iter(units_of(backend, model)), None) is not None:
        yield "the model is sharded already, restore it first"
        return
    uses = {use.name: use for use in backend.modules.parameter_uses(model)}
    planned = {each.name for each in plan.parameters} | set(plan.tied)
    yield from (f"{name} is in the plan only" for name in sorted(planned - set(uses)))
    yield from (f"{name} is in the model only" for name in sorted(set(uses) - planned))
    yield from _unit_violations(backend, model, plan)
    for name in sorted(planned & set(uses)):
        yield from _parameter_violations(backend, uses, plan, name)


def _unit_violations(backend: Backend, model: Module, plan: ShardingPlan) -> Iterator[str]:
    modules = {name for name, _ in backend.modules.named_modules(model)}
    seen: list[str] = []
    for unit in plan.units:
        if unit.name not in modules:
            yield f"the unit {unit.name!r} is no module of the model"
        if unit.name in seen:
            yield f"the unit {unit.name!r} is named twice"
        outer = [name for name in seen if _is_below(unit.name, name)]
        if outer:
            yield f"the unit {unit.name!r} comes after {outer[0]!r}, which is around it; write inner units first"
        seen.append(unit.name)


def _parameter_violations(
    backend: Backend, uses: dict[str, ParameterUse], plan: ShardingPlan, name: str
) -> Iterator[str]:
    parameter, each = uses[name].parameter, plan[name]
    first = uses.get(each.name)
    if first is not None and first.parameter is not parameter:
        yield f"{name} is tied to {each.name} in the plan and not in the model"
    facts = {
        "shape": (tuple(int(size) for size in parameter.shape), each.shape),
        "dtype": (backend.tensors.dtype_name(parameter), each.dtype),
        "trainable": (backend.modules.is_trainable(parameter), each.trainable),
    }
    for fact, (found, wanted) in facts.items():
        if found != wanted:
            yield f"{name} has {fact} {found}, planned was {wanted}"
    if not _is_below(name, each.unit) or each.unit not in {unit.name for unit in plan.units}:
        yield f"{name} belongs to the unit {each.unit!r}, which is not a unit of the plan around it"
    yield from _placement_violations(plan, each, name)


def _placement_violations(plan: ShardingPlan, each: ParameterPlan, name: str) -> Iterator[str]:
    for axis, placement in each.placements.items():
        if axis != "shard" or axis not in plan.mesh.names or not isinstance(placement, Shard):
            yield (
                f"{name} is placed as {axis}: {placement}; a fully sharded parameter is shard: shard(DIM) "
                "on a mesh with that axis, or has no placement"
            )
        elif not -len(each.shape) <= placement.dim < len(each.shape):
            yield f"{name} is placed as {placement}, a dim that its shape {list(each.shape)} does not have"


def _is_below(name: str, module: str) -> bool:
    return module == "" or name.startswith(f"{module}.")
