"""Rules of lint on contracts: what an override says of the inside of a module fits how its parameters are cut.

How activations lie where a module works on them is no choice: the cuts of its parameters decide it, and with it what
the module makes and what gradients it gives. So the inner ends of a contract (`after` and `gradient` of an input,
`before` and `gradient_before` of an output) are those of the template. Two kinds of modules are freer. A norm, a
projection or a module kept whole works on each token for itself: any tokens will do, if it hands on those that it
takes. A region that is declared opaque is trusted. How tensors lie between modules is left to `lint_boundaries`, but
not their gradients: these are the usual ones of the layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Container, Iterator

from hyper_parallel.core.placement import Partial, Replicate
from hyper_parallel.core.plan.blocks import EDGES
from hyper_parallel.core.plan.contracts import (
    FEATURES,
    BoundaryPlan,
    ByAxis,
    Contract,
    active,
    gradient_of,
    possible_gradient,
)
from hyper_parallel.core.plan.override_file import AUTO
from hyper_parallel.core.plan.placing import BY_TOKEN
from hyper_parallel.core.plan.violations import Finding
from hyper_parallel.core.plan.whole import above

if TYPE_CHECKING:
    from hyper_parallel.core.plan.derive import Draft

INNER = {"inputs": ("after", "gradient"), "outputs": ("before", "gradient_before")}
"""By side: how a module works on a tensor, and how the gradient of that lies."""

OUTER = {"inputs": ("before", "gradient_before"), "outputs": ("after", "gradient")}
"""By side: how a tensor lies between modules, and how its gradient does."""

GIVEN_BACK = "{type: auto}"
"""The line for a boundary that an override takes away."""

_OF_THE_USER = ("tokens", "logits")
"""What comes from outside of the model, or is handed to it: nobody else knows of its gradient."""

_Right = dict[str, tuple[ByAxis, str]]
"""By the end of a contract: what it must be, and why."""


def lint_contracts(draft: Draft, told: Container[tuple[str, str, str]] = ()) -> Iterator[Finding]:
    """Every rule on the inside of boundaries, but for the contracts (by module, side and name) that other rules have
    `told` of."""
    yield from _taken_away(draft)
    holding = {plan.module for plan in draft.boundaries if plan.kind not in EDGES}
    for plan in draft.boundaries:
        template = None if is_trusted(draft, plan.module) else draft.usual.get(plan.module)
        if plan is template:
            continue
        is_inside = any(
            each in holding and draft.blocks.holds(each, plan.module, "inputs") for each in above(plan.module)
        )
        for side in INNER:
            for contract in (each for each in getattr(plan, side) if (plan.module, side, each.name) not in told):
                linked = is_inside and side == "inputs" and contract.name == "hidden"  # the chain compares its gradient
                yield from _ends(draft, plan, template, side, contract, linked)


def is_trusted(draft: Draft, module: str) -> bool:
    """Tell whether an override declares an opaque region here, which communicates by itself."""
    return draft.overrides.is_opaque(module)


def is_given(draft: Draft, module: str, *way: str) -> bool:
    """Tell whether an override speaks of one end of a contract: `way` is its side, name and end."""
    fields = draft.overrides.modules.get(module, {})
    return any(path[:3] == way and value != AUTO for path, value in fields.items())


def lies(draft: Draft, placements: ByAxis) -> str:
    """Placements over all active axes, as text that can be compared and shown."""
    return ", ".join(f"{axis}: {placements.get(axis, Replicate())}" for axis in active(draft.mesh))


def section(draft: Draft, module: str) -> str:
    """Where a line wins over all that the file says of a module's contracts: behind the last entry for it."""
    lines = draft.overrides.lines.get(module, ("boundaries",))
    return lines[-1].partition(":")[0]


def _taken_away(draft: Draft) -> Iterator[Finding]:
    """A boundary inside of another, or at an edge of the blocks, is not missed by what is around it, but what it does
    is."""
    here = {plan.module for plan in draft.boundaries if plan.kind not in EDGES}
    for module, usual in draft.usual.items():
        if draft.overrides.modules.get(module, {}).get(("type",)) != "none":
            continue
        around = next((each for each in above(module) if each in here), None)
        if (around is None and usual.kind not in EDGES) or (around is not None and is_trusted(draft, around)):
            continue
        changes = [each for each in (*usual.inputs, *usual.outputs) if not each.is_trivial]
        if changes or usual.region == "opaque":
            done = _change(draft, changes[0]) if changes else usual.note
            inside = "" if around is None else f" inside of {around}"
            message = f"is none, and so nothing is done there{inside}; needed is: {done}"
            yield Finding("contract", module, message, module, GIVEN_BACK, "boundaries")


def _change(draft: Draft, contract: Contract) -> str:
    before, after = lies(draft, contract.before), lies(draft, contract.after)
    if before != after:
        return f"{contract.name} from ({before}) to ({after})"
    there, back = lies(draft, contract.gradient), lies(draft, contract.source_gradient)
    return f"the gradient of {contract.name} from ({there}) to ({back})"


def _ends(
    draft: Draft, plan: BoundaryPlan, template: BoundaryPlan | None, side: str, contract: Contract, linked: bool
) -> Iterator[Finding]:
    """The ends of one contract that are given, and wrong; but for the outer gradient, if it is `linked`."""
    for end, (right, why) in _right(draft, plan, template, side, contract).items():
        if linked and end == OUTER[side][1]:
            continue
        found, wanted = (lies(draft, each) for each in (_end(contract, end), right))
        if found != wanted and is_given(draft, plan.module, side, contract.name, end):
            message = f"{side[:-1]} {contract.name}: {end} is given as ({found}); {why} ({wanted})"
            fix = f"{{{side}: {{{contract.name}: {{{end}: auto}}}}}}"
            yield Finding("contract", plan.module, message, plan.module, fix, section(draft, plan.module))


def _right(draft: Draft, plan: BoundaryPlan, template: BoundaryPlan | None, side: str, contract: Contract) -> _Right:
    """What the ends of a contract must be, but the layout of the outer one."""
    (layout, gradient), (outer, outer_gradient) = INNER[side], OUTER[side]
    usual = next((each for each in getattr(template, side, ()) if each.name == contract.name), None)
    if usual is None:  # a region's: whatever it declares, if that can be
        return {end: _possible(draft, contract, at, end) for at, end in (INNER[side], OUTER[side])}
    by_token = draft.kinds.get(plan.module) in BY_TOKEN or plan.kind == "whole"
    if by_token and _hands_on_its_tokens(draft, plan):
        right = {gradient: _possible(draft, contract, layout, gradient)}
    else:
        why = f"as the parameters of this {plan.kind} are placed, it is"
        if by_token:
            why = f"both ends of a {plan.kind} have the same whole tokens and no pending sum, such as"
        right = {end: (_end(usual, end), why) for end in INNER[side]}
    if contract.name in _OF_THE_USER:
        right[outer_gradient] = _possible(draft, contract, outer, outer_gradient)
    else:
        tensor, was = _end(contract, outer), _end(usual, outer)
        same = {axis: each for axis, each in _end(usual, outer_gradient).items() if tensor.get(axis) == was.get(axis)}
        right[outer_gradient] = ({**gradient_of(tensor, pending=False), **same}, _why(draft, tensor))
    return right


def _possible(draft: Draft, contract: Contract, layout: str, gradient: str) -> tuple[ByAxis, str]:
    """The gradient that is there, as far as it can be."""
    tensor = _end(contract, layout)
    return possible_gradient(tensor, _end(contract, gradient)), _why(draft, tensor)


def _why(draft: Draft, tensor: ByAxis) -> str:
    return f"the gradient of ({lies(draft, tensor)}) is"


def _end(contract: Contract, end: str) -> ByAxis:
    """One end of a contract by its key in an override file."""
    return contract.source_gradient if end == "gradient_before" else getattr(contract, end)


def _hands_on_its_tokens(draft: Draft, plan: BoundaryPlan) -> bool:
    """Tell whether hidden states, and their gradients, lie alike where they come in and where they go out, whole tokens
    everywhere."""
    taken, made = (
        next((each for each in contracts if each.name == "hidden"), None) for contracts in (plan.inputs, plan.outputs)
    )
    if taken is None or made is None:
        return False
    cut = [dim for each in taken.after.values() for dim in getattr(each, "dims", (getattr(each, "dim", None),))]
    return (
        lies(draft, taken.after) == lies(draft, made.before)
        and lies(draft, taken.gradient) == lies(draft, made.source_gradient)
        and FEATURES not in cut
        and not any(isinstance(each, Partial) for each in taken.after.values())
    )
