"""Axes along which every rank has samples of its own. No operator tells what is wrong there: each rank runs a model.

Whatever a plan says, nothing crosses between different samples but what the plan itself sends: parameters, their
gradients, and tokens on the way to their experts.
"""

from __future__ import annotations

from typing import Iterable, Iterator

from hyper_parallel.core.errors import ContractError
from hyper_parallel.core.execution.crossing import changed_axes
from hyper_parallel.core.mesh import BATCH_AXES
from hyper_parallel.core.placement import Replicate, Shard
from hyper_parallel.core.plan.contracts import BoundaryPlan, Contract
from hyper_parallel.core.plan.plan import ParameterPlan, ShardingPlan
from hyper_parallel.core.validation.contracts import written
from hyper_parallel.core.validation.parameters import line_of

EXPERT = "expert"
DEALT = Shard(0)
"""How packed experts are dealt out: each rank has the next ones."""


def check_samples(plan: ShardingPlan) -> None:
    """Raise `ContractError` for the first thing that a plan has wrong along axes of different samples."""
    if plan.mesh.axis_size(EXPERT) > 1:
        for problem in _parameters(plan.parameters):
            raise ContractError(problem)
    for boundary in plan.boundaries:
        for problem in _contracts(plan, boundary):
            raise ContractError(problem)


def _parameters(parameters: Iterable[ParameterPlan]) -> Iterator[str]:
    parameters = tuple(parameters)
    dealt = {each.boundary: each for each in parameters if each.placements.get(EXPERT) == DEALT}
    for each in parameters:
        placement = each.placements.get(EXPERT, Replicate())
        problem, legal = "", ""
        if isinstance(placement, Replicate):
            other = dealt.get(each.boundary)
            if other is not None and each.role.startswith(EXPERT):
                problem = f"it is replicate over expert, and {other.name} beside it is dealt out"
                legal = f"both {DEALT}, or both replicate over expert"
            elif each.trainable and EXPERT not in each.pending:
                problem = (
                    "it is replicate over expert, whose ranks have samples of their own, and nothing sums up its "
                    "gradient there"
                )
                legal = "pending with expert"
        elif placement != DEALT or not each.role.startswith(EXPERT):
            problem = f"it is {placement} over expert, along which only experts are dealt out, one after the other"
            legal = f"{DEALT} over expert for a tensor of packed experts, replicate for others"
        elif EXPERT in each.pending:
            problem = (
                "it is dealt out over expert, so each rank has the whole gradient of its experts, and their sum would "
                "mix those of several"
            )
            legal = "pending without expert"
        if problem:
            yield f"{each.name}: {problem}\n  legal: {legal}\n  plan: {line_of(each)}"


def _contracts(plan: ShardingPlan, boundary: BoundaryPlan) -> Iterator[str]:
    for side, contracts in (("input", boundary.inputs), ("output", boundary.outputs)):
        for contract in contracts:
            for axis in changed_axes(contract, plan.mesh):
                if axis in BATCH_AXES:
                    yield _crossed(boundary.module, side, contract, axis)


def _crossed(module: str, side: str, contract: Contract, axis: str) -> str:
    before, after = (each.get(axis, Replicate()) for each in (contract.before, contract.after))
    back = (each.get(axis, Replicate()) for each in (contract.source_gradient, contract.gradient))
    return (
        f"{module}: the {side} {contract.name!r}: over {axis}, whose ranks have samples of their own, it is {before} "
        f"before the transition and {after} after it, and its gradient is {' and '.join(map(str, back))}\n"
        f"  legal: the same before and after over {axis}: {Shard(0)}\n"
        f"  plan: boundary {module}, {side} {contract.name}: before: {written(contract.before)}, after: "
        f"{written(contract.after)}"
    )
