"""Pass 6: everything that is wrong with a draft, at once. The rules on parameters; those on boundaries stand beside."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Iterator, Sequence

from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.plan.grouping import Group, group
from hyper_parallel.core.plan.lint_boundaries import lint_boundaries
from hyper_parallel.core.plan.placing import DATA_PARALLEL, with_shard
from hyper_parallel.core.plan.role_rules import ROLES
from hyper_parallel.core.plan.roles import assign_roles
from hyper_parallel.core.plan.templates import Member, scopes
from hyper_parallel.core.plan.violations import Finding, Violation, report, together

if TYPE_CHECKING:
    from hyper_parallel.core.plan.derive import Draft

__all__ = ["Violation", "lint", "report"]


def lint(draft: Draft) -> list[Violation]:
    """Every violation of a draft, alike ones of many layers together."""
    rules = (_axes, _unknown, _problems, _groups, _placements, _tied, _partners, _roles_taken, lint_boundaries)
    findings = [finding for rule in rules for finding in rule(draft)]
    modules = dict.fromkeys([*(plan.module for plan in draft.boundaries), *draft.kinds, *draft.model.modules])
    names = {
        "parameters": [*draft.members, *draft.roles.unknown],
        "boundaries": list(modules),
        "regions": list(modules),
    }
    return together(findings, names)


def _axes(draft: Draft) -> Iterator[Finding]:
    if draft.mesh.axis_size("pipeline") > 1:
        yield Finding("axis", "", f"the mesh {draft.mesh} has a pipeline, which is not planned; leave that axis out")


def _unknown(draft: Draft) -> Iterator[Finding]:
    """What no rule knows, and what contradicts itself."""
    for name, tried in draft.roles.unknown.items():
        yield Finding("unknown", name, "; ".join(tried), name, "{role: none}")


def _problems(draft: Draft) -> Iterator[Finding]:
    """What pass 4 could not place. A cut that can't be made for one parameter can't be made for those around it."""
    holder, scope_of = draft.holder, scopes(draft.groups, draft.kinds, draft.members)
    for name, member in draft.members.items():
        for problem in member.placed.problems:
            target, fix = name, problem.line.partition(": ")[2]
            if problem.rule != "consistent":
                scope = scope_of[holder[name]].block if member.tensor != "vocabulary" else ""
                target = _whole_of(scope or holder[name])
            yield Finding(problem.rule, name, problem.message, target, fix, because=member.assignment.rule)


def _whole_of(module: str) -> str:
    """The pattern of all parameters of a module."""
    return f"{module}.**" if module else "**"


def _groups(draft: Draft) -> Iterator[Finding]:
    """Every parameter in exactly one boundary."""
    counts = Counter(name for each in draft.groups for name in each.parameters)
    for name, count in counts.items():
        if count > 1:
            modules = " and ".join(each.module for each in draft.groups if name in each.parameters)
            yield Finding("one boundary", name, f"stands in {count} boundaries, {modules}; it must stand in one")


def _placements(draft: Draft) -> Iterator[Finding]:
    """Layouts that are possible, on axes that exist, cut over data axes as fully sharded data parallelism cuts."""
    seen: set[tuple] = set()
    for name, member in draft.members.items():
        placements, shape = dict(member.placed.placements), member.description.shape
        strange = [axis for axis in placements if axis not in draft.mesh.names]
        if strange:
            yield Finding("axis", name, f"is placed over {strange[0]!r}, which the mesh {draft.mesh} does not have")
            continue
        key = (tuple(placements.items()), shape)
        if key in seen:
            continue
        try:
            Layout(draft.mesh, placements, shape)
        except LayoutError as error:
            yield Finding("layout", name, str(error), name, "{placements: auto}", because=member.assignment.rule)
            continue
        others = {axis: each for axis, each in placements.items() if axis not in DATA_PARALLEL}
        usual = with_shard(member.description, others, draft.mesh)
        wrong = [axis for axis in DATA_PARALLEL if placements.get(axis) != usual.get(axis)]
        for axis in wrong:
            found, right = placements.get(axis, "replicate"), usual.get(axis, "replicate")
            message = f"{axis}: {found} is set by hand; fully sharded data parallelism makes it {right}"
            yield Finding("data parallel", name, message)
        if not wrong:
            seen.add(key)


def _tied(draft: Draft) -> Iterator[Finding]:
    """One tensor lies in one way, whatever its names."""
    for other, first in draft.model.tied.items():
        if not (other in draft.members and first in draft.members):
            continue
        one, two = draft.members[first].placed, draft.members[other].placed
        if dict(one.placements) != dict(two.placements):
            here, there = _told(one.placements), _told(two.placements)
            axes = [axis for axis in draft.mesh.names if one.placements.get(axis) != two.placements.get(axis)]
            whole = [axis for axis in axes if axis not in DATA_PARALLEL]
            fix = f"{{placements: {{{', '.join(f'{axis}: replicate' for axis in whole)}}}}}" if whole else ""
            name = other if any(axis in two.placements for axis in whole) else first
            message = f"is the same tensor as {first}, which is placed as {here}, and it as {there}"
            yield Finding("tied", other, message, name, fix, because=draft.members[other].assignment.rule)
        elif set(one.pending) != set(two.pending):
            yield Finding(
                "tied",
                other,
                f"is the same tensor as {first}, whose gradient is pending over {_list(one.pending)}, and its own over "
                f"{_list(two.pending)}",
            )


def _told(placements) -> str:
    return ", ".join(f"{axis}: {each}" for axis, each in placements.items()) or "replicate"


def _list(axes: Sequence[str]) -> str:
    return ", ".join(axes) or "no axis"


def _partners(draft: Draft) -> Iterator[Finding]:
    """What works on the same features or experts is cut alike."""
    ranks = draft.mesh.axis_size("tensor")
    for each in draft.groups:
        own = [draft.members[name] for name in each.parameters]
        featured = [member for member in own if _is_featured(member) and not _is_few(member, ranks)]
        dealt = [m for m in own if m.assignment.expert_dim is not None or m.assignment.expert is not None]
        for axis, members in (("tensor", featured), ("expert", dealt)):
            cut = [member for member in members if axis in member.placed.placements]
            whole = [member for member in members if axis not in member.placed.placements]
            if cut and not any(member.placed.problems for member in members):
                for member in whole:
                    yield _alone(draft, each, member, cut[0], axis)


def _is_featured(member: Member) -> bool:
    """Works on features, heads or a vocabulary that `tensor` cuts; not so a bias that is added after a reduction."""
    return member.tensor in ("output", "heads", "vocabulary") or (
        member.tensor == "input" and member.assignment.input_dim is not None
    )


def _is_few(member: Member, ranks: int) -> bool:
    """Key/value heads that are fewer than ranks, which each rank keeps."""
    heads = member.assignment.heads
    return member.assignment.role in ("key", "value") and bool(heads) and heads < ranks and ranks % heads == 0


def _alone(draft: Draft, each: Group, member: Member, partner: Member, axis: str) -> Finding:
    name = member.description.name
    message = f"is whole over {axis}, while {partner.description.name}, which works on the same, is cut"
    if axis in draft.overrides.placements(name):
        target, fix = name, f"{{placements: {{{axis}: auto}}}}"
    else:
        target, fix = _whole_of(each.module), f"{{placements: {{{axis}: replicate}}}}"
    return Finding("consistent", name, message, target, fix, because=member.assignment.rule)


def _roles_taken(draft: Draft) -> Iterator[Finding]:
    """What an override keeps whole, although rules know it, and others of its boundary are cut."""
    taken = [name for name, (role, _) in draft.overrides.roles.items() if role == "whole"]
    if not taken:
        return
    found = assign_roles(draft.model)
    groups = group(draft.model, found)
    partners = {name: each.parameters for each in groups for name in each.parameters}
    for name in taken:
        known = found.assignments.get(name)
        if known is None:
            continue
        if ROLES[known.role].tensor == "vocabulary":
            message = f"is {known.role}, and keeps no contract with role: none"
            yield Finding("consistent", name, message, name, "{role: auto, placements: none}", because=known.rule)
            continue
        cut = [each for each in partners[name] if each in draft.members and draft.members[each].is_cut]
        if cut and ROLES[known.role].tensor in ("output", "heads", "input"):
            message = f"stays whole with role: none, while {cut[0]}, which works on the same, is cut over tensor"
            yield Finding("consistent", name, message, name, "{role: auto}", because=known.rule)
