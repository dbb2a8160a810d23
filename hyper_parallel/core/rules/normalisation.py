"""Softmax and norms: functions of all elements along some dims, at each of them."""

from __future__ import annotations

from typing import Sequence

from hyper_parallel.core.rules.call import Operand, View
from hyper_parallel.core.rules.checks import refuse_cut, refuse_partial, resolve, resolve_all
from hyper_parallel.core.rules.pointwise import broadcast
from hyper_parallel.core.rules.state import PARTIAL, State, cut
from hyper_parallel.core.rules.table import RuleError, rule


@rule("softmax log_softmax softmin", "input dim")
def softmax(view: View) -> State:
    """Elements along one dim in proportion to each other."""
    return _normalised(view, [resolve(view.get("dim", -1), view["input"].dims)])


@rule("normalize", "input p dim")
def normalize(view: View) -> State:
    """Elements divided by their norm along some dims."""
    return _normalised(view, resolve_all(view.get("dim", 1), view["input"].dims))


@rule("layer_norm rms_norm", "input normalized_shape weight bias")
def layer_norm(view: View) -> State:
    """The last dims brought to one size, then scaled and shifted by tensors of these dims."""
    x, normalized = view["input"], view["normalized_shape"]
    count = 1 if isinstance(normalized, int) else len(normalized)
    return _normalised(view, range(x.dims - count, x.dims))


@rule("layer_norm_from", "input weight bias begin")
def layer_norm_from(view: View) -> State:
    """As `layer_norm`, over the dims from `begin` on; with the mean and the deviation as two more results."""
    x = view["input"]
    begin = resolve(view.get("begin", -1), x.dims)
    state = _normalised(view, range(begin, x.dims))
    return state, state, state


@rule("rms_norm_from", "input weight")
def rms_norm_from(view: View) -> Sequence[State]:
    """As `rms_norm`, over the dims of the weight; with the reciprocal of the root as a second result."""
    x = view["input"]
    return [_normalised(view, range(x.dims - view["weight"].dims, x.dims))] * 2


@rule("group_norm", "input groups weight bias")
def group_norm(view: View) -> State:
    """Groups of channels, which are dim 1, brought to one size."""
    return _normalised(view, range(1, view["input"].dims))


@rule("glu", "input dim")
def glu(view: View) -> State:
    """The first half of a dim times the sigmoid of the second."""
    x, dim = view["input"], resolve(view.get("dim", -1), view["input"].dims)
    refuse_partial(view.op, [x])
    if x.state.cut != dim:
        return State() if x.state.is_replicate else x.state
    if x.state.blocks % 2:
        raise RuleError(
            f"input is {x.state}, so that its halves are not the halves of the whole dim",
            f"input as strided_shard({dim}, 2)",
        )
    return cut(dim, x.state.blocks // 2, x.state.unit)


@rule("cross_entropy nll_loss", "input target weight ignore_index reduction label_smoothing")
def cross_entropy(view: View) -> State:
    """Losses of rows of classes, which are dim 1 (0 where there is one row)."""
    x, target = view["input"], view["target"]
    refuse_partial(view.op, view.operands)
    classes = 1 if x.dims > 1 else 0
    if x.state.cut == classes:
        raise RuleError(
            f"input is {x.state}: each rank holds a part of the classes, but their probabilities need all of them",
            "hyper_parallel.cross_entropy, which keeps them cut; or input as replicate",
        )
    _check_rows(view, x, target, classes)
    reduction = view.get("reduction") or "mean"
    if x.state.cut is None and target.state.cut is None:
        return State()
    if reduction == "none":
        return target.state
    if reduction == "sum":
        return PARTIAL
    raise RuleError(
        f"input is {x.state}, and the mean over its rows would be that of this rank's part",
        'reduction="sum", which is then partial, divided by the number of all targets; or input as replicate',
    )


def _check_rows(view: View, x: Operand, target: Operand, classes: int) -> None:
    """Rows and targets are cut alike, and the weights of classes are whole."""
    weight = view.get("weight")
    if weight is not None:
        refuse_cut(view.op, weight, [0], "needs the weights of all classes")
    if target.dims < x.dims:
        rows = target._replace(shape=(*target.shape[:classes], 1, *target.shape[classes:]), state=State())
        if target.state.cut is not None:
            rows = rows._replace(state=target.state.at(target.state.cut + (target.state.cut >= classes)))
    else:
        rows = target
    broadcast(view.op, (x, rows))


def _normalised(view: View, dims: Sequence[int]) -> State:
    """The state of the input, when it is whole along the dims; what it is scaled by is whole too."""
    x = view["input"]
    refuse_partial(view.op, view.operands)
    refuse_cut(view.op, x, dims, "needs all elements along that dim")
    for each in view.operands:
        if each is not x:
            refuse_cut(view.op, each, range(each.dims), "applies it to all elements of a dim")
    return State(same=tuple(dim for dim in x.state.same if dim not in dims)) if x.state.is_replicate else x.state
