"""Whether a plan can be run on a model, on this mesh, by these ranks: every reason, before anything is changed."""

from __future__ import annotations

from hashlib import sha256
from math import prod
from typing import Any, Iterator

from hyper_parallel.core.backend import Backend, Module, ParameterUse
from hyper_parallel.core.errors import ConfigError, HyperParallelError, LayoutError, PlanError
from hyper_parallel.core.execution.facts import Facts, is_in, model_placements
from hyper_parallel.core.fsdp.unit import units_of
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import MODEL_AXES, DeviceMesh
from hyper_parallel.core.placement import Partial, Placement, RaggedShard, Shard, StridedShard
from hyper_parallel.core.plan.plan import ParameterPlan, ShardingPlan

RUN = ("replicate", "shard", "expert", "tensor")
"""Axes that production runs over."""

_LISTED = 8


def check_axes(mesh: DeviceMesh) -> None:
    """Raise `ConfigError` for an axis that can be planned and not yet run."""
    more = [axis for axis, size in zip(mesh.names, mesh.shape) if axis not in RUN and size > 1]
    if more:
        raise ConfigError(
            f"parallelize: this plan is for the mesh {mesh}, and running the axes {', '.join(more)} is not offered "
            "yet; such a plan can be printed, explained and saved. To run, plan on a mesh in which only "
            f"{', '.join(RUN[:-1])} and {RUN[-1]} have more than one rank"
        )


def refuse(problems: list[str], plan: ShardingPlan) -> None:
    """Raise `PlanError` that lists what is wrong, if anything is."""
    if problems:
        more = [f"and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
        listed = "; ".join(problems[:_LISTED] + more)
        raise PlanError(f"this plan for {plan.model_class} does not fit the model: {listed}")


def agree(backend: Backend, plan: ShardingPlan, error: HyperParallelError | None) -> None:
    """Tell all ranks what this one has found, and raise on all of them if any has found something wrong.

    Raises:
        HyperParallelError: `error`, what this rank has found.
        PlanError: another rank has refused, or has another plan.
    """
    told = (None if error is None else f"{type(error).__name__}: {error}", _fingerprint(plan))
    everyone = backend.collectives.gather_objects(told)
    if error is not None:
        raise error
    for rank, (refusal, other) in enumerate(everyone):
        if refusal is not None:
            raise PlanError(f"parallelize: rank {rank} refuses its plan, so no rank changes its model: {refusal}")
        if other != told[1]:
            raise PlanError(
                f"parallelize: rank {rank} has another plan than rank {backend.collectives.rank()}; make it from the "
                "same model, mesh and overrides on every rank, or load the same file"
            )


def _fingerprint(plan: ShardingPlan) -> str:
    return sha256(repr(plan.to_dict()).encode()).hexdigest()


def violations(facts: Facts) -> Iterator[str]:
    """Every point where plan and model differ."""
    backend, model, plan = facts.backend, facts.model, facts.plan
    if is_sharded(backend, model):
        yield "the model is sharded already, restore it first"
        return
    uses = {use.name: use for use in backend.modules.parameter_uses(model)}
    planned = {each.name for each in plan.parameters} | set(plan.tied)
    yield from (f"{name} is in the plan only" for name in sorted(planned - set(uses)))
    yield from (f"{name} is in the model only" for name in sorted(set(uses) - planned))
    yield from _tie_violations(plan, uses)
    yield from _unit_violations(facts)
    yield from _experts_of_their_own(plan)
    for name in sorted(planned & set(uses)):
        yield from _parameter_violations(backend, uses, plan, name)
    yield from _boundary_violations(facts)


def is_sharded(backend: Backend, model: Module) -> bool:
    """Tell whether `parallelize` or `fully_shard` has been here."""
    return next(iter(units_of(backend, model)), None) is not None


def _tie_violations(plan: ShardingPlan, uses: dict[str, ParameterUse]) -> Iterator[str]:
    first: dict[int, str] = {}
    for name, use in uses.items():
        other = first.setdefault(id(use.parameter), name)
        if plan.tied.get(name, name) != plan.tied.get(other, other):
            yield f"{name} is tied to {other} in the model and not in the plan"


def _unit_violations(facts: Facts) -> Iterator[str]:
    seen: list[str] = []
    for unit in facts.plan.units:
        if unit.name not in facts.modules:
            yield f"the unit {unit.name!r} is no module of the model"
        if unit.name in seen:
            yield f"the unit {unit.name!r} is named twice"
        outer = [name for name in seen if name != unit.name and is_in(unit.name, name)]
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
    if not is_in(name, each.unit) or each.unit not in {unit.name for unit in plan.units}:
        yield f"{name} belongs to the unit {each.unit!r}, which is not a unit of the plan around it"
    yield from _placement_violations(plan, each, name)


def _experts_of_their_own(plan: ShardingPlan) -> Iterator[str]:
    """Experts in a list, each with a rank that holds it."""
    found: dict[str, None] = {}
    for each in plan.parameters:
        if any(isinstance(placement, RaggedShard) for placement in each.placements.values()):
            around = each.name.partition(".experts.")[0]
            found[".".join("*" if part.isdigit() else part for part in around.split("."))] = None
    for around in found:
        yield (
            f"{around}.experts are modules of their own, and only experts that are packed into one tensor run over "
            f"expert yet; have every rank hold all of them: {around}.experts.**: {{placements: {{expert: replicate}}}}"
        )


def _placement_violations(plan: ShardingPlan, each: ParameterPlan, name: str) -> Iterator[str]:
    try:
        Layout(plan.mesh, each.placements, each.shape)
        layout = Layout(plan.mesh, model_placements(each), each.shape)
    except LayoutError as error:
        yield f"{name}: {error}"
        return
    for axis, placement in each.placements.items():
        if isinstance(placement, RaggedShard):
            return  # told of all experts together
        if isinstance(placement, Partial) or axis not in ("shard", *MODEL_AXES):
            yield f"{name} is placed as {axis}: {placement}; a parameter that is run is cut by shard, tensor or expert"
    found = each.placements.get("shard")
    if isinstance(found, (Shard, StridedShard)) and found != _after_others(plan.mesh, each, found.dim):
        yield (
            f"{name} is {found} over shard; a unit cuts the part that other axes leave on a rank, which is "
            f"{_after_others(plan.mesh, each, found.dim)}"
        )
    if 0 in layout.local_shape(plan.mesh.ranks[-1]) and 0 not in each.shape:
        yield (
            f"{name} of shape {list(each.shape)} leaves nothing for rank {plan.mesh.ranks[-1]} as {layout}; keep it "
            f"whole: {name}: {{placements: {{tensor: replicate}}}}"
        )


def _after_others(mesh: DeviceMesh, parameter: ParameterPlan, dim: int) -> Placement:
    """The placement over `shard` of a part that is cut along `dim` after all other axes have cut."""
    others = (axis for axis, each in model_placements(parameter).items() if getattr(each, "dim", None) == dim)
    parts = prod(mesh.axis_size(axis) for axis in others)
    return Shard(dim) if parts == 1 else StridedShard(dim, parts)


def _boundary_violations(facts: Facts) -> Iterator[str]:
    first: dict[int, Any] = {}
    for boundary in facts.plan.boundaries:
        module = facts.modules.get(boundary.module)
        if module is None:
            yield f"the boundary {boundary.module!r} is no module of the model"
            continue
        other = first.setdefault(id(module), boundary)
        if (other.inputs, other.outputs) != (boundary.inputs, boundary.outputs):
            yield f"{boundary.module} and {other.module} are one module, with different contracts in the plan"
