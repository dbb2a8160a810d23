"""Contracts as states: how a tensor must lie on each side of a boundary, and how its gradient then does."""

from __future__ import annotations

from typing import Mapping, Sequence

from hyper_parallel.core.errors import ContractError
from hyper_parallel.core.placement import Partial, Placement, Replicate, Shard
from hyper_parallel.core.plan.contracts import FEATURES, SEQUENCE, ByAxis, Contract
from hyper_parallel.core.rules.state import COPIED, PARTIAL, WHOLE, State, cut


def contract_states(
    placements: ByAxis, gradient: ByAxis, axes: Sequence[str], dims: int, samples: int
) -> tuple[State, ...]:
    """One side of a contract as the states of a local tensor of `dims` dims.

    `[samples * tokens, features]` is what a model makes of `[samples, tokens, features]`; a part of each sequence is
    then strided.
    """
    return tuple(
        _state(placements.get(axis, Replicate()), gradient.get(axis, Replicate()), dims, samples) for axis in axes
    )


def _state(placement: Placement, gradient: Placement, dims: int, samples: int) -> State:
    if isinstance(placement, Partial):
        return PARTIAL
    if isinstance(placement, Replicate):
        return COPIED if isinstance(gradient, Partial) else WHOLE
    if dims == 2 and placement == Shard(SEQUENCE):
        return cut(0, samples)
    if dims == 2 and placement == Shard(FEATURES):
        return cut(1)
    return State(placement)


def check_ends(module: str, side: str, contract: Contract) -> None:
    """Raise `ContractError` where a contract gives a tensor a gradient that it can't have: that of a part is that part,
    that of a pending sum is whole, and only that of what is replicated can be a pending sum or whole."""
    ends = (("before", contract.before, contract.source_gradient), ("after", contract.after, contract.gradient))
    for end, placements, gradients in ends:
        for axis, placement in placements.items():
            legal = _legal_gradients(placement)
            gradient = gradients.get(axis, Replicate())
            if gradient not in legal:
                line = f"boundary {module}, {side} {contract.name}, {end}: {written(placements)}"
                raise ContractError(
                    f"{module}: the {side} {contract.name!r}: {end} the transition it is {placement} over {axis}, and "
                    f"its gradient is said to be {gradient}\n"
                    f"  legal: a gradient that is {' or '.join(map(str, legal))} over {axis}\n"
                    f"  plan: {line}, its gradient: {written(gradients)}"
                )


def _legal_gradients(placement: Placement) -> tuple[Placement, ...]:
    if isinstance(placement, Replicate):
        return (Replicate(), Partial())
    return (Replicate(),) if isinstance(placement, Partial) else (placement,)


def differs(found: State, expected: State, takes_part: bool) -> bool:
    """Tell whether a tensor that lies as `found` can't be taken for one that lies as `expected`."""
    if expected.cut is not None:
        return found.placement != expected.placement and expected.cut not in found.same
    if expected.is_partial:
        return not (found.is_partial or found.zero)
    return not found.is_replicate or (takes_part and found.pending != expected.pending)


def written(placements: Mapping[str, Placement]) -> str:
    """Placements as a plan file has them."""
    return "{" + ", ".join(f"{axis}: {placement}" for axis, placement in placements.items()) + "}"
