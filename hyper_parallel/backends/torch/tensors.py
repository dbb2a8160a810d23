"""`core.backend.Tensors` for PyTorch."""

from __future__ import annotations

import math
from functools import cache
from typing import Iterable, Sequence

import numpy as np
import torch

from hyper_parallel.core.backend import Move
from hyper_parallel.core.errors import ConfigError, LayoutError
from hyper_parallel.core.host import peak_resident_bytes
from hyper_parallel.core.moves import check_move, check_reduction, check_row, row_length

_FLOAT8 = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]
# Dtypes that operators, and communication libraries, can't add up, and what is used in their place.
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
_WIDER |= {dtype: torch.float32 for dtype in (torch.float16, torch.bfloat16, *_FLOAT8)}
# Dtypes that numpy lacks, and those that hold all their numbers.
_ON_HOST = {torch.complex32: torch.complex64} | {dtype: torch.float32 for dtype in (torch.bfloat16, *_FLOAT8)}
_LOWEST = torch.iinfo(torch.int64).min
_FOLD = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def device() -> torch.device:
    """The device of this process: the current accelerator (cuda, npu, ...) where there is one, else the CPU."""
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator()
    return torch.device("cpu")


def is_tensor(value: object) -> bool:
    """Tell whether `value` is a tensor of this framework."""
    return isinstance(value, torch.Tensor)


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype by its numpy spelling, "bfloat16" included."""
    return _name(tensor.dtype)


def from_numpy(array: np.ndarray, dtype: str | None = None) -> torch.Tensor:
    """A new tensor on this process's device holding a copy of `array`, cast to `dtype` when given."""
    theirs = torch.from_numpy(np.require(array, requirements=("C", "W")))
    return theirs.to(device(), theirs.dtype if dtype is None else _dtype(dtype), copy=True)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy on the host, without autograd history; bfloat16 comes back as float32 (exact)."""
    tensor = tensor.detach()
    tensor = tensor.to(_ON_HOST.get(tensor.dtype, tensor.dtype)).resolve_conj().resolve_neg()
    # A storage that numpy shares can't be released any more, so numpy gets a copy of its own.
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format).numpy()


def repeats_elements(tensor: torch.Tensor) -> bool:
    """Tell whether elements of different places are one in memory, so that they can't be overwritten."""
    strides = zip(tensor.stride(), tensor.shape) if tensor.numel() else ()
    return any(stride == 0 and size > 1 for stride, size in strides)


def has_values(tensor: torch.Tensor) -> bool:
    """False for a tensor of the meta device, which has a shape only."""
    return not tensor.is_meta


def on_meta(shape: Sequence[int], dtype: str) -> torch.Tensor:
    """A new tensor that has a shape only."""
    return torch.empty(tuple(shape), dtype=_dtype(dtype), device="meta")


def without_values(shape: Sequence[int], dtype: str) -> torch.Tensor:
    """A new tensor of the meta device, which has a shape only."""
    return on_meta(shape, dtype)


def to_device(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where this process's operators find it, or where there is nothing to find, else a copy on this
    process's device."""
    if tensor.is_meta:
        return tensor
    target = torch.empty(0, device=device()).device  # with the index that `device` leaves open
    return tensor if tensor.device == target else tensor.data.to(target)


def on_host(numel: int, dtype: str, pinned: bool) -> torch.Tensor:
    """A new 1-D tensor in the host's memory, contents undefined; `pinned` for the device to reach, where there is
    one."""
    return torch.empty(numel, dtype=_dtype(dtype), device="cpu", pin_memory=pinned and device().type != "cpu")


def empty(shape: Sequence[int], dtype: str) -> torch.Tensor:
    """A new contiguous tensor on this process's device, contents undefined."""
    return torch.empty(tuple(shape), dtype=_dtype(dtype), device=device())


def zeros(shape: Sequence[int], dtype: str) -> torch.Tensor:
    """A new contiguous tensor of zeros on this process's device."""
    return torch.zeros(tuple(shape), dtype=_dtype(dtype), device=device())


def buffer(like: torch.Tensor, numel: int, zero: bool = False) -> torch.Tensor:
    """A new 1-D tensor of the dtype and on the device of `like`; contents undefined unless `zero`."""
    return (torch.zeros if zero else torch.empty)(numel, dtype=like.dtype, device=like.device)


def duplicate(tensor: torch.Tensor) -> torch.Tensor:
    """A new contiguous tensor of the shape, dtype and elements of `tensor`, of any strides; no history."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.data)


def zero_(tensor: torch.Tensor) -> None:
    """Fill a tensor, of any strides, possibly an alias, with zeros."""
    tensor.data.zero_()  # not the version counter of `tensor`: see `alias`


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order as a 1-D tensor without history; shares storage when contiguous."""
    # Conjugates and negatives may be views that operators read, but collectives do not.
    return tensor.data.resolve_conj().resolve_neg().contiguous().view(-1).data


def alias(flat: torch.Tensor, start: int, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous tensor of `shape` over the elements `[start, start + prod(shape))` of the 1-D contiguous
    tensor `flat`. Shares its storage: a write through either, collectives included, shows in both. No history.

    Raises `LayoutError` when `flat` is not 1-D and contiguous, does not have these elements, or is released."""
    count = math.prod(shape)
    _require_contiguous(flat, "flat")
    if flat.dim() != 1 or start < 0 or start + count > flat.numel():
        raise LayoutError(
            f"elements [{start}, {start + count}) are not in a tensor of shape {tuple(flat.shape)}: "
            "an alias lies inside a 1-D tensor"
        )
    if count and not storage_bytes(flat):
        raise LayoutError("an alias can't be made while the storage is released: call restore_storage first")
    # `data`, not `detach` or a view: a write to a tensor that shares a version counter would make autograd refuse
    # what it has saved of the others.
    part = flat.data if count == flat.numel() else flat.data.narrow(0, start, count)
    return part.view(tuple(shape)).data


def stretched(tensor: torch.Tensor, numel: int) -> torch.Tensor | None:
    """The `numel` elements from the first one of a contiguous tensor on, as a 1-D tensor over the same storage, beyond
    the tensor's end if need be; None where the storage ends before."""
    _require_contiguous(tensor, "tensor")
    if storage_bytes(tensor) < (tensor.storage_offset() + numel) * tensor.element_size():
        return None
    return tensor.data.as_strided((numel,), (1,)).data


def address(tensor: torch.Tensor) -> int:
    """Where in memory the first element lies, in bytes."""
    return tensor.data_ptr()


def item_bytes(dtype: str) -> int:
    """Bytes of one element."""
    return _dtype(dtype).itemsize


def reads_parts_in_place() -> bool:
    """See `core.backend.Tensors`."""
    return True


@torch.no_grad()
def copy_(target: torch.Tensor, source: torch.Tensor, factor: float = 1.0) -> None:
    """Overwrite `target` (of any strides, possibly an alias) with `source` of the same number of elements, cast, and
    multiplied on the way."""
    if target.numel() != source.numel():  # torch would repeat a single element
        raise LayoutError(f"can't copy shape {tuple(source.shape)} into shape {tuple(target.shape)}: sizes differ")
    source = source.reshape(target.shape)
    if factor == 1.0:
        target.copy_(source)
    else:  # an operator computes in the dtype of its operands, whatever it writes to
        torch.mul(source.to(torch.promote_types(source.dtype, target.dtype)), factor, out=target)


@torch.no_grad()
def scale_(tensor: torch.Tensor, factor: float) -> None:
    """Multiply a tensor, possibly an alias, in place."""
    tensor.mul_(factor)


@torch.no_grad()
def divide_(tensor: torch.Tensor, divisor: int) -> None:
    """Divide a contiguous floating-point tensor, possibly an alias, in place, each element rounded once."""
    tensor.div_(divisor)


@torch.no_grad()
def add_(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Add `other`, of the same shape, to a contiguous tensor, possibly an alias, in place."""
    _require_contiguous(tensor, "tensor")
    if tensor.shape != other.shape:
        raise LayoutError(f"can't add shape {tuple(other.shape)} to shape {tuple(tensor.shape)}: shapes differ")
    tensor.add_(other)


def move_(target: torch.Tensor, source: torch.Tensor, moves: Sequence[Move]) -> None:
    """Copy boxes of elements from `source` to `target`: contiguous, of one dtype, over different memory. One copy for
    each move; nothing else of `target` is touched.

    Raises `LayoutError` when a tensor is not contiguous, the dtypes differ, or a box leaves a tensor."""
    _require_contiguous(target, "target")
    _require_contiguous(source, "source")
    if target.dtype != source.dtype:
        raise LayoutError(f"can't move {dtype_name(source)} into {dtype_name(target)}: moved elements stay as they are")
    to, of = target.data, source.data  # no history, and version counters of their own: see `alias`
    to_start, of_start = to.storage_offset(), of.storage_offset()
    to_numel, of_numel = to.numel(), of.numel()
    for move in moves:
        if 0 in move.sizes:
            continue
        check_move(move, to_numel, of_numel)
        sizes, target_start, target_strides, source_start, source_strides = move
        to.as_strided(sizes, target_strides, to_start + target_start).copy_(
            of.as_strided(sizes, source_strides, of_start + source_start)
        )


def reduce_rows(tensor: torch.Tensor, rows: int, op: str) -> torch.Tensor:
    """A new 1-D tensor of n elements from the `rows * n` of a 1-D one: "sum", "max" or "min" over the rows, in
    row order. Half precision is summed in float32 and rounded once. NaN wins a max or a min.

    Raises `LayoutError` for another op, rows that do not come out even, or a sum of bools."""
    check_reduction(op, dtype_name(tensor))
    table = tensor.data.view(rows, row_length(tensor.numel(), rows))
    if table.dtype == torch.uint64 and op != "sum":
        table = table.view(torch.int64) ^ _LOWEST  # signed numbers in the order of the unsigned ones
        return (_folded(table, op) ^ _LOWEST).view(torch.uint64)
    return _folded(table, op).to(table.dtype)


def _folded(table: torch.Tensor, op: str) -> torch.Tensor:
    """The rows of a table put together, in the dtype that this is computed in."""
    result = table[0].to(wide(table.dtype), copy=True)
    for row in table[1:]:
        _FOLD[op](result, row.to(result.dtype), out=result)
    return result


def tie_shares(tensor: torch.Tensor, rows: int, result: torch.Tensor) -> torch.Tensor:
    """For a 1-D floating `tensor` of `rows * n` elements and `result` (n), its max or min over the rows: a new 1-D
    tensor of `rows * n` that is 0 where a row differs from `result`, else 1 over the number of rows that don't.

    A NaN that won does not differ from itself. Raises `LayoutError` when `result` is not of this dtype and size."""
    table, row = _rows(tensor, rows, result)
    same = ((table == row) | (table.isnan() & row.isnan())).to(wide(table.dtype))
    return same.div_(same.sum(0)).to(table.dtype).view(-1)


def multiply_rows(tensor: torch.Tensor, rows: int, row: torch.Tensor) -> torch.Tensor:
    """A new 1-D tensor: each of the `rows` rows of the 1-D `tensor` (`rows * n`) times the 1-D `row` (n).

    Raises `LayoutError` when `row` is not of this dtype and size."""
    table, row = _rows(tensor, rows, row)
    return (table * row).view(-1)


def chunk_rows(tensor: torch.Tensor, dim: int, pieces: Sequence[int]) -> list[torch.Tensor]:
    """Contiguous copies of consecutive pieces along `dim`, of the given lengths (zero allowed)."""
    if sum(pieces) != tensor.shape[dim] or min(pieces, default=0) < 0:
        raise LayoutError(f"pieces {list(pieces)} do not make up dim {dim} of shape {tuple(tensor.shape)}")
    return [
        piece.clone(memory_format=torch.contiguous_format) for piece in torch.split(tensor.detach(), list(pieces), dim)
    ]


def concatenate(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Join along `dim`; empty pieces allowed."""
    return torch.cat([tensor.detach() for tensor in tensors], dim)


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes that the storage of `tensor` holds now; 0 after `release_storage`."""
    return tensor.untyped_storage().nbytes()


def release_storage(tensor: torch.Tensor) -> None:
    """Give the memory back; every alias keeps its shape but must not be read until `restore_storage`."""
    tensor.untyped_storage().resize_(0)


def restore_storage(tensor: torch.Tensor) -> None:
    """Take memory again for the `numel` elements of the 1-D `tensor`; contents undefined, aliases valid again."""
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.untyped_storage().nbytes() < needed:
        tensor.untyped_storage().resize_(needed)


@torch.no_grad()
def squared_norm(tensors: Iterable[torch.Tensor]) -> float:
    """Sum of squares of all elements of all tensors, accumulated in float64 where the device has it."""
    norms: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors:
        precision = torch.float32 if tensor.device.type == "npu" else torch.float64
        norms.setdefault(tensor.device.type, []).append(torch.linalg.vector_norm(tensor, dtype=precision))
    return sum(float(torch.stack(each).square().sum()) for each in norms.values())


def memory_bytes() -> int:
    """Peak bytes held by this process's device, or, on a CPU, the peak resident size of the process."""
    if device().type == "cpu":
        return peak_resident_bytes()
    return torch.accelerator.max_memory_allocated()


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or _name(dtype) != name:  # "float" means other things elsewhere
        raise ConfigError(f'unknown dtype {name!r}: write "float32", "bfloat16", "float16", "float64", "int64", ...')
    return dtype


def _require_contiguous(tensor: torch.Tensor, name: str) -> None:
    if not tensor.is_contiguous():
        raise LayoutError(f"{name} of shape {tuple(tensor.shape)} is not contiguous: pass a contiguous tensor")


def wide(dtype: torch.dtype) -> torch.dtype:
    """What to compute sums in: half precision is rounded once, at the end; whole numbers wrap round at the end."""
    return _WIDER.get(dtype, dtype)


def _rows(tensor: torch.Tensor, rows: int, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`tensor` as a table of `rows` rows, and `row`, which has their length and dtype; both without history."""
    length = row_length(tensor.numel(), rows)
    check_row(row.numel(), dtype_name(row), length, dtype_name(tensor))
    return tensor.data.view(rows, length), row.data.view(length)
