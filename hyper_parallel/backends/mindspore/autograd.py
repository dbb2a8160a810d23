"""Autograd glue for MindSpore's PyNative engine. Parts of it have no public door; each is used here only."""

from __future__ import annotations

from typing import Any, Callable, ContextManager, Sequence

import mindspore as ms
from mindspore.common._grad_function import _Function
from mindspore.graph.api import _pynative_executor as _engine

from hyper_parallel.core.backend import Parameter, Tensor


def grad_enabled() -> bool:
    """See `core.backend.Autograd`."""
    return _engine.requires_grad()  # `grad_flag` stays on under `no_grad`


def no_grad() -> ContextManager[None]:
    """See `core.backend.Autograd`."""
    return ms._no_grad()


def requires_grad(tensor: Tensor) -> bool:
    """See `core.backend.Autograd`."""
    return bool(tensor._requires_grad) and tensor._grad_node is not None


class _Attach(_Function):
    """Identity from parameters to their full tensors; returns the shards of the gradients, which settlement fills."""

    @staticmethod
    def forward(
        ctx: Any, on_gradients: Callable, fulls: Sequence[Tensor], *parameters: Parameter
    ) -> tuple[Tensor, ...]:
        ctx.on_gradients = on_gradients
        ctx.set_materialize_grads(False)
        return tuple(fulls)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None) + tuple(ctx.on_gradients(list(gradients)))


def attach(
    parameters: Sequence[Parameter],
    fulls: Sequence[Tensor],
    on_gradients: Callable[[list[Tensor | None]], list[Tensor]],
) -> list[Tensor]:
    """See `core.backend.Autograd`."""
    attached = _Attach.apply(on_gradients, list(fulls), *parameters)
    return list(attached) if isinstance(attached, tuple) else [attached]


def deliver(parameter: Parameter, gradient: Tensor) -> None:
    """See `core.backend.Autograd`. The engine returns the very tensors that `_Attach.backward` gave it."""


def on_gradient(tensor: Tensor, callback: Callable[[], None]) -> None:
    """See `core.backend.Autograd`."""
    tensor.register_hook(lambda gradient: callback())


def queue_final_callback(callback: Callable[[], None]) -> None:
    """See `core.backend.Autograd`. Runs before `value_and_grad` returns; what it changes in place is seen there."""
    _engine.queue_backward_final_callback(callback)


def in_backward() -> bool:
    """See `core.backend.Autograd`."""
    return _engine.get_current_autodiff_engine_id() != -1


def value_and_grad(
    function: Callable[..., Tensor], parameters: Sequence[Parameter]
) -> Callable[..., tuple[Tensor, list[Tensor | None]]]:
    """See `core.backend.Autograd`."""
    differentiated = ms.value_and_grad(function, None, weights=list(parameters))

    def run(*args: Any, **kwargs: Any) -> tuple[Tensor, list[Tensor | None]]:
        try:
            value, gradients = differentiated(*args, **kwargs)
        except BaseException:
            _engine.set_grad_flag(False)  # the engine leaves it on after an exception in forward
            raise
        return value, list(gradients)

    return run
