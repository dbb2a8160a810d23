"""What both backends check before they touch memory that a caller has described by numbers."""

from __future__ import annotations

from hyper_parallel.core.backend import Move
from hyper_parallel.core.errors import LayoutError


def check_move(move: Move, target_numel: int, source_numel: int) -> None:
    """Raise `LayoutError` unless the (non-empty) box lies inside a target and a source of so many elements."""
    sizes, target_last, target_strides, source_last, source_strides = move
    inside = target_last >= 0 and source_last >= 0
    for size, target_stride, source_stride in zip(sizes, target_strides, source_strides, strict=True):
        inside = inside and target_stride >= 0 and source_stride >= 0
        target_last += (size - 1) * target_stride
        source_last += (size - 1) * source_stride
    if not inside or target_last >= target_numel or source_last >= source_numel:
        raise LayoutError(
            f"{move} leaves its tensors: it ends at element {target_last} of a target with {target_numel} "
            f"and at element {source_last} of a source with {source_numel} elements, and nothing may be negative"
        )


def check_reduction(op: str, dtype: str) -> None:
    """Raise `LayoutError` for a reduction of rows that there is not."""
    if op not in ("sum", "max", "min"):
        raise LayoutError(f'rows have no {op!r}: write "sum", "max" or "min"')
    if op == "sum" and dtype == "bool":
        raise LayoutError("bool has no sum: cast to an integer dtype")
    if op != "sum" and dtype.startswith("complex"):
        raise LayoutError(f"{dtype} has no {op}: complex numbers have no order")


def row_length(numel: int, rows: int) -> int:
    """The length of each of the `rows` rows of a 1-D tensor; `LayoutError` when they do not come out even."""
    if rows < 1 or numel % rows:
        raise LayoutError(f"{numel} elements do not make {rows} rows of one length")
    return numel // rows


def check_row(found: int, found_dtype: str, wanted: int, wanted_dtype: str) -> None:
    """Raise `LayoutError` unless a row has the number of elements and the dtype of those that it is used with."""
    if (found, found_dtype) != (wanted, wanted_dtype):
        raise LayoutError(f"a row of {found} {found_dtype} does not fit rows of {wanted} {wanted_dtype}")
