"""`core.backend.Orthogonalizing` for PyTorch."""

from __future__ import annotations

import math
from typing import Sequence

import torch

from hyper_parallel.backends.torch.tensors import wide
from hyper_parallel.core.muon.iteration import check_form, check_update, iterate, matrix_batch
from hyper_parallel.core.muon.newton_schulz import NewtonSchulz
from hyper_parallel.core.regions import Box

_CACHED = 2**21
"""Bytes of matrices that a CPU computes together: with more it waits for memory, with fewer for calls."""


class _Products:
    """`core.muon.iteration.Products`, into memory that is there."""

    def room(self, like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        return like.new_empty(like.shape[0], rows, columns)

    def gram(self, matrices: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        return torch.bmm(matrices, matrices.mT, out=room)

    def product(self, left: torch.Tensor, right: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        return torch.bmm(left, right, out=room)

    def fused(
        self,
        added: torch.Tensor,
        beta: float,
        left: torch.Tensor,
        right: torch.Tensor,
        alpha: float,
        room: torch.Tensor,
    ) -> torch.Tensor:
        return torch.baddbmm(added, left, right, beta=beta, alpha=alpha, out=room)

    def plus_identity(self, matrices: torch.Tensor, factor: float, room: torch.Tensor) -> torch.Tensor:
        room.copy_(matrices).diagonal(dim1=1, dim2=2).add_(factor)
        return room


@torch.no_grad()
def newton_schulz(batch: torch.Tensor, settings: NewtonSchulz) -> torch.Tensor:
    """The matrices of a batch [k, m, n] orthogonalized; see `core.backend.Orthogonalizing`."""
    count, rows, columns = matrix_batch(batch.shape)
    wire = getattr(torch, settings.wire_dtype)
    if not batch.numel():
        return batch.new_empty(batch.shape, dtype=wire)
    source = batch.mT if rows > columns else batch
    together = count
    if batch.device.type == "cpu":
        together = max(1, _CACHED // (rows * columns * getattr(torch, settings.dtype).itemsize))
    if together >= count:
        x = _orthogonalized(source, settings)
        return (x.mT if rows > columns else x).to(wire).contiguous()
    made = torch.empty(batch.shape, dtype=wire, device=batch.device)
    target = made.mT if rows > columns else made
    for part, result in zip(source.split(together), target.split(together)):
        result.copy_(_orthogonalized(part, settings))
    return made


def _orthogonalized(source: torch.Tensor, settings: NewtonSchulz) -> torch.Tensor:
    """Matrices that are no taller than wide, of any strides, orthogonalized in new memory of `settings.dtype`."""
    x = torch.empty(source.shape, dtype=getattr(torch, settings.dtype), device=source.device)
    # float16 would lose gradients before they have their norm.
    cast = torch.empty_like(x, dtype=torch.float32) if x.dtype == torch.float16 else x
    cast.copy_(source)
    norms = torch.linalg.vector_norm(cast, dim=(1, 2), keepdim=True, dtype=torch.float32)
    # Divided by infinity all would be zeros, and look like an update.
    norms = torch.where(norms.isinf(), math.nan, norms + settings.eps)
    torch.div(cast, norms, out=x)
    del cast
    return iterate(_Products(), x, settings)


@torch.no_grad()
def momenta_(
    buffers: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    momentum: float,
    form: str,
    nesterov: bool,
    dtype: str | None = None,
    foreach: bool = True,
) -> list[torch.Tensor]:
    """Take the gradients into the momentum buffers, in place; what is to be orthogonalized, in new tensors."""
    check_form(form)
    if not foreach or not buffers:
        one_by_one = zip(buffers, gradients, strict=True)
        return [momenta_([b], [g], momentum, form, nesterov, dtype)[0] for b, g in one_by_one]
    held = [buffer.detach() for buffer in buffers]
    new = [gradient.detach().to(buffer.dtype) for gradient, buffer in zip(gradients, held, strict=True)]
    if form == "ema":
        torch._foreach_lerp_(held, new, 1 - momentum)
        ahead = torch._foreach_lerp(new, held, momentum) if nesterov else held
    else:
        torch._foreach_mul_(held, momentum)
        torch._foreach_add_(held, new)
        ahead = torch._foreach_add(new, held, alpha=momentum) if nesterov else held
    target = None if dtype is None else getattr(torch, dtype)
    return [each.to(target or each.dtype, copy=not nesterov).contiguous() for each in ahead]


@torch.no_grad()
def apply_(
    parameters: Sequence[torch.Tensor],
    updates: Sequence[torch.Tensor],
    learning_rate: float,
    factors: Sequence[float],
    decay: float,
    foreach: bool = True,
) -> None:
    """Decay the parameters, then move each by its update times its factor; see `core.backend.Orthogonalizing`."""
    together: dict[float, tuple[float, list[torch.Tensor], list[torch.Tensor]]] = {}
    narrow = []
    for place, (parameter, update, factor) in enumerate(zip(parameters, updates, factors, strict=True)):
        target = parameter.detach()
        check_update(place, tuple(update.shape), tuple(target.shape))
        if wide(target.dtype) != target.dtype:
            narrow.append((target, target.to(wide(target.dtype))))
            target = narrow[-1][1]
        targets, those = together.setdefault(factor if foreach else place, (factor, [], []))[1:]
        targets.append(target)
        those.append(update)
    for factor, targets, those in together.values():
        torch._foreach_mul_(targets, 1 - learning_rate * decay)
        torch._foreach_add_(targets, those, alpha=-learning_rate * factor)
    for target, value in narrow:
        target.copy_(value)


@torch.no_grad()
def normalize_rows_(
    updates: torch.Tensor, second: torch.Tensor, beta2: float, eps: float, transposed: bool = False
) -> None:
    """Divide each row by the root of its running mean square, and keep the norm of each matrix; both in place."""
    if not updates.numel():
        return
    rows = updates.mT if transposed else updates
    values = rows.float()
    squares = values.square()
    norms = squares.sum((1, 2), keepdim=True).sqrt_()
    second.lerp_(squares.mean(2), 1 - beta2)
    del squares
    values = values / second.sqrt().add_(eps)[..., None]
    after = torch.linalg.vector_norm(values, dim=(1, 2), keepdim=True)
    rows.copy_(values.mul_(norms / after.add_(torch.finfo(torch.float32).tiny)))


@torch.no_grad()
def all_finite(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """For each tensor whether all of its elements are finite; waits for the device once where they are."""
    filled = [tensor.detach() for tensor in tensors if tensor.numel()]
    # The Euclidean norm is thirty times as fast as the largest element, and not finite where squares overflow as well.
    flags = _finite_norms(filled, 2.0)
    doubtful = iter(_finite_norms([each for each, finite in zip(filled, flags) if not finite], math.inf))
    found = iter([finite or next(doubtful) for finite in flags])
    return [next(found) if tensor.numel() else True for tensor in tensors]


def _finite_norms(tensors: Sequence[torch.Tensor], order: float) -> list[bool]:
    if not tensors:
        return []
    return torch.stack([each.isfinite() for each in torch._foreach_norm(tensors, order)]).tolist()


@torch.no_grad()
def scale_blocks_(parameter: torch.Tensor, boxes: Sequence[Box], factors: Sequence[float]) -> None:
    """Multiply each box of a tensor with its factor, in place."""
    for box, factor in zip(boxes, factors, strict=True):
        parameter.detach()[box].mul_(factor)
