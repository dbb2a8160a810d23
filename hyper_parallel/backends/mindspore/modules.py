"""Reading and adjusting MindSpore cells."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Iterator, Mapping, Sequence

import mindspore as ms
import numpy as np
from mindspore import nn

from hyper_parallel.core.backend import HookHandle, Module, Parameter, ParameterUse, Tensor
from hyper_parallel.core.loading import check_values

# MindSpore keeps the running statistics of its normalisations as parameters that no gradient reaches and the forward
# changes. They are what PyTorch calls buffers: every rank has its own.
_STATISTICS = ("moving_mean", "moving_variance")


def is_module(value: object) -> bool:
    """See `core.backend.Modules`."""
    return isinstance(value, nn.Cell)


def named_modules(module: Module) -> Iterator[tuple[str, Module]]:
    """See `core.backend.Modules`."""
    return _walk(module, "")


def _walk(cell: Module, path: str) -> Iterator[tuple[str, Module]]:
    """Like `cells_and_names`, which leaves out where a cell stands a second time."""
    yield path, cell
    for name, child in cell._cells.items():
        if child is not None:
            yield from _walk(child, f"{path}.{name}" if path else name)


def parameter_uses(module: Module) -> list[ParameterUse]:
    """See `core.backend.Modules`."""
    return [
        ParameterUse(f"{path}.{attribute}" if path else attribute, owner, attribute, parameter)
        for path, owner in named_modules(module)
        for attribute, parameter in owner._params.items()
        if parameter is not None and attribute not in _STATISTICS
    ]


def load_parameters(module: Module, values: Mapping[str, np.ndarray]) -> None:
    """See `core.backend.Modules`."""
    uses = parameter_uses(module)
    check_values(uses, values)
    for use in uses:
        if use.name in values:
            use.parameter.set_data(ms.Tensor(np.array(values[use.name])).astype(use.parameter.dtype))


def place_buffers(module: Module) -> None:
    """See `core.backend.Modules`. MindSpore moves a tensor when an operator needs it elsewhere."""


def is_trainable(parameter: Parameter) -> bool:
    """See `core.backend.Modules`."""
    return parameter.requires_grad


def replace_parameter(uses: Sequence[ParameterUse], value: Tensor) -> Parameter:
    """See `core.backend.Modules`. A new object: the engine fixes a gradient's shape when the parameter is made."""
    old = uses[0].parameter
    parameter = ms.Parameter(value, name=old.name, requires_grad=old.requires_grad)
    parameter.data = value  # the constructor has copied it
    for use in uses:
        setattr(use.owner, use.attribute, parameter)
    return parameter


def registered(owner: Module, attribute: str) -> Parameter | None:
    """See `core.backend.Modules`."""
    return owner._params.get(attribute)


def before_forward(module: Module, hook: Callable[[tuple, dict], None]) -> HookHandle:
    """See `core.backend.Modules`."""
    return module.register_forward_pre_hook(partial(_before, hook), with_kwargs=True, prepend=True)


def _before(hook: Callable[[tuple, dict], None], module: Module, args: tuple, kwargs: dict) -> None:
    hook(args, kwargs)


def after_forward(module: Module, hook: Callable[[Any], None]) -> HookHandle:
    """See `core.backend.Modules`."""
    return module.register_forward_hook(partial(_after, hook))


def _after(hook: Callable[[Any], None], module: Module, args: tuple, output: Any) -> None:
    hook(output)
