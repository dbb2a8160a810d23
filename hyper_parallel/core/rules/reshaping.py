"""Where the cut of a tensor stands when the same elements get another shape."""

from __future__ import annotations

from math import prod
from typing import Sequence

from hyper_parallel.core.rules.call import Operand
from hyper_parallel.core.rules.state import PARTIAL, State, cut
from hyper_parallel.core.rules.table import RuleError

Shape = Sequence[int]


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


def _resolved(count: int, shape: Shape) -> tuple[int, ...]:
    """The shape with -1 worked out."""
    known = prod(size for size in shape if size != -1)
    return tuple(count // known if size == -1 and known else size for size in shape)


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
    place, blocks = _chosen(x, shape, _among_changed(x, shape, places, hole), hole)
    return cut(place, blocks, _carried_unit(x, new, place, prod(sizes[dim + 1 :])))


Places = list[tuple[int, int]]
"""Where the cut can stand, with the number of blocks that it has there."""


def _among_changed(x: Operand, shape: Shape, places: Places, hole: int | None) -> Places:
    """The places among the dims that are not the same in both shapes, counted from both ends; a -1 is not the same.

    Where a dim could be counted from either end, that of a tensor with heads, which has more than three dims, is
    counted from the front: samples stay, and heads are repeated. Of others the last dim, features, stays; and heads
    [samples, heads, tokens, features] that are made one of three dims are merged with the samples.
    """
    left, right, last = 0, 0, len(shape) - 1
    with_samples = (x.dims, len(shape), x.state.cut) == (4, 3, 1)
    hole = None if with_samples else hole
    for end in ("left", "right") if x.dims > 3 and not with_samples else ("right", "left"):
        if end == "left":
            most = min(x.state.cut, last - right)
            while left < most and shape[left] == x.shape[left] and left != hole:
                left += 1
        else:
            most = min(x.dims - 1 - x.state.cut, last - left)
            while right < most and shape[last - right] == x.shape[-1 - right] and last - right != hole:
                right += 1
    return [each for each in places if left <= each[0] <= last - right] or places


def _carried_unit(x: Operand, shape: Shape, place: int, old: int) -> int:
    """The unit of the new cut dim. Each element of the old one stands for `old` numbers.

    What belongs together, such as the features of a head, gets dims of its own, or stays together in the cut dim. Split
    or joined otherwise it would be taken for another number of heads than the whole model has.
    """
    unit, dims = x.state.unit * old, range(place + 1, len(shape) + 1)
    inner = [prod(shape[dim:]) for dim in dims]
    if x.state.unit == 1 or unit in inner:
        return 1
    if old % inner[0]:
        does = "joins them to" if inner[0] > unit else "splits it into"
        raise RuleError(
            f"{x.name} {list(x.shape)} is {x.state} in units of {x.state.unit}, and the shape {list(shape)} {does} "
            f"parts of {inner[0] // old}",
            f"the cut dim as (-1, {x.state.unit}); a number of heads in the model's code has to be local",
        )
    return unit // inner[0]


def _chosen(x: Operand, shape: Shape, places: Places, hole: int | None) -> tuple[int, int]:
    """One of the places where the cut can stand; they differ only where dims have one element for each block.

    With one head on each rank, its heads are such a dim, and so is an unsqueeze that is written as a view. In this
    order: dims up to the cut one that stay as they are keep the cut; a -1 stands for the one head; heads that a rank's
    one key head groups stay heads, whatever tokens are merged with the group, and the dim of the key head is the cut
    one where the group gets a dim of its own; a unit tells; rows of features become samples of one token; features,
    the last dim, are what is split into heads; what was merged is split again, heads that were merged with samples
    among their features too; blocks stay where they were.
    """
    dim, blocks, unit = x.state.cut, x.state.blocks, x.state.unit
    old = prod(x.shape[dim + 1 :])
    after = {each: prod(shape[each[0] + 1 :]) for each in places}
    plain = [each for each in places if each[1] == min(blocks for _, blocks in places)]
    preferences = (
        [each for each in places if each == (dim, blocks) and _stays(x, shape, hole)],
        [each for each in places if each == (hole, blocks) and shape[hole] == blocks],
        [each for each in plain if each == (1, blocks) and _groups_heads(x, shape)],
        [each for each in plain if each == (dim, blocks) and _splits_heads(x, shape)],
        [each for each in plain if unit > 1 and after[each] == unit * old],
        [each for each in plain if unit == 1 and each == (2, 1) and _makes_one_token(x, shape)],
        plain if dim == x.dims - 1 > 0 else [],
        [each for each in plain if after[each] == old],
        [each for each in plain if each == (2, 1) and _joins_heads(x, shape)],
        [each for each in places if each == (dim, blocks) and blocks > 1],
        plain,
    )
    return next(found for found in preferences if found)[0]


def _groups_heads(x: Operand, shape: Shape) -> bool:
    """Tell whether heads [samples, heads, tokens, features] become [samples, 1, heads * tokens, features]."""
    return x.state.cut == 1 and x.dims == 4 and tuple(shape) == (x.shape[0], 1, prod(x.shape[1:3]), x.shape[3])


def _splits_heads(x: Operand, shape: Shape) -> bool:
    """Tell whether heads, of four dims with tokens beside them, get a dim of size 1 before them."""
    dim = x.state.cut
    put_in = (*x.shape[:dim], 1, *x.shape[dim:])
    return x.dims == 4 and 0 < dim < 3 and tuple(shape) == put_in


def _makes_one_token(x: Operand, shape: Shape) -> bool:
    """Tell whether [samples, features] become [samples, 1, features]."""
    return x.state.cut == 1 and x.dims == 2 and tuple(shape) == (x.shape[0], 1, x.shape[1])


def _joins_heads(x: Operand, shape: Shape) -> bool:
    """Tell whether heads [tokens, samples * heads, features] become [tokens, samples, heads * features]."""
    samples = x.state.blocks
    if (x.dims, x.state.cut) != (3, 1) or samples == 1:
        return False
    tokens, heads, features = x.shape
    return tuple(shape) == (tokens, samples, heads // samples * features)


def _stays(x: Operand, shape: Shape, hole: int | None) -> bool:
    """Tell whether the cut dim and those before it are the same in both shapes. Blocks that are followed by a new dim
    of size 1 are split from it, and the one dim of a parameter is what a -1 stands for."""
    dim = x.state.cut
    if tuple(shape[: dim + 1]) != x.shape[: dim + 1]:
        return False
    if x.state.blocks > 1:
        if x.dims < len(shape) and dim == 0 and shape[0] == x.state.blocks and x.dims > 2:
            return False  # one head for each sample, with which it was merged
        return x.shape[dim + 1 : dim + 2] == tuple(shape[dim + 1 : dim + 2])
    return dim > 0 or (hole is None and x.dims > 1)
