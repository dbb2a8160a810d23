"""One global batch, the part of it that each rank sees, and the loss of a step."""

from __future__ import annotations

from typing import Any, Callable, Mapping

import numpy as np

from hyper_parallel.core.backend import Backend, Module, Tensor
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.execution.apply import execution_of
from hyper_parallel.core.execution.loss import planned_cross_entropy, whole_cross_entropy
from hyper_parallel.core.mesh import BATCH_AXES, DeviceMesh

LABELS = "labels"
IGNORED = -100
"""The label of a token that counts nothing."""

LossFunction = Callable[[Module, Mapping[str, Any]], Tensor]
"""From a model and what a rank has of the batch to a scalar: a mean over samples."""


class Batch:
    """The global batch on the host: arrays of `[samples, ...]` by the model's argument names, and `labels`.

    What is no array (`use_cache=False`) goes to the model as it is.

    Raises:
        ConfigError: there is no array, or arrays differ in their number of samples.
    """

    def __init__(self, backend: Backend, values: Mapping[str, Any]):
        if not isinstance(values, Mapping):
            raise ConfigError(f"check_gradients: the batch maps argument names to arrays, found {type(values)}")
        is_tensor, to_numpy = backend.tensors.is_tensor, backend.tensors.to_numpy
        self.values = {name: to_numpy(each) if is_tensor(each) else each for name, each in values.items()}
        self.arrays = {name: each for name, each in self.values.items() if isinstance(each, np.ndarray)}
        sizes = {name: len(each) if each.ndim else 0 for name, each in self.arrays.items()}
        if len(set(sizes.values())) != 1 or 0 in sizes.values():
            raise ConfigError(
                "check_gradients: the batch holds arrays or tensors of [samples, ...], with as many samples in each; "
                f"found {sizes or 'none'}"
            )
        self.samples = next(iter(sizes.values()))

    def rows(self, mesh: DeviceMesh, rank: int) -> slice:
        """The samples of a rank: those along the batch axes have different ones, equally many.

        Raises:
            ConfigError: the samples can't be dealt out evenly.
        """
        count, place = data_ranks(mesh), 0
        if self.samples % count:
            raise ConfigError(
                f"check_gradients: {self.samples} samples can't be dealt out evenly to {count} ranks along "
                f"{' and '.join(_active_batch_axes(mesh))}; pass a multiple of {count}"
            )
        for axis in _active_batch_axes(mesh):
            place = place * mesh.axis_size(axis) + mesh.coordinates(rank)[axis]
        each = self.samples // count
        return slice(place * each, (place + 1) * each)

    def part(self, backend: Backend, rows: slice, dtype: str) -> dict[str, Any]:
        """The values of some samples, as tensors of this process's device; numbers that are no integers as `dtype`."""

        def tensor(array: np.ndarray) -> Tensor:
            return backend.tensors.from_numpy(array[rows], dtype if array.dtype.kind == "f" else None)

        return {name: tensor(each) if name in self.arrays else each for name, each in self.values.items()}

    def targets(self) -> np.ndarray:
        """The labels; where there are none, the tokens.

        Raises:
            ConfigError: nothing tells which of the arrays are the tokens.
        """
        if LABELS in self.arrays:
            return self.arrays[LABELS]
        tokens = [name for name, each in self.arrays.items() if each.dtype.kind in "iu" and each.ndim == 2]
        named = [name for name in tokens if name == "input_ids"] or tokens
        if len(named) != 1:
            raise ConfigError(
                f"check_gradients: the batch has no {LABELS!r}, and its tokens could be each of {tokens}; add "
                f"{LABELS!r}, of [samples, tokens], or pass loss_fn"
            )
        return self.arrays[named[0]]


def data_ranks(mesh: DeviceMesh) -> int:
    """How many parts a batch is dealt out in."""
    return int(np.prod([mesh.axis_size(axis) for axis in BATCH_AXES]))


def _active_batch_axes(mesh: DeviceMesh) -> list[str]:
    return [axis for axis in mesh.names if axis in BATCH_AXES and mesh.axis_size(axis) > 1]


def causal_loss(backend: Backend, batch: Batch, parts: int, rows: slice) -> LossFunction:
    """The cross entropy of each next token, as a mean over the tokens that count in the whole batch.

    A rank has the sum over its own samples times `parts`, the number of ranks that have others: gradients, which are
    means over those ranks, are then exactly those of the whole batch.
    """
    labels = batch.targets()[:, 1:]
    count = int((labels != IGNORED).sum())

    def loss(model: Module, values: Mapping[str, Any]) -> Tensor:
        logits = logits_of(backend, model(**{name: each for name, each in values.items() if name != LABELS}))[:, :-1]
        targets = backend.tensors.from_numpy(np.ascontiguousarray(labels[rows]))
        execution = execution_of(model)
        if execution is None:
            summed = whole_cross_entropy(backend, logits, targets, "sum", IGNORED)
        else:
            summed = planned_cross_entropy(execution.backend, execution.plan, logits, targets, "sum", IGNORED)
        return summed * (parts / count)

    return loss


def logits_of(backend: Backend, output: Any) -> Tensor:
    """The logits among what a model returns: those of that name, or the first tensor.

    Raises:
        ConfigError: there are none.
    """
    named = getattr(output, "logits", None)
    first = named if named is not None else output[0] if isinstance(output, (tuple, list)) else output
    if not backend.tensors.is_tensor(first):
        raise ConfigError(
            f"check_gradients: the model returns {type(output).__name__}, in which no tensor of logits is found; pass "
            "loss_fn"
        )
    return first
