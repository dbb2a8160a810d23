"""Reading and adjusting MindSpore cells."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, ContextManager, Iterator, Mapping, NoReturn, Sequence

import mindspore as ms
import numpy as np
from mindspore import mint, nn
from mindspore.nn.utils import no_init_parameters

from hyper_parallel.backends.mindspore import stand_ins
from hyper_parallel.core.backend import BufferUse, HookHandle, Module, Parameter, ParameterUse, Tensor
from hyper_parallel.core.hooks import Handles, on_arguments, on_output
from hyper_parallel.core.loading import check_values

# MindSpore keeps the running statistics of its normalisations as parameters that no gradient reaches and the forward
# changes. They are what PyTorch calls buffers: every rank has its own.
_STATISTICS = {
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
    "running_mean": "running_mean",
    "running_var": "running_var",
    "num_batches_tracked": "num_batches_tracked",
}

# The names that PyTorch gives to MindSpore's own layers, those of `mint` being called as in PyTorch already, and to
# what they hold: a model written in each framework's layers then has one plan and one set of names in checkpoints.
_CLASS_NAMES = {each: name for name, each in vars(mint.nn).items() if isinstance(each, type)} | {
    nn.Dense: "Linear",
    nn.CellList: "ModuleList",
    nn.CellDict: "ModuleDict",
    nn.SequentialCell: "Sequential",
}
_NORMS = (
    *(nn.LayerNorm, nn.GroupNorm, nn.SyncBatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
_PARAMETER_NAMES = (
    ((nn.Embedding, nn.EmbeddingLookup), {"embedding_table": "weight"}),
    (_NORMS, {"gamma": "weight", "beta": "bias"}),
)


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
            yield from _walk(child, _joined(path, name))


def class_name(module: Module) -> str:
    """See `core.backend.Modules`."""
    return _CLASS_NAMES.get(type(module), type(module).__name__)


def without_values() -> ContextManager[None]:
    """See `core.backend.Modules`."""
    return no_init_parameters()


def parameter_uses(module: Module) -> list[ParameterUse]:
    """See `core.backend.Modules`."""
    return [
        ParameterUse(_joined(path, _parameter_name(owner, attribute)), owner, attribute, parameter)
        for path, owner in named_modules(module)
        for attribute, parameter in owner._params.items()
        if parameter is not None and not _is_statistic(attribute, parameter)
    ]


def _is_statistic(attribute: str, parameter: Parameter) -> bool:
    return attribute in _STATISTICS and not parameter.requires_grad


def _parameter_name(owner: Module, attribute: str) -> str:
    for classes, names in _PARAMETER_NAMES:
        name = names.get(attribute)
        # A user's subclass may hold something else under that name.
        if name is not None and isinstance(owner, classes) and name not in owner._params:
            return name
    return attribute


def buffers(module: Module) -> list[BufferUse]:
    """See `core.backend.Modules`."""
    found = []
    for path, owner in named_modules(module):
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                found.append(BufferUse(_joined(path, name), buffer, name not in owner._non_persistent_buffers_set))
        for attribute, parameter in owner._params.items():
            if parameter is not None and _is_statistic(attribute, parameter):
                found.append(BufferUse(_joined(path, _STATISTICS[attribute]), parameter, True))
    return found


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def load_parameters(module: Module, values: Mapping[str, np.ndarray]) -> None:
    """See `core.backend.Modules`."""
    uses = parameter_uses(module)
    check_values(uses, values)
    for use in uses:
        if use.name in values:
            use.parameter.set_data(ms.Tensor(np.array(values[use.name])).astype(use.parameter.dtype))


def convert(module: Module, dtype: str) -> None:
    """See `core.backend.Modules`. A parameter is made anew with its dtype: the engine fixes that of its gradient."""
    kind = getattr(ms, dtype)
    shared: dict[int, list[ParameterUse]] = {}
    for use in parameter_uses(module):
        shared.setdefault(id(use.parameter), []).append(use)
    for uses in shared.values():
        if uses[0].parameter.is_floating_point():
            replace_parameter(uses, ms.Tensor(uses[0].parameter.asnumpy()).astype(kind))
    for _, owner in named_modules(module):
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                owner._buffers[name] = buffer.astype(kind)


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


def stand_in(parameter: Parameter, refuse: Callable[[str], NoReturn]) -> Tensor:
    """See `core.backend.Modules`."""
    return stand_ins.stand_in(parameter, refuse)


def registered(owner: Module, attribute: str) -> Parameter | None:
    """See `core.backend.Modules`."""
    return owner._params.get(attribute)


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
