"""Operators that draw random numbers.

What is the same on every rank of an axis, or a pending sum, stays so only while all of them draw the same: from
generators that stand alike. Where ranks draw each for itself (`view.apart`) only what is cut can be drawn for.
"""

from __future__ import annotations

from typing import Sequence

from hyper_parallel.core.rules.call import Operand, View
from hyper_parallel.core.rules.checks import refuse_cut, refuse_partial, resolve
from hyper_parallel.core.rules.normalisation import softmax
from hyper_parallel.core.rules.state import State
from hyper_parallel.core.rules.table import RuleError, rule

_FEATURES = {"dropout1d": 2, "dropout2d": 3, "dropout3d": 4}
"""Operators that drop whole features, and the dims of one sample."""

DRAWING = frozenset(
    "dropout alpha_dropout dropout_pair feature_dropout feature_alpha_dropout bernoulli rand_like randn_like "
    "randint_like uniform_ normal_ exponential_ bernoulli_ random_ multinomial gumbel_softmax attention".split()
    + list(_FEATURES)
)
"""Operators that draw, some of them only where they are told to; see `draws`."""


def draws(op: object, arguments: dict) -> bool:
    """Tell whether a call draws random numbers, by its canonical name and arguments."""
    op = op.removesuffix("_") if isinstance(op, str) and op not in DRAWING else op
    if op not in DRAWING:
        return False
    if op == "attention":
        return bool(arguments.get("dropout"))
    return arguments.get("training") is not False and arguments.get("p") != 0


def refuse_apart(view: View, x: Operand) -> None:
    """Raise where each rank would draw other numbers for what is the same on all of them, or a pending sum."""
    if view.apart and x.state.cut is None:
        what = "a part of one sum" if x.state.is_partial else "the same"
        raise RuleError(
            f"{x.name} is {x.state}, {what} on every rank, and here each rank draws other numbers, since the module "
            "works on a part of its features or of the sequence",
            f"{x.name} as shard; or {view.op} outside of the module, or behind its last linear",
        )


def is_idle(view: View) -> bool:
    """Tell whether nothing is dropped."""
    return not view.get("training", True) or view.get("p", 0.5) == 0


@rule("dropout", "input p training")
def dropout(view: View) -> State:
    """Elements set to zero by chance; of a pending sum each rank drops the same elements of its part."""
    x = view["input"]
    if is_idle(view):
        return x.state
    refuse_apart(view, x)
    return State() if x.state.is_replicate else x.state


@rule("alpha_dropout", "input p training")
def alpha_dropout(view: View) -> State:
    """Elements set to a number that is not 0 by chance, so that no pending sum can be dropped by its parts."""
    if not is_idle(view):
        refuse_partial(view.op, [view["input"]])
    return dropout(view)


@rule("dropout1d dropout2d dropout3d feature_dropout", "input p training")
def feature_dropout(view: View) -> State:
    """All that a sample has of a feature (the dim behind it) is set to zero together, by chance. What is cut within a
    feature has to be dropped alike by all ranks, as what is whole."""
    x = view["input"]
    first = 1 if x.dims == _FEATURES.get(view.op) else 2
    if view.apart and not is_idle(view) and x.state.cut is not None and x.state.cut >= first:
        raise RuleError(
            f"{x.name} is {x.state}, so that each rank holds a part of every feature, and here each rank draws other "
            "numbers: a feature would be dropped on one rank and kept on another",
            f"{x.name} cut along samples or features, or {view.op} outside of the module",
        )
    return dropout(view)


@rule("feature_alpha_dropout", "input p training")
def feature_alpha_dropout(view: View) -> State:
    """Both."""
    if not is_idle(view):
        refuse_partial(view.op, [view["input"]])
    return feature_dropout(view)


@rule("dropout_pair", "input p", constant=(1,))
def dropout_pair(view: View) -> Sequence[State]:
    """As `dropout`, with the mask as a second result."""
    state = dropout(view)
    return [state, State() if state.is_partial else state]


@rule("bernoulli", "input", constant=None)
@rule("rand_like randn_like randint_like", "input", constant=None)
def drawn_alike(view: View) -> State:
    """Numbers for each place of a tensor."""
    x = view["input"]
    refuse_partial(view.op, [x])
    refuse_apart(view, x)
    return State() if x.state.is_replicate else x.state


@rule("uniform_ normal_ exponential_ bernoulli_ random_", "input")
def overwritten(view: View) -> State:
    """A tensor filled with numbers."""
    return drawn_alike(view)


@rule("gumbel_softmax", "input tau hard eps dim")
def gumbel_softmax(view: View) -> State:
    """Numbers drawn in proportion to each other along one dim."""
    refuse_partial(view.op, [view["input"]])
    refuse_apart(view, view["input"])
    return softmax(view)


@rule("multinomial", "input count", constant=None)
def multinomial(view: View) -> State:
    """Places in the last dim, drawn in proportion to what stands there."""
    x = view["input"]
    refuse_partial(view.op, [x])
    refuse_apart(view, x)
    refuse_cut(view.op, x, [resolve(-1, x.dims)], "needs the weights of all places")
    return State() if x.state.is_replicate else x.state
