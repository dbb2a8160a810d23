"""Reading and adjusting PyTorch modules."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, ContextManager, Iterator, Mapping, NoReturn, Sequence

import numpy as np
import torch

from hyper_parallel.backends.torch import stand_ins
from hyper_parallel.backends.torch.tensors import to_device
from hyper_parallel.core.backend import BufferUse, HookHandle, Module, Parameter, ParameterUse, Tensor
from hyper_parallel.core.hooks import Handles, on_arguments, on_output
from hyper_parallel.core.loading import check_values


def is_module(value: object) -> bool:
    """See `core.backend.Modules`."""
    return isinstance(value, torch.nn.Module)


def named_modules(module: Module) -> Iterator[tuple[str, Module]]:
    """See `core.backend.Modules`."""
    return module.named_modules(remove_duplicate=False)


def class_name(module: Module) -> str:
    """See `core.backend.Modules`. What FSDP2 has sharded is of a class made for that, and goes by the name it had."""
    kind = type(module)
    while len(kind.__bases__) == 2 and kind.__bases__[0].__module__.startswith("torch.distributed."):
        kind = kind.__bases__[1]
    return kind.__name__


def without_values() -> ContextManager[None]:
    """See `core.backend.Modules`."""
    return torch.device("meta")


def parameter_uses(module: Module) -> list[ParameterUse]:
    """See `core.backend.Modules`."""
    return [
        ParameterUse(f"{path}.{attribute}" if path else attribute, owner, attribute, parameter)
        for path, owner in named_modules(module)
        for attribute, parameter in owner._parameters.items()
        if parameter is not None
    ]


def buffers(module: Module) -> list[BufferUse]:
    """See `core.backend.Modules`."""
    return [
        BufferUse(f"{path}.{name}" if path else name, buffer, name not in owner._non_persistent_buffers_set)
        for path, owner in named_modules(module)
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]


def load_parameters(module: Module, values: Mapping[str, np.ndarray]) -> None:
    """See `core.backend.Modules`."""
    uses = parameter_uses(module)
    check_values(uses, values)
    with torch.no_grad():
        for use in uses:
            if use.name in values:
                use.parameter.copy_(torch.from_numpy(np.array(values[use.name])))


def convert(module: Module, dtype: str) -> None:
    """See `core.backend.Modules`."""
    module.to(getattr(torch, dtype))


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
    """See `core.backend.Modules`. The parameter object stays, so an optimizer that holds it goes on; but PyTorch lets
    none go from the meta device to another."""
    parameter = uses[0].parameter
    if parameter.is_meta == value.is_meta:
        parameter.data = value
    else:
        parameter = torch.nn.Parameter(value, parameter.requires_grad)
    parameter.grad = None  # it belonged to the old shape
    for use in uses:
        use.owner._parameters[use.attribute] = parameter
    return parameter


def stand_in(parameter: Parameter, refuse: Callable[[str], NoReturn]) -> Tensor:
    """See `core.backend.Modules`."""
    return stand_ins.stand_in(parameter, refuse)


def registered(owner: Module, attribute: str) -> Parameter | None:
    """See `core.backend.Modules`."""
    return owner._parameters.get(attribute)


def before_forward(module: Module, hook: Callable[[tuple, dict], None]) -> HookHandle:
    """See `core.backend.Modules`."""
    return module.register_forward_pre_hook(partial(on_arguments, hook), with_kwargs=True, prepend=True)


def after_forward(module: Module, hook: Callable[[Any], None]) -> HookHandle:
    """See `core.backend.Modules`."""
    return module.register_forward_hook(partial(on_output, hook))


def around_forward(
    module: Module, enter: Callable[[tuple, dict], tuple[tuple, dict]], leave: Callable[[Any], Any]
) -> HookHandle:
    """See `core.backend.Modules`."""
    return Handles(
        module.register_forward_pre_hook(partial(on_arguments, enter), with_kwargs=True, prepend=True),
        module.register_forward_hook(partial(on_output, leave)),
    )
