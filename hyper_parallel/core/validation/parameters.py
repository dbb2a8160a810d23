"""Parameters as followed tensors: what a plan says of each, as states."""

from __future__ import annotations

from hyper_parallel.core.errors import ContractError
from hyper_parallel.core.placement import Replicate
from hyper_parallel.core.plan.plan import ParameterPlan
from hyper_parallel.core.rules.state import COPIED, PARTIAL, WHOLE, State
from hyper_parallel.core.validation.contracts import written
from hyper_parallel.core.validation.messages import PARAMETER


def line_of(parameter: ParameterPlan) -> str:
    """A parameter's line of the plan."""
    pending = ", ".join(parameter.pending)
    return f"{PARAMETER}{parameter.name}: placements: {written(parameter.placements)}, pending: [{pending}]"


def parameter_states(
    parameter: ParameterPlan, axes: tuple[str, ...], is_share: bool, unit: int = 1
) -> tuple[State, ...]:
    """How a parameter lies along each axis. With `is_share` it counts once: one rank has it, others have zeros. `unit`
    is how many elements along the dim that `tensor` cuts belong together, as those of one head.

    Raises:
        ContractError: the plan calls the gradient of a part a partial sum.
    """
    return tuple(_state(parameter, axis, is_share, unit if axis == "tensor" else 1) for axis in axes)


def _state(parameter: ParameterPlan, axis: str, is_share: bool, unit: int) -> State:
    placement, pending = parameter.placements.get(axis, Replicate()), axis in parameter.pending
    if not isinstance(placement, Replicate):
        if pending:
            raise ContractError(
                f"{parameter.name}: its gradient is said to be a partial sum over {axis}, which cuts it: each rank "
                "computes all of the gradient of its part, and the sum would mix the parts of several ranks\n"
                f"  legal: pending without {axis}\n  plan: {line_of(parameter)}"
            )
        return State(placement, unit=unit)
    if is_share and axis == "tensor":
        return PARTIAL
    return COPIED if pending else WHOLE
