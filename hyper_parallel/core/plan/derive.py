"""The six passes, one after the other: from a description, a mesh and overrides to a plan without a violation."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Iterable, Mapping

from hyper_parallel.core.errors import PlanError
from hyper_parallel.core.host import collector_at_rest
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import BATCH_AXES, DeviceMesh
from hyper_parallel.core.placement import Placement, Replicate
from hyper_parallel.core.plan.assignment import RoleResult
from hyper_parallel.core.plan.blocks import Blocks, find_blocks
from hyper_parallel.core.plan.boundaries import boundary_types, without_boundary
from hyper_parallel.core.plan.contracts import BoundaryPlan, active
from hyper_parallel.core.plan.fully_sharded import notes_on_shards, plan_fully_sharded, units_by_parameter, units_of
from hyper_parallel.core.plan.grouping import Group, group
from hyper_parallel.core.plan.lint import lint, report
from hyper_parallel.core.plan.lint_uses import notes_on_tables
from hyper_parallel.core.plan.model import ModelDescription, ParameterDescription
from hyper_parallel.core.plan.overrides import Overrides, with_regions
from hyper_parallel.core.plan.placing import BY_TOKEN, DATA_PARALLEL, Surroundings, place, settled
from hyper_parallel.core.plan.plan import ParameterPlan, ShardingPlan
from hyper_parallel.core.plan.roles import all_names, assign_roles
from hyper_parallel.core.plan.templates import Member, Streams, boundaries, scopes
from hyper_parallel.core.plan.trusted import settle_trusted
from hyper_parallel.core.plan.whole import acting_kinds, first_parameters, settle_whole, whole_places, with_whole


@dataclass(frozen=True)
class Draft:
    """A plan in the making, with all that lint wants to know. `members` and `roles` have every name, tied ones too;
    `planned` are the boundaries as they are without overrides of contracts, `usual` the same by module without those
    that only an override declares, and `misfits` is what overrides say of boundaries that are none."""

    model: ModelDescription
    mesh: DeviceMesh
    overrides: Overrides
    roles: RoleResult
    groups: tuple[Group, ...]
    kinds: Mapping[str, str]
    members: Mapping[str, Member]
    boundaries: tuple[BoundaryPlan, ...]
    blocks: Blocks
    planned: tuple[BoundaryPlan, ...]
    usual: Mapping[str, BoundaryPlan]
    misfits: tuple[str, ...] = ()

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each name, tied and unknown ones too."""
        return {each.name: each.shape for each in all_names(self.model)}

    @cached_property
    def holder(self) -> dict[str, str]:
        """The boundary module of each name."""
        return {name: each.module for each in self.groups for name in each.parameters}

    def with_boundaries_of(self, modules: Iterable[str]) -> Draft:
        """The same as if no override took the boundaries of some modules away."""
        overrides = self.overrides.without_types(modules)
        plans, misfits = overrides.boundaries(self.planned, self.kinds, self.blocks)
        return replace(self, overrides=overrides, boundaries=tuple(plans), misfits=tuple(misfits))


@collector_at_rest()
def derive(
    model: ModelDescription, mesh: DeviceMesh, overrides: Mapping[str, Any] | str | os.PathLike | None = None
) -> ShardingPlan:
    """Plan a model on a mesh.

    Where only `replicate` and `shard` are active nothing has to be known of a parameter but its shape, and overrides
    have nothing to decide; every other axis needs its role.

    Raises:
        PlanError: every violation, with what to write into the override file.
    """
    checked = Overrides.read(overrides, model, mesh)
    if set(active(mesh)) <= set(DATA_PARALLEL):
        return plan_fully_sharded(model, mesh)
    draft = make_draft(model, mesh, checked)
    violations = lint(draft)
    if violations:
        raise PlanError(f"{model.class_name} can't be planned on {mesh}:\n{report(violations)}")
    return _plan(draft)


def make_draft(model: ModelDescription, mesh: DeviceMesh, overrides: Overrides) -> Draft:
    """Passes 1 to 5."""
    roles = assign_roles(model, overrides.roles)
    groups = group(model, roles)
    if strange := without_boundary(groups, roles):
        roles = RoleResult(
            {name: each for name, each in roles.assignments.items() if name not in strange},
            {**roles.unknown, **{name: [why] for name, why in strange.items()}},
            roles.hidden,
        )
        groups = group(model, roles)
    described = {each.name: each for each in all_names(model)}
    experts = _expert_counts(groups, roles)
    members = {}
    kinds = overrides.boundary_types(boundary_types(groups, roles), groups)
    streams = Streams(mesh, overrides.sequence_parallel, hidden_size(described.values(), roles))
    blocks = find_blocks(model, roles, streams)
    streams_at = {each.module: blocks.streams_at(each.module) for each in groups}
    for each in groups:
        around = Surroundings(mesh, streams_at[each.module].sequence_parallel, experts.get(each.module))
        members |= _placed(each, around, described, roles, overrides)
        if kinds[each.module] == "attention" and any(members[name].placed.gathers for name in each.parameters):
            members |= _placed(each, replace(around, all_heads=True), described, roles, overrides)
    scope_of = scopes(groups, kinds, members)
    for each in groups:
        for name in each.parameters:
            placed, scope = members[name].placed, scope_of[each.module]
            placed = settled(placed, roles.assignments[name], scope.cut)
            members[name] = replace(members[name], placed=placed)
    places = whole_places(model, roles, acting_kinds(kinds, scope_of))
    settle_whole(members, places, scope_of, blocks)
    order = first_parameters(described)
    usual = with_whole(boundaries(groups, kinds, members, streams_at), places.values(), blocks, order)
    usual = blocks.with_edges(with_regions(usual, overrides.regions, blocks, order))
    plans, misfits = overrides.boundaries(usual, kinds, blocks)
    acts_in = {name: each.module for each in groups for name in each.parameters}
    acts_in |= {name: place.module or place.inside for name, place in places.items()}
    _settle_by_token(members, acts_in, plans, kinds, mesh)
    settle_trusted(members, acts_in, plans, usual, overrides, mesh)
    for name in places:
        if (said := overrides.pending(name)) is not None:
            axes = tuple(axis for axis in active(mesh) if axis in BATCH_AXES or axis in said)
            members[name] = replace(members[name], placed=replace(members[name].placed, pending=axes))
    by_module = {plan.module: plan for plan in usual if plan.kind != "region"}
    return Draft(
        model=model,
        mesh=mesh,
        overrides=overrides,
        roles=roles,
        groups=groups,
        kinds=kinds,
        members=members,
        boundaries=tuple(plans),
        blocks=blocks,
        planned=tuple(usual),
        usual=by_module,
        misfits=tuple(misfits),
    )


def _placed(
    group: Group,
    around: Surroundings,
    described: Mapping[str, ParameterDescription],
    roles: RoleResult,
    overrides: Overrides,
) -> dict[str, Member]:
    """The members of one group, each placed."""
    return {
        name: Member(
            described[name],
            roles.assignments[name],
            place(described[name], roles.assignments[name], around, overrides.placements(name)),
        )
        for name in group.parameters
    }


def _settle_by_token(
    members: dict[str, Member],
    acts_in: Mapping[str, str],
    plans: Iterable[BoundaryPlan],
    kinds: Mapping[str, str],
    mesh: DeviceMesh,
) -> None:
    """What works on each token for itself sees the tokens that its contract brings: gradients of its parameters are
    partial sums along all axes that cut these, or along which the gradient comes as a partial sum. In place."""
    pending: dict[str, tuple[str, ...]] = {}
    for plan in plans:
        if kinds.get(plan.module) in BY_TOKEN or plan.kind == "whole":
            gradient = next((each.gradient for each in plan.inputs if each.name == "hidden"), {})
            pending[plan.module] = tuple(
                axis for axis in active(mesh) if gradient.get(axis, Replicate()) != Replicate()
            )
    for name, module in acts_in.items():
        if module in pending:
            members[name] = replace(members[name], placed=replace(members[name].placed, pending=pending[module]))


def hidden_size(parameters: Iterable[ParameterDescription], roles: RoleResult) -> int:
    """Width of the hidden states: what pass 1 knows, else what norms work on, else the input of attention, else 1."""
    if roles.hidden:
        return roles.hidden
    sizes = {each.name: each.shape for each in parameters}
    for role, dim in (("norm", 0), ("query", None), ("qkv", None), ("latent", None)):
        for name, assignment in roles.assignments.items():
            if assignment.role == role and sizes[name]:
                along = dim if dim is not None else assignment.input_dim
                if along is not None:
                    return sizes[name][along]
    return 1


def _expert_counts(groups: Iterable[Group], roles: RoleResult) -> dict[str, int]:
    """Number of experts in each module that holds them one by one."""
    counts: dict[str, int] = {}
    for each in groups:
        numbers = [roles.assignments[name].expert for name in each.parameters]
        if known := [number for number in numbers if number is not None]:
            counts[each.module] = max(known) + 1
    return counts


def _plan(draft: Draft) -> ShardingPlan:
    unit_of = units_by_parameter(draft.model)
    holder = draft.holder
    local_shapes = _LocalShapes(draft.mesh)
    parameters = tuple(
        _parameter(draft, each, unit_of[each.name], holder[each.name], local_shapes) for each in draft.model.parameters
    )
    return ShardingPlan(
        model_class=draft.model.class_name,
        mesh=draft.mesh,
        units=units_of(draft.model, parameters),
        parameters=parameters,
        tied=dict(draft.model.tied),
        notes=(*notes_on_shards(parameters, draft.mesh), *notes_on_tables(draft)),
        boundaries=draft.boundaries,
        sequence_parallel=draft.overrides.sequence_parallel,
        tokens=draft.overrides.tokens,
        overrides=draft.overrides.remembered(),
    )


class _LocalShapes:
    """Local shapes on the first rank, each worked out once: parameters by the thousand share a few dozen layouts."""

    def __init__(self, mesh: DeviceMesh):
        self._mesh = mesh
        self._known: dict[tuple, tuple[int, ...]] = {}

    def of(self, placements: Mapping[str, Placement], shape: tuple[int, ...]) -> tuple[int, ...]:
        key = (shape, tuple(placements.items()))
        if key not in self._known:
            self._known[key] = Layout(self._mesh, placements, shape).local_shape(self._mesh.ranks[0])
        return self._known[key]


def _parameter(
    draft: Draft, described: ParameterDescription, unit: str, boundary: str, local_shapes: _LocalShapes
) -> ParameterPlan:
    member = draft.members[described.name]
    placements = member.placed.placements
    return ParameterPlan(
        name=described.name,
        shape=described.shape,
        dtype=described.dtype,
        trainable=described.trainable,
        placements=placements,
        unit=unit,
        role=member.assignment.role,
        rule=member.assignment.rule,
        boundary=boundary,
        pending=member.placed.pending,
        local_shape=local_shapes.of(placements, described.shape),
        notes=member.placed.notes,
    )
