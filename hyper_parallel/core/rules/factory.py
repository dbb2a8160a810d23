"""Tensors made in the likeness of others, and tensors overwritten as a whole."""

from __future__ import annotations

from typing import Sequence

from hyper_parallel.core.rules.call import Operand, View
from hyper_parallel.core.rules.checks import only_partial, refuse_partial
from hyper_parallel.core.rules.pointwise import broadcast
from hyper_parallel.core.rules.state import PARTIAL, State, constant
from hyper_parallel.core.rules.table import RuleError, rule

ZEROS = ("zeros_like", "empty_like", "new_zeros", "new_empty", "zero_")
"""Whose elements are zero, or undefined."""


@rule("zeros_like ones_like empty_like", "input", constant=None)
@rule("full_like", "input value", constant=None)
def alike(view: View) -> State:
    """One value everywhere, in the shape of another tensor. What is made like a part is a part; what is made like a
    whole tensor may be read as either."""
    x = view["input"]
    return x.state if x.state.cut is not None else constant(x.dims, _is_zero(view))


@rule("new_zeros new_ones new_empty", "input *shape", constant=None)
@rule("new_full", "input shape value", constant=None)
def new(view: View) -> State:
    """One value everywhere, in a shape of local sizes, which may therefore be read as a part of any dim."""
    shape = view["shape"]
    return constant(1 if isinstance(shape, int) else len(shape), _is_zero(view))


@rule("new_tensor", "input data", constant=None)
def made(view: View) -> State:
    """Values of the program, which are the same on every rank."""
    return State()


@rule("zero_", "input", constant=None)
@rule("fill_", "input value", constant=None)
def filled(view: View) -> State:
    """Every element overwritten by one number."""
    x, value = view["input"], view.get("value", 0)
    if isinstance(value, Operand) or (x.state.is_partial and value):
        refuse_partial(view.op, view.operands)
    return x.state if not x.state.is_replicate else constant(x.dims, _is_zero(view))


@rule("copy_", "input other", silent=("input",))
def copied(view: View) -> State:
    """Every element overwritten by those of another tensor, which is broadcast."""
    target, source = view["input"], view["other"]
    if not (target.state.is_partial or source.state.is_partial):
        return broadcast(view.op, (target, source))
    if not only_partial((target, source)):
        raise RuleError(
            f"{source.name} is {source.state} and overwrites {target.name}, which is {target.state}",
            f"a target that is {source.state}, or a new tensor in its place",
        )
    return PARTIAL


def _is_zero(view: View) -> bool:
    value = view.get("value", 0)
    return view.op in ZEROS or (view.op in ("full_like", "new_full", "fill_") and _number(value) == 0)


def _number(value: float | Operand | Sequence) -> float | None:
    return value if isinstance(value, (int, float)) else None
