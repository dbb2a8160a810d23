"""The matrices that Muon sees in a parameter. Where a parameter lies on a mesh has no part in this (paper §6.6)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Sequence

import numpy as np

from hyper_parallel.core.errors import ConfigError

Ranges = tuple[range, ...]


@dataclass(frozen=True)
class LogicalMatrix:
    """One matrix of each plane of a parameter: some of its rows and some of its columns, in their order here.

    `transposed` says that the parameter stores it as [in, out]: its logical rows are the columns here. Orthogonalizing
    is the same either way, scaling is not. `label` is what messages call it, as "query" or "head 3".
    """

    rows: Ranges
    columns: Ranges
    transposed: bool = False
    label: str = ""

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Numbers of rows and columns as they lie in the plane."""
        return sum(map(len, self.rows)), sum(map(len, self.columns))

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the logical matrix: what scales by shape go by."""
        rows, columns = self.stored_shape
        return (columns, rows) if self.transposed else (rows, columns)

    @property
    def core_shape(self) -> tuple[int, int]:
        """The smaller and the larger side: what matrices that are orthogonalized together have in common."""
        rows, columns = self.stored_shape
        return min(rows, columns), max(rows, columns)


@dataclass(frozen=True)
class MatrixView:
    """How a parameter holds its matrices, reversibly: every element of it is in one of them.

    The dims before `lead` count planes; those from `lead` on before `split`, flattened, are the rows of a plane, and
    the rest its columns. Each plane holds the same `matrices`.

    Args:
        shape: global shape of the parameter.
        lead: how many leading dims count planes; 0 for a matrix, 1 for packed experts [E, M, N].
        split: where the columns begin; `lead < split < len(shape)`.
        matrices: the logical matrices of a plane; one that is all of it when not given.

    Raises:
        ConfigError: dims that the parameter does not have, or matrices that leave elements out or share some.
    """

    shape: tuple[int, ...]
    lead: int
    split: int
    matrices: tuple[LogicalMatrix, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if not 0 <= self.lead < self.split < len(self.shape):
            raise ConfigError(
                f"a matrix view of shape {list(self.shape)} has {self.lead} leading dims and columns from dim "
                f"{self.split} on; there must be dims for rows and for columns: 0 <= lead < split < {len(self.shape)}"
            )
        if not self.matrices:
            rows, columns = self.plane
            object.__setattr__(self, "matrices", (LogicalMatrix((range(rows),), (range(columns),)),))
        object.__setattr__(self, "matrices", tuple(self.matrices))
        _check_cover(self)

    @property
    def plane(self) -> tuple[int, int]:
        """Rows and columns of each plane."""
        return prod(self.shape[self.lead : self.split]), prod(self.shape[self.split :])

    @property
    def planes(self) -> int:
        """How many planes the whole parameter has."""
        return prod(self.shape[: self.lead])


def usual_view(shape: Sequence[int], transposed: bool = False) -> MatrixView | None:
    """What a parameter holds where nothing else is said: [M, N] is a matrix, [M, 1, N] too, [E, M, N] are E of them,
    and [O, I, *kernel] is a convolution's [O, I * kernel] (paper §6.6). None for what has fewer than two dims."""
    shape = tuple(shape)
    if len(shape) < 2:
        return None
    lead, split = {2: (0, 1), 3: (0, 1) if shape[1] == 1 else (1, 2)}.get(len(shape), (0, 1))
    if not transposed:
        return MatrixView(shape, lead, split)
    rows, columns = prod(shape[lead:split]), prod(shape[split:])
    return MatrixView(shape, lead, split, (LogicalMatrix((range(rows),), (range(columns),), transposed=True),))


def split_rows(shape: Sequence[int], sizes: Sequence[int], labels: Sequence[str] = (), lead: int = 0) -> MatrixView:
    """A parameter whose rows are several matrices, one below the other, of `sizes` rows: queries, keys and values."""
    shape = tuple(shape)
    columns = (range(prod(shape[lead + 1 :])),)
    starts = np.cumsum([0, *sizes]).tolist()
    named = list(labels) or [""] * len(sizes)
    matrices = tuple(
        LogicalMatrix((range(start, start + size),), columns, label=label)
        for start, size, label in zip(starts[:-1], sizes, named, strict=True)
    )
    return MatrixView(shape, lead, lead + 1, matrices)


def _check_cover(view: MatrixView) -> None:
    """Rows and columns are those of the plane, and every element of it is in exactly one matrix."""
    size = view.plane
    where = f"a matrix view of shape {list(view.shape)}, whose planes are {size[0]} x {size[1]}"
    marks = []
    for matrix in view.matrices:
        sides = []
        for name, ranges, length in (("rows", matrix.rows, size[0]), ("columns", matrix.columns, size[1])):
            taken = [index for each in ranges if len(each) for index in (each.start, each[-1])]
            if any(not 0 <= index < length for index in taken):
                raise ConfigError(f"{where}: {matrix.label or 'a matrix'} has the {name} {list(ranges)}, of {length}")
            mark = np.zeros(length, dtype=np.int64)
            for each in ranges:
                mark[each.start : each.stop : each.step] += 1
            if mark.max(initial=0) > 1:
                raise ConfigError(f"{where}: {matrix.label or 'a matrix'} names some of its {name} twice")
            sides.append(mark)
        marks.append(sides)
    rows, columns = (np.array([sides[side] for sides in marks]) for side in (0, 1))
    shared = (rows @ rows.T > 0) & (columns @ columns.T > 0)
    np.fill_diagonal(shared, False)
    if shared.any():
        one, other = (view.matrices[index].label or f"matrix {index}" for index in np.argwhere(shared)[0])
        raise ConfigError(f"{where}: {one} and {other} share elements; every element belongs to one matrix")
    covered, whole = int((rows.sum(1) * columns.sum(1)).sum()), size[0] * size[1]
    if covered != whole:
        raise ConfigError(
            f"{where}: the matrices hold {covered} of its {whole} elements; name matrices for the rest too"
        )
