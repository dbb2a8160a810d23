"""What an orthogonalized update is multiplied with, by the shape of its logical matrix."""

from __future__ import annotations

import math
from numbers import Real
from typing import Callable

from hyper_parallel.core.errors import ConfigError

SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms": lambda rows, columns: math.sqrt(rows / columns),
}
"""By [out, in]. "match_rms" gives updates about the size of AdamW's, so that its learning rates serve (Moonlight);
"original" is the first Muon's; "spectral" leaves a factor of the size to the user; "unit_rms" takes inputs of size 1 to
changes of outputs of size 1."""


def check_scale(scale: str | float) -> None:
    """Raise `ConfigError` for what is neither one of `SCALES` nor a number above 0."""
    if isinstance(scale, str) and scale in SCALES:
        return
    if isinstance(scale, Real) and not isinstance(scale, bool) and math.isfinite(scale) and scale > 0:
        return
    names = ", ".join(f'"{name}"' for name in SCALES)
    raise ConfigError(f"scale is {scale!r}: write {names}, or a number above 0")


def scale_of(scale: str | float, shape: tuple[int, int]) -> float:
    """The factor of a logical matrix of `shape` [out, in]; a number is itself. 1.0 for a matrix without elements.

    Raises `ConfigError` as `check_scale` does."""
    check_scale(scale)
    if not isinstance(scale, str):
        return float(scale)
    return SCALES[scale](*shape) if min(shape) else 1.0
