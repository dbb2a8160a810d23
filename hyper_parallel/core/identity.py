"""A map from living objects to facts about them, keyed on identity."""

from __future__ import annotations

import weakref
from typing import Any


class IdentityMap:
    """Facts about objects that may define `==` as they like (tensors do). An entry ends with its object."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref, Any]] = {}

    def set(self, key: object, value: Any) -> None:
        """Remember `value` for `key`, replacing what was there."""
        number, entries = id(key), self._entries

        def forget(reference: weakref.ref) -> None:
            if number in entries and entries[number][0] is reference:
                del entries[number]

        entries[number] = (weakref.ref(key, forget), value)

    def get(self, key: object, default: Any = None) -> Any:
        """What is remembered for `key`."""
        reference, value = self._entries.get(id(key), (None, None))
        return value if reference is not None and reference() is key else default

    def pop(self, key: object) -> None:
        """Forget `key`; harmless when it is not there."""
        if self.get(key, self) is not self:
            del self._entries[id(key)]

    def __len__(self) -> int:
        return len(self._entries)
