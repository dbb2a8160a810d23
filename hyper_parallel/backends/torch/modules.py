"""Reading and adjusting PyTorch modules."""

from __future__ import annotations

from typing import Any, Callable, Iterator, Mapping, Sequence

import numpy as np
import torch

from hyper_parallel.backends.torch.tensors import to_device
from hyper_parallel.core.backend import HookHandle, Module, Parameter, ParameterUse, Tensor
from hyper_parallel.core.loading import check_values


def is_module(value: object) -> bool:
    """See `core.backend.Modules`."""
    return isinstance(value, torch.nn.Module)


def named_modules(module: Module) -> Iterator[tuple[str, Module]]:
    """See `core.backend.Modules`."""
    return module.named_modules()


def parameter_uses(module: Module) -> list[ParameterUse]:
    """See `core.backend.Modules`."""
    return [
        ParameterUse(f"{path}.{attribute}" if path else attribute, owner, attribute, parameter)
        for path, owner in module.named_modules()
        for attribute, parameter in owner._parameters.items()
        if parameter is not None
    ]


def load_parameters(module: Module, values: Mapping[str, np.ndarray]) -> None:
    """See `core.backend.Modules`."""
    uses = parameter_uses(module)
    check_values(uses, values)
    with torch.no_grad():
        for use in uses:
            if use.name in values:
                use.parameter.copy_(torch.from_numpy(np.array(values[use.name])))


def place_buffers(module: Module) -> None:
    """See `core.backend.Modules`."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = to_device(buffer)


def is_trainable(parameter: Parameter) -> bool:
    """See `core.backend.Modules`."""
    return parameter.requires_grad


def replace_parameter(uses: Sequence[ParameterUse], value: Tensor) -> Parameter:
    """See `core.backend.Modules`. The parameter object stays, so an optimizer that holds it goes on."""
    parameter = uses[0].parameter
    parameter.data = value
    parameter.grad = None  # it belonged to the old shape
    return parameter


def shadow(owner: Module, attribute: str, tensor: Tensor) -> None:
    """See `core.backend.Modules`. The instance dictionary comes before `Module.__getattr__`."""
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
