"""A sharded model in words: where every parameter and gradient lies, and the order of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Callable, Iterator, Sequence

from hyper_parallel.core.backend import Group
from hyper_parallel.core.fsdp.buffers import FusedBuffer
from hyper_parallel.core.fsdp.schedule import Schedule
from hyper_parallel.core.topology import Topology

if TYPE_CHECKING:
    from hyper_parallel.core.fsdp.parameter import ShardedParameter
    from hyper_parallel.core.fsdp.unit import Unit


def describe(units: Sequence[Unit], topology: Topology | None) -> str:
    """See `hyper_parallel.describe`."""
    of_schedule: dict[Schedule, list[Unit]] = {}
    for unit in units:  # to ask for the schedule lets a root adopt what is below it
        of_schedule.setdefault(unit.schedule, []).append(unit)
    blocks = ["\n".join(_unit_lines(unit, topology)) for unit in units]
    for schedule, members in of_schedule.items():
        blocks.append("\n".join(_step_lines(schedule.order or members)))
    return "\n\n".join(blocks) + "\n"


def _name(unit: Any) -> str:
    return unit.name or "(root)"


def _unit_lines(unit: Unit, topology: Topology | None) -> Iterator[str]:
    whole = sum(each.spec.numel * unit.backend.tensors.item_bytes(each.full_dtype) for each in unit.parameters)
    yield f"unit {_name(unit)}: {_count(len(unit.parameters), 'parameter')}, {whole:,} bytes when gathered"
    yield f"  gathered over {_ranks(unit.shard_group, topology)}; after forward {_after_forward(unit)}"
    for each in unit.parameters:
        spec = each.spec
        how = "whole on every rank" if spec.is_whole else f"dim {spec.dim} cut in {spec.pieces}"
        padding = spec.sent_numel(unit.backend.collectives.gathers_uneven()) - spec.numel
        cost = "" if spec.is_whole or not padding else f", {_count(padding, 'element')} of padding in equal pieces"
        dtypes = spec.dtype if each.full_dtype == spec.dtype else f"{spec.dtype}, gathered in {each.full_dtype}"
        yield f"    {spec.name} {list(spec.shape)} {dtypes}: {how}, here {list(spec.local_shape)}{cost}"
    if not unit.needs_reduction:
        yield "  gradients stay as they are"
        return
    for number, (members, places) in enumerate(unit.arranged(unit.parameters), 1):
        yield from _buffer_lines(number, [unit.parameters[index] for index in members], places, topology)


def _buffer_lines(
    number: int, members: Sequence[ShardedParameter], places: FusedBuffer, topology: Topology | None
) -> Iterator[str]:
    first, size = members[0], places.item_bytes
    summed = f"all-reduced over {_ranks(first.sum_group, topology)}" if first.sum_group.size > 1 else "not all-reduced"
    if first.early_all_reduce and first.sum_group.size > 1:
        summed += ", as soon as it is there"
    yield (
        f"  gradient buffer {number}: {places.numel * size:,} bytes of {first.reduced_dtype}, "
        f"{(places.numel - places.used) * size:,} of them padding; {summed}"
    )
    for each, start, count in zip(members, places.starts, places.sizes):
        yield f"    {each.spec.name} at byte {start * size:,}, {count * size:,} bytes"


def _ranks(group: Group, topology: Topology | None) -> str:
    tier = "" if topology is None or group.size == 1 else f" ({topology.tier(group.ranks)} tier)"
    return f"the ranks {', '.join(map(str, group.ranks))}{tier}" if group.size > 1 else "this rank alone"


def _after_forward(unit: Unit) -> str:
    kept = unit.reshard_after_forward
    if kept is False or kept is None:
        return "kept for backward"
    if kept is not True:
        return f"kept in parts by {kept} neighbours together"
    return "freed, unless backward begins with it" if unit.stays_for_backward else "freed"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")


@dataclass(eq=False)
class _StandIn:
    """A unit as the schedule sees it."""

    name: str
    needs_reduction: bool
    reshard_after_forward: bool | int | None
    stays_for_backward: bool
    reshard_after_backward: bool
    unshard_in_backward: bool
    early_all_reduce: bool
    accumulation: str
    is_recorded: bool
    """Its module's backward is followed; where no parameter needs it, it is not."""
    has_gradients: bool
    forward_prefetch: list[_StandIn] = field(default_factory=list)
    backward_prefetch: list[_StandIn] = field(default_factory=list)


@dataclass(frozen=True)
class _StandInReduction:
    unit: _StandIn
    kind: str


@dataclass
class _Told:
    """A runtime that notes what it is told, in words."""

    words: list[str] = field(default_factory=list)
    disagreements: int = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *subject: self._note(name, *subject)

    def _note(self, name: str, subject: Any = None) -> None:
        if isinstance(subject, (_StandIn, _StandInReduction)):
            unit = getattr(subject, "unit", subject)
            verb = name.replace("issue_", "start ").replace("wait_", "wait for ")
            for plain, shown in (("reduce_scatter", "reduce-scatter"), ("all_reduce", "all-reduce")):
                verb = verb.replace(plain, shown)
            self.words.append(f"{verb} {_name(unit)}")

    def in_backward(self) -> bool:
        return False

    def left_behind(self, reduced: Any) -> tuple:
        return ()


def _step_lines(order: Sequence[Unit]) -> Iterator[str]:
    """A step after others, as the schedule itself tells it: modules run one after the other, inside of the first."""
    yield "a step, when the modules run in this order:"
    told, stand_ins = _Told(), _stand_ins(order)
    schedule = Schedule(told, order[0].settings)
    for _ in range(2):  # what comes next is known from the step before
        lines = list(_told_step(schedule, told, stand_ins))
    yield from lines


def _stand_ins(order: Sequence[Unit]) -> list[_StandIn]:
    made = {
        unit: _StandIn(
            unit.name,
            unit.needs_reduction,
            unit.reshard_after_forward,
            unit.stays_for_backward,
            unit.reshard_after_backward,
            unit.unshard_in_backward,
            unit.early_all_reduce,
            unit.accumulation,
            any(each.is_served for each in unit.parameters),
            bool(unit.trainable()),
        )
        for unit in order
    }
    for unit, stand_in in made.items():
        stand_in.forward_prefetch = [made[each] for each in unit.forward_prefetch if each in made]
        stand_in.backward_prefetch = [made[each] for each in unit.backward_prefetch if each in made]
    return list(made.values())


def _told_step(schedule: Schedule, told: _Told, units: Sequence[_StandIn]) -> Iterator[str]:
    def line(when: str) -> Iterator[str]:
        if told.words:
            yield f"  {when}: {', '.join(told.words)}"
            told.words.clear()

    root, *others = units
    schedule.before_root_forward(recording=True)
    schedule.before_forward(root)
    yield from line(f"before forward of {_name(root)}")
    for unit in others:
        schedule.before_forward(unit)
        yield from line(f"before forward of {_name(unit)}")
        schedule.after_forward(unit, unit.is_recorded)
        yield from line(f"after forward of {_name(unit)}")
    schedule.after_forward(root, root.is_recorded)
    schedule.after_root_forward(recording=True)
    yield from line(f"after forward of {_name(root)}")
    backward = [unit for unit in reversed(others) if unit.is_recorded]
    if root.is_recorded:
        schedule.before_backward(root)
        yield from line(f"before backward of {_name(root)}")
    if backward:
        schedule.before_backward(backward[0])
        yield from line(f"before backward of {_name(backward[0])}")
    for unit, following in zip_longest(backward, backward[1:]):
        if unit.has_gradients:
            schedule.gradients_ready(_StandInReduction(unit, unit.accumulation))
        yield from line(f"gradients of {_name(unit)}")
        if following is not None:  # the gradient that leaves one module is what reaches the next
            schedule.before_backward(following)
            yield from line(f"before backward of {_name(following)}")
        schedule.after_backward(unit)
        yield from line(f"after backward of {_name(unit)}")
    if root.is_recorded and root.has_gradients:
        schedule.gradients_ready(_StandInReduction(root, root.accumulation))
        yield from line(f"gradients of {_name(root)}")
    if any(unit.has_gradients for unit in units):
        schedule.end_of_backward()
    yield from line("settlement")
