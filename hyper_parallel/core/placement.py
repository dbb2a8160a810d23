"""Placements: what one mesh axis does to a tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from operator import index
from typing import Any, Callable, Sequence

from hyper_parallel.core.errors import LayoutError

REDUCTIONS = ("sum", "avg", "max", "min")
"""What can be pending on a partial value."""


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

    def __post_init__(self) -> None:
        _set(self, dim=_whole(self.dim, "the dim of a shard"))

    def __str__(self) -> str:
        return f"shard({self.dim})"


@dataclass(frozen=True)
class StridedShard:
    """Tensor dim `dim` is split by ceil-chunk *after* axes that stand to the right in the mesh have split it.

    `split_factor` is the product of their sizes. `{"shard": StridedShard(0, 4), "tensor": Shard(0)}` with four tensor
    ranks is fully sharded data parallelism over tensor parallelism: `tensor` splits first, `shard` cuts each piece.
    Where no axis to the right splits the dim, it is cut into `split_factor` blocks by ceil-chunk and each block is
    split: a rank holds one part of every block, one after the other. Text form: `strided_shard(0, 4)`.
    """

    dim: int
    split_factor: int

    def __post_init__(self) -> None:
        dim = _whole(self.dim, "the dim of a strided shard")
        factor = _whole(self.split_factor, "the split factor of a strided shard")
        if factor < 1:
            raise LayoutError(f"the split factor of a strided shard is {factor}; the least is 1, which is shard({dim})")
        _set(self, dim=dim, split_factor=factor)

    def __str__(self) -> str:
        return f"strided_shard({self.dim}, {self.split_factor})"


@dataclass(frozen=True)
class RaggedShard:
    """The leading dims `dims`, flattened, are split along the axis in the proportion of `local_units`.

    With `n` flattened elements and `u = ceil(n / sum(local_units))`, each rank takes the next `local_units[i] * u` of
    them, or what is left; a rank may hold nothing. Equal units split as `Shard` does. The local shape is
    `(own part of n, *other dims)`. Text form: `ragged_shard([0, 1], [2, 0, 1])`.
    """

    dims: tuple[int, ...]
    local_units: tuple[int, ...]

    def __post_init__(self) -> None:
        dims = (self.dims,) if isinstance(self.dims, int) else self.dims
        dims = tuple(_whole(dim, "a dim of a ragged shard") for dim in _several(dims, "the dims of a ragged shard"))
        units = tuple(
            _whole(unit, "a local unit of a ragged shard")
            for unit in _several(self.local_units, "the local units of a ragged shard")
        )
        if not dims:
            raise LayoutError(
                "a ragged shard names no dim; write at least the first one, as in ragged_shard([0], [1, 2])"
            )
        if min(units, default=0) < 0 or sum(units) < 1:
            raise LayoutError(
                f"the local units of a ragged shard are {list(units)}; they are not negative, and one is positive"
            )
        _set(self, dims=dims, local_units=units)

    def __str__(self) -> str:
        return f"ragged_shard({list(self.dims)}, {list(self.local_units)})"

    def bounds(self, length: int, index: int) -> tuple[int, int]:
        """Start and stop of the part of coordinate `index` among `length` flattened elements; may be empty."""
        unit = -(-length // sum(self.local_units))
        before = sum(self.local_units[:index])
        return min(before * unit, length), min((before + self.local_units[index]) * unit, length)


@dataclass(frozen=True)
class Partial:
    """Every rank along the axis holds a contribution, and `op` of them is the value.

    `op` is "sum", "avg", "max" or "min". Text form: `partial` for a sum, `partial(max)`.
    """

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in REDUCTIONS:
            raise LayoutError(f"{self.op!r} can't be pending on a partial value; write one of {', '.join(REDUCTIONS)}")

    def __str__(self) -> str:
        return "partial" if self.op == "sum" else f"partial({self.op})"


Placement = Replicate | Shard | StridedShard | RaggedShard | Partial
PLACEMENTS = (Replicate, Shard, StridedShard, RaggedShard, Partial)

_NUMBER = r"\s*(-?\d+)\s*"
_NUMBERS = r"\s*\[([-\d\s,]*)\]\s*"
_FORMS: tuple[tuple[str, Callable[..., Placement]], ...] = (
    (r"replicate", Replicate),
    (rf"shard\({_NUMBER}\)", lambda dim: Shard(int(dim))),
    (rf"strided_shard\({_NUMBER},{_NUMBER}\)", lambda dim, factor: StridedShard(int(dim), int(factor))),
    (rf"ragged_shard\({_NUMBERS},{_NUMBERS}\)", lambda dims, units: RaggedShard(_numbers(dims), _numbers(units))),
    (r"partial", Partial),
    (r"partial\(\s*(\w+)\s*\)", Partial),
)


def parse_placement(text: str) -> Placement:
    """Read a placement back from its text form.

    Raises:
        LayoutError: the text is no placement.
    """
    if isinstance(text, str):
        for form, make in _FORMS:
            if match := re.fullmatch(form, text.strip()):
                return make(*match.groups())
    raise LayoutError(
        f"{text!r} is no placement; write replicate, shard(DIM), strided_shard(DIM, SPLIT_FACTOR), "
        "ragged_shard([DIM, ...], [UNITS, ...]), partial or partial(OP)"
    )


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(re.fullmatch(r"-?\d+", part) for part in parts):
        raise LayoutError(f"[{text}] is no list of whole numbers; write for example [0, 1]")
    return tuple(map(int, parts))


def _whole(value: Any, what: str) -> int:
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise LayoutError(f"{what} is a whole number, found {value!r}")


def _several(values: Sequence[int], what: str) -> Sequence[int]:
    try:
        return tuple(values)
    except TypeError as error:
        raise LayoutError(f"{what} are a list of whole numbers, found {values!r}") from error


def whole_numbers(values: Sequence[int], what: str) -> tuple[int, ...]:
    """The values as ints. Raises `LayoutError`, which begins with `what`, for another thing than whole numbers."""
    try:
        numbers = () if isinstance(values, str) else tuple(values)
        if not isinstance(values, str) and not any(isinstance(each, bool) for each in numbers):
            return tuple(map(index, numbers))
    except TypeError:
        pass
    raise LayoutError(f"{what}, found {values!r}")


def _set(placement: Any, **fields: Any) -> None:
    for name, value in fields.items():
        object.__setattr__(placement, name, value)
