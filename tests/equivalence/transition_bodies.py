"""What the workers do in `test_transitions.py`: transitions on real ranks, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

from hyper_parallel import DeviceMesh, Layout, LayoutError, Partial, Replicate, Shard
from hyper_parallel.core.backend import Backend, Move, Tensor
from hyper_parallel.core.replay import Redistribution, redistribution
from hyper_parallel.core.topology import Topology
from tests.core import oracle

MARGIN = 3


class Case(NamedTuple):
    """A transition to run, and where its numbers come from."""

    source: Layout
    target: Layout
    seed: int
    dtype: str = "float32"
    topology: Topology | None = None


def contributions_of(layout: Layout, seed: int, dtype: str = "float32") -> dict[oracle.Place, np.ndarray]:
    """Small whole numbers, exact in every dtype. bfloat16 is float32, which is how a backend takes and returns it."""
    random = np.random.default_rng(seed)
    low, high = (0, 2) if dtype == "bool" else (0, 10) if dtype == "uint8" else (-9, 10)
    kind = "float32" if dtype == "bfloat16" else dtype
    return oracle.contributions(layout, lambda: random.integers(low, high, layout.shape).astype(kind))


def own(backend: Backend, layout: Layout, seed: int, dtype: str = "float32") -> np.ndarray:
    """What this rank holds of these contributions."""
    return oracle.local(layout, contributions_of(layout, seed, dtype), backend.collectives.rank())


def compiled(backend: Backend, case: Case) -> Redistribution:
    return redistribution(backend, case.source, case.target, case.topology)


def parameter(backend: Backend, array: np.ndarray, dtype: str) -> Any:
    """A trainable parameter of the framework."""
    value = backend.tensors.from_numpy(array, dtype)
    if backend.name == "torch":
        import torch

        return torch.nn.Parameter(value)
    import mindspore

    return mindspore.Parameter(value, name="weight")


def gradient_through(
    backend: Backend, function: Callable[[Tensor], Tensor], weight: Any, gradient: np.ndarray, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """`function(weight)`, and the gradient of `weight` when that of the result is `gradient`."""
    tensors, results = backend.tensors, []

    def loss() -> Tensor:
        results.append(function(weight))
        return backend.autograd.differentiable(
            results[0],
            lambda _: (tensors.zeros((), dtype), None),
            lambda *_: tensors.from_numpy(gradient, dtype),
        )

    _, (found,) = backend.autograd.value_and_grad(loss, [weight])()
    return tensors.to_numpy(results[0]), tensors.to_numpy(found)


def forward_and_backward(backend: Backend, cases: Sequence[Case]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The result of every transition and the gradient of its input, of one for which the numbers are drawn too."""
    found = []
    for case in cases:
        weight = parameter(backend, own(backend, case.source, case.seed, case.dtype), case.dtype)
        gradient = own(backend, case.target.gradient, case.seed + 1, case.dtype)
        found.append(gradient_through(backend, compiled(backend, case), weight, gradient, case.dtype))
    return found


def without_autograd(backend: Backend, cases: Sequence[Case]) -> list[np.ndarray]:
    """The results of `run`, into a new tensor and into a part of another one; inputs stay as they are."""
    tensors, found = backend.tensors, []
    for case in cases:
        array = own(backend, case.source, case.seed, case.dtype)
        local, run = tensors.from_numpy(array, case.dtype), compiled(backend, case).run
        found.append(tensors.to_numpy(run(local)))
        shape = found[-1].shape
        margins = np.ones(2 * MARGIN + prod(shape))
        holder = tensors.from_numpy(margins, case.dtype)
        out = tensors.alias(holder, MARGIN, shape)
        assert run(local, out=out) is out
        margins[MARGIN : MARGIN + prod(shape)] = found[-1].reshape(-1)
        np.testing.assert_array_equal(tensors.to_numpy(holder), margins.astype(found[-1].dtype))
        np.testing.assert_array_equal(tensors.to_numpy(local), array)
    return found


def strided_inputs(backend: Backend, cases: Sequence[Case]) -> list[tuple[np.ndarray, np.ndarray]]:
    """As `forward_and_backward`, of float32 inputs that are not contiguous: their dims lie the other way round."""
    return [strided_input(backend, case) for case in cases]


def strided_input(backend: Backend, case: Case) -> tuple[np.ndarray, np.ndarray]:
    transition, array = compiled(backend, case), own(backend, case.source, case.seed)
    dims = tuple(reversed(range(array.ndim)))
    weight = parameter(backend, np.ascontiguousarray(array.transpose(dims)), "float32")
    gradient = own(backend, case.target.gradient, case.seed + 1)
    result, back = gradient_through(backend, lambda it: transition(it.permute(dims)), weight, gradient, "float32")
    with backend.autograd.no_grad():
        np.testing.assert_array_equal(backend.tensors.to_numpy(transition.run(weight.permute(dims))), result)
    return result, back.transpose(dims)


class Counting:
    """A backend's tensors, counting the elements that are copied."""

    def __init__(self, tensors: Any):
        self._tensors = tensors
        self.copied = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensors, name)

    def move_(self, target: Tensor, source: Tensor, moves: Sequence[Move]) -> None:
        self.copied += sum(prod(move.sizes) for move in moves)
        self._tensors.move_(target, source, moves)

    def duplicate(self, tensor: Tensor) -> Tensor:
        self.copied += prod(tensor.shape)
        return self._tensors.duplicate(tensor)

    def copy_(self, target: Tensor, source: Tensor) -> None:
        self.copied += prod(target.shape)
        self._tensors.copy_(target, source)


def copies(backend: Backend, cases: Sequence[Case]) -> list[tuple[int, int]]:
    """Elements that each transition copied on this rank, and those that its lowering tells."""
    found = []
    for case in cases:
        counting = Counting(backend.tensors)
        transition = redistribution(replace(backend, tensors=counting), case.source, case.target, case.topology)
        transition.run(backend.tensors.from_numpy(own(backend, case.source, case.seed)))
        found.append((counting.copied, transition.program.copied))
    return found


def a_part_after_the_whole(backend: Backend) -> list[list[float]]:
    """Transitions on the full mesh, on its rows, on its columns, on a mesh that leaves two ranks out, and on the full
    mesh again."""
    whole = DeviceMesh((2, 2), ("replicate", "shard"))
    rank, found = backend.collectives.rank(), []

    def gather(mesh: DeviceMesh) -> None:
        size = len(mesh.names)
        source = Layout(mesh, [Shard(0)] + [Replicate()] * (size - 1), (mesh.shape[0],))
        case = Case(source, source.with_placements([Replicate()] * size), 0)
        local = backend.tensors.from_numpy(np.full(source.local_shape(rank), rank, "float32"))
        found.append(backend.tensors.to_numpy(compiled(backend, case).run(local)).tolist())

    gather(whole)
    gather(whole.submesh(("shard",), rank))
    gather(whole.submesh(("replicate",), rank))
    if rank in (1, 2):
        gather(DeviceMesh((2,), ("tensor",), ranks=(2, 1)))
    gather(whole)
    return found


def refusals(backend: Backend) -> dict[str, str]:
    """Messages of the errors on this rank; nothing is launched, so that the ranks stay in step."""
    tensors, rank = backend.tensors, backend.collectives.rank()
    mesh = DeviceMesh((2,), ("shard",))
    rows, whole = Layout(mesh, [Shard(0)], (3, 2)), Layout(mesh, [Replicate()], (3, 2))
    gather = redistribution(backend, rows, whole)
    average = redistribution(backend, whole.with_placements([Partial("avg")]), whole)
    local = tensors.zeros(rows.local_shape(rank), "float32")
    turned_out = tensors.zeros((2, 3), "float32").permute((1, 0))
    elsewhere = Layout(DeviceMesh((1,), ("shard",), ranks=(1 - rank,)), [Replicate()], (3, 2))
    mistakes = {
        "local": partial(gather, tensors.zeros((7, 2), "float32")),
        "local of run": partial(gather.run, tensors.zeros((7, 2), "float32")),
        "shape of out": partial(gather.run, local, tensors.zeros((2, 3), "float32")),
        "dtype of out": partial(gather.run, local, tensors.zeros((3, 2), "float64")),
        "strided out": partial(gather.run, local, turned_out),
        "average": partial(average, tensors.zeros((3, 2), "int32")),
        "rank": partial(redistribution, backend, elsewhere, elsewhere),
    }
    return {name: refused(call) for name, call in mistakes.items()}


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except LayoutError as error:
        return str(error)
    return "accepted"
