"""PyTorch's AdamW and cross entropy."""

from __future__ import annotations

import math
from typing import ContextManager, Sequence

import torch
from torch.nn import Parameter
from torch.nn import functional as F

from hyper_parallel.core.backend import LocatedTargets


def adamw(
    groups: Sequence[tuple[Sequence[Parameter], float]],
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
) -> torch.optim.Optimizer:
    """PyTorch's AdamW over `(parameters, weight_decay)` groups."""
    described = [{"params": list(parameters), "weight_decay": decay} for parameters, decay in groups]
    return torch.optim.AdamW(described, lr=learning_rate, betas=betas, eps=eps)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float, algorithm: str | None = None) -> None:
    """Set it for every group, or for those of an algorithm."""
    for group in optimizer.param_groups:
        if algorithm not in (None, group.get("algorithm")):
            continue
        group["lr"] = learning_rate


def apply_gradients(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Parameter], gradients: Sequence[torch.Tensor | None]
) -> None:
    """One step; a parameter whose gradient is None keeps its value and its state."""
    optimizer.zero_grad()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    optimizer.zero_grad()


def is_profiled() -> bool:
    """See `core.backend.Training`."""
    return torch.autograd._profiler_enabled()


def profiler_range(name: str) -> ContextManager[None]:
    """See `core.backend.Training`."""
    return torch.profiler.record_function(name)


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean", ignore_index: int = -100
) -> torch.Tensor:
    """Sum or mean over the tokens that count, in float32 at least."""
    wide = logits.to(_wide(logits))
    return F.cross_entropy(
        wide.reshape(-1, wide.shape[-1]), targets.reshape(-1).long(), ignore_index=ignore_index, reduction=reduction
    )


# The loss of a part of the vocabulary


def locate_targets(targets: torch.Tensor, start: int, length: int, ignore_index: int) -> LocatedTargets:
    """Where targets lie among the `length` entries of the vocabulary from `start` on."""
    ids = targets.reshape(-1).long()
    counted = ids != ignore_index
    places = ids - start
    here = counted & (places >= 0) & (places < length)
    return LocatedTargets(torch.where(here, places, 0), here, counted)


def largest_logits(logits: torch.Tensor) -> torch.Tensor:
    """The largest logit of each token; minus infinity where the part is empty."""
    rows = _rows(logits)
    if rows.shape[1] == 0:
        return rows.new_full((rows.shape[0],), -torch.inf, dtype=_wide(rows))
    return rows.amax(1).to(_wide(rows))


def vocabulary_terms(
    logits: torch.Tensor, largest: torch.Tensor, targets: LocatedTargets
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exponentials, and the sums and targets' logits that are to be summed over the ranks."""
    shifted = torch.sub(_rows(logits), largest[:, None])  # wide as `largest` is
    if shifted.numel() == 0:
        return shifted, shifted.new_zeros(2 * shifted.shape[0])
    chosen = shifted.gather(1, targets.places[:, None])[:, 0]
    exponentials = shifted.exp_()
    return exponentials, torch.cat([exponentials.sum(1), torch.where(targets.here, chosen, 0)])


def vocabulary_loss(terms: torch.Tensor, targets: LocatedTargets, mean: bool) -> torch.Tensor:
    """The sum over the tokens that count, or the mean."""
    sums, chosen = terms.chunk(2)
    total = torch.where(targets.counted, sums.log() - chosen, 0).sum()
    return total / targets.counted.sum() if mean else total


def vocabulary_gradient(
    exponentials: torch.Tensor,
    terms: torch.Tensor,
    targets: LocatedTargets,
    gradient: torch.Tensor,
    mean: bool,
    dtype: str,
    overwrite: bool,
) -> torch.Tensor:
    """Softmax minus one at the target, times the gradient of the loss, where a token counts."""
    share = gradient / targets.counted.sum() if mean else gradient
    weights = torch.where(targets.counted, share, 0)
    factors = (weights / terms.chunk(2)[0])[:, None]
    result = exponentials.mul_(factors) if overwrite else exponentials * factors
    if result.numel():
        result.scatter_add_(1, targets.places[:, None], torch.where(targets.here, -weights, 0)[:, None])
    return result.to(getattr(torch, dtype))


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """What a loss is computed in."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _rows(logits: torch.Tensor) -> torch.Tensor:
    """One row for each token."""
    return logits.reshape(math.prod(logits.shape[:-1]), logits.shape[-1])
