"""Operators that give the same elements another shape."""

from __future__ import annotations

from math import prod
from typing import Sequence

from hyper_parallel.core.rules.call import Operand, View
from hyper_parallel.core.rules.checks import refuse_cut, refuse_partial, resolve
from hyper_parallel.core.rules.reshaping import Shape, reshaped
from hyper_parallel.core.rules.state import PARTIAL, State, constant, cut
from hyper_parallel.core.rules.table import RuleError, rule


@rule("reshape", "input *shape")
def reshape(view: View) -> State:
    """The elements in their order, in dims of another number; one of them may be -1."""
    return reshaped(view["input"], view["shape"])


@rule("view_as reshape_as", "input other", silent=("other",))
def reshape_as(view: View) -> State:
    """The elements in the shape of another tensor, which is cut where they are."""
    other = view["other"]
    state = reshaped(view["input"], other.shape)
    if state.cut != other.state.cut:
        raise _other_shape(view, state, other)
    return state


@rule("flatten", "input start_dim end_dim")
def flatten(view: View) -> State:
    """Several dims made one."""
    x = view["input"]
    first, last = resolve(view.get("start_dim", 0), x.dims), resolve(view.get("end_dim", -1), x.dims)
    shape = (*x.shape[:first], prod(x.shape[first : last + 1]), *x.shape[last + 1 :])
    if x.state.cut is None:
        return reshaped(x, shape)
    place = min(x.state.cut, first) if x.state.cut <= last else x.state.cut - (last - first)
    return reshaped(x, shape, range(place, place + 1))


@rule("unflatten", "input dim sizes")
def unflatten(view: View) -> State:
    """One dim made several."""
    x, dim, sizes = view["input"], resolve(view["dim"], view["input"].dims), view["sizes"]
    shape = (*x.shape[:dim], *sizes, *x.shape[dim + 1 :])
    if x.state.cut is None:
        return reshaped(x, shape)
    more = len(sizes) - 1
    places = range(dim, dim + more + 1) if x.state.cut == dim else [x.state.cut + more * (x.state.cut > dim)]
    return reshaped(x, shape, places)


@rule("permute", "input *dims")
def permute(view: View) -> State:
    """The dims in another order."""
    x = view["input"]
    return moved(x, [resolve(dim, x.dims) for dim in view["dims"]])


@rule("transpose", "input dim0 dim1")
def transpose(view: View) -> State:
    """Two dims exchanged."""
    x = view["input"]
    order = list(range(x.dims))
    one, other = resolve(view["dim0"], x.dims), resolve(view["dim1"], x.dims)
    if order:
        order[one], order[other] = order[other], order[one]
    return moved(x, order)


@rule("transpose_all", "input")
def transpose_all(view: View) -> State:
    """All dims in the opposite order."""
    return moved(view["input"], range(view["input"].dims)[::-1])


@rule("transpose_last", "input")
def transpose_last(view: View) -> State:
    """The last two dims exchanged; a vector stays what it is."""
    x = view["input"]
    order = list(range(x.dims))
    return moved(x, order[:-2] + order[-2:][::-1])


@rule("movedim", "input source destination")
def movedim(view: View) -> State:
    """Dims moved to other places, the rest in its order."""
    x, source, target = view["input"], _several(view["source"]), _several(view["destination"])
    by_place = dict(zip((resolve(dim, x.dims) for dim in target), (resolve(dim, x.dims) for dim in source)))
    rest = iter(dim for dim in range(x.dims) if dim not in by_place.values())
    return moved(x, [by_place[place] if place in by_place else next(rest) for place in range(x.dims)])


@rule("unsqueeze", "input dim")
def unsqueeze(view: View) -> State:
    """A dim of size 1 more."""
    x = view["input"]
    place = resolve(view["dim"], x.dims + 1)
    return renamed(x.state, {dim: dim + (dim >= place) for dim in range(x.dims)})


@rule("squeeze", "input *dim")
def squeeze(view: View) -> State:
    """Without dims of size 1: those named, or all."""
    x, named = view["input"], _several(view.get("dim", ()))
    named = tuple(each for each in (named[0] if named and isinstance(named[0], tuple) else named) if each is not None)
    chosen = [resolve(dim, x.dims) for dim in named] if named else range(x.dims)
    gone = [dim for dim in chosen if x.dims and x.shape[dim] == 1]
    refuse_cut(view.op, x, gone, "would drop that dim, which is longer than this rank's part")
    left = [dim for dim in range(x.dims) if dim not in gone]
    return renamed(x.state, {dim: place for place, dim in enumerate(left)})


@rule("expand", "input *shape")
def expand(view: View) -> State:
    """Dims of size 1, and new ones in front, repeated; -1 leaves a dim as it is."""
    return expanded(view["input"], view["shape"])


@rule("expand_as", "input other", silent=("other",))
def expand_as(view: View) -> State:
    """Repeated to the shape of another tensor. Where that is cut the elements are so too, or are repeated."""
    x, other = view["input"], view["other"]
    state = expanded(x, other.shape)
    if state.is_replicate and other.state.cut in state.same:
        return other.state
    if state.cut != other.state.cut:
        raise _other_shape(view, state, other)
    return state


def _other_shape(view: View, state: State, other: Operand) -> RuleError:
    """What is made is not cut as the tensor is whose local shape it takes."""
    return RuleError(
        f"{view.op}: the result would be {state}, but the shape is that of {other.name}, which is {other.state}",
        f"both cut alike, or {other.name} as {state.placement}",
    )


@rule("repeat", "input *repeats")
def repeat(view: View) -> State:
    """The whole tensor several times along each dim, new ones in front included."""
    x = view["input"]
    repeats = (1,) * (x.dims - len(view["repeats"])) + view["repeats"]
    more = len(repeats) - x.dims
    if x.state.is_partial:
        return PARTIAL
    if x.state.cut is not None:
        dim = x.state.cut + more
        return cut(dim, x.state.blocks * repeats[dim], x.state.unit)
    return State(same=tuple(dim for dim in range(len(repeats)) if dim < more or x.repeats(dim - more)))


@rule("repeat_interleave", "input repeats dim")
def repeat_interleave(view: View) -> State:
    """Each element several times along a dim; without a dim, of all elements in their order."""
    x, repeats, dim = view["input"], view["repeats"], view.get("dim")
    counted = isinstance(repeats, Operand)
    if counted:
        refuse_partial(view.op, [repeats])
        refuse_cut(view.op, repeats, range(repeats.dims), "needs all numbers of repetitions")
    state = x.state if dim is not None else reshaped(x, (-1,))
    place = resolve(dim, x.dims) if dim is not None else 0
    if state.cut == place:
        if counted:
            raise RuleError(
                f"input is {x.state}, and repeats counts the elements of the whole dim",
                "one number of repetitions, or input as replicate",
            )
        unit = 1 if state.unit == 1 else state.unit * max(repeats, 1)  # repeated heads are heads of the same size
        return cut(place, state.blocks, unit)
    if state.is_replicate and dim is not None and x.shape[place] == 1 and not counted:
        return State(same=(*state.same, *([place] if place not in state.same else [])))
    return state


@rule("view_as_complex", "input")
def view_as_complex(view: View) -> State:
    """The last dim, of two elements, made one complex number."""
    x = view["input"]
    refuse_cut(view.op, x, [x.dims - 1], "makes one number of its two elements")
    return renamed(x.state, {dim: dim for dim in range(x.dims - 1)})


@rule("view_as_real", "input")
def view_as_real(view: View) -> State:
    """Complex numbers made a last dim of two elements."""
    return renamed(view["input"].state, {dim: dim for dim in range(view["input"].dims)})


@rule("diagonal", "input offset dim1 dim2")
def diagonal(view: View) -> State:
    """The diagonal of two dims as the last dim."""
    x = view["input"]
    pair = [resolve(view.get(name, default), x.dims) for name, default in (("dim1", 0), ("dim2", 1))]
    refuse_cut(view.op, x, pair, "walks along both dims at once")
    left = [dim for dim in range(x.dims) if dim not in pair]
    return renamed(x.state, {dim: place for place, dim in enumerate(left)})


def moved(x: Operand, order: Sequence[int]) -> State:
    """The state of `x` with its dims in another order."""
    return renamed(x.state, {dim: place for place, dim in enumerate(order)})


def renamed(state: State, places: dict[int, int]) -> State:
    """The state with each dim at its new place; those that `places` lacks have gone."""
    if state.cut is not None:
        return state.at(places[state.cut])
    if state.is_partial:
        return state
    return State(same=tuple(sorted(places[dim] for dim in state.same if dim in places)), zero=state.zero)


def expanded(x: Operand, shape: Shape) -> State:
    """The state of `x` repeated to a shape."""
    if x.state.is_partial:
        return PARTIAL
    more = len(shape) - x.dims
    if x.state.cut is not None:
        size = shape[x.state.cut + more]
        if size not in (-1, x.shape[x.state.cut]):
            raise RuleError(
                f"{x.name} {list(x.shape)} is {x.state}, and would be repeated to {size} along that dim: a rank would "
                "repeat its own element where all of them belong",
                f"{x.name} as replicate, or a size of {x.shape[x.state.cut]} or -1 there",
            )
        return x.state.at(x.state.cut + more)
    if x.state.zero:
        return constant(len(shape), zero=True)
    return State(same=tuple(dim for dim in range(len(shape)) if dim < more or x.repeats(dim - more)))


def _several(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)
