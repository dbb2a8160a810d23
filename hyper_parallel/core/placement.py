"""Placements: what one mesh axis does to a tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hyper_parallel.core.errors import LayoutError


@dataclass(frozen=True)
class Replicate:
    """Every rank along the axis holds the same elements. Text form: `replicate`."""

    def __str__(self) -> str:
        return "replicate"


@dataclass(frozen=True)
class Shard:
    """Tensor dim `dim` is split along the axis by ceil-chunk. Text form: `shard(0)`.

    With `c = ceil(n / k)` the rank at coordinate `i` of `k` holds `[i*c, min((i+1)*c, n))`, which may be empty.
    A negative dim counts from the end and is resolved by the layout.
    """

    dim: int

    def __str__(self) -> str:
        return f"shard({self.dim})"


@dataclass(frozen=True)
class Partial:
    """Every rank along the axis holds a summand of the value. Text form: `partial`."""

    def __str__(self) -> str:
        return "partial"


Placement = Replicate | Shard | Partial


def parse_placement(text: str) -> Placement:
    """Read a placement back from its text form.

    Raises:
        LayoutError: the text is no placement.
    """
    if text == "replicate":
        return Replicate()
    if text == "partial":
        return Partial()
    match = re.fullmatch(r"shard\((-?\d+)\)", text)
    if match:
        return Shard(int(match[1]))
    raise LayoutError(f"{text!r} is no placement; write replicate, partial or shard(DIM)")
