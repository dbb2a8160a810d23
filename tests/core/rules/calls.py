"""Calls of operators, written down without a framework."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.rules.call import Argument, call_of
from hyper_parallel.core.rules.state import WHOLE, State
from hyper_parallel.core.rules.table import infer

AXIS, RANKS = "tensor", 2


class T:
    """A tensor of a call: its local shape, how it lies along the one axis, and whether a gradient flows to it."""

    def __init__(self, *shape: int, state: State = WHOLE, dtype: str = "float32", grad: bool | None = None) -> None:
        takes_part = dtype.startswith("float") if grad is None else grad
        self.argument = Argument(shape, dtype, takes_part, (state,))


def call(op: str, declared: frozenset[str] = frozenset(), **arguments: Any):
    """The call of `op` along one axis of two ranks."""
    return call_of(op, arguments, (AXIS,), (RANKS,), lambda each: getattr(each, "argument", None), declared)


def states(op: str, declared: frozenset[str] = frozenset(), **arguments: Any) -> tuple[State, ...]:
    """What the rules say of the results of a call."""
    return tuple(state for (state,) in infer(call(op, declared, **arguments)))


def state(op: str, declared: frozenset[str] = frozenset(), **arguments: Any) -> State:
    """What the rules say of the one result of a call."""
    (only,) = states(op, declared, **arguments)
    return only
