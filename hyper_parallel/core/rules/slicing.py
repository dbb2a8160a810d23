"""Operators that take tensors apart along a dim, or join them."""

from __future__ import annotations

from typing import Sequence

from hyper_parallel.core.rules.call import Operand, View
from hyper_parallel.core.rules.checks import merge_cuts, only_partial, refuse_cut, refuse_partial, resolve
from hyper_parallel.core.rules.shape import renamed
from hyper_parallel.core.rules.state import PARTIAL, State, cut
from hyper_parallel.core.rules.table import RuleError, rule


@rule("split", "input size dim")
def split(view: View) -> Sequence[State]:
    """Parts of one size, the last one smaller, or of the sizes given."""
    x, size, dim = view["input"], view["size"], resolve(view.get("dim", 0), view["input"].dims)
    length = x.shape[dim]
    if isinstance(size, int):
        size = [min(size, length - start) for start in range(0, length, size)] or [0]
    return parted(view.op, x, dim, size)


@rule("chunk", "input chunks dim")
def chunk(view: View) -> Sequence[State]:
    """At most `chunks` parts of one size, the last one smaller."""
    x, dim = view["input"], resolve(view.get("dim", 0), view["input"].dims)
    size = -(-x.shape[dim] // view["chunks"]) or 1
    sizes = [min(size, x.shape[dim] - at) for at in range(0, x.shape[dim], size)] or [0]
    if len(sizes) < view["chunks"]:
        refuse_cut(view.op, x, [dim], f"makes {len(sizes)} of {view['chunks']} chunks of this rank's part")
    return parted(view.op, x, dim, sizes)


@rule("tensor_split", "input sections dim")
def tensor_split(view: View) -> Sequence[State]:
    """`sections` parts that differ by one at most, or parts that begin at the places given."""
    x, sections, dim = view["input"], view["sections"], resolve(view.get("dim", 0), view["input"].dims)
    length = x.shape[dim]
    if isinstance(sections, int):
        sizes = [length // sections + (place < length % sections) for place in range(sections)]
    else:
        ends = [min(end, length) for end in (*sections, length)]
        sizes = [max(end - start, 0) for start, end in zip((0, *ends), ends)]
    return parted(view.op, x, dim, sizes)


@rule("unbind", "input dim")
def unbind(view: View) -> Sequence[State]:
    """Each element of a dim on its own, without that dim."""
    x, dim = view["input"], resolve(view.get("dim", 0), view["input"].dims)
    return [selected(view.op, x, dim)] * x.shape[dim]


@rule("select", "input dim index")
def select(view: View) -> State:
    """One element of a dim, without that dim."""
    return selected(view.op, view["input"], resolve(view["dim"], view["input"].dims))


@rule("narrow", "input dim start length")
def narrow(view: View) -> State:
    """A run of elements along a dim."""
    x, start = view["input"], view["start"]
    dim = resolve(view["dim"], x.dims)
    start = start + x.shape[dim] if isinstance(start, int) and start < 0 else start
    return sliced(view.op, x, dim, start, view["length"], 1)


@rule("slice", "input dim start stop step")
def strided(view: View) -> State:
    """Elements of a dim from a start to a stop, in steps."""
    x = view["input"]
    dim = resolve(view["dim"], x.dims)
    run = range(*slice(view["start"], view["stop"], view.get("step", 1)).indices(x.shape[dim]))
    return sliced(view.op, x, dim, run.start, len(run), run.step)


@rule("cat", "tensors dim")
def cat(view: View) -> State:
    """Tensors one after the other along a dim."""
    tensors = [each for each in view.operands if each.shape != (0,)]  # which PyTorch joins to anything
    if not tensors:
        return State()
    if any(each.state.is_partial for each in tensors):
        return _all_partial(view.op, tensors)
    dim = resolve(view.get("dim", 0), tensors[0].dims)
    if any(each.state.cut == dim for each in tensors):
        return _joined_parts(view.op, tensors, dim)
    merged = merge_cuts(view.op, [(each, _without(dim, each.dims)) for each in tensors])
    if merged is not None:
        return merged
    same = set(range(tensors[0].dims)) - {dim}
    return State(same=tuple(sorted(place for place in same if all(place in each.state.same for each in tensors))))


@rule("stack", "tensors dim")
def stack(view: View) -> State:
    """Tensors of one shape side by side along a new dim."""
    tensors = view.operands
    if any(each.state.is_partial for each in tensors):
        return _all_partial(view.op, tensors)
    place = resolve(view.get("dim", 0), tensors[0].dims + 1)
    into = {dim + (dim >= place): dim for dim in range(tensors[0].dims)}
    merged = merge_cuts(view.op, [(each, into) for each in tensors])
    if merged is not None:
        return merged
    return State(
        same=tuple(new for new, dim in sorted(into.items()) if all(dim in each.state.same for each in tensors))
    )


@rule("roll", "input shifts dims")
def roll(view: View) -> State:
    """Elements moved along dims, from the end to the front; without dims, of all in their order."""
    x, dims = view["input"], view.get("dims")
    dims = range(x.dims) if dims in (None, ()) else [resolve(dim, x.dims) for dim in _several(dims)]
    refuse_cut(view.op, x, dims, "moves elements from one rank's part to another's")
    return x.state


@rule("flip", "input *dims")
def flip(view: View) -> State:
    """The elements of dims in the opposite order."""
    x = view["input"]
    dims = [resolve(dim, x.dims) for dim in view["dims"]]
    refuse_cut(view.op, x, dims, "moves elements from one rank's part to another's")
    return x.state


@rule("tril triu", "input diagonal")
def triangle(view: View) -> State:
    """Zeros on one side of a diagonal of the last two dims."""
    x = view["input"]
    refuse_cut(view.op, x, [x.dims - 2, x.dims - 1], "counts the diagonal from the whole tensor's corner")
    return renamed(x.state, {dim: dim for dim in range(x.dims - 2)}) if x.state.is_replicate else x.state


@rule("pad", "input pad mode value")
def pad(view: View) -> State:
    """Elements put in front of and behind those of the last dims, or taken away there."""
    x, widths = view["input"], view["pad"]
    padded = [x.dims - 1 - place // 2 for place, width in enumerate(widths) if width]
    refuse_cut(view.op, x, padded, "puts elements at the ends of each rank's part")
    value = view.get("value")
    if (view.get("mode") or "constant") == "constant" and value:
        refuse_partial(f"{view.op} with {value.name if isinstance(value, Operand) else value}", [x])
    if not x.state.is_replicate:
        return x.state
    return State(same=tuple(dim for dim in x.state.same if dim not in padded))


@rule("unfold", "input dimension size step")
def unfold(view: View) -> State:
    """Windows of a dim, which become a new last dim."""
    x = view["input"]
    refuse_cut(view.op, x, [resolve(view["dimension"], x.dims)], "takes windows past the end of a rank's part")
    return State() if x.state.is_replicate else x.state


def parted(op: str, x: Operand, dim: int, sizes: Sequence[int]) -> list[State]:
    """The states of parts of these sizes along `dim`."""
    if x.state.cut != dim:
        return [x.state] * len(sizes)
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return [sliced(op, x, dim, start, size, 1) for start, size in zip(starts, sizes)]


def selected(op: str, x: Operand, dim: int) -> State:
    """The state without `dim`, of which one element is left."""
    refuse_cut(op, x, [dim], "takes single elements of that dim, which another rank may hold")
    return renamed(x.state, {old: old - (old > dim) for old in range(x.dims) if old != dim})


def sliced(op: str, x: Operand, dim: int, start: int, length: int, step: int) -> State:
    """The state of `length` elements of `dim`, from `start` on, `step` apart.

    Along a cut dim these have to be all elements, whole blocks, or every n-th one of parts that n divides.
    """
    size = x.shape[dim]
    if x.state.cut != dim:
        return x.state
    block = size // x.state.blocks
    if step == 1 and block and not start % block and not length % block and length:
        return cut(dim, length // block, x.state.unit)
    if size == 0 or (step > 1 and not block % step and 0 <= start < step and length == -(-(size - start) // step)):
        return cut(dim, x.state.blocks)
    what = f"elements [{start}, {start + length})" if step == 1 else f"every {step}th element from {start} on"
    raise RuleError(
        f"{op}: {x.name} {list(x.shape)} is {x.state}, and {what} of that dim would be taken from each rank's part",
        f"{x.name} as replicate"
        + (f", or parts of {block} elements, which are its blocks" if x.state.blocks > 1 else "")
        + (f", or as strided_shard({dim}, BLOCKS) where these are its blocks" if x.state.blocks == 1 else ""),
    )


def _all_partial(op: str, tensors: Sequence[Operand]) -> State:
    """Pending sums can be joined to each other."""
    if not only_partial(tensors):
        pending = next(each for each in tensors if each.state.is_partial)
        other = next(each for each in tensors if not each.state.is_partial and not each.state.zero)
        raise RuleError(
            f"{op}: {pending.name} is partial and {other.name} is {other.state}, which would be counted once on every "
            "rank",
            f"{pending.name} as {other.state.placement}: reduce it first",
        )
    return PARTIAL


def _joined_parts(op: str, tensors: Sequence[Operand], dim: int) -> State:
    """Tensors that are cut along the dim along which they are joined: their parts are blocks of the result."""
    first = max((each for each in tensors if each.state.cut == dim), key=lambda each: each.shape[dim])
    block = first.shape[dim] // first.state.blocks
    for each in tensors:
        if each.shape[dim] == 0:
            continue
        if each.state.cut != dim:
            raise RuleError(
                f"{op}: {first.name} is {first.state} and {each.name} is {each.state}, but the result has one state",
                f"{each.name} as shard({dim}) too, or all of them replicate along the dim that is joined",
            )
        if each.shape[dim] != block * each.state.blocks:
            raise RuleError(
                f"{op}: {first.name} {list(first.shape)} and {each.name} {list(each.shape)} are cut along the dim that "
                "is joined, into parts of different sizes, and no placement tells such parts",
                "parts of one size, or all of them replicate",
            )
    return cut(
        dim,
        sum(each.state.blocks for each in tensors if each.shape[dim]) or 1,
        max(each.state.unit for each in tensors),
    )


def _without(gone: int, dims: int) -> dict[int, int]:
    return {dim: dim for dim in range(dims) if dim != gone}


def _several(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)
