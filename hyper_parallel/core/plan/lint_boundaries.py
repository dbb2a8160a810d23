"""Rules of lint on boundaries: what is trained acts in one, layouts are possible, and what one hands on the next takes.

Boundaries stand inside of each other as modules do. The outer ones share hidden states: each takes and hands them on as
`contracts.stream` says, or has a neighbour for another way. Inner ones take what the one around them has taken in, and
hand on what it gives away.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterator, Mapping

from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.placement import Partial, Replicate
from hyper_parallel.core.plan.blocks import EDGES, block_of, same_blocks
from hyper_parallel.core.plan.contracts import BoundaryPlan, ByAxis, Contract, active
from hyper_parallel.core.plan.lint_contracts import GIVEN_BACK, OUTER, is_given, is_trusted, lint_contracts, section
from hyper_parallel.core.plan.override_file import SIDES
from hyper_parallel.core.plan.templates import Streams
from hyper_parallel.core.plan.violations import Finding
from hyper_parallel.core.plan.whole import above

if TYPE_CHECKING:
    from hyper_parallel.core.plan.derive import Draft

Lies = tuple[str, ...]


def lint_boundaries(draft: Draft) -> Iterator[Finding]:
    """Every rule on boundaries. Where one that is needed was taken away, what else is wrong shows when it is there."""
    found = list(_findings(draft))
    missed = [each for each in found if each.fix == GIVEN_BACK and _is_taken_away(draft, each.target)]
    if not missed:
        yield from found
        return
    yield from missed
    yield from lint_boundaries(draft.with_boundaries_of({each.target for each in missed}))


def _findings(draft: Draft) -> Iterator[Finding]:
    yield from _misfits(draft)
    yield from _coverage(draft)
    impossible = _impossible(draft)
    yield from _illegal(draft, impossible)
    yield from lint_contracts(draft, impossible)
    yield from _twice(draft)
    yield from _Chain(draft).findings()


def _misfits(draft: Draft) -> Iterator[Finding]:
    for problem in draft.misfits:
        where, _, message = problem.partition(": ")
        yield Finding("override", where, message)


def _coverage(draft: Draft) -> Iterator[Finding]:
    """What is trained, or cut, acts in a boundary, unless an override keeps it whole."""
    modules = {plan.module for plan in draft.boundaries if plan.kind not in EDGES}
    holder = draft.holder
    for name, member in draft.members.items():
        needs = member.description.trainable or member.is_cut
        if not needs or member.assignment.role == "whole" or any(each in modules for each in above(name)):
            continue
        module = next((each for each in above(name) if _is_taken_away(draft, each)), holder[name])
        message = f"acts in no boundary: {module or 'the model itself'} is none"
        yield Finding("coverage", name, message, module, GIVEN_BACK, "boundaries", member.assignment.rule)


def _is_taken_away(draft: Draft, module: str) -> bool:
    return draft.overrides.modules.get(module, {}).get(("type",)) == "none"


def _impossible(draft: Draft) -> dict[tuple[str, str, str], str]:
    """Contracts, by module, side and name, with layouts that can't be, or no transition between them; and why."""
    known: dict[str, str] = {}
    found = {}
    for plan in draft.boundaries:
        for side in OUTER:
            for contract in getattr(plan, side):
                key = str(contract)
                if key not in known:
                    try:
                        contract.transition(draft.mesh, *draft.overrides.tokens)
                        known[key] = ""
                    except LayoutError as error:
                        known[key] = str(error)
                if known[key]:
                    found[plan.module, side, contract.name] = known[key]
    return found


def _illegal(draft: Draft, impossible: Mapping[tuple[str, str, str], str]) -> Iterator[Finding]:
    ends = ", ".join(f"{end}: auto" for end in SIDES)
    for (module, side, name), message in impossible.items():
        fix = f"{{{side}: {{{name}: {{{ends}}}}}}}"
        yield Finding("layout", module, f"{side[:-1]} {name}: {message}", module, fix, section(draft, module))


def _twice(draft: Draft) -> Iterator[Finding]:
    """A module that stands in its list twice has one contract, so entries speak of both places alike. Where the edges
    of the blocks give it two, `lint_sequence` tells."""
    planned, plans = ({each.module: each for each in all_} for all_ in (draft.planned, draft.boundaries))
    for block, other in same_blocks(draft.model).items():
        for module in (each for each in draft.overrides.modules if f"{each}.".startswith((f"{block}.", f"{other}."))):
            here, there = (block, other) if f"{module}.".startswith(f"{block}.") else (other, block)
            twin = there + module.removeprefix(here)
            ours, its = (_crossings(plans.get(each)) for each in (module, twin))
            is_region = module in planned and planned[module].kind == "region"
            alike = is_region or _crossings(planned.get(module)) == _crossings(planned.get(twin))
            if ours != its and alike and (here == block or twin not in draft.overrides.modules):
                message = f"is one module with {twin}, as their blocks hold the same parameters, and does otherwise"
                fix, below = _given_back(draft, module, is_region)
                yield Finding("contract", module, message, module, fix, below)


def _crossings(plan: BoundaryPlan | None) -> object:
    """What is done around a module."""
    return None if plan is None else (plan.region, plan.inputs, plan.outputs)


def _given_back(draft: Draft, module: str, is_region: bool) -> tuple[str, str]:
    """The line, and its section, that gives all that entries say of a boundary back to the planner."""
    if is_region:
        return "{type: none}", "boundaries"
    fields, below = draft.overrides.modules[module], section(draft, module)
    if fields.get(("type",)) == "none":
        return GIVEN_BACK, "boundaries"
    ends = ", ".join(f"{end}: auto" for end in SIDES)
    names = {side: dict.fromkeys(path[1] for path in fields if path[0] == side) for side in OUTER}
    parts = [f"{side}: {{{', '.join(f'{name}: {{{ends}}}' for name in own)}}}" for side, own in names.items() if own]
    if fields.get(("kind",), "auto") != "auto":
        parts, below = ["kind: auto", *parts], "regions"
    return f"{{{', '.join(parts)}}}", below


class _Chain:
    """Walks the boundaries of a draft."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.axes = active(draft.mesh)
        self.streams = Streams(draft.mesh, draft.overrides.sequence_parallel, 1)
        self.plans = {plan.module: plan for plan in draft.boundaries}
        holding = {module for module, plan in self.plans.items() if plan.kind not in EDGES}
        self.around = {
            (module, side): next(
                (each for each in above(module) if each in holding and draft.blocks.holds(each, module, side)), None
            )
            for module in self.plans
            for side in OUTER
        }
        blocks = list(dict.fromkeys(block_of(module) for module in self.plans))
        self.place = {block: number for number, block in enumerate(block for block in blocks if block)}

    def findings(self) -> Iterator[Finding]:
        """Every link that does not hold."""
        for (module, side), around in self.around.items():
            plan = self.plans[module]
            if around is None:
                yield from self._outer(plan, side)
                yield from self._sums(plan, side)
            else:
                yield from self._inner(plan, self.plans[around], side)
                yield from self._parts(plan, self.plans[around], side)
        yield from self._features()

    def lies(self, placements: ByAxis) -> Lies:
        """Placements over all active axes, as text that can be compared and shown."""
        return tuple(f"{axis}: {placements.get(axis, Replicate())}" for axis in self.axes)

    def _outer(self, plan: BoundaryPlan, side: str) -> Iterator[Finding]:
        """Hidden states between boundaries lie as they do there, or as a neighbour has them."""
        usual, end = self.lies(self._streams(plan, side).outside), OUTER[side][0]
        verb, missing = ("takes", "hands them on so") if side == "inputs" else ("hands on", "takes them so")
        other, there = ("outputs", "after") if side == "inputs" else ("inputs", "before")
        for contract in (each for each in getattr(plan, side) if each.name == "hidden"):
            layout = getattr(contract, end)
            if (found := self.lies(layout)) == usual:
                continue
            pending = any(isinstance(each, Partial) for each in layout.values())
            if pending or not any(found == self.lies(getattr(each, there)) for each in self._neighbours(plan, other)):
                missing = "adds up a pending sum" if pending and side == "outputs" else missing
                yield self._broken(plan, contract, side, end, verb, missing, usual)

    def _sums(self, plan: BoundaryPlan, side: str) -> Iterator[Finding]:
        """Nothing between modules adds up a pending sum."""
        end = OUTER[side][0]
        for contract in getattr(plan, side) if plan.module in self.draft.usual else ():
            layout = getattr(contract, end)
            if contract.name != "hidden" and any(isinstance(each, Partial) for each in layout.values()):
                message = f"has {contract.name} as ({', '.join(self.lies(layout))}), and nothing adds up a pending sum"
                yield self._finding(plan, message, side, contract.name, end)

    def _streams(self, plan: BoundaryPlan, side: str) -> Streams:
        return self.draft.blocks.streams_beside(plan.module, side)

    def _neighbours(self, plan: BoundaryPlan, side: str) -> Iterator[Contract]:
        """Hidden states of the outer boundaries in the same block, and across its edge: on the other `side`. Those
        that stand on the same side of the edges only."""
        here = self._streams(plan, "inputs" if side == "outputs" else "outputs")
        place = self.place.get(block_of(plan.module))
        for module, other in self.plans.items():
            if module == plan.module or self.around[module, side] is not None:
                continue
            if self._streams(other, side) != here:
                continue
            there = self.place.get(block_of(module))
            step = None if place is None or there is None else there - place
            if step in (None, 0, 1 if side == "inputs" else -1):
                yield from (each for each in getattr(other, side) if each.name == "hidden")

    def _broken(
        self, plan: BoundaryPlan, contract: Contract, side: str, end: str, verb: str, missing: str, usual: Lies
    ) -> Finding:
        found = ", ".join(self.lies(getattr(contract, end)))
        message = f"{verb} hidden states as ({found}), and no neighbour {missing}; they lie as ({', '.join(usual)})"
        return self._finding(plan, message, side, "hidden", end)

    def _inner(self, plan: BoundaryPlan, outer: BoundaryPlan, side: str) -> Iterator[Finding]:
        """Inside of another boundary hidden states and their gradients are what it has made of them: as its template
        says, where that is checked for itself."""
        if not is_trusted(self.draft, outer.module):
            outer = self.draft.usual.get(outer.module, outer)
        taken, given = (_hidden(each) for each in (outer.inputs, outer.outputs))
        mine = _hidden(getattr(plan, side))
        if side == "inputs" and mine and taken:
            broken = list(self._link(plan, outer, "inputs", "before", mine.before, taken.after, "takes hidden states"))
            yield from broken
            back = "gradient_before"
            if not broken or is_given(self.draft, plan.module, "inputs", "hidden", back):
                found, verb = mine.source_gradient, "gives gradients back"
                yield from self._link(plan, outer, "inputs", back, found, taken.gradient, verb)
        passes_on = plan.kind == "norm" and taken
        if side == "outputs" and mine and (passes_on or given):
            expected = taken.after if passes_on else given.before
            yield from self._link(plan, outer, "outputs", "after", mine.after, expected, "hands hidden states on")

    def _link(
        self, plan: BoundaryPlan, outer: BoundaryPlan, side: str, end: str, found: ByAxis, wanted: ByAxis, verb: str
    ) -> Iterator[Finding]:
        here, there = (", ".join(self.lies(each)) for each in (found, wanted))
        if here != there:
            message = f"{verb} as ({here}), and {outer.module}, around it, wants ({there})"
            modules = self.draft.overrides.modules
            if plan.module in modules or outer.module not in modules:
                yield self._finding(plan, message, side, "hidden", end, outer.module)
            else:
                end = {"before": "after", "gradient_before": "gradient", "after": "before"}[end]
                message = f"has ({there}) inside, and {plan.module} {verb} as ({here})"
                yield self._finding(outer, message, side, "hidden", end, outer.module)

    def _finding(
        self, plan: BoundaryPlan, message: str, side: str, name: str, end: str, outer: str | None = None
    ) -> Finding:
        taken_away = next((each for each in above(plan.module) if _is_taken_away(self.draft, each)), None)
        if taken_away is not None:
            return Finding("chain", plan.module, message, taken_away, GIVEN_BACK, "boundaries")
        if plan.module not in self.draft.overrides.modules:
            return Finding("chain", plan.module, message, *self._around_untouched(plan, outer))
        fix = f"{{{side}: {{{name}: {{{end}: auto}}}}}}"
        return Finding("chain", plan.module, message, plan.module, fix, section(self.draft, plan.module))

    def _around_untouched(self, plan: BoundaryPlan, outer: str | None) -> tuple[str, str]:
        """Pattern and line for a boundary whose contracts no entry changes: the roles around it are to blame. A router
        works on whole hidden states, and where no experts are left its block does nothing to have them so."""
        held = next((each.parameters for each in self.draft.groups if each.module == plan.module), ())
        by_hand = next((name for name in held if name in self.draft.overrides.roles_by_hand), None)
        if by_hand is not None:
            return by_hand, "{role: auto}"
        if outer is None:
            return f"{plan.module.rpartition('.')[0]}.**".lstrip("."), "{role: none}"
        return f"{outer}.**", "{placements: {tensor: replicate}}"

    def _features(self) -> Iterator[Finding]:
        """Inner features between two halves that no module holds together: what one gives the other takes."""
        ends: dict[str, list[tuple[BoundaryPlan, str, Lies]]] = {}
        for module, plan in self.plans.items():
            for side, name, found in self._handed(plan):
                if name == "features" and self.around[module, side] is None:
                    ends.setdefault(module.rpartition(".")[0], []).append((plan, side, found))
        changed = self.draft.overrides.modules
        for parts in ends.values():
            first, first_side, usual = parts[0]
            for plan, side, lies in parts[1:]:
                if lies == usual:
                    continue
                message = f"has features as ({', '.join(lies)}), and {first.module} as ({', '.join(usual)})"
                if plan.module in changed or first.module in changed:
                    culprit, at = (plan, side) if plan.module in changed else (first, first_side)
                    yield self._finding(culprit, message, at, "features", OUTER[at][0])
                else:
                    pattern = f"{plan.module}.**"
                    yield Finding("chain", plan.module, message, pattern, "{placements: {tensor: replicate}}")

    def _parts(self, plan: BoundaryPlan, outer: BoundaryPlan, side: str) -> Iterator[Finding]:
        """What else goes in and out of a part of a module lies there as the template says."""
        if plan.module not in self.draft.usual or is_trusted(self.draft, outer.module):
            return
        usual = {(at, name): lies for at, name, lies in self._handed(self.draft.usual[plan.module])}
        for name, found in ((name, lies) for at, name, lies in self._handed(plan) if at == side):
            wanted = usual.get((side, name), found)
            if name != "hidden" and found != wanted:
                message = f"has {name} as ({', '.join(found)}), and {outer.module}, around it, as ({', '.join(wanted)})"
                yield self._finding(plan, message, side, name, OUTER[side][0])

    def _handed(self, plan: BoundaryPlan) -> Iterator[tuple[str, str, Lies]]:
        """Side, name and layout of all that goes in and out."""
        for side, (end, _) in OUTER.items():
            for contract in getattr(plan, side):
                yield side, contract.name, self.lies(getattr(contract, end))


def _hidden(contracts: tuple[Contract, ...]) -> Contract | None:
    return next((each for each in contracts if each.name == "hidden"), None)
