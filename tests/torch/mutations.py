"""Ways to break a plan: every change of one parameter, one contract or one boundary that a slip could make."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Iterator

from hyper_parallel import Partial, Replicate, Shard, ShardingPlan, StridedShard
from hyper_parallel.core.placement import Placement
from hyper_parallel.core.plan.contracts import BoundaryPlan, Contract
from hyper_parallel.core.plan.plan import ParameterPlan

AXIS, OTHER = "tensor", "shard"
WHOLE = Replicate()
SIDES = ("inputs", "outputs")


@dataclass(frozen=True)
class Mutation:
    """`kind` groups them, `what` tells the change. An error has to name the module `where`, or something in it, or the
    module `to` which a boundary was moved."""

    kind: str
    what: str
    where: str
    plan: ShardingPlan
    to: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


def mutations(plan: ShardingPlan, modules: list[str]) -> Iterator[Mutation]:
    """All of them. `modules` are the names of the model's modules, to which boundaries may be moved."""
    yield from _of_parameters(plan)
    yield from _of_contracts(plan)
    yield from _of_boundaries(plan, modules)


# Parameters


def _of_parameters(plan: ShardingPlan) -> Iterator[Mutation]:
    for each in plan.parameters:
        for kind, changes in _changes_of(each, plan.mesh.axis_size(OTHER) > 1):
            parameters = tuple(replace(other, **changes) if other is each else other for other in plan.parameters)
            what = ", ".join(f"{field} {_text(value)}" for field, value in changes.items())
            module = each.name.rpartition(".")[0]
            yield Mutation(kind, f"{each.name}: {what}", module, replace(plan, parameters=parameters))


def _changes_of(each: ParameterPlan, on_two_axes: bool) -> Iterator[tuple[str, dict]]:
    found, dims = each.placements.get(AXIS), range(len(each.shape))
    if found is None:
        yield from (("cut instead of whole", _placed(each, Shard(dim))) for dim in dims)
    else:
        yield "whole instead of cut", _placed(each, None)
        yield from (("cut along another dim", _placed(each, Shard(dim))) for dim in dims if dim != found.dim)
        yield from (("split another way", _placed(each, other)) for other in _other_splits(each, found))
    if on_two_axes and each.placements.get(AXIS) != each.placements.get(OTHER):
        exchanged = {AXIS: OTHER, OTHER: AXIS}
        placements = {exchanged.get(axis, axis): placement for axis, placement in each.placements.items()}
        yield "another axis", {"placements": placements}
    if AXIS in each.pending:
        yield "sum of the gradient dropped", {"pending": ()}
        if on_two_axes:
            yield "another axis", {"pending": (OTHER,)}
    else:
        yield "sum of the gradient added", {"pending": (AXIS,)}


def _placed(each: ParameterPlan, placement: Placement | None) -> dict:
    placements = {axis: other for axis, other in each.placements.items() if axis != AXIS}
    return {"placements": placements | ({} if placement is None else {AXIS: placement})}


def _other_splits(each: ParameterPlan, found: Placement) -> Iterator[Placement]:
    blocks = getattr(found, "split_factor", 1)
    for other in {1, 2, 3} - {blocks}:
        if each.shape[found.dim] % (2 * other) == 0:
            yield Shard(found.dim) if other == 1 else StridedShard(found.dim, other)


# Contracts


def _of_contracts(plan: ShardingPlan) -> Iterator[Mutation]:
    for boundary in plan.boundaries:
        for side in SIDES:
            for number, contract in enumerate(getattr(boundary, side)):
                for kind, changes in _ends(contract, plan.mesh.axis_size(OTHER) > 1):
                    what = ", ".join(f"{end} {_text(value)}" for end, value in changes.items())
                    contracts = list(getattr(boundary, side))
                    contracts[number] = replace(contract, **changes)
                    changed = replace(boundary, **{side: tuple(contracts)})
                    told = f"{boundary.module}, {side[:-1]} {contract.name}: {what}"
                    yield Mutation(kind, told, boundary.module, _with(plan, boundary, changed))


def _ends(contract: Contract, on_two_axes: bool) -> Iterator[tuple[str, dict]]:
    if contract.dims < 3:
        return
    before, after = contract.before, contract.after
    back, gradient = contract.source_gradient, contract.gradient
    if not contract.is_trivial:
        swapped = {"before": after, "after": before, "gradient": back, "gradient_before": gradient}
        yield "ends swapped", swapped
        yield "transition dropped", {"after": before, "gradient": back}
        yield "transition dropped", {"before": after, "gradient_before": gradient}
    for end, lies, its_gradient in (("before", before, "gradient_before"), ("after", after, "gradient")):
        now = lies.get(AXIS, WHOLE)
        backward = (back if end == "before" else gradient).get(AXIS, WHOLE)
        for other in (WHOLE, Shard(1), Shard(2), Partial()):
            if other != now:
                usual = WHOLE if isinstance(other, Partial) else other
                yield f"{end} replaced", {end: {**lies, AXIS: other}, its_gradient: {**_own(lies), AXIS: usual}}
        if now == WHOLE:
            other = WHOLE if isinstance(backward, Partial) else Partial()
            yield "gradient replaced", {its_gradient: {**(back if end == "before" else gradient), AXIS: other}}
        if on_two_axes and AXIS in lies and lies.get(OTHER) != lies[AXIS]:
            yield "another axis", {end: _exchanged(lies), its_gradient: _exchanged(_own(lies))}


def _own(lies) -> dict:
    return {axis: WHOLE if isinstance(each, Partial) else each for axis, each in lies.items()}


def _exchanged(lies) -> dict:
    return {**lies, AXIS: lies.get(OTHER, WHOLE), OTHER: lies.get(AXIS, WHOLE)}


# Boundaries


def _of_boundaries(plan: ShardingPlan, modules: list[str]) -> Iterator[Mutation]:
    taken = {each.module for each in plan.boundaries}
    for boundary in plan.boundaries:
        if all(each.is_trivial for each in (*boundary.inputs, *boundary.outputs)):
            continue
        name = boundary.module
        yield Mutation("boundary dropped", name, name, _with(plan, boundary))
        for other in _near(name, modules):
            if other not in taken:
                moved = _with(plan, boundary, replace(boundary, module=other))
                yield Mutation("boundary moved", f"{name} to {other}", name, moved, other)
                both = _with(plan, boundary, boundary, replace(boundary, module=other))
                yield Mutation("boundary doubled", f"{name} at {other} too", name, both, other)
        sides = replace(boundary, inputs=boundary.outputs, outputs=boundary.inputs)
        yield Mutation("sides swapped", name, name, _with(plan, boundary, sides))


def _near(name: str, modules: list[str]) -> Iterator[str]:
    """The module around, and those just below."""
    around = name.rpartition(".")[0]
    if around:
        yield around
    yield from (each for each in modules if each.rpartition(".")[0] == name)


def _with(plan: ShardingPlan, boundary: BoundaryPlan, *instead: BoundaryPlan) -> ShardingPlan:
    boundaries = [each for other in plan.boundaries for each in (instead if other is boundary else (other,))]
    return replace(plan, boundaries=tuple(boundaries))


def _text(value) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    return "{" + ", ".join(f"{axis}: {each}" for axis, each in value.items()) + "}"
