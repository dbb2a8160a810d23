"""What many rules ask and refuse, in the same words."""

from __future__ import annotations

from typing import Iterable, Sequence

from hyper_parallel.core.rules.call import Operand
from hyper_parallel.core.rules.state import State
from hyper_parallel.core.rules.table import RuleError


def resolve(dim: int, dims: int) -> int:
    """A dim counted from the front; a tensor without dims has one for this purpose, as in both frameworks."""
    if not -max(dims, 1) <= dim < max(dims, 1):
        raise RuleError(f"dim {dim} is none of a tensor of {dims} dims", f"a dim of -{dims} to {dims - 1}")
    return dim % max(dims, 1)


def resolve_all(dim: int | Sequence[int] | None, dims: int) -> tuple[int, ...]:
    """The dims that `dim` names, counted from the front; all of them where it is None or empty."""
    if dim is None or dim == ():
        return tuple(range(dims))
    return tuple(resolve(each, dims) for each in ((dim,) if isinstance(dim, int) else dim))


def refuse_partial(op: str, operands: Iterable[Operand]) -> None:
    """Raise where an operand is a pending sum, and `op` of a sum is not the sum of `op` of its parts."""
    for each in operands:
        if each.state.is_partial:
            raise RuleError(
                f"{each.name} is partial, and {op} of a sum can't be worked out from its parts",
                f"{each.name} as replicate or shard: reduce it before {op}",
            )


def refuse_cut(op: str, operand: Operand, dims: Iterable[int], why: str) -> None:
    """Raise where an operand is cut along one of the dims."""
    if operand.state.cut in tuple(dims):
        kept = [f"shard({dim})" for dim in range(operand.dims) if dim not in tuple(dims)]
        raise RuleError(
            f"{operand.name} is {operand.state} and {op} {why}",
            f"{operand.name} as {' or '.join(['replicate', *kept])}",
        )


def only_partial(operands: Sequence[Operand]) -> bool:
    """Tell whether the operands are pending sums, all of those that are not zero."""
    return any(o.state.is_partial for o in operands) and all(o.state.is_partial or o.state.zero for o in operands)


def merge_cuts(op: str, placed: Sequence[tuple[Operand, dict[int, int]]]) -> State | None:
    """The cut of a result whose dims are made of those of the operands, or None where nothing is cut.

    Each operand comes with its dims by dim of the result. All that are cut must be so along the same dim of the
    result, into parts of one size; others may lack the dim, or repeat themselves along it.
    """
    cutting = [(operand, into) for operand, into in placed if operand.state.cut is not None]
    if not cutting:
        return None
    first, dim = cutting[0][0], _result_dim(*cutting[0])
    for operand, into in placed:
        if operand.state.cut is not None:
            _check_alike(op, first, dim, operand, into)
        elif dim in into:
            _check_repeats(op, first, operand, into[dim])
    return first.state.at(dim) if len(cutting) == 1 else _widest(cutting).at(dim)


def _widest(cutting: Sequence[tuple[Operand, dict[int, int]]]) -> State:
    return max((operand.state for operand, _ in cutting), key=lambda state: state.unit)


def _result_dim(operand: Operand, into: dict[int, int]) -> int:
    return next(result for result, dim in into.items() if dim == operand.state.cut)


def _check_alike(op: str, first: Operand, dim: int, other: Operand, into: dict[int, int]) -> None:
    if _result_dim(other, into) != dim or other.state.blocks != first.state.blocks:
        raise RuleError(
            f"{op}: {first.name} is {first.state} and {other.name} is {other.state}, which are different parts",
            f"both cut alike, or one of {first.name} and {other.name} as replicate",
        )
    if other.shape[other.state.cut] != first.shape[first.state.cut]:
        raise RuleError(
            f"{op}: {first.name} {list(first.shape)} and {other.name} {list(other.shape)} are cut along the same dim "
            "into parts of different sizes",
            "both of the same whole size along the cut dim",
        )


def _check_repeats(op: str, first: Operand, other: Operand, dim: int) -> None:
    if not other.repeats(dim) or other.shape[dim] not in (1, first.shape[first.state.cut]):
        raise RuleError(
            f"{op}: {other.name} {list(other.shape)} is whole along dim {dim}, where {first.name} "
            f"{list(first.shape)} holds only this rank's part",
            f"{other.name} as {first.state.at(dim).placement}, of size 1 there, or the same all along it",
        )
