"""MindSpore's AdamW and cross entropy.

The optimizer is that of `mindspore.experimental`: on a CPU the one of `mindspore.mint` changes nothing, or has no
kernel.
"""

from __future__ import annotations

from typing import Any, Sequence

import mindspore as ms
from mindspore import Parameter, Tensor, mint, ops
from mindspore.experimental import optim


def adamw(
    groups: Sequence[tuple[Sequence[Parameter], float]],
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
) -> Any:
    """MindSpore's AdamW over `(parameters, weight_decay)` groups."""
    # MindSpore can make no state for a shard without elements, and there is nothing to update.
    filled = [([p for p in parameters if p.size], decay) for parameters, decay in groups]
    described = [{"params": parameters, "weight_decay": decay} for parameters, decay in filled if parameters]
    if not described:
        return _NothingToUpdate()
    return optim.AdamW(described, lr=learning_rate, betas=betas, eps=eps)


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Set it for every group."""
    for group in optimizer.param_groups:
        # Its step is compiled: only the tensor that it was compiled with is looked at again.
        ops.assign(group["lr"], Tensor(learning_rate, ms.float32))


def apply_gradients(optimizer: Any, parameters: Sequence[Parameter], gradients: Sequence[Tensor | None]) -> None:
    """One step; a parameter whose gradient is None keeps its value and its state."""
    by_parameter = {id(parameter): gradient for parameter, gradient in zip(parameters, gradients, strict=True)}
    ordered = [by_parameter.get(id(parameter)) for parameter in optimizer.parameters]
    kept = [
        (tensor, tensor.copy())
        for index, gradient in enumerate(ordered)
        if gradient is None
        for tensor in (optimizer.parameters[index], optimizer.exp_avg[index], optimizer.exp_avg_sq[index])
    ]
    # `mutable`, or the compiled step warns that it takes the gradients for constants.
    optimizer(tuple(ms.mutable(_or_zeros(g, p)) for g, p in zip(ordered, optimizer.parameters)))
    for tensor, value in kept:
        ops.assign(tensor, value)


def cross_entropy_sum(logits: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """Sum over tokens, in float32 at least."""
    wide = logits if logits.dtype == ms.float64 else logits.astype(ms.float32)
    classes = wide.shape[-1]
    return ops.cross_entropy(
        wide.reshape(-1, classes), targets.reshape(-1).astype(ms.int32), ignore_index=ignore_index, reduction="sum"
    )


def _or_zeros(gradient: Tensor | None, parameter: Parameter) -> Tensor:
    """What MindSpore's optimizer takes for a missing gradient."""
    return mint.zeros(parameter.shape, dtype=parameter.dtype) if gradient is None else gradient


class _NothingToUpdate:
    """The optimizer of a rank that holds no element of any parameter."""

    parameters: tuple = ()
    param_groups: tuple = ()

    def __call__(self, gradients: tuple) -> None:
        """Nothing."""
