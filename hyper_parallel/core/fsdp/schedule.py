"""The order of events of fully sharded data parallelism (§5.3, Algorithm 1), and nothing else.

A `Schedule` hears what happens to units (a forward begins, a gradient arrives, ...) and tells a `Runtime` what to do.
It knows no tensor and no framework: both backends drive the same object, and so does a recording runtime in the
tests.

Forward: gather before, free after. Backward: gather before the first gradient enters a unit, free when the last has
left it, reduce when the gradients of all its parameters are complete. Layers are counted in forward order, backward
runs downwards:

    post-backward step of layer l:  (1) wait for the reduce-scatter of layer l+1
                                    (2) settle what needs no reduction
                                    (3) issue the reduce-scatter of layer l
                                    (4) issue the all-reduce of layer l+1 and park it
    end of backward (settlement):   wait for everything parked, hand the gradients over

Nothing waits for an all-reduce before the settlement.
"""

from __future__ import annotations

from collections import Counter
from typing import Callable, Protocol


class ScheduledUnit(Protocol):
    """What the schedule must know of a unit."""

    name: str
    reshard_after_forward: bool
    needs_reduction: bool


class Reduction(Protocol):
    """The gradients of one unit on their way, from `gradients_ready` to `settle`."""

    unit: ScheduledUnit


class Runtime(Protocol):
    """What carries the events out. `issue` returns at once; `wait` returns when the result is there."""

    def issue_gather(self, unit: ScheduledUnit) -> None:
        """Start gathering the full parameters."""

    def wait_gather(self, unit: ScheduledUnit) -> None:
        """Have them readable."""

    def free(self, unit: ScheduledUnit) -> None:
        """Give the memory of the full parameters back."""

    def issue_reduce_scatter(self, reduction: Reduction) -> None:
        """Start reducing over the shard axis."""

    def wait_reduce_scatter(self, reduction: Reduction) -> None:
        """Have the shards of the gradients, summed over the shard axis."""

    def issue_all_reduce(self, reduction: Reduction) -> None:
        """Start reducing the shards over the replica axis."""

    def wait_all_reduce(self, reduction: Reduction) -> None:
        """Have them summed over the replica axis."""

    def settle(self, reduction: Reduction) -> None:
        """Hand the finished gradients to their parameters."""

    def in_backward(self) -> bool:
        """Tell whether the engine is running a backward pass now."""

    def call_at_end_of_backward(self, callback: Callable[[], None]) -> None:
        """Call back once this backward pass has computed every gradient."""


class Schedule:
    """The state machine for all units below one root. Every method is one event."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._gathered: dict[ScheduledUnit, None] = {}  # in order of gathering
        self._forwards: Counter[ScheduledUnit] = Counter()
        self.backward_number = 0
        """Counts backward passes, so that events of one are not taken for events of another."""
        self._forget_backward()

    def _forget_backward(self) -> None:
        self.backward_number += 1
        self._armed = False
        self._backwards: Counter[ScheduledUnit] = Counter()
        self._reduced: set[ScheduledUnit] = set()
        self._previous: Reduction | None = None
        self._parked: list[Reduction] = []

    def is_gathered(self, unit: ScheduledUnit) -> bool:
        """Tell whether the full parameters of a unit may be read now."""
        return unit in self._gathered

    def before_root_forward(self) -> None:
        """The outermost unit is entered: whatever an earlier step left behind (by an exception, or by a forward
        that no backward followed) is out of date."""
        if not self._runtime.in_backward():
            self._forwards.clear()
            self._abandon()
            self._forget_backward()
            self._free_all()

    def before_forward(self, unit: ScheduledUnit) -> None:
        """A module is about to run."""
        self._forwards[unit] += 1
        self._gather(unit)

    def after_forward(self, unit: ScheduledUnit, recording: bool, watched: bool = True) -> None:
        """A module has run. In a recompute its parameters stay: the backward of the same module comes next.

        So they do after a recorded forward whose outputs can't be watched: nothing would gather them for backward.
        """
        self._forwards[unit] -= 1
        wanted = recording and not (unit.reshard_after_forward and watched)
        if self._forwards[unit] <= 0 and not wanted and not self._runtime.in_backward():
            self._free(unit)

    def before_backward(self, unit: ScheduledUnit) -> None:
        """The first gradient has reached the outputs of one call of a module."""
        self._arm()
        self._backwards[unit] += 1
        self._gather(unit)

    def after_backward(self, unit: ScheduledUnit) -> None:
        """The last gradient has left the inputs of one call of a module."""
        self._backwards[unit] -= 1
        if self._backwards[unit] <= 0 and self._forwards[unit] <= 0:
            self._free(unit)

    def gradients_ready(self, reduction: Reduction) -> None:
        """The gradients of all parameters of a unit are complete: Algorithm 1."""
        self._arm()
        again = reduction.unit in self._reduced
        if again:
            self._drain()
        self._reduced.add(reduction.unit)

        previous, self._previous = self._previous, None
        if previous is not None:
            self._runtime.wait_reduce_scatter(previous)  # (1)
        if not reduction.unit.needs_reduction:
            self._runtime.settle(reduction)  # (2)
        else:
            self._runtime.issue_reduce_scatter(reduction)  # (3)
            self._previous = reduction
        if previous is not None:
            self._park(previous)  # (4)
        if again:
            self._drain()  # an engine that adds what a node returns twice must add finished values

    def end_of_backward(self) -> None:
        """Settlement: the only place that waits for the slow tier."""
        self._drain()
        self._free_all()
        self._forget_backward()

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            self._runtime.call_at_end_of_backward(self.end_of_backward)

    def _park(self, reduction: Reduction) -> None:
        self._runtime.issue_all_reduce(reduction)
        self._parked.append(reduction)

    def _drain(self) -> None:
        if self._previous is not None:
            last, self._previous = self._previous, None
            self._runtime.wait_reduce_scatter(last)
            self._park(last)
        parked, self._parked = self._parked, []
        for reduction in parked:
            self._runtime.wait_all_reduce(reduction)
            self._runtime.settle(reduction)

    def _abandon(self) -> None:
        """What an exception has left in flight must come to an end before its ranks communicate again."""
        if self._previous is not None:
            self._runtime.wait_reduce_scatter(self._previous)
        for reduction in self._parked:
            self._runtime.wait_all_reduce(reduction)

    def _gather(self, unit: ScheduledUnit) -> None:
        if unit not in self._gathered:
            self._runtime.issue_gather(unit)
            self._runtime.wait_gather(unit)
            self._gathered[unit] = None

    def _free(self, unit: ScheduledUnit) -> None:
        if unit in self._gathered:
            del self._gathered[unit]
            self._runtime.free(unit)

    def _free_all(self) -> None:
        for unit in list(self._gathered):
            self._free(unit)
