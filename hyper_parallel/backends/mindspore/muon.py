"""`core.backend.Orthogonalizing` for MindSpore.

MindSpore has no products into memory that is there, and no functions for lists. On a CPU it lacks products in half
precision: numbers are kept in float32 there, and each result is rounded to half precision, which is what such a product
is. What is elementwise is computed in numpy there, as in `tensors.py`.
"""

from __future__ import annotations

import math
from typing import Sequence

import mindspore as ms
import numpy as np
from mindspore import mint, ops

from hyper_parallel.backends.mindspore import tensors
from hyper_parallel.backends.mindspore.tensors import memory, on_cpu, wide
from hyper_parallel.core.muon.iteration import check_form, check_update, iterate, matrix_batch
from hyper_parallel.core.muon.newton_schulz import NewtonSchulz
from hyper_parallel.core.regions import Box

_HALF = ("float16", "bfloat16")
_TINY = float(np.finfo(np.float32).tiny)


class _Products:
    """`core.muon.iteration.Products` in `dtype`, into new memory. `carrier` is the dtype of the tensors."""

    def __init__(self, dtype: str):
        self._rounds_to = dtype if on_cpu() and dtype in _HALF else None
        self.carrier = "float32" if self._rounds_to else dtype

    def room(self, like: ms.Tensor, rows: int, columns: int) -> None:
        return None

    def gram(self, matrices: ms.Tensor, room: None) -> ms.Tensor:
        return self.rounded(ops.BatchMatMul(transpose_b=True)(matrices, matrices))

    def product(self, left: ms.Tensor, right: ms.Tensor, room: None) -> ms.Tensor:
        return self.rounded(mint.bmm(left, right))

    def fused(
        self, added: ms.Tensor, beta: float, left: ms.Tensor, right: ms.Tensor, alpha: float, room: None
    ) -> ms.Tensor:
        fuse = ops.baddbmm if on_cpu() else mint.baddbmm  # each has no kernel where the other has one
        return self.rounded(fuse(added, left, right, beta=beta, alpha=alpha))

    def plus_identity(self, matrices: ms.Tensor, factor: float, room: None) -> ms.Tensor:
        return self.rounded(matrices + factor * mint.eye(matrices.shape[1], dtype=matrices.dtype))

    def rounded(self, tensor: ms.Tensor) -> ms.Tensor:
        """A new tensor of `carrier`, its elements rounded in place to what `dtype` has."""
        if self._rounds_to == "bfloat16":
            # The upper half of a float32, to nearest, ties to even: ten times as fast as numpy's casts there and back.
            bits = memory(tensor).view(np.uint32)
            bits += 0x7FFF + ((bits >> 16) & 1)
            bits &= 0xFFFF0000
        elif self._rounds_to == "float16":
            with np.errstate(over="ignore"):
                memory(tensor)[...] = memory(tensor).astype(np.float16)
        return tensor


def newton_schulz(batch: ms.Tensor, settings: NewtonSchulz) -> ms.Tensor:
    """The matrices of a batch [k, m, n] orthogonalized; see `core.backend.Orthogonalizing`."""
    _, rows, columns = matrix_batch(tuple(batch.shape))
    if batch.size == 0:
        return tensors.zeros(batch.shape, settings.wire_dtype)
    products, tall = _Products(settings.dtype), rows > columns
    with ms._no_grad():
        source = mint.transpose(batch, 1, 2) if tall else batch
        given = _cast(_cast(source, settings.wire_dtype), "float32")
        norms = mint.sqrt(mint.sum(given * given, (1, 2), keepdim=True))
        # Divided by infinity all would be zeros, and look like an update.
        norms = mint.where(norms == math.inf, math.nan, norms + settings.eps)
        x = products.rounded(_cast(given / norms, products.carrier))
        x = iterate(products, x, settings)
        return _cast(mint.transpose(x, 1, 2) if tall else x, settings.wire_dtype)


def _cast(tensor: ms.Tensor, dtype: str) -> ms.Tensor:
    """A contiguous tensor of that dtype: the tensor itself where it is one."""
    if tensors.dtype_name(tensor) == dtype and tensor.is_contiguous():
        return tensor
    made = tensors.empty(tensor.shape, dtype)
    tensors.copy_(made, tensor)  # MindSpore's own cast takes several times as long on a CPU
    return made


def momenta_(
    buffers: Sequence[ms.Tensor],
    gradients: Sequence[ms.Tensor],
    momentum: float,
    form: str,
    nesterov: bool,
    dtype: str | None = None,
    foreach: bool = True,
) -> list[ms.Tensor]:
    """Take the gradients into the momentum buffers, in place; what is to be orthogonalized, in new tensors. There are
    no operators for lists: `foreach` changes nothing."""
    check_form(form)
    chosen = []
    with ms._no_grad():
        for buffer, gradient in zip(buffers, gradients, strict=True):
            held, new = _values(buffer), _values(gradient)
            if form == "ema":
                held = _lerp(held, new, 1 - momentum)
                ahead = _lerp(new, held, momentum) if nesterov else held
            else:
                held = held * momentum + new
                ahead = new + momentum * held if nesterov else held
            _store(buffer, held)
            made = tensors.empty(buffer.shape, dtype or tensors.dtype_name(buffer))
            _store(made, ahead)
            chosen.append(made)
    return chosen


def apply_(
    parameters: Sequence[ms.Tensor],
    updates: Sequence[ms.Tensor],
    learning_rate: float,
    factors: Sequence[float],
    decay: float,
    foreach: bool = True,
) -> None:
    """Decay the parameters, then move each by its update times its factor; see `core.backend.Orthogonalizing`. There
    are no operators for lists: `foreach` changes nothing."""
    with ms._no_grad():
        for place, (parameter, update, factor) in enumerate(zip(parameters, updates, factors, strict=True)):
            check_update(place, tuple(update.shape), tuple(parameter.shape))
            kept = _values(parameter) * (1 - learning_rate * decay)
            _store(parameter, kept - _values(update) * (learning_rate * factor))


def normalize_rows_(updates: ms.Tensor, second: ms.Tensor, beta2: float, eps: float, transposed: bool = False) -> None:
    """Divide each row by the root of its running mean square, and keep the norm of each matrix; both in place."""
    if updates.size == 0:
        return
    with ms._no_grad():
        rows = _values(updates).reshape(tuple(updates.shape))
        across = 1 if transposed else 2
        squares = rows * rows
        norms = squares.sum((1, 2), keepdims=True) ** 0.5
        moment = _lerp(_values(second).reshape(tuple(second.shape)), squares.mean(across), 1 - beta2)
        _store(second, moment)
        divisor = moment**0.5 + eps
        rows = rows / (divisor[:, None, :] if transposed else divisor[:, :, None])
        after = (rows * rows).sum((1, 2), keepdims=True) ** 0.5
        _store(updates, rows * (norms / (after + _TINY)))


def all_finite(tensors: Sequence[ms.Tensor]) -> list[bool]:
    """For each tensor whether all of its elements are finite; waits for the device once."""
    if on_cpu():
        return [bool(np.isfinite(tensor.asnumpy()).all()) for tensor in tensors]
    with ms._no_grad():
        filled = [mint.isfinite(tensor).all() for tensor in tensors if tensor.size]
        found = iter(mint.stack(filled).asnumpy().tolist() if filled else ())
        return [bool(next(found)) if tensor.size else True for tensor in tensors]


def scale_blocks_(parameter: ms.Tensor, boxes: Sequence[Box], factors: Sequence[float]) -> None:
    """Multiply each box of a contiguous tensor with its factor, in place."""
    elements = memory(parameter).reshape(tuple(parameter.shape)) if on_cpu() else None
    for box, factor in zip(boxes, factors, strict=True):
        if any(part.start >= part.stop for part in box):  # numpy crashes when it assigns an empty slice of bfloat16
            continue
        if elements is not None:
            elements[box] = wide(elements[box]) * factor
        else:
            with ms._no_grad():
                parameter[box] = parameter[box] * factor


def _values(tensor: ms.Tensor) -> np.ndarray | ms.Tensor:
    """Elements to compute with, half precision in float32: on a CPU a 1-D array, over the tensor's memory if can be."""
    if on_cpu():
        return wide(memory(tensor) if tensor.is_contiguous() else tensor.asnumpy().reshape(-1))
    return tensor.astype(ms.float32) if tensors.dtype_name(tensor) in _HALF else tensor


def _store(tensor: ms.Tensor, values: np.ndarray | ms.Tensor) -> None:
    """Overwrite a contiguous tensor with what was computed, cast."""
    if not on_cpu():
        tensor.copy_(values.reshape(tensor.shape))
    elif tensor.size:  # numpy crashes when it assigns an empty slice of MindSpore's bfloat16
        memory(tensor)[...] = values.reshape(-1)


def _lerp(start: np.ndarray | ms.Tensor, end: np.ndarray | ms.Tensor, weight: float) -> np.ndarray | ms.Tensor:
    """From `start` to `end`; computed from the nearer one, as PyTorch does."""
    if weight < 0.5:
        return start + (end - start) * weight
    return end - (end - start) * (1 - weight)
