"""Operators that bring the elements along some dims together."""

from __future__ import annotations

from typing import Sequence

from hyper_parallel.core.rules.call import Operand, View
from hyper_parallel.core.rules.checks import merge_cuts, only_partial, refuse_cut, refuse_partial, resolve, resolve_all
from hyper_parallel.core.rules.state import PARTIAL, State
from hyper_parallel.core.rules.table import RuleError, rule

EXTREMA = "amax amin logsumexp prod var std norm"
TRUTHS = "all any count_nonzero argmax argmin"
ALONG = "cumprod cummax cummin logcumsumexp"


@rule("sum", "input dim keepdim")
def summed(view: View) -> State:
    """Each rank sums up its own part."""
    x, dims = view["input"], resolve_all(view.get("dim"), view["input"].dims)
    if x.state.is_partial or x.state.cut in dims:
        return PARTIAL
    return _reduced(x, dims, view.get("keepdim", False))


@rule("mean", "input dim keepdim")
def mean(view: View) -> State:
    """The mean of a part is not the mean."""
    x, dims = view["input"], resolve_all(view.get("dim"), view["input"].dims)
    if x.state.is_partial:
        return PARTIAL
    if x.state.cut in dims:
        raise RuleError(
            f"input is {x.state}, and the mean along that dim would be that of this rank's part",
            "input as replicate; or the sum, which is then partial, divided by the whole length",
        )
    return _reduced(x, dims, view.get("keepdim", False))


@rule(EXTREMA, "input dim keepdim")
@rule("reduction", "input dim keepdim")
@rule(TRUTHS, "input dim keepdim", constant=None)
def reduced(view: View) -> State:
    """Any function of all elements along the dims."""
    x, dims = view["input"], resolve_all(view.get("dim"), view["input"].dims)
    refuse_partial(view.op, [x])
    refuse_cut(view.op, x, dims, "needs all elements along that dim")
    return _reduced(x, dims, view.get("keepdim", False))


@rule("std_mean", "input dim correction keepdim")
def spread(view: View) -> Sequence[State]:
    """The deviation, and the mean."""
    return [reduced(view)] * 2


@rule("max min median", "input dim keepdim", constant=(1,))
def extreme(view: View) -> State | Sequence[State]:
    """With a dim, values and their places along it; without, one value."""
    state = reduced(view)
    return state if view.get("dim") is None else (state, state)


@rule("cumsum", "input dim")
def running_sum(view: View) -> State:
    """Sums of all elements so far."""
    x = view["input"]
    _refuse_along(view, x)
    return PARTIAL if x.state.is_partial else State() if x.state.is_replicate else x.state


@rule(ALONG, "input dim", constant=(1,))
def running(view: View) -> State | Sequence[State]:
    """Any function of all elements so far; an extreme comes with its place."""
    x = view["input"]
    refuse_partial(view.op, [x])
    _refuse_along(view, x)
    state = State() if x.state.is_replicate else x.state
    return (state, state) if view.op in ("cummax", "cummin") else state


@rule("diff", "input n dim prepend append")
def differences(view: View) -> State:
    """Differences of neighbours along a dim, of tensors that are joined there."""
    dim = resolve(view.get("dim", -1), view["input"].dims)
    for each in view.operands:
        refuse_cut(view.op, each, [dim], "looks at neighbours in another rank's part")
    if any(each.state.is_partial for each in view.operands):
        if not only_partial(view.operands):
            refuse_partial(view.op, view.operands)
        return PARTIAL
    beside = [(each, {at: at for at in range(each.dims) if at != dim}) for each in view.operands]
    return merge_cuts(view.op, beside) or State()


@rule("read", "input other", constant=None)
def read(view: View) -> Sequence[State]:
    """Elements that become numbers of the program, which has to go on alike on every rank."""
    refuse_partial("reading its elements", view.operands)
    for each in view.operands:
        refuse_cut(view.op, each, range(each.dims), "hands the program elements that differ among ranks")
    return ()


def _refuse_along(view: View, x: Operand) -> None:
    dim = resolve(view["dim"], x.dims)
    refuse_cut(view.op, x, [dim], "runs along that dim, from one rank's part into the next")


def _reduced(x: Operand, dims: Sequence[int], keepdim: bool) -> State:
    """The state of what is left when the dims have gone, or have one element each."""
    left = [dim for dim in range(x.dims) if keepdim or dim not in dims]
    if x.state.cut is not None:
        return x.state.at(left.index(x.state.cut))
    return State(same=tuple(left.index(dim) for dim in x.state.same if dim in left and dim not in dims))
