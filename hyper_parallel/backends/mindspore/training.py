"""MindSpore's AdamW and cross entropy.

The optimizer is that of `mindspore.experimental`: on a CPU the one of `mindspore.mint` changes nothing, or has no
kernel.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import Any, Iterator, Sequence

import mindspore as ms
from mindspore import Parameter, Tensor, mint, ops
from mindspore.experimental import optim
from mindspore.profiler import mstx

from hyper_parallel.backends.mindspore.optimizer import Muon, step_with_none
from hyper_parallel.core.backend import LocatedTargets


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


def set_learning_rate(optimizer: Any, learning_rate: float, algorithm: str | None = None) -> None:
    """Set it for every group, or for those of an algorithm."""
    for group in optimizer.param_groups:
        if algorithm not in (None, group.get("algorithm")):
            continue
        # Its step is compiled: only the tensor that it was compiled with is looked at again.
        ops.assign(group["lr"], Tensor(learning_rate, ms.float32))


def apply_gradients(optimizer: Any, parameters: Sequence[Parameter], gradients: Sequence[Tensor | None]) -> None:
    """One step; a parameter whose gradient is None keeps its value and its state."""
    by_parameter = {id(parameter): gradient for parameter, gradient in zip(parameters, gradients, strict=True)}
    ordered = [by_parameter.get(id(parameter)) for parameter in optimizer.parameters]
    if isinstance(optimizer, Muon):  # which leaves what has no gradient as it is
        optimizer(ordered)
        return
    step_with_none(optimizer, ordered)


def is_profiled() -> bool:
    """See `core.backend.Training`. The profiler records ranges on Ascend only, when it is asked to (`mstx=True`)."""
    return bool(mstx.enable) and ms.get_context("device_target") == "Ascend"


@contextmanager
def profiler_range(name: str) -> Iterator[None]:
    """See `core.backend.Training`."""
    number = mstx.range_start(name)
    try:
        yield
    finally:
        mstx.range_end(number)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean", ignore_index: int = -100) -> Tensor:
    """Sum or mean over the tokens that count, in float32 at least."""
    return ops.cross_entropy(
        _rows(logits).astype(_wide(logits)),
        targets.reshape(-1).astype(ms.int32),
        ignore_index=ignore_index,
        reduction=reduction,
    )


# The loss of a part of the vocabulary


def locate_targets(targets: Tensor, start: int, length: int, ignore_index: int) -> LocatedTargets:
    """Where targets lie among the `length` entries of the vocabulary from `start` on."""
    ids = targets.reshape(-1).astype(ms.int64)
    counted = ids != ignore_index
    places = ids - start
    here = mint.logical_and(counted, mint.logical_and(places >= 0, places < length))
    return LocatedTargets(mint.where(here, places, 0), here, counted)


def largest_logits(logits: Tensor) -> Tensor:
    """The largest logit of each token; minus infinity where the part is empty."""
    rows = _rows(logits).astype(_wide(logits))
    if rows.shape[1] == 0:
        return ops.full((rows.shape[0],), float("-inf"), dtype=rows.dtype)
    return ops.amax(rows, 1)


def vocabulary_terms(logits: Tensor, largest: Tensor, targets: LocatedTargets) -> tuple[Tensor, Tensor]:
    """Exponentials, and the sums and targets' logits that are to be summed over the ranks."""
    shifted = _rows(logits).astype(largest.dtype) - largest[:, None]
    if shifted.size == 0:  # on a CPU MindSpore leaves sums of nothing undefined
        return shifted, mint.zeros((2 * shifted.shape[0],), dtype=shifted.dtype)
    exponentials = mint.exp(shifted)
    chosen = mint.gather(shifted, 1, targets.places[:, None])[:, 0]
    return exponentials, mint.cat([mint.sum(exponentials, 1), mint.where(targets.here, chosen, 0.0)])


def vocabulary_loss(terms: Tensor, targets: LocatedTargets, mean: bool) -> Tensor:
    """The sum over the tokens that count, or the mean."""
    sums, chosen = mint.chunk(terms, 2)
    total = _sum(mint.where(targets.counted, mint.log(sums) - chosen, 0.0))
    return total / _count(targets, total) if mean else total


def vocabulary_gradient(
    exponentials: Tensor,
    terms: Tensor,
    targets: LocatedTargets,
    gradient: Tensor,
    mean: bool,
    dtype: str,
    overwrite: bool,
) -> Tensor:
    """Softmax minus one at the target, times the gradient of the loss, where a token counts. Always in memory of its
    own: on a CPU MindSpore multiplies nothing in place."""
    share = gradient / _count(targets, gradient) if mean else gradient
    weights = mint.where(targets.counted, share, 0.0)
    result = exponentials * (weights / mint.chunk(terms, 2)[0])[:, None]
    if result.size:
        ones = mint.where(targets.here, -weights, 0.0)[:, None]
        result = ops.tensor_scatter_elements(result, targets.places[:, None], ones, 1, "add")
    return result.astype(getattr(ms, dtype))


def _wide(tensor: Tensor) -> ms.Type:
    """What a loss is computed in."""
    return ms.float64 if tensor.dtype == ms.float64 else ms.float32


def _rows(logits: Tensor) -> Tensor:
    """One row for each token."""
    return logits.reshape(math.prod(logits.shape[:-1]), logits.shape[-1])


def _count(targets: LocatedTargets, like: Tensor) -> Tensor:
    """How many tokens count, in the dtype of `like`."""
    return _sum(targets.counted.astype(like.dtype))


def _sum(values: Tensor) -> Tensor:
    """The sum of a 1-D tensor, of nothing too."""
    return values.sum() if values.size else mint.zeros((), dtype=values.dtype)


class _NothingToUpdate:
    """The optimizer of a rank that holds no element of any parameter."""

    parameters: tuple = ()
    param_groups: tuple = ()

    def __call__(self, gradients: tuple) -> None:
        """Nothing."""
