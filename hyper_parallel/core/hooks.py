"""Hooks that belong together."""

from __future__ import annotations

from hyper_parallel.core.backend import HookHandle


class Handles:
    """Several hooks that are taken away as one."""

    def __init__(self, *handles: HookHandle):
        self._handles = handles

    def remove(self) -> None:
        """Take them away; harmless when done twice."""
        for handle in self._handles:
            handle.remove()
