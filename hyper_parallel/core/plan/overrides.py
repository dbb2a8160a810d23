"""Pass 5: what a user decides otherwise, applied to what the other passes have found.

Entries are taken in the order of the file, field by field: a later one wins, and `auto` gives the field back.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Iterable, Mapping, Sequence

from hyper_parallel.core.errors import PlanError
from hyper_parallel.core.mesh import BATCH_AXES, DeviceMesh
from hyper_parallel.core.placement import Partial, Placement, Replicate
from hyper_parallel.core.plan.blocks import EDGES, Blocks
from hyper_parallel.core.plan.boundaries import TYPES
from hyper_parallel.core.plan.conditions import Facts
from hyper_parallel.core.plan.contracts import BoundaryPlan, ByAxis, Contract, active
from hyper_parallel.core.plan.grouping import Group
from hyper_parallel.core.plan.model import ModelDescription
from hyper_parallel.core.plan.override_file import AUTO, Entry, OverrideFile, closest, read_overrides
from hyper_parallel.core.plan.patterns import matching
from hyper_parallel.core.plan.roles import all_names
from hyper_parallel.core.plan.whole import above

_FAMILIES = ({"mlp", "up", "down"}, {"norm", "projection"}, {"experts", "moe"})
"""Types whose boundaries carry contracts of one form."""

_INNER = ("adapter", "whole")
"""Types of groups that have no boundary, or that of what else is in their module."""

LENGTH = 4096
"""Tokens of a sequence that traffic is counted for where nothing else is said."""

Fields = dict[tuple[str, ...], Any]


@dataclass(frozen=True)
class Overrides:
    """An override file, checked against a model and a mesh.

    `parameters` and `modules` hold the fields that entries set, by the name of what they are set for, `lines` the
    entries themselves as text, and `sources` where the last of them stands. `roles` are for pass 1:
    `{name: (role, who says so)}`. `regions` are modules that become boundaries, `reach` are those that each entry for
    boundaries names, by where it stands.
    """

    sequence_parallel: bool = True
    tokens: tuple[int, int] = (1, LENGTH)
    roles: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    parameters: Mapping[str, Fields] = field(default_factory=dict)
    modules: Mapping[str, Fields] = field(default_factory=dict)
    lines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    regions: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    reach: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def read(
        cls, source: Mapping[str, Any] | str | os.PathLike | None, model: ModelDescription, mesh: DeviceMesh
    ) -> Overrides:
        """Read a mapping or a YAML file; docs/overrides.md describes it.

        Raises:
            PlanError: everything that is wrong with it, a line each: the file, the entry, and what to write.
        """
        file = read_overrides(source, Facts(model, mesh))
        names = [each.name for each in all_names(model)]
        modules = list(dict.fromkeys([*model.modules, *(name.rpartition(".")[0] for name in names)]))
        found = _Applied(file, names, modules)
        tokens = _tokens(file, mesh)
        if file.problems:
            raise PlanError("\n".join(file.problems))
        wanted = file.sequence_parallel
        cut = mesh.axis_size("tensor") > 1
        return cls(
            sequence_parallel=cut if wanted is None else wanted and cut,
            tokens=tokens,
            roles=found.roles(),
            parameters=found.parameters,
            modules=found.modules,
            lines={name: tuple(lines) for name, lines in found.lines.items()},
            regions=tuple(found.regions),
            sources=found.sources,
            reach={where: tuple(modules) for where, modules in found.reach.items()},
        )

    def remembered(self) -> dict[str, str]:
        """For `ShardingPlan.overrides`: what entries applied to, and the entries on one line."""
        return {name: "; ".join(lines) for name, lines in self.lines.items()}

    def placements(self, name: str) -> Mapping[str, Placement]:
        """Placements that the user decides for one parameter."""
        fields = self.parameters.get(name, {})
        return {path[1]: value for path, value in fields.items() if path[0] == "placements" and value != AUTO}

    @cached_property
    def roles_by_hand(self) -> frozenset[str]:
        """The parameters that an entry gives another role than none."""
        return frozenset(name for name, (role, _) in self.roles.items() if role != "whole")

    def pending(self, name: str) -> tuple[str, ...] | None:
        """The axes of the model along which the user says that a whole parameter's gradient is a partial sum; None
        where nothing is said."""
        found = self.parameters.get(name, {}).get(("pending",), AUTO)
        return None if found == AUTO else found

    def is_opaque(self, module: str) -> bool:
        """Tell whether the user declares an opaque region here, which communicates by itself and is trusted."""
        return self.modules.get(module, {}).get(("kind",)) == "opaque"

    def without_types(self, modules: Iterable[str]) -> Overrides:
        """The same with the types of some modules left to the planner."""
        others = {
            module: {path: value for path, value in self.modules[module].items() if path != ("type",)}
            for module in modules
        }
        return replace(self, modules={**self.modules, **others})

    def boundary_types(self, kinds: Mapping[str, str], groups: Sequence[Group]) -> dict[str, str]:
        """Pass 3 with the types that the user decides.

        Raises:
            PlanError: a type that the roles of a group can't make.
        """
        types = dict(kinds)
        problems = []
        for each in groups:
            kind = self.modules.get(each.module, {}).get(("type",), AUTO)
            usual = types[each.module]
            if kind not in TYPES or kind == usual or usual in _INNER:
                continue
            if not any({kind, usual} <= family for family in _FAMILIES):
                problems.append(
                    f"{self.sources[each.module]}: type: {each.module} is {usual} by the roles of its parameters, and "
                    f"can't be {kind}; give {each.parameters[0]} another role, or declare a region"
                )
            types[each.module] = kind
        if problems:
            raise PlanError("\n".join(problems))
        return types

    def boundaries(
        self, plans: Sequence[BoundaryPlan], kinds: Mapping[str, str], blocks: Blocks
    ) -> tuple[list[BoundaryPlan], list[str]]:
        """Pass 4 with the contracts that the user decides, and what in them fits no boundary."""
        problems: list[str] = []
        around = _Around(self, plans, blocks)
        kept = []
        for plan in plans:
            fields = self.modules.get(plan.module)
            if not fields:
                kept.append(plan)
                continue
            kind = fields.get(("type",), AUTO)
            if kind != "none":
                changed, wrong = around.changed(plan)
                kept.append(changed)
                if kind not in (AUTO, plan.kind) and kinds.get(plan.module, _INNER[0]) in _INNER:
                    wrong.append(f"type: it follows from what is in there, and can't be {kind}; write {plan.kind}")
                problems.extend(f"{self.sources[plan.module]}: {plan.module}: {each}" for each in wrong)
        known = {plan.module for plan in plans}
        for where, modules in self.reach.items():
            if not known & set(modules):
                problems.append(f"{where}: {modules[0]} is no boundary{closest(modules[0], known)}")
        return kept, problems


class _Applied:
    """The entries of a file laid over the names of a model."""

    def __init__(self, file: OverrideFile, names: Sequence[str], modules: Sequence[str]) -> None:
        self.parameters: dict[str, Fields] = {}
        self.modules: dict[str, Fields] = {}
        self.lines: dict[str, list[str]] = {}
        self.sources: dict[str, str] = {}
        self.regions: dict[str, None] = {}
        self.reach: dict[str, list[str]] = {}
        for entry in file.entries:
            known = names if entry.section == "parameters" else modules
            what = "parameter" if entry.section == "parameters" else "module"
            found = matching(entry.pattern, known)
            if not found:
                file.problems.append(f"{entry.where}: no {what} is called so{closest(entry.pattern, known)}")
            elif entry.section == "boundaries":
                self.reach[entry.where] = found
            for name in found:
                self._apply(entry, name)

    def _apply(self, entry: Entry, name: str) -> None:
        into = self.parameters if entry.section == "parameters" else self.modules
        fields = into.setdefault(name, {})
        for path, value in entry.fields.items():
            fields[path] = value
        self.lines.setdefault(name, []).append(f"{entry.section}: {entry.text}")
        self.sources[name] = entry.where
        if entry.section == "regions":
            self.regions[name] = None

    def roles(self) -> dict[str, tuple[str, str]]:
        """The roles that are set; `none` is a parameter that stays whole."""
        found = {name: fields[("role",)] for name, fields in self.parameters.items() if ("role",) in fields}
        named = {name: "whole" if role == "none" else role for name, role in found.items() if role != AUTO}
        return {name: (role, "an override") for name, role in named.items()}


def _tokens(file: OverrideFile, mesh: DeviceMesh) -> tuple[int, int]:
    ranks = prod(mesh.axis_size(axis) for axis in BATCH_AXES)
    if file.tokens is None:
        return ranks, LENGTH
    if file.tokens[0] < ranks:
        file.problems.append(
            f"{file.origin}: tokens: {file.tokens[0]} sequence{'s' * (file.tokens[0] > 1)} for {ranks} ranks that each "
            f"take other ones; write at least [{ranks}, {file.tokens[1]}]"
        )
    return file.tokens


def with_regions(
    plans: Sequence[BoundaryPlan], regions: Sequence[str], blocks: Blocks, order: Mapping[str, int]
) -> list[BoundaryPlan]:
    """The boundaries with those of regions that are none yet: hidden states go in and out as they lie between
    them. Inside of another boundary nothing is known of what goes in and out. `order` is as from `first_parameters`."""
    plans = list(plans)
    known = {plan.module for plan in plans}
    for module in regions:
        if module not in known:
            place, streams = order.get(module, 0), blocks.streams_at(module)
            at = next((i for i, plan in enumerate(plans) if order.get(plan.module, -1) > place), len(plans))
            inner = any(each in known and blocks.streams_at(each) == streams for each in above(module))
            hidden = () if inner else (streams.contract("hidden", streams.outside, streams.outside),)
            plans.insert(at, BoundaryPlan(module, "region", hidden, hidden, "transparent"))
    return plans


class _Around:
    """The boundaries as entries change them. What a region takes and gives beside its usual contracts lies as the
    boundary around it has it, which an entry may have changed first."""

    def __init__(self, overrides: Overrides, plans: Sequence[BoundaryPlan], blocks: Blocks) -> None:
        self._fields, self._blocks = overrides.modules, blocks
        self._plans = {plan.module: plan for plan in plans if plan.kind not in EDGES}
        self._known: dict[str, tuple[BoundaryPlan, list[str]]] = {}

    def changed(self, plan: BoundaryPlan) -> tuple[BoundaryPlan, list[str]]:
        """One boundary with the fields of its entries, and which of them it can't have."""
        if plan.module not in self._known:
            self._known[plan.module] = self._change(plan, self._fields.get(plan.module, {}))
        return self._known[plan.module]

    def _change(self, plan: BoundaryPlan, fields: Fields) -> tuple[BoundaryPlan, list[str]]:
        sides, wrong = {}, []
        for side in ("inputs", "outputs"):
            mine: dict[str, Fields] = {}
            for path, value in fields.items():
                if path[0] == side:
                    mine.setdefault(path[1], {})[path[2:]] = value
            contracts = {each.name: each for each in getattr(plan, side)}
            for name, changes in mine.items():
                if name not in contracts and plan.kind != "region":
                    wrong.append(f"it has no {side[:-1]} {name!r}; write {' or '.join(contracts) or 'none'}")
                    continue
                known = contracts.get(name) or self._further(plan.module, side, name)
                contracts[name] = _contract(known, changes, active(self._blocks.streams.mesh))
            sides[side] = tuple(contracts.values())
        region = fields.get(("kind",), AUTO)
        return replace(plan, region=plan.region if region == AUTO else region, **sides), wrong

    def _further(self, module: str, side: str, name: str) -> Contract:
        """A tensor that only an entry speaks of. Hidden states come in as the boundary around the module has taken
        them, and go out as it has made them, with its gradients; other tensors lie as hidden states that come in."""
        end = side if name == "hidden" else "inputs"
        streams = self._blocks.streams_beside(module, end)
        around = next((each for each in above(module) if self._is_around(each, module, end)), None)
        lies, gradient = streams.outside, None
        for hidden in () if around is None else getattr(self._as_linted(self._plans[around]), end):
            if hidden.name == "hidden":
                taken = (hidden.after, hidden.gradient)
                lies, gradient = taken if end == "inputs" else (hidden.before, hidden.source_gradient)
        known = streams.contract(name, lies, lies)
        if name != "hidden" or gradient is None or gradient == known.gradient:
            return known
        return replace(known, gradient=gradient, gradient_before=gradient)

    def _is_around(self, outer: str, module: str, side: str) -> bool:
        taken_away = self._fields.get(outer, {}).get(("type",)) == "none"
        return outer in self._plans and not taken_away and self._blocks.holds(outer, module, side)

    def _as_linted(self, plan: BoundaryPlan) -> BoundaryPlan:
        """A boundary as lint holds what is inside of it against it: one that is checked as its template says."""
        is_trusted = self._fields.get(plan.module, {}).get(("kind",)) == "opaque"
        return self.changed(plan)[0] if is_trusted or plan.kind == "region" else plan


def _contract(contract: Contract, changes: Fields, axes: Sequence[str]) -> Contract:
    """A contract with other layouts on axes of more than one rank. Where only the tensor's is given, and another than
    the planner's, the gradient's is the usual one on that axis."""
    changes = {path: value for path, value in changes.items() if value != AUTO}
    sizes = {path[0]: value for path, value in changes.items() if len(path) == 1}
    layouts: dict[str, dict[str, Placement]] = {}
    for (side, axis), value in ((path, value) for path, value in changes.items() if len(path) == 2):
        if axis in axes:
            layouts.setdefault(side, {})[axis] = value
    gradients = (("after", "gradient", contract.gradient), ("before", "gradient_before", contract.gradient_before))
    made: dict[str, ByAxis] = {}
    for side, gradient, old in gradients:
        known, given = getattr(contract, side), layouts.get(side, {})
        made[side] = {**known, **given}
        other = {axis: each for axis, each in given.items() if each != known.get(axis, Replicate())}
        usual = {axis: Replicate() if isinstance(each, Partial) else each for axis, each in other.items()}
        if old is not None or layouts.get(gradient):
            made[gradient] = {
                **(contract.source_gradient if old is None else old),
                **usual,
                **layouts.get(gradient, {}),
            }
    return replace(contract, **sizes, **made)
