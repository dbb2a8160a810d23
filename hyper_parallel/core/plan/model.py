"""A framework-neutral description of a model: names, shapes, dtypes, owning modules, ties."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Mapping

from hyper_parallel.core.backend import Backend, Module


@dataclass(frozen=True)
class ParameterDescription:
    """One parameter, under the first name that the model gives it. `module_class` is the class of its owner."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    module_class: str
    trainable: bool = True

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return prod(self.shape)


@dataclass(frozen=True)
class ModelDescription:
    """All that the planner knows of a model.

    `modules` maps every qualified module name ("" is the model itself) to its class name, parents before children.
    `tied` maps each further name of a parameter to its first.
    """

    class_name: str
    parameters: tuple[ParameterDescription, ...]
    modules: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)


def describe(model: Module, backend: Backend) -> ModelDescription:
    """Describe a model through its backend. Reads names and shapes only; no tensor is touched."""
    modules = {name: type(module).__name__ for name, module in backend.modules.named_modules(model)}
    parameters: list[ParameterDescription] = []
    tied: dict[str, str] = {}
    first_names: dict[int, str] = {}
    for use in backend.modules.parameter_uses(model):
        first = first_names.setdefault(id(use.parameter), use.name)
        if first != use.name:
            tied[use.name] = first
            continue
        parameters.append(
            ParameterDescription(
                name=use.name,
                shape=tuple(int(size) for size in use.parameter.shape),
                dtype=backend.tensors.dtype_name(use.parameter),
                module_class=type(use.owner).__name__,
                trainable=backend.modules.is_trainable(use.parameter),
            )
        )
    return ModelDescription(type(model).__name__, tuple(parameters), modules, tied)
