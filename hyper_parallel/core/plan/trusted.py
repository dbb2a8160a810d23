"""Parameters of regions that an override declares opaque: along which axes their gradients are partial sums.

Such a region computes as its author likes, so the planner goes by what it takes in. Where the gradient of its hidden
states is a part of theirs, or a summand, the module works on a part of the tokens or of what follows, and so is the
gradient of each of its parameters a summand; where it is whole on every rank, theirs is too. `pending` of an override
says otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Iterable, Iterator, Mapping

from hyper_parallel.core.mesh import BATCH_AXES, DeviceMesh
from hyper_parallel.core.placement import Replicate
from hyper_parallel.core.plan.blocks import EDGES
from hyper_parallel.core.plan.contracts import BoundaryPlan, ByAxis, active
from hyper_parallel.core.plan.overrides import Overrides
from hyper_parallel.core.plan.placing import Placed
from hyper_parallel.core.plan.templates import Member


def settle_trusted(
    members: dict[str, Member],
    acts_in: Mapping[str, str],
    plans: Iterable[BoundaryPlan],
    planned: Iterable[BoundaryPlan],
    overrides: Overrides,
    mesh: DeviceMesh,
) -> None:
    """Give every parameter of a trusted region its pending axes, in place. Where the region takes its hidden states as
    the planner would have it, so do its parameters. `acts_in` has the module that each acts in, `planned` are the
    boundaries without overrides of contracts."""
    plans, usual = list(plans), {each.module: each for each in planned if each.kind not in EDGES}
    for plan in plans:
        if plan.kind in EDGES or not overrides.is_opaque(plan.module):
            continue
        now, before = (_gradient_taken(each) for each in (plan, usual[plan.module]))
        names = list(parameters_of(plan.module, acts_in, plans))
        shared = {members[name].linear for name in names if members[name].is_cut and members[name].tensor == "input"}
        for name in names:
            placed, said = members[name].placed, overrides.pending(name)
            axes = tuple(axis for axis in active(mesh) if _is_pending(axis, placed, now, before, said))
            if members[name].linear in shared and not members[name].is_cut:
                axes = placed.pending  # the first tensor rank adds this bias, and has its gradient
            members[name] = replace(members[name], placed=replace(placed, pending=axes))


def parameters_of(module: str, acts_in: Mapping[str, str], plans: Iterable[BoundaryPlan]) -> Iterator[str]:
    """The parameters that act in a module, or in one below it that has no boundary of its own."""
    others = {each.module for each in plans if each.kind not in EDGES} - {module}
    for name, acting in acts_in.items():
        if acting == module or (acting.startswith(f"{module}.") and acting not in others):
            yield name


def _gradient_taken(plan: BoundaryPlan) -> ByAxis:
    """How the gradient of the hidden states lies that a boundary takes in."""
    return next((each.gradient for each in plan.inputs if each.name == "hidden"), {})


def _is_pending(axis: str, placed: Placed, now: ByAxis, before: ByAxis, said: tuple[str, ...] | None) -> bool:
    if axis in BATCH_AXES or axis in placed.placements:
        return axis in placed.pending
    if said is not None:
        return axis in said
    lies, usual = (each.get(axis, Replicate()) for each in (now, before))
    return axis in placed.pending if lies == usual else lies != Replicate()
