"""What an override keeps whole: which module computes with it, on which part of the tokens, and what its gradient is.

Nothing is known of such a module but that it takes hidden states and gives hidden states. So it gets all tokens of its
samples, and every rank of `tensor` and `context` computes the same: right for whatever mixes tokens, if wasteful.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Iterable, Iterator, Mapping, Sequence

from hyper_parallel.core.mesh import BATCH_AXES
from hyper_parallel.core.placement import Replicate
from hyper_parallel.core.plan.assignment import RoleResult
from hyper_parallel.core.plan.blocks import Blocks
from hyper_parallel.core.plan.contracts import BoundaryPlan, active
from hyper_parallel.core.plan.model import ModelDescription
from hyper_parallel.core.plan.names import block_of
from hyper_parallel.core.plan.placing import Placed
from hyper_parallel.core.plan.role_rules import LIST_CLASSES
from hyper_parallel.core.plan.templates import Member, Scope, Streams


@dataclass(frozen=True)
class Place:
    """Where one whole parameter acts.

    `module` is what computes with it on all tokens. Where that is "", the parameter acts `inside` of that other
    boundary, on what it works with, or, if that is "" too, on hidden states as they lie between boundaries.
    """

    module: str = ""
    inside: str = ""


def whole_places(model: ModelDescription, roles: RoleResult, kinds: Mapping[str, str]) -> dict[str, Place]:
    """The place of every name with the role `whole`.

    Its module is the outermost block, or part of one, that holds nothing else than whole parameters and is
    no list itself.
    """
    whole = [name for name, each in roles.assignments.items() if each.role == "whole"]
    if not whole:
        return {}
    others = {name for name in (*roles.assignments, *roles.unknown)} - set(whole)
    mixed = {module for name in others for module in above(name)}
    return {name: _place(name, mixed, model, kinds) for name in whole}


def acting_kinds(kinds: Mapping[str, str], scope_of: Mapping[str, Scope]) -> dict[str, str]:
    """The type of each boundary's module, blocks around experts too: also one that bare whole parameters stand in."""
    blocks = {scope.block for scope in scope_of.values() if scope.block}
    types = {module: kinds.get(module, "moe") for module in scope_of}
    return types | {block: "moe" for block in blocks if types[block] == "whole"}


def _place(name: str, mixed: set[str], model: ModelDescription, kinds: Mapping[str, str]) -> Place:
    around = next((each for each in above(name) if each and kinds.get(each, "whole") != "whole"), "")
    if around:
        return Place(inside=around)
    for module in reversed(list(above(name))):
        if block_of(module) and module not in mixed and model.modules.get(module) not in LIST_CLASSES:
            return Place(module)
    return Place()


def above(name: str) -> Iterator[str]:
    """The modules around a parameter, the innermost first, the model itself ("") last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def pending_of_whole(placed: Placed, place: Place, scope: Scope | None, streams: Streams) -> Placed:
    """Along which axes its raw gradient is a partial sum.

    The data axes always. In a module of its own neither `tensor` nor `context`, since every rank computes all of it.
    Elsewhere `context`, and `tensor` where that cuts what is around it, or the tokens.
    """
    axes = [axis for axis in active(streams.mesh) if axis in BATCH_AXES]
    if not place.module:
        cut = scope.cut if scope else streams.sequence_parallel and not place.inside
        axes += [axis for axis in active(streams.mesh) if axis == "context" or (axis == "tensor" and cut)]
    return replace(placed, pending=tuple(axes))


def with_whole(
    plans: Sequence[BoundaryPlan],
    places: Iterable[Place],
    blocks: Blocks,
    order: Mapping[str, int],
) -> list[BoundaryPlan]:
    """The boundaries with those of whole modules, each before the first that the model has after it."""
    plans = list(plans)
    for module in dict.fromkeys(place.module for place in places if place.module):
        at = next((i for i, plan in enumerate(plans) if order.get(plan.module, -1) > order[module]), len(plans))
        plans.insert(at, _boundary(module, blocks.streams_at(module)))
    return plans


def _boundary(module: str, streams: Streams) -> BoundaryPlan:
    inside = {axis: each if axis in BATCH_AXES else Replicate() for axis, each in streams.outside.items()}
    taken = streams.contract("hidden", streams.outside, inside)
    given = streams.contract("hidden", inside, streams.outside)
    return BoundaryPlan(module, "whole", (taken,), (given,), note="every rank computes all of it")


def first_parameters(names: Iterable[str]) -> dict[str, int]:
    """The number of the first parameter below each module."""
    order: dict[str, int] = {}
    for number, name in enumerate(names):
        for module in above(name):
            order.setdefault(module, number)
    return order


def settle_whole(
    members: dict[str, Member],
    places: Mapping[str, Place],
    scope_of: Mapping[str, Scope],
    blocks: Blocks,
) -> None:
    """Give every whole parameter its pending axes, in place."""
    for name, place in places.items():
        placed = pending_of_whole(members[name].placed, place, scope_of.get(place.inside), blocks.streams_at(name))
        members[name] = replace(members[name], placed=placed)
