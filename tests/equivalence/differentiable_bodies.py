"""What the workers do in `test_primitives.py` with one differentiable operation."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from hyper_parallel.core.backend import Backend, Move, Tensor
from hyper_parallel.core.errors import ConfigError
from tests.equivalence.primitive_bodies import parameter


class Doubling:
    """Twice the elements, all twice in a row: an operation that autograd can't see through, and how often it ran."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self.forwards = 0
        self.backwards = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        return self._backend.autograd.differentiable(tensor, self._forward, self._backward)

    def _forward(self, tensor: Tensor) -> tuple[Tensor, Any]:
        assert not self._backend.autograd.grad_enabled()
        self.forwards += 1
        tensors = self._backend.tensors
        source = tensors.flat(tensor)
        result = tensors.empty((2, *tensor.shape), tensors.dtype_name(tensor))
        size = int(np.prod(tensor.shape))
        tensors.move_(tensors.flat(result), source, [Move((2, size), 0, (size, 1), 0, (0, 1))])
        return result, tuple(tensor.shape)

    def _backward(self, gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
        assert not self._backend.autograd.grad_enabled()
        self.backwards += 1
        tensors = self._backend.tensors
        return tensors.alias(tensors.reduce_rows(tensors.flat(gradient), 2, "sum"), 0, shape)


def gradients(backend: Backend) -> None:
    """At a leaf, in the middle, twice in one computation, and beside another path."""
    x = np.float32([[1, 2, 3], [4, 5, 6]])
    weights = np.stack([x + 1, x * x])  # so that the two halves of the result get different gradients
    weight = parameter(backend, x)
    factor = backend.tensors.from_numpy(weights)

    def expect(function: Callable[[Doubling], Tensor], value: float, gradient: np.ndarray, runs: int) -> None:
        double = Doubling(backend)
        found, (grad,) = backend.autograd.value_and_grad(lambda: function(double), [weight])()
        assert float(backend.tensors.to_numpy(found)) == value
        np.testing.assert_array_equal(backend.tensors.to_numpy(grad), gradient)
        assert tuple(grad.shape) == x.shape
        assert (double.forwards, double.backwards) == (runs, runs)

    once = weights.sum(0)
    expect(lambda double: (double(weight) * factor).sum(), (once * x).sum(), once, runs=1)
    expect(lambda double: (double(weight * 2) * factor).sum(), 2 * (once * x).sum(), 2 * once, runs=1)
    expect(
        lambda double: (double(weight) * factor).sum() + (double(weight) * 3).sum() + weight.sum(),
        (once * x).sum() + 7 * x.sum(),
        once + 7,
        runs=2,
    )
    expect(lambda double: (double(double(weight)[0]) * factor).sum(), (once * x).sum(), once, runs=2)


def unused_results(backend: Backend) -> None:
    weight = parameter(backend, np.ones((2, 2), "float32"))
    double = Doubling(backend)

    def loss() -> Tensor:
        double(weight * 2)
        return (weight * 3).sum()

    _, (gradient,) = backend.autograd.value_and_grad(loss, [weight])()
    assert backend.tensors.to_numpy(gradient).tolist() == [[3, 3], [3, 3]]
    assert (double.forwards, double.backwards) == (1, 0)


def results_over_the_input(backend: Backend) -> None:
    """What `forward` returns may be the input itself, or lie over its memory: the gradient still comes through."""
    tensors = backend.tensors
    ways = {
        "itself": lambda tensor: tensor,
        "reshaped": lambda tensor: tensor.reshape(3, 2),
        "flat": tensors.flat,
        "alias": lambda tensor: tensors.alias(tensors.flat(tensor), 0, (6, 1)),
        "part": lambda tensor: tensors.alias(tensors.flat(tensor), 2, (3,)),
    }
    x = np.arange(6, dtype="float32").reshape(2, 3)
    for name, way in ways.items():
        for before in (1, 2):  # 1: the parameter itself is the input
            weight = parameter(backend, x)
            seen = []

            def backward(gradient: Tensor, kept: Any) -> Tensor:
                seen.append((kept, tensors.to_numpy(gradient).reshape(-1).tolist()))
                return tensors.from_numpy(np.full((2, 3), 10.0, "float32"))

            def loss() -> Tensor:
                source = weight if before == 1 else weight * before
                result = backend.autograd.differentiable(source, lambda tensor: (way(tensor), name), backward)
                return (result * 4).sum() + source.sum()

            value, (gradient,) = backend.autograd.value_and_grad(loss, [weight])()
            part = x.reshape(-1)[2:5] if name == "part" else x
            assert float(tensors.to_numpy(value)) == before * (4 * part.sum() + x.sum()), name
            assert tensors.to_numpy(gradient).tolist() == np.full((2, 3), 11.0 * before).tolist(), name
            assert seen == [(name, [4.0] * part.size)]


def identity_passes_the_gradient_on(backend: Backend) -> None:
    """`backward` may return its argument. Two parameters that get it do not share memory where the framework sees to
    that (in MindSpore the gradients of a plain sum share it)."""
    first, second = (parameter(backend, np.ones(3, "float32")) for _ in range(2))

    def loss() -> Tensor:
        same = backend.autograd.differentiable(second, lambda tensor: (tensor, None), lambda gradient, kept: gradient)
        return ((first + same) * 5).sum()

    _, found = backend.autograd.value_and_grad(loss, [first, second])()
    assert [backend.tensors.to_numpy(gradient).tolist() for gradient in found] == [[5, 5, 5], [5, 5, 5]]
    if backend.name == "torch":
        backend.tensors.scale_(found[0], 0.0)
        assert found[1].tolist() == [5, 5, 5]


def gradients_of_any_form(backend: Backend) -> None:
    """A gradient may be one number seen many times; `flat` makes elements of it, of vectors too."""
    tensors = backend.tensors
    weight = parameter(backend, np.ones(3, "float32"))

    def backward(gradient: Tensor, kept: Any) -> Tensor:
        result = tensors.buffer(gradient, 3)
        tensors.move_(result, tensors.flat(gradient), [Move((3,), 0, (1,), 0, (1,))])
        return result

    def loss() -> Tensor:
        return backend.autograd.differentiable(weight, lambda tensor: (tensor, None), backward).sum()

    _, (gradient,) = backend.autograd.value_and_grad(loss, [weight])()
    assert tensors.to_numpy(gradient).tolist() == [1, 1, 1]


def nothing_to_record(backend: Backend) -> None:
    """Outside recording, under `no_grad`, for constants and for integers only `forward` runs."""
    autograd, tensors = backend.autograd, backend.tensors
    weight = parameter(backend, np.ones(3, "float32"))
    double = Doubling(backend)

    def loss() -> Tensor:
        with autograd.no_grad():
            silent = double(weight)
        constant = double(tensors.from_numpy(np.ones(3, "float32")))
        integers = double(tensors.from_numpy(np.arange(3)))
        for tensor in (silent, constant, integers):
            assert not autograd.requires_grad(tensor)
        assert tensors.to_numpy(integers).tolist() == [[0, 1, 2], [0, 1, 2]]
        return (weight * constant[0]).sum() + silent.sum()

    _, (gradient,) = autograd.value_and_grad(loss, [weight])()
    assert tensors.to_numpy(gradient).tolist() == [1, 1, 1]
    assert (double.forwards, double.backwards) == (3, 0)


def dtypes_may_change(backend: Backend) -> None:
    tensors = backend.tensors
    weight = parameter(backend, np.float32([1, 2]))

    def cast(tensor: Tensor, dtype: str) -> Tensor:
        result = tensors.empty(tensor.shape, dtype)
        tensors.copy_(result, tensor)
        return result

    def loss() -> Tensor:
        wide = backend.autograd.differentiable(
            weight, lambda tensor: (cast(tensor, "float64"), None), lambda gradient, kept: cast(gradient, "float32")
        )
        assert tensors.dtype_name(wide) == "float64"
        return (wide * 3).sum()

    _, (gradient,) = backend.autograd.value_and_grad(loss, [weight])()
    assert tensors.dtype_name(gradient) == "float32"
    assert tensors.to_numpy(gradient).tolist() == [3, 3]


def errors_come_through(backend: Backend) -> None:
    """An exception in `forward` or `backward` reaches the caller as itself, and the next step is fine."""
    weight = parameter(backend, np.ones(2, "float32"))
    double = Doubling(backend)

    def fail(*_: Any) -> Any:
        raise KeyError("on purpose")

    for forward, backward in ((fail, None), (lambda tensor: (tensor, None), fail)):
        try:
            backend.autograd.value_and_grad(
                lambda: backend.autograd.differentiable(weight * 1, forward, backward).sum(), [weight]
            )()
        except KeyError as error:
            assert error.args == ("on purpose",)
        else:
            raise AssertionError("the exception is lost")
        _, (gradient,) = backend.autograd.value_and_grad(lambda: double(weight).sum(), [weight])()
        assert backend.tensors.to_numpy(gradient).tolist() == [2, 2]


def retained_graph(backend: Backend) -> None:
    import torch

    weight = torch.nn.Parameter(torch.ones(2))
    double = Doubling(backend)
    loss = (double(weight) * 3).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert weight.grad.tolist() == [12, 12]
    assert (double.forwards, double.backwards) == (1, 2)


def second_derivatives(backend: Backend) -> str:
    """The message of the error; a gradient of a gradient that does not go through the operation is right."""
    weight = parameter(backend, np.float32([2, 3]))

    def squared_gradient(function: Callable[[Tensor], Tensor]) -> list[float]:
        if backend.name == "torch":
            import torch

            (gradient,) = torch.autograd.grad(function(weight), weight, create_graph=True)
            (second,) = torch.autograd.grad((gradient * gradient).sum(), weight)
        else:
            import mindspore

            def outer() -> Tensor:
                _, gradient = mindspore.value_and_grad(lambda: function(weight), None, weights=weight)()
                return (gradient * gradient).sum()

            _, second = mindspore.value_and_grad(outer, None, weights=weight)()
        return backend.tensors.to_numpy(second).tolist()

    def same(tensor: Tensor) -> Tensor:
        return backend.autograd.differentiable(tensor, lambda it: (it, None), lambda gradient, kept: gradient)

    # d/dw (2 w + 1)^2 = 8 w + 4: the operation passes on a gradient that depends on nothing
    assert squared_gradient(lambda w: (w * w).sum() + same(w).sum()) == [20, 28]
    try:
        squared_gradient(lambda w: (same(w) * w * w).sum())
    except ConfigError as error:
        return str(error)
    return "accepted"
