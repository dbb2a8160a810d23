"""PyTorch's AdamW and cross entropy."""

from __future__ import annotations

from typing import Sequence

import torch
from torch.nn import Parameter
from torch.nn.functional import cross_entropy


def adamw(
    groups: Sequence[tuple[Sequence[Parameter], float]],
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
) -> torch.optim.Optimizer:
    """PyTorch's AdamW over `(parameters, weight_decay)` groups."""
    described = [{"params": list(parameters), "weight_decay": decay} for parameters, decay in groups]
    return torch.optim.AdamW(described, lr=learning_rate, betas=betas, eps=eps)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set it for every group."""
    for group in optimizer.param_groups:
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


def cross_entropy_sum(logits: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Sum over tokens, in float32 at least."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    classes = wide.shape[-1]
    return cross_entropy(
        wide.reshape(-1, classes), targets.reshape(-1).long(), ignore_index=ignore_index, reduction="sum"
    )
