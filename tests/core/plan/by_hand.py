"""Descriptions of models for tests: stored ones, changed ones, and small ones written by hand."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Callable, Mapping

from hyper_parallel.core.plan.model import ModelDescription, ParameterDescription

MODELS = Path(__file__).parents[2] / "data" / "models"

HEADS = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96}
"""The sizes of the stored models."""


def stored(name: str) -> ModelDescription:
    """A model of tests/data/models."""
    return ModelDescription.load(MODELS / f"{name}.json")


def by_hand(
    parameters: Mapping[str, tuple[tuple[int, ...], str]],
    modules: Mapping[str, str] | None = None,
    config: Mapping[str, object] = HEADS,
) -> ModelDescription:
    """A model of these parameters: name to shape and class of the owner. `modules` are classes of further modules."""
    owners = {name.rpartition(".")[0]: owner for name, (_, owner) in parameters.items()}
    described = tuple(
        ParameterDescription(name, shape, "float32", owner) for name, (shape, owner) in parameters.items()
    )
    return ModelDescription("Model", described, {"": "Model"} | owners | dict(modules or {}), config=config)


def renamed(model: ModelDescription, rename: Callable[[str], str], wrappers: Mapping[str, str]) -> ModelDescription:
    """The model with every name changed, and modules of classes `wrappers` where the change puts some."""
    return replace(
        model,
        parameters=tuple(replace(each, name=rename(each.name)) for each in model.parameters),
        modules={"": model.class_name}
        | {rename(name): kind for name, kind in model.modules.items() if name}
        | dict(wrappers),
        tied={rename(name): rename(first) for name, first in model.tied.items()},
    )


def with_shape(model: ModelDescription, pattern: str, shape: tuple[int, ...]) -> ModelDescription:
    """The model with another shape for every parameter that the regular expression fits."""
    found = [each for each in model.parameters if re.fullmatch(pattern, each.name)]
    assert found, f"no parameter is called {pattern}"
    changed = tuple(replace(each, shape=shape) if each in found else each for each in model.parameters)
    return replace(model, parameters=changed)


def layerless(name: str) -> str:
    """A name with "*" for the numbers of layers."""
    return re.sub(r"\.\d+\.", ".*.", name)
