"""Biases behind a weight whose inputs are cut: the linear gives a summand of a sum over the tensor ranks, and the bias
counts once.

The first tensor rank adds it and the others add zeros, so it belongs to the pending sum: whatever the module's code
makes of the sum before ranks add it up (a scale, a weight for each expert, a shared expert beside) is made of the bias
too.
"""

from __future__ import annotations

from typing import Iterator

from hyper_parallel.core.backend import Tensor
from hyper_parallel.core.execution.adaptations import Adaptations
from hyper_parallel.core.execution.facts import Facts, is_cut
from hyper_parallel.core.plan.plan import ParameterPlan
from hyper_parallel.core.plan.role_rules import ROLES


def find_biases(facts: Facts, found: Adaptations) -> None:
    """Have every bias behind a cut weight added once."""
    for parameter in facts.plan.parameters:
        behind = parameter.role and ROLES[parameter.role].tensor == "input" and not is_cut(parameter)
        if behind and any(is_cut(weight) for weight in _weights_of(facts, parameter)):
            found.shares[parameter.name] = nothing_of if facts.place else all_of
            if "tensor" not in parameter.pending:
                found.problems.append(
                    f"{parameter.name}: the first tensor rank adds it, to its part of a sum, and has all of its "
                    f"gradient; found pending: [{', '.join(parameter.pending)}], which has to name tensor: make the "
                    "plan anew"
                )


def all_of(bias: Tensor) -> Tensor:
    """The share of the first tensor rank."""
    return bias


def nothing_of(bias: Tensor) -> Tensor:
    """The share of any other rank: zeros that depend on the bias, for what is recorded must be recorded on every rank,
    also where nothing else in a module takes part in autograd. Its gradient is zero here."""
    return bias * 0


def _weights_of(facts: Facts, parameter: ParameterPlan) -> Iterator[ParameterPlan]:
    """The weight that a bias belongs to, by its name."""
    owner, _, leaf = parameter.name.rpartition(".")
    weight = "weight" if leaf == "bias" else leaf.removesuffix("_bias")
    name = f"{owner}.{weight}" if owner else weight
    if weight != leaf and name in facts.uses:
        yield facts.plan[name]
