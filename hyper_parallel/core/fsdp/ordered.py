"""A runtime whose collectives keep to the order that all ranks have in common."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Iterator, Sequence

import numpy as np

from hyper_parallel.core.backend import Backend
from hyper_parallel.core.errors import CommunicationError
from hyper_parallel.core.fsdp.common_order import CommonOrder, Token
from hyper_parallel.core.fsdp.reduction import UnitReduction
from hyper_parallel.core.fsdp.runtime import BackendRuntime
from hyper_parallel.core.peers import gathered

if TYPE_CHECKING:
    from hyper_parallel.core.fsdp.unit import Unit

GATHER, SCATTER, REDUCE = "gather", "reduce-scatter", "all-reduce"


class RanksOfModel:
    """The `Peers` of a model whose units lie on the same ranks."""

    def __init__(self, backend: Backend, ranks: Sequence[int]):
        self._backend = backend
        self._group = backend.collectives.groups([sorted(ranks)])
        self.ranks = self._group.ranks

    def exchange(self, value: int) -> list[int]:
        """See `Peers`."""
        return gathered(self._backend, np.array([value], dtype=np.int64), self._group).ravel().tolist()

    def exchange_texts(self, text: str) -> list[str]:
        """See `Peers`."""
        return self._backend.collectives.gather_objects(text, self._group)


@dataclass(frozen=True)
class Situation:
    """What the order of a pass depends on, besides the modules that run."""

    recording: bool
    gathered: tuple[str, ...]
    tree: tuple
    units: tuple

    def __str__(self) -> str:
        alike: dict[tuple, list[str]] = {}
        for name, *settings in self.units:
            alike.setdefault(tuple(settings), []).append(name or "the outermost unit")
        settings = "; ".join(
            f"accumulation {kind!r} and reshard_after_forward {reshard} in {_few(names)}"
            for (kind, reshard), names in alike.items()
        )
        recording = "gradients recorded" if self.recording else "nothing recorded"
        forward, backward, last = self.tree
        return (
            f"{recording}, {_few(self.gathered) or 'nothing'} gathered, {forward} and {backward} units ahead, "
            f"is_last_backward={last}, and {settings}"
        )


class OrderedRuntime:
    """Carries the schedule's events out as the `Runtime` inside does; before anything is sent the ranks agree."""

    def __init__(self, backend: Backend, runtime: BackendRuntime, units: Sequence[Unit], ranks: Sequence[int]):
        self._backend = backend
        self._runtime = runtime
        self._units = list(units)
        self._number = {unit: number for number, unit in enumerate(self._units)}
        self._coming: set[Unit] = set()
        self._joined: set[Unit] = set()  # on their way for the schedule; here already, because the others gathered
        self._shrunk: set[Unit] = set()
        self.order = CommonOrder(RanksOfModel(backend, ranks), self._describe, self._join)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    @property
    def disagreements(self) -> int:
        """See `Runtime`."""
        return self.order.disagreements

    def issue_gather(self, unit: Unit) -> None:
        """See `Runtime`."""
        self.order.step((GATHER, self._number[unit], self._what_is_gathered(unit)), self._situation)
        with _about(unit, GATHER):
            self._runtime.issue_gather(unit)
        self._coming.add(unit)

    def wait_gather(self, unit: Unit) -> None:
        """See `Runtime`."""
        self._coming.discard(unit)
        if unit in self._joined:
            self._joined.discard(unit)
            return
        with _about(unit, GATHER):
            self._runtime.wait_gather(unit)

    def shrink(self, unit: Unit) -> None:
        """See `Runtime`."""
        self._runtime.shrink(unit)
        self._shrunk.add(unit)

    def free(self, unit: Unit) -> None:
        """See `Runtime`."""
        self._runtime.free(unit)
        self._shrunk.discard(unit)

    def issue_reduce_scatter(self, reduction: UnitReduction) -> None:
        """See `Runtime`."""
        self.order.step(self._token(SCATTER, reduction), self._situation)
        with _about(reduction.unit, SCATTER):
            self._runtime.issue_reduce_scatter(reduction)

    def wait_reduce_scatter(self, reduction: UnitReduction) -> None:
        """See `Runtime`."""
        with _about(reduction.unit, SCATTER):
            self._runtime.wait_reduce_scatter(reduction)

    def issue_all_reduce(self, reduction: UnitReduction) -> None:
        """See `Runtime`."""
        self.order.step(self._token(REDUCE, reduction), self._situation)
        with _about(reduction.unit, REDUCE):
            self._runtime.issue_all_reduce(reduction)

    def wait_all_reduce(self, reduction: UnitReduction) -> None:
        """See `Runtime`."""
        with _about(reduction.unit, REDUCE):
            self._runtime.wait_all_reduce(reduction)

    def end_pass(self) -> None:
        """See `Runtime`."""
        self.order.end()

    def _token(self, what: str, reduction: UnitReduction) -> Token:
        places = {each: place for place, each in enumerate(reduction.unit.parameters)}
        return what, self._number[reduction.unit], tuple(places[each] for each in reduction.parameters)

    def _what_is_gathered(self, unit: Unit) -> Any:
        """Whether it is parts of shards; before a model's first forward what tells one unit from others."""
        if unit.has_root:
            return unit in self._shrunk
        return tuple((each.spec.name, each.spec.shape) for each in unit.parameters)

    def _situation(self) -> Situation:
        settings = self._units[0].settings
        tree = (settings.forward_prefetch_depth, settings.backward_prefetch_depth, settings.is_last_backward)
        units = tuple((unit.name, unit.accumulation, unit.reshard_after_forward) for unit in self._units)
        gathered = tuple(_name(unit) for unit in self._units if unit.is_gathered())
        return Situation(self._backend.autograd.grad_enabled(), gathered, tree, units)

    def _describe(self, token: Token) -> str:
        what, number, _ = token
        return f"{what} {_name(self._units[number])}"

    def _join(self, token: Token) -> None:
        """Take part in a collective of the others, whatever this rank has, and wait for it."""
        what, number, detail = token
        unit = self._units[number]
        if what == GATHER:
            self._join_gather(unit, from_parts=detail)
            return
        with _nothing_kept(unit):
            parameters = [unit.parameters[place] for place in detail]
            reduction = UnitReduction(unit, parameters, [None] * len(parameters))
            if what == SCATTER:
                self._runtime.issue_reduce_scatter(reduction)
                self._runtime.wait_reduce_scatter(reduction)
            else:
                self._runtime.issue_all_reduce(reduction)
                self._runtime.wait_all_reduce(reduction)

    def _join_gather(self, unit: Unit, from_parts: bool) -> None:
        if unit in self._coming and unit not in self._joined:
            self._runtime.wait_gather(unit)
        is_used = unit in self._coming or unit.is_gathered()
        if from_parts != (unit in self._shrunk):
            for each in unit.parameters:
                each.pretend_part(unit.part_group if from_parts else None)
        self._runtime.issue_gather(unit)
        self._runtime.wait_gather(unit)
        if unit in self._coming:
            self._joined.add(unit)
        if not is_used:
            self.free(unit)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _name(unit: Unit) -> str:
    if unit.name:
        return unit.name
    return (
        "the outermost unit"
        if unit.has_root
        else f"a {type(unit.modules[0]).__name__} that no forward of its model has come to yet"
    )


@contextmanager
def _nothing_kept(unit: Unit) -> Iterator[None]:
    """Let a reduction of the unit be one of both tiers that takes nothing along."""
    before = unit.kept, unit.requires_gradient_sync, unit.requires_all_reduce
    unit.kept, unit.requires_gradient_sync, unit.requires_all_reduce = type(unit.kept)(unit.backend.tensors), True, True
    try:
        yield
    finally:
        unit.kept, unit.requires_gradient_sync, unit.requires_all_reduce = before


@contextmanager
def _about(unit: Unit, what: str) -> Iterator[None]:
    """Say of a collective that fails which unit it was for."""
    try:
        yield
    except CommunicationError as error:
        raise CommunicationError(f"the {what} of {_name(unit)} has failed: {error}") from error
