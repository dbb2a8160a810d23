"""`core.backend.Tensors` for MindSpore.

Three traps of MindSpore on a CPU shape this file. `add_`, `mul_` and the like return a new tensor and change nothing;
`copy_` into a view that starts behind element 0 of its storage is lost; `asnumpy()` of a view is a copy. So in-place
work on a CPU goes through `memory`, which reaches a tensor's elements by their address. On Ascend the framework's own
in-place operators are used.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Iterable, Sequence

import mindspore as ms
import numpy as np
from mindspore import mint
from mindspore.common import np_dtype

from hyper_parallel.core.backend import Move
from hyper_parallel.core.errors import ConfigError, LayoutError
from hyper_parallel.core.host import peak_resident_bytes
from hyper_parallel.core.moves import check_move, check_reduction, check_row, row_length

_HALF = ("float16", "bfloat16")
_FOLD = {"sum": "add", "max": "maximum", "min": "minimum"}  # so called in numpy and in mint


def on_cpu() -> bool:
    """Tell whether this process computes on the CPU (otherwise on Ascend)."""
    return ms.get_current_device().device_target == "CPU"


if on_cpu():
    # Without this, operators queue up: numpy writes race with them, an error surfaces at a later, innocent operator,
    # and on few cores everything is many times slower.
    ms.runtime.launch_blocking()


def is_tensor(value: object) -> bool:
    """Tell whether `value` is a MindSpore tensor; a Parameter is one."""
    return isinstance(value, ms.Tensor)


def dtype_name(tensor: ms.Tensor) -> str:
    """The dtype by its numpy spelling, "bfloat16" included."""
    return _name(tensor.dtype)


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of that name; MindSpore brings the one for bfloat16."""
    return np.dtype(np_dtype.bfloat16 if name == "bfloat16" else name)


def from_numpy(array: np.ndarray, dtype: str | None = None) -> ms.Tensor:
    """A new tensor on this process's device holding a copy of `array`, cast to `dtype` when given."""
    # Not ms.from_numpy: MindSpore can't release memory that belongs to numpy.
    host = np.ascontiguousarray(array).reshape(np.shape(array))
    tensor = empty(host.shape, dtype or host.dtype.name)
    copy_(tensor, ms.from_numpy(host))
    return tensor


def to_numpy(tensor: ms.Tensor) -> np.ndarray:
    """A copy on the host, without autograd history; bfloat16 comes back as float32 (exact)."""
    return np.array(tensor.asnumpy(), dtype="float32" if dtype_name(tensor) == "bfloat16" else None)


def repeats_elements(tensor: ms.Tensor) -> bool:
    """Tell whether elements of different places are one in memory, so that they can't be overwritten."""
    strides = zip(tensor.stride(), tensor.shape) if tensor.size else ()
    return any(stride == 0 and size > 1 for stride, size in strides)


def has_values(tensor: ms.Tensor) -> bool:
    """False for a tensor of the meta device, and for a parameter that is to be initialised later: they have a shape
    only."""
    return not tensor.is_meta and not getattr(tensor, "has_init", False)


def on_meta(shape: Sequence[int], dtype: str) -> ms.Tensor:
    """A new tensor that has a shape only."""
    return mint.empty(tuple(shape), dtype=_dtype(dtype), device="meta")


def without_values(shape: Sequence[int], dtype: str) -> ms.Tensor:
    """A new tensor of zeros: operators need values, on a CPU at least."""
    return mint.zeros(tuple(shape), dtype=_dtype(dtype))


def to_device(tensor: ms.Tensor) -> ms.Tensor:
    """The tensor itself where this process's operators find it, else a copy on this process's device."""
    if on_cpu() or tensor.device != "CPU":
        return tensor
    made = empty(tensor.shape, dtype_name(tensor))
    copy_(made, tensor)
    return made


def on_host(numel: int, dtype: str, pinned: bool) -> ms.Tensor:
    """A new 1-D tensor in the host's memory, contents undefined; `pinned` for the device to reach, where there is
    one."""
    return mint.empty((numel,), dtype=_dtype(dtype), device="CPU", pin_memory=pinned and not on_cpu())


def empty(shape: Sequence[int], dtype: str) -> ms.Tensor:
    """A new contiguous tensor on this process's device, contents undefined."""
    return mint.empty(tuple(shape), dtype=_dtype(dtype))


def zeros(shape: Sequence[int], dtype: str) -> ms.Tensor:
    """A new contiguous tensor of zeros on this process's device."""
    return mint.zeros(tuple(shape), dtype=_dtype(dtype))


def buffer(like: ms.Tensor, numel: int, zero: bool = False) -> ms.Tensor:
    """A new 1-D tensor of the dtype and on the device of `like`; contents undefined unless `zero`."""
    return (mint.zeros if zero else mint.empty)((numel,), dtype=like.dtype)


def duplicate(tensor: ms.Tensor) -> ms.Tensor:
    """A new contiguous tensor of the shape, dtype and elements of `tensor`, of any strides; no history."""
    made = mint.empty(tuple(tensor.shape), dtype=tensor.dtype)
    copy_(made, tensor)
    return made


def zero_(tensor: ms.Tensor) -> None:
    """Fill a tensor, of any strides, possibly an alias, with zeros."""
    if on_cpu():
        elements = memory(tensor).view(np.uint8) if tensor.is_contiguous() else _strided_bits(tensor)
        elements[...] = 0
    else:
        with ms._no_grad():
            tensor.zero_()


def flat(tensor: ms.Tensor) -> ms.Tensor:
    """The elements in row-major order as a 1-D tensor without history; shares storage when contiguous."""
    if not tensor.is_contiguous():  # `contiguous` copies an alias of a part, too
        with ms._no_grad():
            tensor = tensor.contiguous()
    return _over_storage(tensor, 0, (tensor.size,))


def alias(flat: ms.Tensor, start: int, shape: Sequence[int]) -> ms.Tensor:
    """A contiguous tensor of `shape` over the elements `[start, start + prod(shape))` of the 1-D contiguous
    tensor `flat`. Shares its storage: a write through either, collectives included, shows in both. No history.

    An alias of all of `flat` is an ordinary tensor. One of a part is a view: on a CPU operators copy it before they
    read it (and autograd saves the copy), MindSpore's own `copy_` loses what it writes to it, and its optimizers refuse
    it. So write to it with this module or a collective, and make no parameter of it.

    Raises `LayoutError` when `flat` is not 1-D and contiguous, does not have these elements, or is released."""
    count = math.prod(shape)
    _require_contiguous(flat, "flat")
    if flat.ndim != 1 or start < 0 or start + count > flat.size:
        raise LayoutError(
            f"elements [{start}, {start + count}) are not in a tensor of shape {tuple(flat.shape)}: "
            "an alias lies inside a 1-D tensor"
        )
    if count and not storage_bytes(flat):
        raise LayoutError("an alias can't be made while the storage is released: call restore_storage first")
    return _over_storage(flat, start, shape)


def stretched(tensor: ms.Tensor, numel: int) -> ms.Tensor | None:
    """The `numel` elements from the first one of a contiguous tensor on, as a 1-D tensor over the same storage, beyond
    the tensor's end if need be; None where the storage ends before."""
    _require_contiguous(tensor, "tensor")
    if storage_bytes(tensor) < (tensor.storage_offset() + numel) * tensor.itemsize:
        return None
    return _over_storage(tensor, 0, (numel,))


def address(tensor: ms.Tensor) -> int:
    """Where in memory the first element lies, in bytes."""
    return tensor.data_ptr()


def item_bytes(dtype: str) -> int:
    """Bytes of one element."""
    return numpy_dtype(dtype).itemsize


def reads_parts_in_place() -> bool:
    """See `core.backend.Tensors`. A CPU's operators copy a view first."""
    return not on_cpu()


def _over_storage(tensor: ms.Tensor, start: int, shape: Sequence[int]) -> ms.Tensor:
    """A new tensor over the storage of a contiguous one, without history."""
    if start == 0 and math.prod(shape) == tensor.size and on_cpu() and not _is_view(tensor):
        made = mint.empty((0,), dtype=tensor.dtype)
        made.data = tensor
        made._shape = list(shape)
        return made
    return _strided(tensor, start, shape, [math.prod(shape[dim + 1 :]) for dim in range(len(shape))])


def _strided(tensor: ms.Tensor, start: int, shape: Sequence[int], strides: Sequence[int]) -> ms.Tensor:
    """A view of a contiguous tensor's storage, without history."""
    made = mint.empty((0,), dtype=tensor.dtype)
    with ms._no_grad():
        made.set_(tensor.untyped_storage(), tensor.storage_offset() + start, tuple(shape), tuple(strides))
    return made


def _is_view(tensor: ms.Tensor) -> bool:
    """Tell whether a CPU tensor describes a storage instead of having one: numpy then sees a copy."""
    return tensor.asnumpy().ctypes.data != tensor.data_ptr()


def memory(tensor: ms.Tensor) -> np.ndarray:
    """The elements of a contiguous CPU tensor as a 1-D numpy array over the same memory, which it keeps alive.

    Take a new one each time: after `release_storage` an old one shows memory that belongs to others. Raises
    `LayoutError` when the tensor is not contiguous or its storage is released."""
    _require_contiguous(tensor, "tensor")
    dtype = numpy_dtype(dtype_name(tensor))
    if tensor.size == 0:
        return np.empty(0, dtype)
    if tensor.untyped_storage().data_ptr() == 0:
        raise LayoutError(f"the storage of the tensor of shape {tuple(tensor.shape)} is released: restore it first")
    return np.asarray(_Bytes(tensor)).view(dtype)


class _Bytes:
    """The memory of a tensor, for numpy, which holds on to this object and so to the tensor: its bytes if it is
    contiguous, or as elements of another dtype of the same size, in the tensor's shape."""

    def __init__(self, tensor: ms.Tensor, dtype: str = ""):
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "typestr": dtype or "|u1",
            "shape": tuple(tensor.shape) if dtype else (tensor.nbytes,),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()) if dtype else None,
            "data": (tensor.data_ptr(), False),
        }


def _strided_bits(tensor: ms.Tensor) -> np.ndarray:
    """The memory of a CPU tensor of any strides as an array of its shape, of whole or complex numbers of its size."""
    code = "<c16" if tensor.itemsize == 16 else f"<u{tensor.itemsize}"
    if tensor.size == 0:
        return np.empty(tensor.shape, code)
    if tensor.untyped_storage().data_ptr() == 0:
        raise LayoutError(f"the storage of the tensor of shape {tuple(tensor.shape)} is released: restore it first")
    return np.asarray(_Bytes(tensor, code))


def copy_(target: ms.Tensor, source: ms.Tensor, factor: float = 1.0) -> None:
    """Overwrite `target` (of any strides, possibly an alias) with `source` of the same number of elements, cast, and
    multiplied on the way."""
    if target.size != source.size:  # numpy would repeat a single element
        raise LayoutError(f"can't copy shape {tuple(source.shape)} into shape {tuple(target.shape)}: sizes differ")
    if target.size == 0:  # numpy crashes when it assigns an empty slice of MindSpore's bfloat16
        return
    if not on_cpu():
        with ms._no_grad():
            target.copy_(source.reshape(target.shape) if factor == 1.0 else source.reshape(target.shape) * factor)
        return
    values = source.asnumpy() if factor == 1.0 else wide(source.asnumpy()) * factor
    if target.is_contiguous():
        memory(target)[...] = values.reshape(-1)
    else:
        values = np.ascontiguousarray(values.reshape(target.shape), numpy_dtype(dtype_name(target)))
        bits = _strided_bits(target)
        bits[...] = values.view(bits.dtype)


def scale_(tensor: ms.Tensor, factor: float) -> None:
    """Multiply a contiguous tensor, possibly an alias, in place."""
    _require_contiguous(tensor, "tensor")
    if on_cpu():
        elements = memory(tensor)
        elements[...] = wide(elements) * factor
    else:
        with ms._no_grad():
            tensor.mul_(factor)


def divide_(tensor: ms.Tensor, divisor: int) -> None:
    """Divide a contiguous floating-point tensor, possibly an alias, in place, each element rounded once."""
    _require_contiguous(tensor, "tensor")
    if on_cpu():
        elements = memory(tensor)
        elements[...] = wide(elements) / divisor
    else:
        with ms._no_grad():
            tensor.div_(divisor)


def add_(tensor: ms.Tensor, other: ms.Tensor) -> None:
    """Add `other`, of the same shape, to a contiguous tensor, possibly an alias, in place."""
    _require_contiguous(tensor, "tensor")
    if tensor.shape != other.shape:
        raise LayoutError(f"can't add shape {tuple(other.shape)} to shape {tuple(tensor.shape)}: shapes differ")
    if on_cpu():
        elements = memory(tensor)
        elements[...] = wide(elements) + wide(other.asnumpy().reshape(-1))
    else:
        with ms._no_grad():
            tensor.add_(other)


def move_(target: ms.Tensor, source: ms.Tensor, moves: Sequence[Move]) -> None:
    """Copy boxes of elements from `source` to `target`: contiguous, of one dtype, over different memory. One copy for
    each move; nothing else of `target` is touched.

    Raises `LayoutError` when a tensor is not contiguous, the dtypes differ, or a box leaves a tensor."""
    _require_contiguous(target, "target")
    _require_contiguous(source, "source")
    if target.dtype != source.dtype:
        raise LayoutError(f"can't move {dtype_name(source)} into {dtype_name(target)}: moved elements stay as they are")
    on_host = on_cpu()
    if on_host:
        target, source = _bits(target), _bits(source)
    for move in moves:
        if 0 in move.sizes:
            continue
        check_move(move, target.size, source.size)
        sizes, target_start, target_strides, source_start, source_strides = move
        if on_host:
            box = _box(source, source_start, sizes, source_strides)
            np.copyto(_box(target, target_start, sizes, target_strides), box)
        else:
            with ms._no_grad():
                box = _strided(source, source_start, sizes, source_strides)
                _strided(target, target_start, sizes, target_strides).copy_(box)


def reduce_rows(tensor: ms.Tensor, rows: int, op: str) -> ms.Tensor:
    """A new 1-D tensor of n elements from the `rows * n` of a 1-D one: "sum", "max" or "min" over the rows, in
    row order. Half precision is summed in float32 and rounded once. NaN wins a max or a min.

    Raises `LayoutError` for another op, rows that do not come out even, or a sum of bools."""
    check_reduction(op, dtype_name(tensor))
    fold = getattr(np if on_cpu() else mint, _FOLD[op])
    with ms._no_grad():
        table = _table(tensor, rows)
        result = table[0].copy()
        for row in range(1, rows):
            result = fold(result, table[row])
        return _made(result, tensor)


def tie_shares(tensor: ms.Tensor, rows: int, result: ms.Tensor) -> ms.Tensor:
    """For a 1-D floating `tensor` of `rows * n` elements and `result` (n), its max or min over the rows: a new 1-D
    tensor of `rows * n` that is 0 where a row differs from `result`, else 1 over the number of rows that don't.

    A NaN that won does not differ from itself. Raises `LayoutError` when `result` is not of this dtype and size."""
    with ms._no_grad():
        table, row = _table(tensor, rows), _row(result, tensor, rows)
        same = ((table == row) | ((table != table) & (row != row))).astype(table.dtype)
        return _made(same / same.sum(0), tensor)


def multiply_rows(tensor: ms.Tensor, rows: int, row: ms.Tensor) -> ms.Tensor:
    """A new 1-D tensor: each of the `rows` rows of the 1-D `tensor` (`rows * n`) times the 1-D `row` (n).

    Raises `LayoutError` when `row` is not of this dtype and size."""
    with ms._no_grad():
        return _made(_table(tensor, rows) * _row(row, tensor, rows), tensor)


def wide(elements: np.ndarray) -> np.ndarray:
    """Half precision as a copy in float32, in which frameworks compute before they round; anything else as it is."""
    return elements.astype(np.float32) if elements.dtype.name in _HALF else elements


def chunk_rows(tensor: ms.Tensor, dim: int, pieces: Sequence[int]) -> list[ms.Tensor]:
    """Contiguous copies of consecutive pieces along `dim`, of the given lengths (zero allowed)."""
    if sum(pieces) != tensor.shape[dim] or min(pieces, default=0) < 0:
        raise LayoutError(f"pieces {list(pieces)} do not make up dim {dim} of shape {tuple(tensor.shape)}")
    chunks, start = [], 0
    for length in pieces:
        shape = [length if index == dim % tensor.ndim else size for index, size in enumerate(tensor.shape)]
        chunks.append(empty(shape, dtype_name(tensor)))
        if chunks[-1].size:
            with ms._no_grad():
                copy_(chunks[-1], mint.narrow(tensor, dim, start, length))
        start += length
    return chunks


def concatenate(tensors: Sequence[ms.Tensor], dim: int) -> ms.Tensor:
    """Join along `dim`; empty pieces allowed."""
    with ms._no_grad():
        return mint.cat(list(tensors), dim)


def storage_bytes(tensor: ms.Tensor) -> int:
    """Bytes that the storage of `tensor` holds now; 0 after `release_storage`."""
    # An alias remembers the size that the storage had; only the address tells that it is released.
    storage = tensor.untyped_storage()
    return storage.nbytes() if storage.data_ptr() else 0


def release_storage(tensor: ms.Tensor) -> None:
    """Give the memory back; every alias keeps its shape but must not be read until `restore_storage`."""
    tensor.untyped_storage().resize_(0)


def restore_storage(tensor: ms.Tensor) -> None:
    """Take memory again for the `numel` elements of the 1-D `tensor`; contents undefined, aliases valid again."""
    needed = (tensor.storage_offset() + tensor.size) * tensor.itemsize
    if storage_bytes(tensor) < needed:
        tensor.untyped_storage().resize_(needed)


def squared_norm(tensors: Iterable[ms.Tensor]) -> float:
    """Sum of squares of all elements of all tensors, accumulated in float64 (float32 per tensor on Ascend)."""
    if not on_cpu():
        with ms._no_grad():
            return sum(float(tensor.astype(ms.float32).square().sum().asnumpy()) for tensor in tensors)
    rows = (tensor.asnumpy().reshape(-1).astype(np.float64) for tensor in tensors)
    return sum(float(row @ row) for row in rows)


def memory_bytes() -> int:
    """Peak bytes held by this process's device, or, on a CPU, the peak resident size of the process."""
    if on_cpu():
        return peak_resident_bytes()
    return int(ms.runtime.max_memory_allocated())


@cache
def _name(dtype: ms.Type) -> str:
    return str(dtype).lower()


def _dtype(name: str) -> ms.Type:
    dtype = getattr(ms, "bool_" if name == "bool" else name, None)
    if not isinstance(dtype, ms.Type) or _name(dtype) != name:  # "float" means other things elsewhere
        raise ConfigError(f'unknown dtype {name!r}: write "float32", "bfloat16", "float16", "float64", "int64", ...')
    return dtype


def _require_contiguous(tensor: ms.Tensor, name: str) -> None:
    if not tensor.is_contiguous():
        raise LayoutError(f"{name} of shape {tuple(tensor.shape)} is not contiguous: pass a contiguous tensor")


def _bits(tensor: ms.Tensor) -> np.ndarray:
    """The memory of a CPU tensor in a dtype that numpy can make strided views of."""
    elements = memory(tensor)
    return elements.view(np.uint16) if elements.dtype.name == "bfloat16" else elements


def _box(elements: np.ndarray, start: int, sizes: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """A strided view of a 1-D array; everything is counted in elements."""
    size = elements.itemsize
    return np.ndarray(sizes, elements.dtype, elements, start * size, [stride * size for stride in strides])


def _table(tensor: ms.Tensor, rows: int) -> np.ndarray | ms.Tensor:
    """`rows` rows to compute with, half precision in float32: in numpy on a CPU, which lacks operators for bfloat16."""
    length = row_length(tensor.size, rows)
    if on_cpu():
        return wide(memory(tensor)).reshape(rows, length)
    half = dtype_name(tensor) in _HALF
    return (tensor.astype(ms.float32) if half else tensor).reshape(rows, length)


def _row(row: ms.Tensor, tensor: ms.Tensor, rows: int) -> np.ndarray | ms.Tensor:
    """A row to compute with that belongs to the `rows` rows of `tensor`."""
    check_row(row.size, dtype_name(row), row_length(tensor.size, rows), dtype_name(tensor))
    return _table(row, 1)[0]


def _made(values: np.ndarray | ms.Tensor, like: ms.Tensor) -> ms.Tensor:
    """What was computed as a new 1-D tensor of the dtype of `like`."""
    if not on_cpu():
        return values.reshape(-1).astype(like.dtype)
    made = empty((values.size,), dtype_name(like))
    if values.size:  # numpy crashes when it assigns an empty slice of MindSpore's bfloat16
        memory(made)[...] = values.reshape(-1)
    return made
