"""What stands in the brackets of an index: numbers, slices, None, an ellipsis, masks and tensors of places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Sequence

from hyper_parallel.core.rules.call import Flag, Operand, Slice, View
from hyper_parallel.core.rules.checks import only_partial, refuse_cut, refuse_partial
from hyper_parallel.core.rules.pointwise import broadcast
from hyper_parallel.core.rules.shape import renamed
from hyper_parallel.core.rules.slicing import sliced
from hyper_parallel.core.rules.state import PARTIAL, State
from hyper_parallel.core.rules.table import RuleError, rule


class Taken(NamedTuple):
    """What an index takes.

    `state` is that of the elements taken, `dims` has, for each dim of the result, the dim of the indexed tensor that
    it comes from, None where it comes from none, `shape` the sizes; -1 where only the values of a mask tell.
    """

    state: State
    dims: tuple[int | None, ...]
    shape: tuple[int, ...]


@rule("getitem", "input index")
def getitem(view: View) -> State:
    """The elements that an index takes."""
    return take(view.op, view["input"], _entries(view), view.ranks).state


@rule("setitem_", "input index value")
def setitem(view: View) -> State:
    """Elements overwritten by a number, or by a tensor that is broadcast to them. The result is the target."""
    target, value = view["input"], view["value"]
    if (mask := _only_mask(view)) is not None:
        return broadcast(view.op, (target, mask))
    taken = take(view.op, target, _entries(view), view.ranks)
    if not isinstance(value, Operand):
        if target.state.is_partial and value:
            raise RuleError(
                f"input is partial, and {value} would be written on every rank, to be summed",
                "input as replicate or shard: reduce it first; only 0 can be written before",
            )
        return replace(target.state, same=(), zero=target.state.zero and not value)
    if target.state.is_partial or value.state.is_partial:
        return _written_partial(view, target, value)
    place = Operand("the elements", taken.shape, "", False, taken.state)
    state = broadcast(view.op, (place, value))
    if state.cut is None:
        return State()
    if target.state.cut is not None:
        return target.state
    into = taken.dims[state.cut]
    if into is None or taken.shape[state.cut] != target.shape[into]:
        raise RuleError(
            f"{value.name} is {value.state} along a dim of which {target.name} {list(target.shape)} has another size",
            f"{value.name} as replicate, or written along all of a dim",
        )
    return state.at(into)


def _only_mask(view: View) -> Operand | None:
    """The mask, with the dims of the target, where it is all of the index and a number is written: then elements are
    chosen where they are."""
    index, target = _entries(view), view["input"]
    if len(index) != 1 or not isinstance(index[0], Operand) or index[0].dtype != "bool":
        return None
    if isinstance(view["value"], Operand) or target.state.is_partial or index[0].state.is_partial:
        return None
    return index[0]._replace(shape=index[0].shape + (1,) * (target.dims - index[0].dims))


def take(op: str, x: Operand, index: Sequence[Any], ranks: int) -> Taken:
    """What an index takes of `x`, by the rules of numpy."""
    entries = _spelled_out(index, x.dims)
    chosen, basic, dim = [], [], 0
    state = x.state
    for entry in entries:
        if entry is None:
            basic.append((None, 1))
        elif isinstance(entry, Flag):
            raise RuleError(f"{op}: an index of {entry.value} is not followed", "None, for a dim of size 1 more")
        elif isinstance(entry, Operand) or type(entry) is tuple:
            covered = _covered(entry)
            refuse_cut(op, x, range(dim, dim + covered), "takes elements by their places in the whole dim")
            chosen.append((len(basic), entry))
            dim += covered
        elif isinstance(entry, Slice):
            start, length, step = _bounds(op, x, dim, entry, ranks)
            if state.cut == dim:
                state = sliced(op, x, dim, start, length, step)
            basic.append((dim, length))
            dim += 1
        else:
            refuse_cut(op, x, [dim], "takes single elements of that dim, which another rank may hold")
            dim += 1
    if not chosen:
        return _finished(state, basic)
    return _advanced(op, x, state, basic, chosen, entries)


def _entries(view: View) -> tuple:
    """What stands in the brackets, as a tuple."""
    index = view["index"]
    return index if type(index) is tuple else (index,)


def _spelled_out(index: Sequence[Any], dims: int) -> list[Any]:
    """The index with full slices in place of an ellipsis, and behind the end."""
    full = Slice(None, None, None)
    named = sum(_covered(entry) for entry in index)
    entries: list[Any] = []
    for entry in index if any(each is Ellipsis for each in index) else (*index, Ellipsis):
        entries.extend([full] * (dims - named) if entry is Ellipsis else [entry])
    return entries


def _covered(entry: Any) -> int:
    """The number of dims that an entry of an index stands for."""
    if isinstance(entry, Operand) and entry.dtype == "bool":
        return entry.dims
    return 0 if entry is None or entry is Ellipsis or isinstance(entry, Flag) else 1


def _bounds(op: str, x: Operand, dim: int, entry: Slice, ranks: int) -> tuple[int, int, int]:
    """Start, length and step of a slice. Along a cut dim a bound beyond this rank's part counts from the whole dim's
    ends, so that it has to lie beyond those."""
    size = x.shape[dim]
    for bound in (entry.start, entry.stop) if x.state.cut == dim else ():
        if bound is not None and size < abs(bound) < size * ranks:
            raise RuleError(
                f"{op}: {x.name} {list(x.shape)} is {x.state}, and the bound {bound} lies past this rank's part",
                f"{x.name} as replicate, or bounds taken from the local shape",
            )
    run = range(*slice(entry.start, entry.stop, entry.step).indices(size))
    return run.start, len(run), run.step


def _finished(state: State, basic: Sequence[tuple[int | None, int]]) -> Taken:
    dims = tuple(dim for dim, _ in basic)
    places = {dim: place for place, dim in enumerate(dims) if dim is not None}
    return Taken(renamed(state, places), dims, tuple(size for _, size in basic))


def _advanced(op: str, x: Operand, state: State, basic: list, chosen: list, entries: list) -> Taken:
    """Tensors of places are broadcast to each other, and their dims stand where the first of them stood; in front
    where something else stands between them."""
    tensors = [entry for _, entry in chosen if isinstance(entry, Operand)]
    refuse_partial(op, tensors)
    masks = [each for each in tensors if each.dtype == "bool"]
    for mask in masks:
        refuse_cut(op, mask, range(mask.dims), "takes a number of elements that differs among ranks")
    numbers = [each for each in tensors if each.dtype != "bool"]
    placed = broadcast(op, numbers) if numbers else State()
    wide = max([each.dims for each in numbers] + [1 if masks or len(chosen) > len(numbers) else 0])
    at = chosen[0][0] if _adjacent(entries) else 0
    sizes = _broadcast_sizes(numbers, wide) if not masks else [-1] * wide
    laid_out = [*basic[:at], *((None, size) for size in sizes), *basic[at:]]
    taken = _finished(state, laid_out)
    if placed.cut is None:
        return taken
    if not state.is_replicate:
        raise RuleError(
            f"{op}: {x.name} is {x.state} and the places are {placed}: the result would be cut in two dims by one axis",
            f"{x.name} or the places as replicate",
        )
    return taken._replace(state=placed.at(placed.cut + at))


def _adjacent(entries: list) -> bool:
    """Tell whether the tensors of places stand side by side. Single numbers have been taken out before."""
    left = [entry for entry in entries if not isinstance(entry, int)]
    places = [place for place, entry in enumerate(left) if isinstance(entry, Operand) or type(entry) is tuple]
    return places[-1] - places[0] == len(places) - 1


def _broadcast_sizes(tensors: Sequence[Operand], dims: int) -> list[int]:
    sizes = [1] * dims
    for each in tensors:
        for dim, size in enumerate(each.shape, dims - each.dims):
            sizes[dim] = size if sizes[dim] == 1 else sizes[dim]
    return sizes


def _written_partial(view: View, target: Operand, value: Operand) -> State:
    """Summands written into a pending sum, or into zeros."""
    if not only_partial((target, value)):
        raise RuleError(
            f"{value.name} is {value.state} and is written into {target.name}, which is {target.state}",
            "both partial, or a target of zeros",
        )
    return PARTIAL
