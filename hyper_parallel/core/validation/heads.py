"""Which features belong to one head, where a plan deals heads out: code that counts other heads is then refused."""

from __future__ import annotations

from hyper_parallel.core.execution.facts import Facts
from hyper_parallel.core.placement import Shard, StridedShard
from hyper_parallel.core.plan.assignment import Assignment
from hyper_parallel.core.plan.model import describe
from hyper_parallel.core.plan.plan import ParameterPlan
from hyper_parallel.core.plan.role_rules import ROLES
from hyper_parallel.core.plan.roles import assign_roles

BY_HEADS = frozenset(role for role, kind in ROLES.items() if kind.tensor == "heads")
"""Roles of which `tensor` cuts whole heads."""


def head_units(facts: Facts) -> dict[str, int]:
    """Elements of one head along the dim that `tensor` cuts, by the name of each parameter that is cut by heads.

    A plan has placements; what a head is the model's configuration tells, in the same way as it told the planner.
    """
    cut = [each for each in facts.plan.parameters if each.role in BY_HEADS and "tensor" in each.placements]
    if not cut:
        return {}
    assignments = assign_roles(describe(facts.model, facts.backend)).assignments
    found = ((each.name, assignments.get(each.name)) for each in cut)
    planned = {each.name: each for each in cut}
    units = {name: _unit(planned[name], said, facts.ranks) for name, said in found if said is not None}
    return {name: unit for name, unit in units.items() if unit > 1}


def _unit(planned: ParameterPlan, said: Assignment, ranks: int) -> int:
    """Elements of a head; 1 where the part of a rank is not made of whole heads, as where the output of a projection is
    gathered before anybody looks for heads in it."""
    placement = planned.placements["tensor"]
    if said.role != planned.role or not said.heads or not isinstance(placement, (Shard, StridedShard)):
        return 1
    blocks = getattr(placement, "split_factor", 1)
    if placement.dim != said.output_dim or blocks != max(len(said.packing), 1):
        return 1
    size, rest = divmod(planned.shape[placement.dim], blocks * said.heads)
    return 1 if rest or said.heads % ranks else size
