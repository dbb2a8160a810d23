"""The order in which units were used, from which is told what comes next."""

from __future__ import annotations

from typing import Generic, Iterable, TypeVar

Unit = TypeVar("Unit")


class Order(Generic[Unit]):
    """A remembered order of units, repetitions included, and the place in it that a pass has reached.

    A pass need not keep to it: what is skipped is passed over, and what comes once more is looked for from the start.
    """

    def __init__(self, units: Iterable[Unit] = ()):
        self._units = list(units)
        self._reached = 0

    def after(self, unit: Unit, count: int) -> list[Unit]:
        """The next `count` entries after `unit`, which the pass has come to; none after one that is unknown."""
        for start in (self._reached, 0):
            if unit in self._units[start:]:
                self._reached = self._units.index(unit, start) + 1
                return self._units[self._reached : self._reached + count]
        return []
