"""What every rank does in test_loss.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Callable

import numpy as np

import hyper_parallel
from hyper_parallel.core.backend import Backend, Group
from hyper_parallel.core.errors import ConfigError, HyperParallelError
from hyper_parallel.core.execution.loss import vocabulary_cross_entropy, whole_cross_entropy
from hyper_parallel.core.job import RankGroup
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Shard
from hyper_parallel.core.regions import chunk_bounds
from tests.equivalence.decoder_bodies import build


@dataclass(frozen=True)
class Case:
    """Whole logits [..., V] and what is asked of them. The loss is multiplied by `factor` before its gradient."""

    logits: np.ndarray
    targets: np.ndarray
    dtype: str = "float32"
    reduction: str = "mean"
    ignore_index: int = -100
    factor: float = 1.0

    @property
    def vocabulary(self) -> int:
        return self.logits.shape[-1]


@dataclass(frozen=True)
class Found:
    """The loss and the gradient of this rank's logits, and their dtypes."""

    value: np.ndarray
    gradient: np.ndarray
    value_dtype: str
    gradient_dtype: str


def losses(backend: Backend, cases: list[Case], mesh: DeviceMesh) -> list[Found]:
    """Each case on this rank's part of the vocabulary, over `tensor`."""
    return [_loss(backend, case, _group(backend, mesh)) for case in cases]


def own_losses(backend: Backend, cases: list[Case], mesh: DeviceMesh) -> Found:
    """The case of this rank's samples: ranks that differ along `tensor` alone share one."""
    group = _group(backend, mesh)
    return _loss(backend, cases[group.ranks[0]], group)


def _group(backend: Backend, mesh: DeviceMesh) -> Group:
    return backend.collectives.groups(mesh.groups(["tensor"]))


def _part(backend: Backend, case: Case, group: Group) -> Any:
    """This rank's logits, as a leaf."""
    start, stop = chunk_bounds(case.vocabulary, group.size, group.index)
    part = backend.tensors.from_numpy(case.logits[..., start:stop], case.dtype)
    return backend.autograd.as_leaf(part, part)


def whole_losses(backend: Backend, cases: list[Case]) -> list[Found]:
    """Each case on logits that are no part of anything."""
    return [
        _found(
            backend,
            case,
            _part(backend, case, RankGroup((0,), 0)),
            partial(whole_cross_entropy, backend, reduction=case.reduction, ignore_index=case.ignore_index),
        )
        for case in cases
    ]


def _loss(backend: Backend, case: Case, group: Group) -> Found:
    cross_entropy = partial(
        vocabulary_cross_entropy,
        backend,
        vocabulary=case.vocabulary,
        group=group,
        reduction=case.reduction,
        ignore_index=case.ignore_index,
    )
    return _found(backend, case, _part(backend, case, group), cross_entropy)


def _found(backend: Backend, case: Case, leaf: Any, cross_entropy: Callable[[Any, Any], Any]) -> Found:
    tensors = backend.tensors
    targets = tensors.from_numpy(case.targets)

    def loss() -> Any:
        return case.factor * cross_entropy(leaf * 1, targets)  # of a result, as the logits of a model are

    value, [gradient] = backend.autograd.value_and_grad(loss, [leaf])()
    names = tensors.dtype_name(value), tensors.dtype_name(gradient)
    return Found(tensors.to_numpy(value), tensors.to_numpy(gradient), *names)


def without_recording(backend: Backend, case: Case) -> np.ndarray:
    """The loss under no-grad."""
    group = backend.collectives.world()
    leaf, targets = _part(backend, case, group), backend.tensors.from_numpy(case.targets)
    with backend.autograd.no_grad():
        value = vocabulary_cross_entropy(backend, leaf, targets, case.vocabulary, group)
    assert not backend.autograd.takes_part(value)
    return backend.tensors.to_numpy(value)


class Counted:
    """Collectives that note what is sent: (operation, elements of the input, dtype)."""

    def __init__(self, backend: Backend):
        self._collectives, self._tensors = backend.collectives, backend.tensors
        self.sent: list[tuple[str, int, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collectives, name)

    def all_gather(self, output: Any, input: Any, group: Group) -> Any:
        self._note("all_gather", input)
        return self._collectives.all_gather(output, input, group)

    def all_reduce(self, tensor: Any, group: Group) -> Any:
        self._note("all_reduce", tensor)
        return self._collectives.all_reduce(tensor, group)

    def _note(self, operation: str, tensor: Any) -> None:
        self.sent.append((operation, int(np.prod(tensor.shape)), self._tensors.dtype_name(tensor)))


def what_is_sent(backend: Backend, case: Case) -> tuple[list, list]:
    """The collectives of forward, and those of forward and backward."""
    group, counted = backend.collectives.world(), Counted(backend)
    counting = replace(backend, collectives=counted)
    leaf, targets = _part(backend, case, group), backend.tensors.from_numpy(case.targets)
    forward = []

    def loss() -> Any:
        value = vocabulary_cross_entropy(counting, leaf * 1, targets, case.vocabulary, group)
        forward.extend(counted.sent)
        return value

    backend.autograd.value_and_grad(loss, [leaf])()
    return forward, counted.sent


def refusals(backend: Backend, case: Case) -> dict[str, tuple[str, str]]:
    """Kind and message of what is raised for each mistake, and that nothing was sent."""
    counted = Counted(backend)
    counting, group = replace(backend, collectives=counted), backend.collectives.world()
    leaf, targets = _part(backend, case, group), backend.tensors.from_numpy(case.targets)
    too_large, negative = case.targets.copy(), case.targets.copy()
    too_large[1, 2], negative[0, 1] = case.vocabulary, -1
    numbers = backend.tensors.from_numpy
    mistakes = {
        "too large": {"targets": numbers(too_large)},
        "negative": {"targets": numbers(negative)},
        "floating targets": {"targets": numbers(case.targets.astype("float32"))},
        "integer logits": {"logits": numbers(case.targets)},
        "numpy targets": {"targets": case.targets},
        "shifted": {"targets": numbers(case.targets[:, 1:])},
        "another part": {"vocabulary": case.vocabulary + 2 * group.size},
        "reduction": {"reduction": "none"},
        "ignore_index": {"ignore_index": None},
    }
    return {name: _raised(counting, group, counted, leaf, targets, case, wrong) for name, wrong in mistakes.items()}


def _raised(
    backend: Backend, group: Group, counted: Counted, leaf: Any, targets: Any, case: Case, wrong: dict
) -> tuple[str, str]:
    right = {"logits": leaf, "targets": targets, "vocabulary": case.vocabulary}
    try:
        vocabulary_cross_entropy(backend, group=group, **{**right, **wrong})
    except HyperParallelError as error:
        assert not counted.sent, "nothing may be sent before the arguments are known to be right"
        return type(error).__name__, str(error)
    raise AssertionError(f"{wrong} was not refused")


def changed_afterwards(backend: Backend, case: Case) -> tuple[np.ndarray, str]:
    """In PyTorch: the gradient of two backwards, logits and targets overwritten before them, and the message of a
    third one."""
    group = backend.collectives.world()
    leaf, targets = _part(backend, case, group), backend.tensors.from_numpy(case.targets)
    logits = leaf * 1
    loss = vocabulary_cross_entropy(backend, logits, targets, case.vocabulary, group)
    logits.data.zero_()
    targets.zero_()
    loss.backward(retain_graph=True)
    loss.backward()  # the first backward has changed nothing that the second one needs
    gradient = backend.tensors.to_numpy(leaf.grad)
    try:
        loss.backward()
    except ConfigError as error:
        return gradient, str(error)
    raise AssertionError("a graph that is gone was run again")


# The loss of a model


def model_losses(
    backend: Backend, config: dict, weights: dict, ids: np.ndarray, mesh: DeviceMesh, overrides: dict | None = None
) -> tuple[list, list]:
    """(Loss, gradients by name) of our decoder before it is parallelized and after, on this rank's samples of `ids`.

    Gradients of the parallelized model are the rank's own parts, with their layouts."""
    tensors, rank = backend.tensors, backend.collectives.rank()
    decoder = build(backend, config, weights)
    before = _model_loss(backend, decoder, decoder, tensors.from_numpy(ids))
    hyper_parallel.parallelize(decoder, hyper_parallel.plan(decoder, mesh, overrides))
    own = Layout(mesh, {"shard": Shard(0)} if "shard" in mesh.names else {}, ids.shape).shard(ids, rank)
    after = _model_loss(backend, decoder, decoder, tensors.from_numpy(own))
    return before, after


def _model_loss(backend: Backend, decoder: Any, around: Any, tokens: Any) -> list:
    trained = hyper_parallel.trainable_parameters(decoder)

    def loss() -> Any:
        return hyper_parallel.cross_entropy(decoder(tokens)[:, :-1], tokens[:, 1:], around)

    value, gradients = backend.autograd.value_and_grad(loss, [parameter for _, parameter in trained])()
    return [
        float(backend.tensors.to_numpy(value)),
        {
            name: (backend.tensors.to_numpy(gradient), hyper_parallel.layout_of(parameter))
            for (name, parameter), gradient in zip(trained, gradients, strict=True)
        },
    ]


def losses_through_wrappers(backend: Backend, config: dict, weights: dict, ids: np.ndarray, mesh: DeviceMesh) -> tuple:
    """In PyTorch: the loss by a module around the model, and the message where there are two models."""
    import torch

    first, second = (build(backend, config, weights) for _ in range(2))
    tokens = backend.tensors.from_numpy(ids)
    hyper_parallel.parallelize(first, hyper_parallel.plan(first, mesh))
    value, _ = _model_loss(backend, first, torch.nn.Sequential(first), tokens)
    hyper_parallel.parallelize(second, hyper_parallel.plan(second, mesh))
    try:
        _model_loss(backend, first, torch.nn.ModuleDict({"actor": first, "critic": second}), tokens)
    except ConfigError as error:
        return value, str(error)
    raise AssertionError("two models were not refused")
