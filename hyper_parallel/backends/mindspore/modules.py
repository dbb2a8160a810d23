"""Reading and adjusting MindSpore cells."""

from __future__ import annotations

from typing import Any, Callable, Iterator, Mapping, Sequence

import mindspore as ms
import numpy as np
from mindspore import nn

from hyper_parallel.core.backend import HookHandle, Module, Parameter, ParameterUse, Tensor
from hyper_parallel.core.loading import check_values


def is_module(value: object) -> bool:
    """See `core.backend.Modules`."""
    return isinstance(value, nn.Cell)


def named_modules(module: Module) -> Iterator[tuple[str, Module]]:
    """See `core.backend.Modules`."""
    return module.cells_and_names()


def parameter_uses(module: Module) -> list[ParameterUse]:
    """See `core.backend.Modules`."""
    return [
        ParameterUse(f"{path}.{attribute}" if path else attribute, owner, attribute, parameter)
        for path, owner in module.cells_and_names()
        for attribute, parameter in owner._params.items()
        if parameter is not None
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


def shadow(owner: Module, attribute: str, tensor: Tensor) -> None:
    """See `core.backend.Modules`. The instance dictionary comes before `Cell.__getattr__`."""
    owner.__dict__[attribute] = tensor


def unshadow(owner: Module, attribute: str) -> None:
    """See `core.backend.Modules`."""
    owner.__dict__.pop(attribute, None)


def before_forward(module: Module, hook: Callable[[tuple, dict], None]) -> HookHandle:
    """See `core.backend.Modules`."""
    return module.register_forward_pre_hook(lambda _, args, kwargs: hook(args, kwargs), with_kwargs=True)


def after_forward(module: Module, hook: Callable[[Any], None]) -> HookHandle:
    """See `core.backend.Modules`."""
    return module.register_forward_hook(lambda _, args, output: hook(output))
