"""Checks for loading whole parameters by name, the same for both backends."""

from __future__ import annotations

from typing import Mapping, Sequence

import numpy as np

from hyper_parallel.core.backend import ParameterUse
from hyper_parallel.core.errors import ConfigError


def check_values(
    uses: Sequence[ParameterUse], values: Mapping[str, np.ndarray], whole: Mapping[int, tuple[int, ...]] | None = None
) -> None:
    """Compare `values` with the parameters of a model; a tied parameter needs one of its names. `whole` tells the whole
    shape of those that are shards, by their id.

    Raises:
        ConfigError: lists missing names, unknown names and wrong shapes, at most eight.
    """
    whole = whole or {}
    shapes = {use.name: whole.get(id(use.parameter), tuple(map(int, use.parameter.shape))) for use in uses}
    given = {id(use.parameter) for use in uses if use.name in values}
    wrong = [f"{use.name} is missing" for use in uses if id(use.parameter) not in given]
    wrong += [f"{name} is not in the model" for name in values if name not in shapes]
    wrong += [
        f"{name} has shape {values[name].shape}, the model needs {shape}"
        for name, shape in shapes.items()
        if name in values and values[name].shape != shape
    ]
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ConfigError("these values do not fit the model: " + "; ".join(wrong[:8]) + more)
