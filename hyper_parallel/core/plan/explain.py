"""Why a plan is as it is, pass by pass, told from the plan alone: a loaded one explains itself as well."""

from __future__ import annotations

import difflib
from typing import Iterator

from hyper_parallel.core.errors import PlanError
from hyper_parallel.core.placement import Placement, RaggedShard, Shard, StridedShard
from hyper_parallel.core.plan.blocks import EDGES
from hyper_parallel.core.plan.boundaries import TYPES
from hyper_parallel.core.plan.contracts import BoundaryPlan, active
from hyper_parallel.core.plan.costs import Crossings
from hyper_parallel.core.plan.plan import ParameterPlan, ShardingPlan
from hyper_parallel.core.plan.role_rules import ROLES
from hyper_parallel.core.plan.text import ROOT, contract_text

_TENSOR = {
    "vocabulary": "tensor cuts the vocabulary",
    "output": "tensor cuts the output features",
    "heads": "tensor deals out whole heads",
    "gathered": "tensor cuts the output features, and every rank gets all that the ranks give",
    "input": "tensor cuts the input features; what has none, as a bias, is added once",
    "whole": "tensor leaves it whole",
}
"""The sentence of the template for each way in which the axis treats a role."""

_PASSED = "passes; a plan with a violation is not made"


def explain(plan: ShardingPlan, name: str) -> str:
    """A parameter by any of its names, or a boundary by its module ("" is the model itself).

    Raises:
        PlanError: the plan has neither; names the closest that it has.
    """
    boundaries = {each.module: each for each in plan.boundaries}
    known = {each.name for each in plan.parameters} | set(plan.tied)
    if name in known:
        return "\n".join(_parameter(plan, name, boundaries))
    if name in boundaries:
        return "\n".join(_boundary(plan, boundaries[name]))
    close = difflib.get_close_matches(name, sorted(known | set(boundaries)), 3, 0.5)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    raise PlanError(f"the plan for {plan.model_class} has no parameter and no boundary {name!r}{hint}")


def _parameter(plan: ShardingPlan, name: str, boundaries: dict[str, BoundaryPlan]) -> Iterator[str]:
    each = plan[name]
    trainable = "trainable" if each.trainable else "frozen"
    yield f"{name}: {list(each.shape)} {each.dtype}, {trainable}"
    others = [
        other for other in (each.name, *(o for o, first in plan.tied.items() if first == each.name)) if other != name
    ]
    if others:
        yield f"  one parameter with {', '.join(others)}; {each.name} is its first name"
    if each.role:
        yield f"  1 role: {each.role} ({ROLES[each.role].description}): {each.rule}"
        yield f"  2 group: acts in {each.boundary or ROOT}"
        yield f"  3 boundary: {_type(boundaries, each.boundary)}"
        for other, first in plan.tied.items():
            module = other.rpartition(".")[0]
            if first == each.name and module != each.boundary:
                yield f"    as {other} it acts in {module or ROOT}: {_type(boundaries, module)}"
    else:
        yield "  1-3 role, group, boundary: not asked, since only replicate and shard have more than one rank"
    yield "  4 template:"
    yield from (f"    {line}" for line in _template(plan, each))
    line = plan.overrides.get(name) or plan.overrides.get(each.name) or plan.overrides.get(each.boundary)
    yield f"  5 overrides: {line or 'none'}"
    yield f"  6 lint: {_PASSED if each.role else 'nothing to check'}"
    unit = next(unit for unit in plan.units if unit.name == each.unit)
    when = "freed after forward" if unit.reshard_after_forward else "kept until backward"
    yield f"  unit: {unit.name or ROOT}, gathered before forward, {when}"
    yield f"  local shape: {list(each.local_shape)} on rank {plan.mesh.ranks[0]}"
    yield from (f"  note: {note}" for note in each.notes)


def _type(boundaries: dict[str, BoundaryPlan], acts_in: str) -> str:
    """The boundary at a module, or the one around what has no contracts of its own."""
    boundaries = {module: boundary for module, boundary in boundaries.items() if boundary.kind not in EDGES}
    module = acts_in
    while module and module not in boundaries:
        module = module.rpartition(".")[0]
    if module not in boundaries:
        return "no contract: it acts on whole hidden states"
    around = "" if module == acts_in else f", through the boundary of {module}"
    kind = boundaries[module].kind
    return f"{kind}: {TYPES[kind]}{around}"


def _template(plan: ShardingPlan, each: ParameterPlan) -> Iterator[str]:
    """A line for each active axis: the placement, and the sentence that led to it."""
    for axis in active(plan.mesh):
        placement = each.placements.get(axis)
        pending = "; its gradient is summed over the axis" if axis in each.pending and each.trainable else ""
        why = _why(axis, each, placement)
        yield f"{axis} ({plan.mesh.axis_size(axis)}): {placement or 'replicate'}: {why}{pending}"


def _why(axis: str, each: ParameterPlan, placement: Placement | None) -> str:
    if axis == "replicate":
        return "every replica keeps what it keeps"
    if axis == "context":
        return "ranks see other parts of the sequence and need all of it"
    if axis == "shard":
        return _why_shard(each, placement)
    if axis == "expert":
        if isinstance(placement, RaggedShard):
            return f"one expert, held by rank {placement.local_units.index(max(placement.local_units))} of the axis"
        return "dealt out, expert by expert" if placement else "every expert rank needs it"
    if axis == "tensor" and each.role:
        sentence = _TENSOR[ROLES[each.role].tensor]
        if isinstance(placement, StridedShard) and not _comes_later(each, axis):
            sentence += f", in each of {placement.split_factor} blocks that lie end to end"
        return sentence if placement or sentence == _TENSOR["whole"] else f"{sentence}; here it is whole"
    return "nothing is cut"


def _why_shard(each: ParameterPlan, placement: Placement | None) -> str:
    if placement is None:
        return "a scalar is whole" if not each.shape else "what it could cut is cut already"
    if isinstance(placement, (Shard, StridedShard)):
        after = ", after the other axes" if isinstance(placement, StridedShard) else ""
        return f"fully sharded data parallelism cuts dim {placement.dim}{after}"
    return "written by hand into the file of the plan"


def _comes_later(each: ParameterPlan, axis: str) -> bool:
    """The strided cut stands after that of another axis further right, rather than in blocks."""
    names = list(each.placements)
    right = names[names.index(axis) + 1 :]
    return any(getattr(each.placements[other], "dim", None) == each.placements[axis].dim for other in right)


def _boundary(plan: ShardingPlan, boundary: BoundaryPlan) -> Iterator[str]:
    yield f"{boundary.module or ROOT}: boundary"
    members = [each for each in plan.parameters if each.boundary == boundary.module]
    yield "  1 roles: " + (", ".join(dict.fromkeys(each.role for each in members)) or "none of its own")
    yield "  2 group: " + (", ".join(each.name for each in members) or "the boundaries inside of it")
    yield f"  3 boundary: {boundary.kind}: {TYPES[boundary.kind]}"
    yield "  4 template:"
    crossings = Crossings(plan.mesh, plan.tokens)
    for side, contracts in (("in ", boundary.inputs), ("out", boundary.outputs)):
        yield from (f"    {side} {contract_text(each, crossings)}" for each in contracts)
    region = {"opaque": "opaque: it communicates by itself and is trusted", "transparent": "transparent"}
    yield f"    region: {region.get(boundary.region, 'checked')}"
    yield f"  5 overrides: {plan.overrides.get(boundary.module, 'none')}"
    yield f"  6 lint: {_PASSED}"
    if boundary.note:
        yield f"  note: {boundary.note}"
