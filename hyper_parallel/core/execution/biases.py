"""Biases behind a weight whose inputs are cut: the module's output is a pending sum, and the bias counts once.

Behind attention and feed-forward layers it is added to the sum, out of the tensor that the unit shows, so that its
gradient flows. What experts give is weighed before it is summed up, and what a shared expert beside them gives is
summed up together with that, so there the first tensor rank adds it, and the others add zeros.
"""

from __future__ import annotations

from typing import Any, Iterator

from hyper_parallel.core.backend import ParameterUse, Tensor
from hyper_parallel.core.execution.adaptations import Adaptations
from hyper_parallel.core.execution.boundary import Change
from hyper_parallel.core.execution.facts import Facts, is_cut, is_in
from hyper_parallel.core.placement import Partial
from hyper_parallel.core.plan.plan import ParameterPlan
from hyper_parallel.core.plan.role_rules import ROLES


def find_biases(facts: Facts, found: Adaptations) -> None:
    """Have every bias behind a cut weight added once."""
    for parameter in facts.plan.parameters:
        behind = parameter.role and ROLES[parameter.role].tensor == "input" and not is_cut(parameter)
        if behind and any(is_cut(weight) for weight in _weights_of(facts, parameter)):
            _add_once(facts, found, parameter)


def _weights_of(facts: Facts, parameter: ParameterPlan) -> Iterator[ParameterPlan]:
    """The weight that a bias belongs to, by its name."""
    owner, _, leaf = parameter.name.rpartition(".")
    weight = "weight" if leaf == "bias" else leaf.removesuffix("_bias")
    name = f"{owner}.{weight}" if owner else weight
    if weight != leaf and name in facts.uses:
        yield facts.plan[name]


def _add_once(facts: Facts, found: Adaptations, parameter: ParameterPlan) -> None:
    if ROLES[parameter.role].boundary == "experts" or _is_in_one_summand(facts, parameter):
        found.shares.add(parameter.name)
        if facts.place:
            for use in facts.uses[parameter.name]:
                found.show_instead(use.owner, use.attribute, _zeros(facts, parameter))
        return
    for use in facts.uses[parameter.name]:
        boundary = boundary_that_adds(facts, use, parameter)
        if boundary is None:
            found.problems.append(
                f"{use.name} is added to what every tensor rank has a part of, and the sum is taken further outside, "
                f"together with others; keep its module whole: {parameter.boundary}.**: "
                "{placements: {tensor: replicate}}"
            )
            continue
        place = found.show_instead(use.owner, use.attribute, _nothing(facts, use, parameter))
        found.handed_on.setdefault(boundary, []).append(_addition(facts, use, place))


def _is_in_one_summand(facts: Facts, parameter: ParameterPlan) -> bool:
    """Tell whether a boundary further outside makes the sum, and the plan has one rank make all of the gradient."""
    beyond = all(boundary_that_adds(facts, use, parameter) is None for use in facts.uses[parameter.name])
    return beyond and "tensor" in parameter.pending


def boundary_that_adds(facts: Facts, use: ParameterUse, parameter: ParameterPlan) -> str | None:
    """The boundary whose output is the sum: that of the linear itself where it has one, else that of its module."""
    linear = use.name.rpartition(".")[0]
    for name in (linear, parameter.boundary):
        boundary = facts.boundaries.get(name)
        if boundary is not None and is_in(use.name, name) and boundary.outputs:
            contract = boundary.outputs[0]
            if contract.before.get("tensor") == Partial() != contract.after.get("tensor"):
                return name
    return None


def _nothing(facts: Facts, use: ParameterUse, parameter: ParameterPlan) -> Tensor | None:
    """What the module's code finds for its bias: none where it can do without, else zeros."""
    asks = facts.backend.modules.class_name(use.owner) == "Linear" and not hasattr(use.owner, "has_bias")
    return None if asks else _zeros(facts, parameter)


def _zeros(facts: Facts, parameter: ParameterPlan) -> Tensor:
    return facts.backend.tensors.zeros(facts.local_shape(parameter), parameter.dtype)


def _addition(facts: Facts, use: ParameterUse, place: dict[str, Any]) -> Change:
    registered = facts.backend.modules.registered

    def change(output: Tensor) -> Tensor:
        bias = place.get(use.attribute)
        return output + (registered(use.owner, use.attribute) if bias is None else bias)

    return change
