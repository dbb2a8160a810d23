"""What a mixed precision policy does at the two ends of a unit's module: floating tensors change their dtype."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass
from typing import Any, Callable, Mapping, MutableMapping

from hyper_parallel.core.backend import Backend, HookHandle, Module, Tensor
from hyper_parallel.core.fsdp.policy import FLOATING, MixedPrecisionPolicy


def cast_all(backend: Backend, tree: Any, dtype: str) -> Any:
    """A nest of tuples, lists, mappings and dataclasses with its floating tensors in `dtype`, recorded; what holds none
    that changes is the same object."""

    def cast(tensor: Tensor) -> Tensor:
        found = backend.tensors.dtype_name(tensor)
        return backend.autograd.cast(tensor, dtype) if found in FLOATING and found != dtype else tensor

    return _changed(tree, cast, backend.tensors.is_tensor)


def _changed(value: Any, change: Callable[[Tensor], Tensor], is_tensor: Callable[[Any], bool]) -> Any:
    if is_tensor(value):
        return change(value)
    if isinstance(value, Mapping):
        items = value
    elif isinstance(value, (tuple, list)):
        items = dict(enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        items = {each.name: getattr(value, each.name) for each in fields(value) if hasattr(value, each.name)}
    else:
        return value
    made = {key: _changed(item, change, is_tensor) for key, item in items.items()}
    if all(made[key] is item for key, item in items.items()):
        return value
    return _like(value, made)


def _like(value: Any, items: dict) -> Any:
    """A container as `value` is, with other items."""
    if isinstance(value, tuple):
        return type(value)(*items.values()) if hasattr(value, "_fields") else type(value)(items.values())
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)(items)
    other = copy.copy(value)
    for key, item in items.items():
        if isinstance(value, (list, MutableMapping)):
            other[key] = item
        else:
            object.__setattr__(other, key, item)  # a frozen dataclass, too
    return other


class Casts:
    """What a policy does to what one module is given and returns."""

    def __init__(self, backend: Backend, precision: MixedPrecisionPolicy):
        self._backend = backend
        self._taken, self._given = precision.input_dtype, precision.output_dtype

    def enter(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments, cast."""
        return (args, kwargs) if self._taken is None else cast_all(self._backend, (args, kwargs), self._taken)

    def leave(self, output: Any) -> Any:
        """The output, cast."""
        return output if self._given is None else cast_all(self._backend, output, self._given)

    def around(self, module: Module) -> list[HookHandle]:
        """Hooks that cast before anything else sees the arguments, and after all else has seen the output."""
        if self._taken is None and self._given is None:
            return []
        return [self._backend.modules.around_forward(module, self.enter, self.leave)]
