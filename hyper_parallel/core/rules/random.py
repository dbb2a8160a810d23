"""Operators that draw random numbers.

A part of a tensor may draw what it likes. What is the same on every rank stays so only while all ranks of the axis
draw the same, from generators of one seed that have drawn as often.
"""

from __future__ import annotations

from typing import Sequence

from hyper_parallel.core.rules.call import View
from hyper_parallel.core.rules.checks import refuse_cut, refuse_partial, resolve
from hyper_parallel.core.rules.state import State
from hyper_parallel.core.rules.table import RuleError, rule


@rule("dropout", "input p training")
def dropout(view: View) -> State:
    """Elements set to zero by chance. A pending sum would need the same chance on every rank; its parts are dropped
    where it has been reduced."""
    x = view["input"]
    if not view.get("training", True) or view.get("p", 0.5) == 0:
        return x.state
    if x.state.is_partial:
        raise RuleError(
            "input is partial, and every rank would have to drop the same of its part",
            f"p=0, or input as replicate or shard: reduce it before {view.op}",
        )
    return State() if x.state.is_replicate else x.state


@rule("alpha_dropout", "input p training")
def alpha_dropout(view: View) -> State:
    """Elements set to a number that is not 0 by chance, so that no pending sum can be dropped by its parts."""
    if view.get("training", True) and view.get("p", 0.5) != 0:
        refuse_partial(view.op, [view["input"]])
    return dropout(view)


@rule("dropout_pair", "input p", constant=(1,))
def dropout_pair(view: View) -> Sequence[State]:
    """As `dropout`, with the mask as a second result."""
    return [dropout(view)] * 2


@rule("bernoulli", "input", constant=None)
@rule("rand_like randn_like randint_like", "input", constant=None)
def drawn_alike(view: View) -> State:
    """Numbers for each place of a tensor."""
    x = view["input"]
    refuse_partial(view.op, [x])
    return State() if x.state.is_replicate else x.state


@rule("uniform_ normal_ exponential_ bernoulli_ random_", "input")
def overwritten(view: View) -> State:
    """A tensor filled with numbers."""
    return drawn_alike(view)


@rule("multinomial", "input count", constant=None)
def multinomial(view: View) -> State:
    """Places in the last dim, drawn in proportion to what stands there."""
    x = view["input"]
    refuse_partial(view.op, [x])
    refuse_cut(view.op, x, [resolve(-1, x.dims)], "needs the weights of all places")
    return State() if x.state.is_replicate else x.state
