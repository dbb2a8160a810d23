"""Operators that give the same elements another shape."""

from __future__ import annotations

from math import prod
from typing import Sequence

from hyper_parallel.core.rules.call import Operand, View
from hyper_parallel.core.rules.checks import refuse_cut, refuse_partial, resolve
from hyper_parallel.core.rules.state import PARTIAL, State, constant, cut
from hyper_parallel.core.rules.table import RuleError, rule

Shape = Sequence[int]


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
        return cut(place, state.blocks, state.unit * max(repeats, 1))
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


def reshaped(x: Operand, shape: Shape, among: Sequence[int] | None = None) -> State:
    """The state of `x` in another shape.

    The local tensor is `before` parts one after the other, each of which holds this rank's share of what is cut. In
    the new shape the cut stands at a dim before which the parts are counted in full: they are the dims to its left,
    and blocks of its own. Splitting a cut dim leaves the cut with the leftmost factor; dims that are merged with
    it from the left become blocks. `among` are the places where it can stand, where more is known than the shape.
    """
    resolved = _resolved(prod(x.shape), shape)
    if prod(resolved) != prod(x.shape):
        raise RuleError(
            f"{x.name} {list(x.shape)} can't become {list(shape)}: this rank holds {prod(x.shape)} elements",
            "a shape of local sizes; what the model's code keeps as a number, such as that of heads, has to be local",
        )
    if x.state.is_partial:
        return PARTIAL
    if x.state.is_replicate:
        return State(same=_still_same(x, resolved), zero=x.state.zero)
    hole = tuple(shape).index(-1) if -1 in shape else None
    return _carried(x, resolved, hole, range(len(shape)) if among is None else among)


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


def _resolved(count: int, shape: Shape) -> tuple[int, ...]:
    """The shape with -1 worked out."""
    known = prod(size for size in shape if size != -1)
    return tuple(count // known if size == -1 and known else size for size in shape)


def _several(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _still_same(x: Operand, shape: Shape) -> tuple[int, ...]:
    """Dims of the new shape along which a replicated tensor repeats itself: those that lie inside a run of dims, of
    size 1 or repeating, of the old one."""
    runs: list[tuple[int, int]] = []
    strides = _strides(x.shape)
    for dim in range(x.dims):
        if x.repeats(dim):
            low, high = strides[dim], strides[dim] * x.shape[dim]
            if runs and runs[-1][0] == high:
                runs[-1] = (low, runs[-1][1])
            else:
                runs.append((low, high))
    found = []
    for dim, (size, stride) in enumerate(zip(shape, _strides(shape))):
        if size > 1 and any(not stride % low and not high % (stride * size) for low, high in runs):
            found.append(dim)
    return tuple(found)


def _strides(shape: Shape) -> list[int]:
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _carried(x: Operand, shape: Shape, hole: int | None, among: Sequence[int]) -> State:
    """Where the cut of `x` stands in the new shape."""
    dim, sizes = x.state.cut, [max(size, 1) for size in x.shape]  # what is empty has a place as one element has
    parts, new = prod(sizes[:dim]) * x.state.blocks, [max(size, 1) for size in shape]
    before = [prod(new[:place]) for place in range(len(new))]
    places = [
        (place, parts // left)
        for place, left in enumerate(before)
        if place in among and not parts % left and not new[place] % (parts // left)
    ]
    if not places:
        raise RuleError(
            f"{x.name} {list(x.shape)} is {x.state}, and in the shape {list(shape)} no dim holds this rank's part: "
            "it would be spread over several dims, among the parts of others",
            "a shape that keeps the cut dim, splits it, or merges it with its neighbours",
        )
    place, blocks = _chosen(x, shape, _among_changed(x, shape, places), hole)
    return cut(place, blocks, _carried_unit(x, shape, prod(sizes[dim + 1 :]), prod(new[place + 1 :])))


def _among_changed(x: Operand, shape: Shape, places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The places among the dims that are not the same in both shapes, counted from both ends.

    Where a dim could be counted from either end, that of a tensor with heads, which has more than three dims, is
    counted from the front: samples stay, and heads are repeated. Of others the last dim, features, stays; and heads
    [samples, heads, tokens, features] that are made one of three dims are merged with the samples.
    """
    left, right, room = 0, 0, len(shape) - 1
    with_samples = (x.dims, len(shape), x.state.cut) == (4, 3, 1)
    for end in ("left", "right") if x.dims > 3 and not with_samples else ("right", "left"):
        while end == "left" and left < min(x.state.cut, room - right) and shape[left] == x.shape[left]:
            left += 1
        while (
            end == "right"
            and right < min(x.dims - 1 - x.state.cut, room - left)
            and shape[-1 - right] == x.shape[-1 - right]
        ):
            right += 1
    return [each for each in places if left <= each[0] <= room - right] or places


def _carried_unit(x: Operand, shape: Shape, old: int, new: int) -> int:
    """The unit of the new cut dim, each element of which stands for `new` numbers, as one of the old for `old`."""
    unit = x.state.unit * old
    if x.state.unit == 1 or not new % unit:
        return 1
    if old % new:
        raise RuleError(
            f"{x.name} {list(x.shape)} is {x.state} in units of {x.state.unit}, and the shape {list(shape)} splits it "
            f"into parts of {new // old}",
            f"the cut dim as (-1, {x.state.unit}); a number of heads in the model's code has to be local",
        )
    return unit // new


def _chosen(x: Operand, shape: Shape, places: list[tuple[int, int]], hole: int | None) -> tuple[int, int]:
    """One of the places where the cut can stand; they differ only where dims have one element for each block.

    With one head on each rank, its heads are such a dim, and so is an unsqueeze that is written as a view. In this
    order: what keeps its shape keeps its cut; a -1 that stands for one head on each rank; a unit; features, the last
    dim, are what is split into heads; what was merged is split again; what stands to the left of the cut dim stays; a
    -1 stands for what is merged; features take in what is merged with them; and other dims do so with blocks.
    """
    cut_dim, old = x.state.cut, prod(x.shape[x.state.cut + 1 :])
    least = min(blocks for _, blocks in places)
    plain = [each for each in places if each[1] == least]
    after = {each: prod(shape[each[0] + 1 :]) for each in places}
    preferences = (
        [each for each in places if tuple(shape) == x.shape and each[0] == cut_dim],
        [each for each in places if each == (hole, x.state.blocks) and shape[each[0]] == x.state.blocks],
        [each for each in plain if x.state.unit > 1 and after[each] == x.state.unit * old],
        [each for each in plain if each[0] == hole and cut_dim == x.dims - 1],
        plain if cut_dim == x.dims - 1 > 0 else [],
        [each for each in plain if after[each] == old],
        [each for each in places if after[each] == old and each[1] == x.state.blocks],
        [each for each in places if each[0] == cut_dim and tuple(shape[: cut_dim + 1]) == x.shape[: cut_dim + 1]],
        [each for each in places if each[0] == hole],
        [each for each in places if each == (cut_dim, x.state.blocks) and x.state.blocks > 1],
        [each for each in plain if each[0] == len(shape) - 1],
        [each for each in places if after[each] == old],
        plain,
    )
    return next(found for found in preferences if found)[0]
