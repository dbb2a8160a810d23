"""Operators that take or put elements by their places, and those that find places."""

from __future__ import annotations

from typing import Sequence

from hyper_parallel.core.rules.call import Operand, View
from hyper_parallel.core.rules.checks import merge_cuts, only_partial, refuse_cut, refuse_partial, resolve
from hyper_parallel.core.rules.state import PARTIAL, State
from hyper_parallel.core.rules.table import RuleError, rule

ORDERS = "takes all elements of that dim into account"


@rule("embedding", "input weight")
def embedding(view: View) -> State:
    """Rows of `weight` [rows, features] for whole numbers of any shape."""
    return looked_up(view, view["weight"], 0, view["input"])


@rule("index_select", "input dim index")
@rule("take_rows", "input index dim")
def index_select(view: View) -> State:
    """The elements of a dim at the places that `index` names; its dims stand where the dim stood."""
    x = view["input"]
    return looked_up(view, x, resolve(view.get("dim", 0), x.dims), view["index"])


@rule("gather take_along_dim", "input dim index")
def gather(view: View) -> State:
    """For each element of `index` the one of `input` that stands at this place along `dim`, and beside it in others."""
    x, index = view["input"], view["index"]
    dim = resolve(view["dim"], x.dims)
    refuse_partial(view.op, [index])
    refuse_cut(view.op, x, [dim], "takes elements by their places in the whole dim")
    if x.state.is_partial:
        refuse_cut(view.op, index, range(index.dims), "takes summands at other places on other ranks")
        return PARTIAL
    merged = merge_cuts(view.op, [(x, {at: at for at in range(x.dims) if at != dim}), (index, _each(index))])
    return State() if merged is None else merged


@rule("scatter", "input dim index src reduce")
def scatter(view: View) -> State:
    """As `gather`, the other way: elements of `input` overwritten."""
    value = view["src"]
    if view.get("reduce") is not None or (not isinstance(value, Operand) and value):
        refuse_partial(view.op, view.operands)
    return _put(view, [view["input"], *([value] if isinstance(value, Operand) else [])])


@rule("scatter_add", "input dim index src")
def scatter_add(view: View) -> State:
    """Elements added to those of `input` at the places that `index` names along `dim`."""
    x, index = view["input"], view["index"]
    dim = resolve(view["dim"], x.dims)
    if index.state.cut == dim:
        refuse_cut(view.op, x, [dim], "adds to elements by their places in the whole dim")
        return _added_by_part(view, index.state.at(dim))
    return _put(view, [view["input"], view["src"]])


@rule("index_add", "input dim index source")
def index_add(view: View) -> State:
    """Slices of `source` along `dim` added to those of `input` that `index` names."""
    x, index, source = view["input"], view["index"], view["source"]
    dim = resolve(view["dim"], x.dims)
    refuse_partial(view.op, [index])
    refuse_cut(view.op, x, [dim], "adds to elements by their places in the whole dim")
    if index.state.cut is not None or source.state.cut == dim:
        return _added_by_part(view, State() if index.state.cut is None else index.state.at(dim))
    if x.state.is_partial or source.state.is_partial:
        return _summands(view, (x, source))
    beside = [(each, {at: at for at in range(x.dims) if at != dim}) for each in (x, source)]
    return merge_cuts(view.op, beside) or State()


@rule("one_hot", "input classes", constant=None)
def one_hot(view: View) -> State:
    """A new last dim with a 1 at the place that a number names."""
    ids = view["input"]
    refuse_partial(view.op, [ids])
    if view.get("classes", -1) == -1:
        refuse_cut(view.op, ids, range(ids.dims), "counts classes up to the largest number of all")
    return State() if ids.state.is_replicate else ids.state


@rule("bincount histc", "input", constant=None)
def counted(view: View) -> State:
    """How many elements there are of each kind."""
    refuse_partial(view.op, view.operands)
    if view["input"].state.cut is None:
        return State()
    if view.op == "bincount" or not (view.get("min") or view.get("max")):
        refuse_cut(
            view.op, view["input"], range(view["input"].dims), "finds the number or the bounds of its bins itself"
        )
    return PARTIAL


@rule("topk", "input k dim", constant=(1,))
@rule("sort", "input dim", constant=(1,))
@rule("kthvalue", "input k dim", constant=(1,))
def ordered(view: View) -> Sequence[State]:
    """Elements along a dim by size, and their places."""
    return [_along(view)] * 2


@rule("argsort", "input dim", constant=None)
def argsort(view: View) -> State:
    """Places of the elements along a dim, by size."""
    return _along(view)


@rule("nonzero unique", "input", constant=None)
def found(view: View) -> State:
    """What there is of a kind: as many as the values say."""
    refuse_partial(view.op, view.operands)
    for each in view.operands:
        refuse_cut(view.op, each, range(each.dims), "finds a number of elements that differs among ranks")
    return State()


@rule("masked_select", "input mask")
def masked(view: View) -> State:
    """The elements where the mask is true, as many as it has."""
    refuse_partial(view.op, [view["mask"]])
    for each in view.operands:
        refuse_cut(view.op, each, range(each.dims), "finds a number of elements that differs among ranks")
    return PARTIAL if view["input"].state.is_partial else State()


@rule("nonzero_tuple", "input", constant=None)
def found_places(view: View) -> Sequence[State]:
    """The places of what is not zero: one tensor for each dim."""
    return [found(view)] * max(view["input"].dims, 1)


@rule("searchsorted", "sorted input", constant=None)
def searchsorted(view: View) -> State:
    """Where each element of `input` would stand in the last dim of `sorted`."""
    table, x = view["sorted"], view["input"]
    refuse_partial(view.op, view.operands)
    refuse_cut(view.op, table, range(table.dims), "counts places in all of it")
    if table.dims > 1:
        refuse_cut(view.op, x, range(x.dims), "has a table of its own in each row")
    return State() if x.state.is_replicate else x.state


def looked_up(view: View, table: Operand, dim: int, index: Operand) -> State:
    """The state of what `index` takes of a table along `dim`."""
    refuse_partial(view.op, [index])
    if table.state.cut == dim == 0 and "vocabulary" in view.declared:
        refuse_cut(view.op, index, range(index.dims), "looks tokens up in a part of the vocabulary")
        return PARTIAL
    if table.state.cut == dim:
        raise RuleError(
            f"{table.name} is {table.state}: this rank holds a part of what {index.name} counts in",
            f"{table.name} as replicate or cut along another dim; of a vocabulary, a boundary of type embedding, which "
            "shifts tokens and zeroes the rows of other ranks",
        )
    if index.state.cut is None:
        return table.state if table.state.is_partial else _widened(table, dim, index)
    if not table.state.is_replicate:
        raise RuleError(
            f"{view.op}: {table.name} is {table.state} and {index.name} is {index.state}: the result would be cut in "
            "two ways by one axis",
            f"{table.name} or {index.name} as replicate",
        )
    return index.state.at(index.state.cut + dim)


def _widened(table: Operand, dim: int, index: Operand) -> State:
    if table.state.cut is None:
        return State()
    return table.state.at(table.state.cut + (index.dims - 1 if table.state.cut > dim else 0))


def _along(view: View) -> State:
    x = view["input"]
    refuse_partial(view.op, [x])
    refuse_cut(view.op, x, [resolve(view.get("dim", -1), x.dims)], ORDERS)
    return State() if x.state.is_replicate else x.state


def _put(view: View, summed: Sequence[Operand]) -> State:
    """Elements put beside each other's places; of `summed` all are pending sums, or none."""
    x, index = view["input"], view["index"]
    dim = resolve(view["dim"], x.dims)
    refuse_partial(view.op, [index])
    for each in view.operands:
        refuse_cut(view.op, each, [dim], "puts elements at their places in the whole dim")
    if any(each.state.is_partial for each in view.operands):
        refuse_cut(view.op, index, range(index.dims), "puts summands at other places on other ranks")
        return _summands(view, summed)
    return merge_cuts(view.op, [(each, _each(each)) for each in view.operands]) or State()


def _added_by_part(view: View, wanted: State) -> State:
    """Each rank adds its own part of the elements, which lie as `wanted`, so that the sums are pending."""
    x, index = view["input"], view["index"]
    source = view.get("source", view.get("src"))
    if source.state != wanted:
        raise RuleError(
            f"{view.op}: {index.name} is {index.state} and {source.name} is {source.state}, which are different parts",
            "both cut alike, or both replicate",
        )
    if not (x.state.is_partial or x.state.zero):
        raise RuleError(
            f"{view.op}: each rank adds its own part to {x.name}, which is {x.state} and would be counted once on "
            "every rank",
            f"{x.name} of zeros, or {source.name} and {index.name} as replicate",
        )
    return PARTIAL


def _summands(view: View, summands: Sequence[Operand]) -> State:
    if not only_partial(summands):
        told = " and ".join(f"{each.name} is {each.state}" for each in summands)
        raise RuleError(
            f"{view.op}: {told}: what is not partial would be counted once on every rank", "both partial, or zeros"
        )
    return PARTIAL


def _each(operand: Operand) -> dict[int, int]:
    return {dim: dim for dim in range(operand.dims)}
