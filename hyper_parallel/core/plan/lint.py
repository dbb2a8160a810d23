"""Pass 6: everything that is wrong with a draft, at once. The rules on parameters; those on boundaries stand beside."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Iterator, Mapping, Sequence

from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement import Placement, Replicate
from hyper_parallel.core.plan.assignment import Assignment, RoleResult
from hyper_parallel.core.plan.boundaries import boundary_types, without_boundary
from hyper_parallel.core.plan.grouping import Group, group
from hyper_parallel.core.plan.lint_boundaries import lint_boundaries
from hyper_parallel.core.plan.lint_sequence import lint_sequence
from hyper_parallel.core.plan.lint_uses import lint_uses
from hyper_parallel.core.plan.lint_whole import WholeParameters
from hyper_parallel.core.plan.placing import DATA_PARALLEL, Problem, Surroundings, is_of_heads, place, with_shard
from hyper_parallel.core.plan.role_rules import ROLES
from hyper_parallel.core.plan.roles import all_names, assign_roles
from hyper_parallel.core.plan.templates import Member, scopes
from hyper_parallel.core.plan.trusted import parameters_of
from hyper_parallel.core.plan.violations import Finding, Violation, report, together
from hyper_parallel.core.plan.whole import above

if TYPE_CHECKING:
    from hyper_parallel.core.plan.derive import Draft

__all__ = ["Violation", "lint", "report"]


def lint(draft: Draft) -> list[Violation]:
    """Every violation of a draft, alike ones of many layers together."""
    whole, taken = WholeParameters(draft), list(_roles_taken(draft))
    findings = [*_axes(draft), *_unknown(draft, whole), *whole.misplaced({each.where for each in taken})]
    findings += lint_sequence(draft, {name: each for name, each in whole.places.items() if whole.stays_alone(name)})
    rules = (_pending, _problems, _groups, _placements, _tied, _partners, lint_boundaries, lint_uses)
    others = [*taken, *(finding for rule in rules for finding in rule(draft))]
    findings += [finding for finding in others if not whole.explain(finding)]
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


def _pending(draft: Draft) -> Iterator[Finding]:
    """Pending axes by hand where a role decides them, or where the parameter is cut."""
    trusted = _in_trusted_regions(draft)
    for name in draft.overrides.parameters:
        member, said = draft.members.get(name), draft.overrides.pending(name)
        if not member or said is None:
            continue
        cut = [axis for axis in said if axis in member.placed.placements]
        if name in trusted and cut:
            message = f"is cut over {_list(cut)}, where each rank has the gradient of its own part"
            yield Finding("override", name, message, name, "{pending: auto}", because=member.assignment.rule)
        elif name not in trusted and member.assignment.role != "whole":
            message = f"is {member.assignment.role}, which decides along which axes its gradient is pending"
            yield Finding("override", name, message, name, "{pending: auto}", because=member.assignment.rule)


def _in_trusted_regions(draft: Draft) -> set[str]:
    """The parameters of regions that an override declares opaque."""
    acts_in = {name: each.module for each in draft.groups for name in each.parameters}
    plans = [each for each in draft.boundaries if draft.overrides.is_opaque(each.module)]
    return {name for each in plans for name in parameters_of(each.module, acts_in, draft.boundaries)}


def _unknown(draft: Draft, whole: WholeParameters) -> Iterator[Finding]:
    """What no rule knows, and what contradicts itself. A role by hand that breaks what rules know is taken back."""
    culprits = _culprits(draft)
    for name, tried in draft.roles.unknown.items():
        if name in culprits:
            first, *more = ((each, "{role: auto}") for each in culprits[name])
            yield Finding("unknown", name, "; ".join(tried), *first, also=tuple(more))
        else:
            yield whole.unknown(name, tried)


def _culprits(draft: Draft) -> dict[str, list[str]]:
    """By the unknown names that rules would know: those of their group that have another role by hand. Not where the
    others are kept whole, and all that is left is unknown: then it is kept whole too."""
    overrides, unknown = draft.overrides, draft.roles.unknown
    if not overrides.roles or not unknown:
        return {}
    culprits: dict[str, list[str]] = {}
    for each in group(draft.model, assign_roles(draft.model)):
        by_hand = [name for name in each.parameters if name in overrides.roles]
        left = [name for name in each.parameters if name not in overrides.roles and name not in unknown]
        if by_hand and (left or overrides.roles_by_hand & set(by_hand)):
            culprits |= {name: by_hand for name in each.parameters if name in unknown}
    return culprits


def _problems(draft: Draft) -> Iterator[Finding]:
    """What pass 4 could not place. A cut that can't be made for one parameter can't be made for those around it, which
    mends what is wrong with theirs too."""
    holder, scope_of = draft.holder, scopes(draft.groups, draft.kinds, draft.members)
    wrong = [member for member in (*draft.members.values(), *_unplaced(draft)) if member.placed.problems]
    units = {}
    for name in (each.description.name for each in wrong if each.description.name in holder):
        scope = scope_of[holder[name]].block if draft.members[name].tensor != "vocabulary" else ""
        units[name] = _whole_of(scope or holder[name])
    uncut = {
        (units[each.description.name], problem.axis)
        for each in wrong
        for problem in each.placed.problems
        if problem.rule != "consistent"
    }
    for member in wrong:
        name = member.description.name
        for problem in member.placed.problems:
            by_hand = problem.rule == "consistent"
            if by_hand and (units.get(name), problem.axis) in uncut:
                continue
            fix = f"{{placements: {{{problem.axis}: {problem.fix}}}}}"
            target = name if by_hand else units[name]
            yield Finding(problem.rule, name, problem.message, target, fix, because=member.assignment.rule)


def _unplaced(draft: Draft) -> Iterator[Member]:
    """Unknown parameters that are placed by hand, as they are with the lines that give them a role: that of the rules,
    or none."""
    asked = {name: given for name in draft.roles.unknown if (given := draft.overrides.placements(name))}
    if not asked:
        return
    culprits, found = _culprits(draft), assign_roles(draft.model)
    described = {each.name: each for each in all_names(draft.model)}
    partners = {name: each.parameters for each in group(draft.model, found) for name in each.parameters}

    def placed(name: str, given: Mapping[str, Placement]) -> Member:
        none = Assignment(name, "whole", "")
        assignment = found.assignments.get(name, none) if name not in draft.roles.unknown or name in culprits else none
        return Member(
            described[name], assignment, place(described[name], assignment, Surroundings(draft.mesh, False), given)
        )

    for name, given in asked.items():
        member = placed(name, given)
        problems = [each for each in member.placed.problems if each.rule == "consistent"]
        others = [each for each in partners.get(name, ()) if each != name] if name in culprits else []
        for axis in (
            axis for axis, each in given.items() if each == Replicate() and axis in placed(name, {}).placed.placements
        ):
            cut = next(
                (each for each in others if axis in placed(each, draft.overrides.placements(each)).placed.placements),
                "",
            )
            if cut:
                problems.append(Problem("consistent", _while_cut(axis, cut), axis, "auto"))
        if member.assignment.expert is None:
            yield replace(member, placed=replace(member.placed, problems=tuple(problems)))


def _while_cut(axis: str, partner: str) -> str:
    return f"is whole over {axis}, while {partner}, which works on the same, is cut"


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
        if one.problems or two.problems:
            continue  # told for themselves, and what mends them mends this
        if dict(one.placements) != dict(two.placements):
            here, there = _told(one.placements), _told(two.placements)
            axes = [axis for axis in draft.mesh.names if one.placements.get(axis) != two.placements.get(axis)]
            whole = [axis for axis in axes if axis not in DATA_PARALLEL]
            fix = f"{{placements: {{{', '.join(f'{axis}: replicate' for axis in whole)}}}}}" if whole else ""
            name = other if any(axis in two.placements for axis in whole) else first
            message = f"is the same tensor as {first}, which is placed as {here}, and it as {there}"
        elif set(one.pending) != set(two.pending):
            name, fix = other, ""
            message = (
                f"is the same tensor as {first}, whose gradient is pending over {_list(one.pending)}, and its own over "
                f"{_list(two.pending)}"
            )
        else:
            continue
        if by_hand := [each for each in (other, first) if each in draft.overrides.roles_by_hand]:
            name, fix = by_hand[0], "{role: auto}"
        yield Finding("tied", other, message, name, fix, because=draft.members[other].assignment.rule)


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
        if any(member.placed.gathers for member in own):
            featured = [each for each in featured if not is_of_heads(each.description, each.assignment)]
        dealt = [m for m in own if m.assignment.expert_dim is not None or m.assignment.expert is not None]
        for axis, members in (("tensor", featured), ("expert", dealt)):
            cut = [member for member in members if axis in member.placed.placements]
            whole = [member for member in members if axis not in member.placed.placements]
            if cut and not any(member.placed.problems for member in members):
                for member in whole:
                    yield _alone(draft, each, member, cut[0], axis)


def _is_featured(member: Member) -> bool:
    """Works on features, heads or a vocabulary that `tensor` cuts; not so a bias that one rank adds."""
    return member.tensor in ("output", "heads", "gathered", "vocabulary") or (
        member.tensor == "input" and member.assignment.input_dim is not None
    )


def _is_few(member: Member, ranks: int) -> bool:
    """Key/value heads that are fewer than ranks, which each rank keeps."""
    heads = member.assignment.heads
    return member.assignment.role in ("key", "value") and bool(heads) and heads < ranks and ranks % heads == 0


def _alone(draft: Draft, each: Group, member: Member, partner: Member, axis: str) -> Finding:
    name = member.description.name
    message = _while_cut(axis, partner.description.name)
    if axis in draft.overrides.placements(name):
        target, fix = name, f"{{placements: {{{axis}: auto}}}}"
    else:
        target, fix = _whole_of(each.module), f"{{placements: {{{axis}: replicate}}}}"
    return Finding("consistent", name, message, target, fix, because=member.assignment.rule)


def _roles_taken(draft: Draft) -> Iterator[Finding]:
    """What an override keeps whole, although rules know it, and what it works with is cut."""
    taken = [name for name, (role, _) in draft.overrides.roles.items() if role == "whole"]
    if not taken:
        return
    found = assign_roles(draft.model)
    around = _Around(draft, found)
    for name in (each for each in taken if each in found.assignments):
        role, because = found.assignments[name].role, found.assignments[name].rule
        kind = ROLES[role]
        if kind.tensor == "vocabulary":
            message = f"is {role}, and keeps no contract with role: none"
            yield Finding("consistent", name, message, name, "{role: auto, placements: none}", because=because)
            continue
        target, fix = name, "{role: auto}"
        cut, axis = [], "tensor"
        if kind.tensor in ("output", "heads", "gathered", "input"):
            cut = around.partners(name)
        elif kind.boundary == "wide_norm":
            cut = around.attention(name)
        elif kind.boundary == "router" and kind.pending:
            axis = next((each for each in ("tensor", "expert") if around.block(name, each)), axis)
            cut = around.block(name, axis)
            if around.experts_are_whole(name):
                target, fix = _whole_of(around.blocks[around.holder[name]]), "{role: none}"
        if cut:
            if target == name and axis in draft.overrides.placements(name):
                fix = f"{{role: auto, placements: {{{axis}: auto}}}}"
            message = f"stays whole with role: none, while {cut[0]}, which works on the same, is cut over {axis}"
            yield Finding("consistent", name, message, target, fix, because=because)


class _Around:
    """What is cut around a parameter, in the groups that the rules alone make."""

    def __init__(self, draft: Draft, found: RoleResult) -> None:
        self.members, self.roles = draft.members, draft.overrides.roles
        groups = group(draft.model, found)
        groups = [replace(each, parameters=tuple(n for n in each.parameters if n in draft.members)) for each in groups]
        strange = without_boundary(groups, found)
        typed = [each for each in groups if each.parameters and not strange.keys() & set(each.parameters)]
        self.kinds = boundary_types(typed, found)
        self.groups = {each.module: each.parameters for each in groups}
        self.holder = {name: each.module for each in groups for name in each.parameters}
        scope_of = scopes(typed, self.kinds, draft.members)
        self.blocks = {module: each.block or module for module, each in scope_of.items()}

    def partners(self, name: str) -> list[str]:
        """Those of the same group that `tensor` cuts."""
        return self._cut("tensor", [self.holder[name]])

    def attention(self, name: str) -> list[str]:
        """What `tensor` cuts in the attention around a norm over all heads."""
        return self._cut("tensor", [each for each in above(name) if self.kinds.get(each) == "attention"])

    def block(self, name: str, axis: str) -> list[str]:
        """What an axis cuts in the block of experts that a router belongs to."""
        return self._cut(axis, self._in_block(name))

    def experts_are_whole(self, name: str) -> bool:
        """Tell whether an override keeps the experts of a router's block whole."""
        names = [
            each for module in self._in_block(name) if self.kinds[module] == "experts" for each in self.groups[module]
        ]
        return bool(names) and all(self.roles.get(each, ("",))[0] == "whole" for each in names)

    def _in_block(self, name: str) -> list[str]:
        block = self.blocks.get(self.holder[name])
        return [module for module, each in self.blocks.items() if each == block and module in self.groups]

    def _cut(self, axis: str, modules: Sequence[str]) -> list[str]:
        names = [name for module in modules for name in self.groups[module]]
        return [name for name in names if axis in self.members[name].placed.placements]
