"""Which units are gathered, and which on their way: the only caller of what gathers and frees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Container, Iterable

if TYPE_CHECKING:
    from hyper_parallel.core.fsdp.schedule import Runtime, ScheduledUnit


class Gathers:
    """Full parameters come and go here. A buffer is never freed while a collective fills it."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self._coming: dict[ScheduledUnit, None] = {}  # issued, not waited for; in order, as all ranks wait alike
        self._readable: dict[ScheduledUnit, None] = {}
        self._ahead: set[ScheduledUnit] = set()  # fetched for a use that has not come yet
        self._shrunk: dict[ScheduledUnit, None] = {}  # a part is kept, from which a smaller group gathers again
        self._kept: set[ScheduledUnit] = set()  # stays when a new forward begins
        self._retained: dict[ScheduledUnit, None] = {}  # readable, for the backward of the forward that has left it
        self.unused = 0
        """How often a unit was fetched ahead for a use that did not come."""

    def is_readable(self, unit: ScheduledUnit) -> bool:
        """Tell whether the full parameters may be read now."""
        return unit in self._readable

    def readable(self) -> list[ScheduledUnit]:
        """All units that are gathered."""
        return list(self._readable)

    def fetch(self, unit: ScheduledUnit) -> None:
        """Start gathering, if need be."""
        if unit not in self._readable and unit not in self._coming:
            self.runtime.issue_gather(unit)
            self._coming[unit] = None

    def fetch_anew(self, unit: ScheduledUnit) -> None:
        """Start gathering what the shards hold now, if need be: since a unit was retained they may have changed."""
        if unit in self._retained:
            self.free(unit)
        self.fetch(unit)

    def fetch_ahead(self, units: Iterable[ScheduledUnit]) -> None:
        """Start gathering what is likely to be used next."""
        for unit in units:
            if unit not in self._readable and unit not in self._coming:
                self.fetch(unit)
                self._ahead.add(unit)

    def have(self, unit: ScheduledUnit) -> None:
        """Make the full parameters readable."""
        self.fetch(unit)
        self._arrive(unit)
        self._ahead.discard(unit)
        self._retained.pop(unit, None)

    def keep(self, unit: ScheduledUnit) -> None:
        """Let a unit stay as it is when the next forward begins."""
        self._kept.add(unit)

    def retain(self, unit: ScheduledUnit) -> None:
        """Let a unit that has been computed with stay for backward, and for nothing else."""
        self._arrive(unit)
        if unit in self._readable:
            self._kept.discard(unit)
            self._retained[unit] = None
            self.runtime.retain(unit)

    def free_retained(self, used: ScheduledUnit) -> None:
        """Free what was retained, but for what is `used` now: backward will not begin with it."""
        for unit in list(self._retained):
            if unit is not used:
                self.free(unit)

    def free(self, unit: ScheduledUnit) -> None:
        """Give the memory back, once nothing writes to it any more."""
        self._arrive(unit)
        if unit in self._readable or unit in self._shrunk:
            self._readable.pop(unit, None)
            self._shrunk.pop(unit, None)
            self.runtime.free(unit)
        self._kept.discard(unit)
        self._retained.pop(unit, None)
        if unit in self._ahead:
            self._ahead.discard(unit)
            self.unused += 1

    def shrink(self, unit: ScheduledUnit) -> None:
        """Keep no more than this rank's part of what a smaller group holds together."""
        self._arrive(unit)
        if unit in self._readable:
            del self._readable[unit]
            self._kept.discard(unit)
            self._shrunk[unit] = None
            self.runtime.shrink(unit)

    def free_unused(self) -> None:
        """Free what was fetched ahead for a use that did not come."""
        for unit in {**self._readable, **self._coming}:
            if unit in self._ahead:
                self.free(unit)

    def free_everything(self) -> None:
        """Free all, whatever it was kept for."""
        self._kept.clear()
        self.free_what_is_not_kept()

    def free_what_is_not_kept(self) -> None:
        """Free whatever is left of earlier passes."""
        for unit in {**self._readable, **self._coming, **self._shrunk}:
            if unit not in self._kept:
                self.free(unit)

    def after_backward(self, running: Container[ScheduledUnit] = ()) -> None:
        """Free everything but what is to stay from one backward to the next forward, and what is computed with in the
        `running` forwards that the backward is a part of."""
        for unit in {**self._readable, **self._coming, **self._shrunk}:
            if unit in running and unit in self._readable:
                continue
            if unit.reshard_after_backward or unit not in self._readable:
                self.free(unit)
            else:
                self._kept.add(unit)

    def take_over(self, other: Gathers) -> None:
        """Go on with what another one has gathered."""
        for unit in list(other._coming):
            other._arrive(unit)
        self._readable.update(other._readable)
        self._shrunk.update(other._shrunk)
        self._kept |= other._kept
        self._retained.update(other._retained)
        self._ahead |= other._ahead
        self.unused += other.unused

    def _arrive(self, unit: ScheduledUnit) -> None:
        if unit in self._coming:
            del self._coming[unit]
            self.runtime.wait_gather(unit)
            self._readable[unit] = None
