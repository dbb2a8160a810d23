"""The order of events of fully sharded data parallelism (§5.3, Algorithm 1), and nothing else.

A `Schedule` hears what happens to units (a forward begins, a gradient arrives, ...) and tells a `Runtime` what to do.
It knows no tensor and no framework: both backends drive the same object, and so does a recording runtime in the
tests.

Forward: gather before, free after; what backward would gather again at its very beginning, by the order of the last
recorded forward, may stay. Backward: gather before the first gradient enters a unit, free when the last has left it,
reduce when the gradients of all its parameters are complete. What is likely to come next is fetched ahead, before a
unit's own gather is waited for: in forward by the order of the last forward, in backward by that order reversed, unless
a unit says itself what to fetch. A recompute fetches nothing ahead. Layers are counted in forward order, backward runs
downwards:

    post-backward step of layer l:  (1) wait for the reduce-scatter of layer l+1
                                    (2) settle what needs no reduction
                                    (3) issue the reduce-scatter of layer l
                                    (4) issue the all-reduce of layer l+1 and park it
    end of backward (settlement):   wait for everything parked, hand the gradients over

A unit with `early_all_reduce` has (4) right behind (3): its all-reduce is issued behind its own reduce-scatter and
begins by itself when that is done, not when the next layer down has computed its gradients.

Nothing waits for an all-reduce before the settlement. While gradients are accumulated a layer's may be kept back, as
they are before (3), or summed over the fast tier before (4).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Callable, Container, Iterable, Protocol, Sequence

from hyper_parallel.core.fsdp.gathers import Gathers
from hyper_parallel.core.fsdp.order import Order


class ScheduledUnit(Protocol):
    """What the schedule must know of a unit. All of it may change between two passes."""

    name: str
    needs_reduction: bool
    reshard_after_forward: bool | int | None
    """Free after forward: yes, no, all but the part that a group of so many ranks needs to gather it again; None for
    only where no backward is to come."""
    stays_for_backward: bool
    """But do not free it after forward if backward would gather it again at its very beginning."""
    reshard_after_backward: bool
    unshard_in_backward: bool
    early_all_reduce: bool
    """Begin the all-reduce when the reduce-scatter is done. Never changes."""
    forward_prefetch: Sequence[ScheduledUnit]
    """What to fetch ahead in its forward; what comes next in order where this is empty."""
    backward_prefetch: Sequence[ScheduledUnit]


class Reduction(Protocol):
    """The gradients of one unit on their way, from `gradients_ready` to `settle`."""

    unit: ScheduledUnit
    kind: str
    """"all": reduce over both tiers. "scatter": over the fast tier, then keep for a later one. "none": keep."""


class Runtime(Protocol):
    """What carries the events out. `issue` returns at once; `wait` returns when the result is there."""

    disagreements: int
    """How often ranks have done different things. Errors, after which ranks may remember different things as well."""

    def issue_gather(self, unit: ScheduledUnit) -> None:
        """Start gathering the full parameters, from what `shrink` has kept if it has."""

    def wait_gather(self, unit: ScheduledUnit) -> None:
        """Have them readable."""

    def shrink(self, unit: ScheduledUnit) -> None:
        """Free the full parameters but for what `unit.reshard_after_forward` ranks gather them from."""

    def free(self, unit: ScheduledUnit) -> None:
        """Give the memory of the full parameters back, and that of what is kept of them."""

    def retain(self, unit: ScheduledUnit) -> None:
        """Leave the full parameters for backward; modules see them no more, as when they are freed."""

    def keep(self, reduction: Reduction) -> None:
        """Add the full gradients to what the unit keeps; the unit's next reduction takes it up before it starts."""

    def issue_reduce_scatter(self, reduction: Reduction) -> None:
        """Start reducing over the shard axis."""

    def wait_reduce_scatter(self, reduction: Reduction) -> None:
        """Have the shards of the gradients, summed over the shard axis."""

    def accumulate(self, reduction: Reduction) -> None:
        """Add the shards to what the unit keeps; the unit's next all-reduce takes it up."""

    def issue_all_reduce(self, reduction: Reduction) -> None:
        """Start reducing the shards over the replica axis; with `early_all_reduce` as soon as they are there."""

    def wait_all_reduce(self, reduction: Reduction) -> None:
        """Have them summed over the replica axis."""

    def settle(self, reduction: Reduction) -> None:
        """Hand the finished gradients to their parameters."""

    def end_pass(self) -> None:
        """Everything of a pass is issued, and nothing of it handed over: raise if the ranks have not all done alike."""

    def left_behind(self, reduced: Container[ScheduledUnit]) -> Iterable[Reduction]:
        """Reductions of what is kept by units that are not `reduced` and have to hand their gradients over now."""

    def forget_kept(self) -> None:
        """Drop what `keep` and `accumulate` have kept, of every unit."""

    def in_backward(self) -> bool:
        """Tell whether the engine is running a backward pass now."""

    def call_at_end_of_backward(self, callback: Callable[[], None]) -> None:
        """Call back once this backward pass has computed every gradient."""


@dataclass
class Settings:
    """What holds for all units of a tree."""

    forward_prefetch_depth: int = 1
    """How many units to fetch ahead in forward, by the order of the last one."""
    backward_prefetch_depth: int = 1
    """How many units to fetch ahead in backward, by the reversed order of the last forward."""
    is_last_backward: bool = True
    """Settle at the end of backward; if not, reductions go on until the end of a later one."""


class Schedule:
    """The state machine for all units below one root. Every method is one event."""

    def __init__(self, runtime: Runtime, settings: Settings | None = None):
        self.settings = Settings() if settings is None else settings
        self.gathers = Gathers(runtime)
        self._runtime = runtime
        self._forwards: Counter[ScheduledUnit] = Counter()
        self._entered: list[ScheduledUnit] = []  # in the forward of the root that runs now, or the last one
        self._left: list[ScheduledUnit] = []
        self._entered_before: list[ScheduledUnit] = []  # in the last one that was recorded to its end
        self._left_before: list[ScheduledUnit] = []
        self._goes_as_before = False
        self._root_runs = self._root_records = False
        self._forward_order = self._backward_order = Order()
        self.backward_number = 0
        """Counts backward passes, so that events of one are not taken for events of another."""
        self._previous: Reduction | None = None
        self._parked: list[Reduction] = []
        self._disagreements = runtime.disagreements
        self._forget_backward()

    @property
    def runtime(self) -> Runtime:
        """What carries the events out."""
        return self._runtime

    @runtime.setter
    def runtime(self, runtime: Runtime) -> None:
        self._runtime = self.gathers.runtime = runtime

    @property
    def order(self) -> list[ScheduledUnit]:
        """The units in the order in which the last forward of the root entered them, each once; none before one."""
        return list(dict.fromkeys(self._entered))

    def _forget_backward(self) -> None:
        self.backward_number += 1
        self._armed = False
        self._backwards: Counter[ScheduledUnit] = Counter()
        self._reduced: set[ScheduledUnit] = set()

    def before_root_forward(self, recording: bool) -> bool:
        """The outermost unit is entered: whatever an earlier step left behind (by an exception, or by a forward
        that no backward followed) is out of date, unless it is kept on purpose. Tells whether a backward was broken off
        or the ranks have disagreed, so that no graph from before is of use."""
        if self._runtime.in_backward():
            return False
        before, self._disagreements = self._disagreements, self._runtime.disagreements
        disagreed = before != self._disagreements
        broken = disagreed or self._armed
        self._forwards.clear()
        if broken:
            self._abandon_backward()
        self._forget_backward()
        if disagreed:
            self.gathers.free_everything()
            self._entered, self._entered_before, self._left_before = [], [], []
        self.gathers.free_what_is_not_kept()
        self._forward_order = Order(self._entered)
        self._entered, self._left = [], []
        self._goes_as_before, self._root_runs, self._root_records = True, True, recording
        return broken

    def after_root_forward(self, recording: bool) -> None:
        """The outermost unit is left."""
        if not self._runtime.in_backward():
            self._root_runs = False
            if recording:  # after an evaluation that goes another way, training goes on as before
                self._entered_before, self._left_before = self._entered, self._left
            self._backward_order = Order(reversed(self._left))
            self.gathers.free_unused()
            if not recording:
                self._runtime.end_pass()

    def before_forward(self, unit: ScheduledUnit) -> None:
        """A module is about to run. A recompute need not come to its end."""
        if not self._runtime.in_backward():
            self._forwards[unit] += 1
            if self._root_runs:
                self._entered.append(unit)
                self._compare_with_before()
                self.gathers.fetch(unit)
                following = self._forward_order.after(unit, self.settings.forward_prefetch_depth)
                self.gathers.fetch_ahead(unit.forward_prefetch or following)
            else:
                self.gathers.fetch_anew(unit)
        self.gathers.have(unit)

    def _compare_with_before(self) -> None:
        """Where this forward goes another way than the last recorded one, backward does not begin with what stayed."""
        place = len(self._entered) - 1
        if self._goes_as_before and self._entered[place:] != self._entered_before[place : place + 1]:
            self._goes_as_before = False
            self.gathers.free_retained(used=self._entered[-1])

    def after_forward(self, unit: ScheduledUnit, recording: bool, watched: bool = True) -> None:
        """A module has run. In a recompute its parameters stay: the backward of the same module comes next.

        So they do after a recorded forward whose outputs can't be watched: nothing would gather them for backward.
        """
        if self._runtime.in_backward():
            return
        self._forwards[unit] -= 1
        if self._root_runs:
            self._left.append(unit)
        if self._forwards[unit] > 0 or (recording and not watched):
            return
        wish = unit.reshard_after_forward
        if wish is False:
            if not recording:
                self.gathers.keep(unit)
        elif wish is None:
            if not recording:
                self.gathers.free(unit)
        elif self._root_runs and self._root_records and self._begins_backward(unit):
            self.gathers.retain(unit)
        elif wish is True or not recording:
            self.gathers.free(unit)
        else:
            self.gathers.shrink(unit)

    def _begins_backward(self, unit: ScheduledUnit) -> bool:
        """Tell whether the unit, which has just been left, is what backward needs first, or fetches ahead for that: if
        this forward goes on as the last recorded one did. Freed, it would be gathered again at once."""
        *before, root = self._left_before or [unit]
        place = len(self._left) - 1
        stays = self._goes_as_before and unit.stays_for_backward and unit.unshard_in_backward
        if not stays or unit not in before[place : place + 1]:
            return False
        asked = root.backward_prefetch or before[-1].backward_prefetch
        return len(before) - place <= 1 + (0 if asked else self.settings.backward_prefetch_depth)

    def before_backward(self, unit: ScheduledUnit) -> None:
        """The first gradient has reached the outputs of one call of a module."""
        self._arm()
        self._backwards[unit] += 1
        if unit.unshard_in_backward:
            self.gathers.fetch(unit)
        following = self._backward_order.after(unit, self.settings.backward_prefetch_depth)
        self.gathers.fetch_ahead(each for each in unit.backward_prefetch or following if each.unshard_in_backward)
        if unit.unshard_in_backward:
            self.gathers.have(unit)

    def after_backward(self, unit: ScheduledUnit) -> None:
        """The last gradient has left the inputs of one call of a module."""
        self._backwards[unit] -= 1
        if self._backwards[unit] <= 0 and self._forwards[unit] <= 0 and unit.reshard_after_backward:
            self.gathers.free(unit)

    def gradients_ready(self, reduction: Reduction) -> None:
        """The gradients of all parameters of a unit are complete: Algorithm 1."""
        self._arm()
        again = reduction.unit in self._reduced and reduction.kind == "all"
        if again:
            self._drain()
        self._reduced.add(reduction.unit)

        previous, self._previous = self._previous, None
        if previous is not None:
            self._runtime.wait_reduce_scatter(previous)  # (1)
        if reduction.kind == "none":
            self._runtime.keep(reduction)
        elif not reduction.unit.needs_reduction:
            self._runtime.settle(reduction)  # (2)
        else:
            self._runtime.issue_reduce_scatter(reduction)  # (3)
            if _is_early(reduction):
                self._runtime.issue_all_reduce(reduction)
            self._previous = reduction
        if previous is not None:
            self._park(previous)  # (4)
        if again:
            self._drain()  # an engine that adds what a node returns twice must add finished values

    def end_of_backward(self) -> None:
        """Settlement: the only place that waits for the slow tier."""
        for reduction in self._runtime.left_behind(self._reduced):
            self.gradients_ready(reduction)
        if self.settings.is_last_backward:
            self._issue_rest()
        self._runtime.end_pass()
        try:
            if self.settings.is_last_backward:
                self._drain()
        finally:  # a hook of the user's may raise
            self.gathers.after_backward(running=+self._forwards)
        self._forget_backward()

    def adopt(self, other: Schedule) -> None:
        """Go on for units that have been on their own."""
        self.gathers.take_over(other.gathers)

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            self._runtime.call_at_end_of_backward(self.end_of_backward)

    def _park(self, reduction: Reduction) -> None:
        if reduction.kind == "scatter":
            self._runtime.accumulate(reduction)
            return
        if not _is_early(reduction):
            self._runtime.issue_all_reduce(reduction)
        self._parked.append(reduction)

    def _issue_rest(self) -> None:
        if self._previous is not None:
            last, self._previous = self._previous, None
            self._runtime.wait_reduce_scatter(last)
            self._park(last)

    def _drain(self) -> None:
        self._issue_rest()
        while self._parked:
            reduction = self._parked.pop(0)
            self._runtime.wait_all_reduce(reduction)
            self._runtime.settle(reduction)

    def _abandon_backward(self) -> None:
        """What an exception has left in flight must come to an end before its ranks communicate again. What was kept
        for a sum is lost with it: a part of this backward's gradients may be in it."""
        if self._previous is not None:
            self._runtime.wait_reduce_scatter(self._previous)
            if _is_early(self._previous):
                self._parked.append(self._previous)
        for reduction in self._parked:
            self._runtime.wait_all_reduce(reduction)
        self._previous, self._parked = None, []
        self._runtime.forget_kept()


def _is_early(reduction: Reduction) -> bool:
    return reduction.unit.early_all_reduce and reduction.kind == "all"
