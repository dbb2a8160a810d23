"""Pass 3: what kind of boundary each group is, by the roles of its members."""

from __future__ import annotations

from typing import Iterable

from hyper_parallel.core.errors import PlanError
from hyper_parallel.core.plan.assignment import RoleResult
from hyper_parallel.core.plan.grouping import Group
from hyper_parallel.core.plan.role_rules import ROLES

TYPES: dict[str, str] = {
    "attention": "takes hidden states, mixes them across positions, gives hidden states",
    "mixer": "takes hidden states, mixes them across positions by a recurrence or a convolution, gives hidden states",
    "mlp": "takes hidden states through inner features to hidden states",
    "up": "hidden states to inner features: the first half of an mlp that no module holds as a whole",
    "down": "inner features to hidden states: the second half of such an mlp",
    "norm": "a norm over hidden states",
    "wide_norm": "a norm over the features of all heads, inside an attention",
    "sum_norm": "a norm over the sum of what experts give, at the end of their block",
    "embedding": "token or position indices to hidden states",
    "projection": "between the width of the embedding and that of hidden states",
    "head": "hidden states to logits",
    "router": "hidden states to scores of experts, or to a gate on the shared expert",
    "experts": "hidden states through chosen experts to hidden states; or the block that calls experts in a list",
    "moe": "a module that holds experts and the parameters of their router",
    "whole": "kept whole because an override says so",
    "entry": "the first block, where each tensor rank takes its part of the sequence",
    "exit": "the last block, after which each tensor rank has the whole sequence",
    "region": "communicates by itself, as an override declares",
}
"""Every type of boundary by its text form."""


def boundary_types(groups: Iterable[Group], roles: RoleResult) -> dict[str, str]:
    """The type of each group's module, a key of `TYPES`.

    Raises:
        PlanError: members of a group have roles that make no boundary together; lists every such group.
    """
    groups = tuple(groups)
    strange = without_boundary(groups, roles)
    if strange:
        raise PlanError("\n".join(dict.fromkeys(strange.values())))
    return {each.module: _type(each, roles) for each in groups}


def without_boundary(groups: Iterable[Group], roles: RoleResult) -> dict[str, str]:
    """The parameters whose roles make no boundary with the others of their group, and why."""
    return {
        name: f"'{each.module or 'the model itself'}' ({each.class_name}) holds {_members(each, roles)}, which make no "
        "boundary together; give parameters of one kind a module of their own, or set roles in the override file"
        for each in groups
        if _type(each, roles) is None
        for name in each.parameters
    }


def _type(group: Group, roles: RoleResult) -> str | None:
    members = {roles.assignments[name].role for name in group.parameters}
    families = {ROLES[role].boundary for role in members} - {"adapter"}
    families = families - {"whole"} or families  # what is kept whole acts inside of what else is there
    if families == {"mlp"}:
        opens, closes = bool(members - {"down", "adapter"}), "down" in members
        return "mlp" if opens and closes else "down" if closes else "up"
    if families == {"router", "experts"}:
        return "moe"
    if len(families) != 1:
        return None
    return families.pop()


def _members(group: Group, roles: RoleResult) -> str:
    """One parameter of each role, the first."""
    first = {roles.assignments[name].role: name for name in reversed(group.parameters)}
    return ", ".join(f"{role} ({first[role]})" for role in sorted(first))
