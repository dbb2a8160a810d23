"""A framework-neutral description of a model: names, shapes, dtypes, owning modules, buffers, ties."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Mapping

from hyper_parallel.core.backend import Backend, Module
from hyper_parallel.core.errors import PlanError

ITEM_BYTES: Mapping[str, int] = {
    **{"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8},
    **{"float8_e4m3fn": 1, "float8_e5m2": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8},
    **{"complex64": 8, "complex128": 16},
}
"""Bytes of one element of every dtype that a description may name."""


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
class BufferDescription:
    """A tensor that belongs to a module and is no parameter; in checkpoints only when `persistent`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    persistent: bool = True


@dataclass(frozen=True)
class ModelDescription:
    """All that the planner knows of a model.

    `modules` maps every qualified module name ("" is the model itself) to its class name, parents before children.
    `tied` maps each further name of a parameter to its first. `config` is what the model says of itself, as JSON has
    it: text, numbers, lists and mappings. docs/planning.md describes the file that `save` writes.
    """

    class_name: str
    parameters: tuple[ParameterDescription, ...]
    modules: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[BufferDescription, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The description as JSON has it. A tied name stands in `tied` only, which makes it unmistakable."""
        return {
            "model_class": self.class_name,
            "config": dict(self.config),
            "parameters": [
                {
                    "name": each.name,
                    "shape": list(each.shape),
                    "dtype": each.dtype,
                    "module": each.module_class,
                    "requires_grad": each.trainable,
                }
                for each in self.parameters
            ],
            "buffers": [
                {"name": each.name, "shape": list(each.shape), "dtype": each.dtype, "persistent": each.persistent}
                for each in self.buffers
            ],
            "modules": {name: class_name for name, class_name in self.modules.items() if name},
            "tied": dict(self.tied),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelDescription:
        """Read what `to_dict` gave, or what another tool wrote in this format.

        Raises:
            PlanError: names the key and what is wrong with it.
        """
        from hyper_parallel.core.plan.model_json import read_description

        return read_description(values)

    def save(self, path: str | os.PathLike) -> None:
        """Write JSON, one entry a line; a file that is there is replaced as a whole."""
        path = Path(path)
        draft = path.with_name(path.name + ".part")
        draft.write_text(_lines(self.to_dict()))
        os.replace(draft, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> ModelDescription:
        """Read what `save` wrote, or another tool in this format.

        Raises:
            PlanError: the file is missing, no JSON, or no description; names the file and the key.
        """
        from hyper_parallel.core.plan.model_json import load_json

        values = load_json(path, "the description")
        try:
            return cls.from_dict(values)
        except PlanError as error:
            raise PlanError(f"the description {path}: {error}") from error


def describe(model: Module, backend: Backend) -> ModelDescription:
    """Describe a model through its backend. Reads names and shapes only; no tensor is touched.

    Raises:
        PlanError: a parameter or buffer has a dtype that is not in `ITEM_BYTES`.
    """
    from hyper_parallel.core.plan.model_json import config_of

    modules = {name: backend.modules.class_name(module) for name, module in backend.modules.named_modules(model)}
    parameters, tied = _describe_parameters(model, backend)
    buffers = _describe_buffers(model, backend)
    return ModelDescription(modules[""], parameters, modules, tied, buffers, config_of(model))


def _describe_parameters(model: Module, backend: Backend) -> tuple[tuple[ParameterDescription, ...], dict[str, str]]:
    """The parameters under their first names, and the first name of each further one."""
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
                dtype=_dtype(use.name, backend.tensors.dtype_name(use.parameter)),
                module_class=backend.modules.class_name(use.owner),
                trainable=backend.modules.is_trainable(use.parameter),
            )
        )
    return tuple(parameters), tied


def _describe_buffers(model: Module, backend: Backend) -> tuple[BufferDescription, ...]:
    """The buffers, each under its first name."""
    uses = {}
    for use in backend.modules.buffers(model):
        uses.setdefault(id(use.buffer), use)
    return tuple(
        BufferDescription(
            name=use.name,
            shape=tuple(int(size) for size in use.buffer.shape),
            dtype=_dtype(use.name, backend.tensors.dtype_name(use.buffer)),
            persistent=use.persistent,
        )
        for use in uses.values()
    )


def _dtype(name: str, dtype: str) -> str:
    if dtype not in ITEM_BYTES:
        raise PlanError(f"{name} has the dtype {dtype}, which no plan knows; known are {', '.join(ITEM_BYTES)}")
    return dtype


def _lines(values: Mapping[str, Any]) -> str:
    """JSON in which every entry of an outer list or mapping has a line of its own."""
    parts = []
    for key, value in values.items():
        if isinstance(value, list):
            lines, around = [json.dumps(each) for each in value], "[]"
        elif isinstance(value, dict):
            lines, around = [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in value.items()], "{}"
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
            continue
        body = ",\n  ".join(lines)
        parts.append(f" {json.dumps(key)}: {around[0]}" + (f"\n  {body}\n " if lines else "") + around[1])
    return "{\n" + ",\n".join(parts) + "\n}\n"
