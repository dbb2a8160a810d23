"""What one rank does in a transition: offsets, sizes and splits, with nothing left to decide."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Callable, NamedTuple, Sequence

from hyper_parallel.core.backend import Move
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.regions import row_major
from hyper_parallel.core.wire import LOCAL, Step


class Reduction(NamedTuple):
    """What is done with a received buffer of `rows` contributions of equal size."""

    rows: int
    op: str


@dataclass(frozen=True)
class Stage:
    """One step on one rank, on flat contiguous tensors.

    1. `pack`: moves from the input to what is sent, of `sent` elements; None when the input itself is sent.
    2. `collective` ("all_gather", "all_to_all", "reduce_scatter", "all_reduce" in place) over the ascending ranks
       `group`, with `input_splits` and `output_splits` where it is an all-to-all; None when nothing travels.
    3. `reduction` of the `received` elements, for pieces of unequal size and for a maximum or minimum.
    4. `keep`: moves from the input to the output, of `numel` elements; `unpack`: moves from what was received; None
       when that is the output itself. `zero` says that they leave gaps. `factor` and `divisor`
       scale the output.

    A `share` packs its input in the order of the rows, multiplies the shares of all rows with it and sends each row
    back to its rank; where every rank has reduced everything it keeps row `row`. `step` counts the transition's steps.
    """

    kind: str
    step: int
    numel: int
    collective: str | None = None
    group: tuple[int, ...] = ()
    pack: tuple[Move, ...] | None = None
    sent: int = 0
    input_splits: tuple[int, ...] | None = None
    output_splits: tuple[int, ...] | None = None
    received: int = 0
    reduction: Reduction | None = None
    keep: tuple[Move, ...] = ()
    unpack: tuple[Move, ...] | None = None
    zero: bool = False
    factor: int = 1
    divisor: int = 1
    row: int | None = None

    @property
    def copied(self) -> int:
        """Elements that this rank copies on its own device at most, beside what a collective moves. What works in place
        copies an input that must stay as it is."""
        moves = (*(self.pack or ()), *self.keep, *(self.unpack or ()))
        in_place = self.collective == "all_reduce" or self.kind == "scale"
        return sum(prod(move.sizes) for move in moves) + (self.numel if in_place else 0)


@dataclass(frozen=True)
class Program:
    """What one rank does, forward and backward.

    With `keeps_rows` the first stage is a maximum or minimum, and the last one of `backward` needs to know how the rows
    of its buffer compared with the result.
    """

    rank: int
    forward: tuple[Stage, ...]
    backward: tuple[Stage, ...]
    source_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    keeps_rows: bool
    needs_floating: bool

    @property
    def copied(self) -> int:
        """Elements that the forward copies on this rank."""
        return sum(stage.copied for stage in self.forward)


def compile_program(
    steps: Sequence[Step], gradient_steps: Sequence[Step], source: Layout, target: Layout, rank: int
) -> Program:
    """The program of a rank for these steps, forward and backward."""
    return Program(
        rank,
        _stages(steps, rank),
        _stages(gradient_steps, rank),
        source.local_shape(rank),
        target.local_shape(rank),
        keeps_rows=bool(steps) and steps[0].op != "sum",
        needs_floating=any(step.divisor != 1 for step in steps),
    )


def _stages(steps: Sequence[Step], rank: int) -> tuple[Stage, ...]:
    stages = ((place, _stage(step, rank)) for place, step in enumerate(steps))
    return tuple(replace(stage, step=place) for place, stage in stages if stage is not None)


def _stage(step: Step, rank: int) -> Stage | None:
    """A step on one rank; None when the rank has nothing to do in it."""
    if step.kind == "scale":
        return Stage(step.kind, 0, step.after.local_numel(rank), factor=step.factor, divisor=step.divisor)
    if step.kind == "share":
        return _share(step, rank)
    if step.kind == "all_reduce":
        numel = step.after.local_numel(rank)
        return Stage(
            step.kind, 0, numel, "all_reduce", step.group(rank), sent=numel, received=numel, divisor=step.divisor
        )
    if step.kind == "reduce_scatter":
        return _reduce_scatter(step, rank)
    if step.kind in LOCAL:
        return _local(step, rank)
    if step.kind == "all_gather":
        sizes = {step.before.local_numel(member) for member in step.group(rank)}
        if len(sizes) == 1:
            return _all_gather(step, rank, sizes.pop())
    return _all_to_all(step, rank)


def _local(step: Step, rank: int) -> Stage | None:
    keep, numel = step.moves(rank, rank), step.after.local_numel(rank)
    if _is_identity(keep, step.before.local_numel(rank), numel):
        return None
    return Stage(step.kind, 0, numel, keep=keep, zero=_count(keep) < numel)


def _all_gather(step: Step, rank: int, each: int) -> Stage:
    group = step.group(rank)
    unpack = []
    for place, member in enumerate(group):
        for move in step.moves(member, rank):
            unpack.append(move._replace(source_start=place * each + move.source_start))
    numel, received = step.after.local_numel(rank), each * len(group)
    whole = _is_identity(unpack, received, numel)
    return Stage(
        step.kind, 0, numel, "all_gather", group, sent=each, received=received, unpack=None if whole else tuple(unpack)
    )


def _all_to_all(step: Step, rank: int) -> Stage:
    """An exchange with counts; what a rank keeps travels too where that saves packing or unpacking."""
    group, numel = step.group(rank), step.after.local_numel(rank)
    held, keep = step.before.local_numel(rank), step.moves(rank, rank)
    through = _packed(step, rank, group, group)
    others = [member for member in group if member != rank]
    beside = _packed(step, rank, group, others)
    pack, unpack = (not _is_identity(moves, size, size_) for moves, size, size_ in _sides(through, held, numel))
    beside_unpack = not _is_identity(beside.unpack, beside.received, numel)
    cost_through = pack * through.sent + unpack * through.received
    cost_beside = beside.sent + _count(keep) + beside_unpack * beside.received
    if cost_through < cost_beside:
        plan, keep = through, ()
    else:
        plan, pack, unpack = beside, True, beside_unpack
    return Stage(
        step.kind,
        0,
        numel,
        "all_to_all",
        group,
        pack=plan.pack if pack else None,
        sent=plan.sent,
        input_splits=plan.input_splits,
        output_splits=plan.output_splits,
        received=plan.received,
        keep=keep,
        unpack=plan.unpack if unpack else None,
        zero=plan.received + _count(keep) < numel,
    )


class _Packing(NamedTuple):
    """Both ends of an all-to-all on one rank."""

    pack: tuple[Move, ...]
    unpack: tuple[Move, ...]
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]

    @property
    def sent(self) -> int:
        return sum(self.input_splits)

    @property
    def received(self) -> int:
        return sum(self.output_splits)


def _packed(step: Step, rank: int, group: Sequence[int], peers: Sequence[int]) -> _Packing:
    """What goes to and comes from `peers`, in the order of the group."""
    sends = [step.moves(rank, member) if member in peers else () for member in group]
    receives = [step.moves(member, rank) if member in peers else () for member in group]
    return _Packing(_to_buffer(sends), _from_buffer(receives), tuple(map(_count, sends)), tuple(map(_count, receives)))


def _sides(packing: _Packing, held: int, numel: int) -> tuple[tuple[tuple[Move, ...], int, int], ...]:
    return (packing.pack, held, packing.sent), (packing.unpack, packing.received, numel)


def _reduce_scatter(step: Step, rank: int) -> Stage:
    """Every member gets the contributions to its piece. Only sums of equal pieces have a collective of their own."""
    group, held, numel = step.group(rank), step.before.local_numel(rank), step.after.local_numel(rank)
    sends = [step.moves(rank, member) for member in group]
    sizes = tuple(map(_count, sends))
    own = sizes[group.index(rank)]
    pack = _to_buffer(sends)
    unpack = _from_buffer([step.moves(rank, rank)])
    equal = len(set(sizes)) == 1
    native = equal and step.op == "sum"
    return Stage(
        step.kind,
        0,
        numel,
        "reduce_scatter" if native else "all_to_all",
        group,
        pack=None if _is_identity(pack, held, sum(sizes)) else pack,
        sent=sum(sizes),
        input_splits=None if native else sizes,
        output_splits=None if native else (own,) * len(group),
        received=own if native else own * len(group),
        reduction=None if native else Reduction(len(group), step.op),
        unpack=None if _is_identity(unpack, own, numel) else unpack,
        divisor=step.divisor,
    )


def _share(step: Step, rank: int) -> Stage:
    """The way back of a maximum or minimum: a rank that reduced a piece sends every contributor its share."""
    group, own = step.group(rank), step.before.local_numel(rank)
    travels = step.travels
    pieces = [step.moves(member, rank) for member in (group if travels else (rank,))]
    pack, unpack = _to_buffer([step.moves(rank, rank)]), _from_buffer(pieces)
    numel, received = step.after.local_numel(rank), sum(map(_count, pieces))
    return Stage(
        step.kind,
        0,
        numel,
        "all_to_all" if travels else None,
        group,
        pack=None if _is_identity(pack, own, own) else pack,
        sent=own * len(group),
        input_splits=(own,) * len(group) if travels else None,
        output_splits=tuple(map(_count, pieces)) if travels else None,
        received=received,
        unpack=None if _is_identity(unpack, received, numel) else unpack,
        row=None if travels else group.index(rank),
    )


def _to_buffer(parts: Sequence[Sequence[Move]]) -> tuple[Move, ...]:
    """The same sources, their elements one after the other in a buffer."""
    return _end_to_end(parts, lambda move, at, strides: move._replace(target_start=at, target_strides=strides))


def _from_buffer(parts: Sequence[Sequence[Move]]) -> tuple[Move, ...]:
    """The same targets, from elements one after the other in a buffer."""
    return _end_to_end(parts, lambda move, at, strides: move._replace(source_start=at, source_strides=strides))


def _end_to_end(
    parts: Sequence[Sequence[Move]], place: Callable[[Move, int, tuple[int, ...]], Move]
) -> tuple[Move, ...]:
    moves, position = [], 0
    for move in chain.from_iterable(parts):
        moves.append(place(move, position, row_major(move.sizes)))
        position += prod(move.sizes)
    return tuple(moves)


def _count(moves: Sequence[Move]) -> int:
    return sum(prod(move.sizes) for move in moves)


def _is_identity(moves: Sequence[Move], source: int, target: int) -> bool:
    """Tell whether the moves leave every element where it is and cover both tensors."""
    if source != target or _count(moves) != source:
        return False
    return all(move.target_start == move.source_start and move.target_strides == move.source_strides for move in moves)
