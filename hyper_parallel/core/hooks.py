"""Hooks on modules, as both frameworks call them, and those that belong together."""

from __future__ import annotations

from typing import Any, Callable

from hyper_parallel.core.backend import HookHandle, Module


def on_arguments(hook: Callable[[tuple, dict], Any], module: Module, args: tuple, kwargs: dict) -> Any:
    """What a framework calls before a forward, for a hook that asks for the arguments alone."""
    return hook(args, kwargs)


def on_output(hook: Callable[[Any], Any], module: Module, args: tuple, output: Any) -> Any:
    """What a framework calls after a forward, for a hook that asks for the output alone."""
    return hook(output)


class Handles:
    """Several hooks that are taken away as one."""

    def __init__(self, *handles: HookHandle):
        self._handles = handles

    def remove(self) -> None:
        """Take them away; harmless when done twice."""
        for handle in self._handles:
            handle.remove()
