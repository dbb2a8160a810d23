"""Autograd glue for PyTorch."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import cache
from typing import Any, Callable, ContextManager, Iterable, Sequence

import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from hyper_parallel.core.backend import HookHandle, Parameter, Tensor
from hyper_parallel.core.errors import ConfigError

_NOTHING = nullcontext()


def grad_enabled() -> bool:
    """See `core.backend.Autograd`."""
    return torch.is_grad_enabled()


def no_grad() -> ContextManager[None]:
    """See `core.backend.Autograd`."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def enable_grad() -> ContextManager[None]:
    """See `core.backend.Autograd`."""
    return torch.enable_grad()


def requires_grad(tensor: Tensor) -> bool:
    """See `core.backend.Autograd`."""
    return tensor.grad_fn is not None


def takes_part(tensor: Tensor) -> bool:
    """See `core.backend.Autograd`."""
    return tensor.requires_grad


def is_leaf(tensor: Tensor) -> bool:
    """See `core.backend.Autograd`."""
    return tensor.requires_grad and tensor.is_leaf


def as_leaf(tensor: Tensor, like: Tensor) -> Tensor:
    """See `core.backend.Autograd`."""
    tensor = tensor.detach()
    return torch.nn.Parameter(tensor) if isinstance(like, torch.nn.Parameter) else tensor.requires_grad_()


def deep_copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """See `core.backend.Autograd`."""
    return copy.deepcopy(tensor, memo)


def cast(tensor: Tensor, dtype: str) -> Tensor:
    """See `core.backend.Autograd`."""
    return tensor.to(getattr(torch, dtype))


class _Attach(torch.autograd.Function):
    """Where full tensors come from; hands their gradients out instead of passing them on."""

    @staticmethod
    def forward(ctx: Any, on_gradients: Callable, fulls: Sequence[Tensor], anchor: Tensor) -> tuple[Tensor, ...]:
        ctx.on_gradients = on_gradients
        ctx.set_materialize_grads(False)
        return tuple(fulls)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.on_gradients(list(gradients))
        return None, None, None


def attach(
    parameters: Sequence[Parameter],
    fulls: Sequence[Tensor],
    on_gradients: Callable[[list[Tensor | None]], Iterable[Tensor]],
) -> list[Tensor]:
    """See `core.backend.Autograd`. The parameters are no inputs of the node: `deliver` gives them what they get."""
    anchor = torch.empty(0, requires_grad=True)  # makes the engine record the node
    return list(_Attach.apply(on_gradients, list(fulls), anchor))


_NO_TANGENT = "a transition has no forward-mode derivative: use backward() or torch.autograd.grad"


class _Differentiable(torch.autograd.Function):
    """Any function of one tensor together with its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, way: tuple[Callable, Callable]) -> Tensor:
        forward, ctx.backward_of_forward = way
        result, ctx.kept = forward(tensor)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return ctx.backward_of_forward(gradient, ctx.kept), None
        with torch.no_grad():
            passed = ctx.backward_of_forward(gradient, ctx.kept)
        return _Once.apply(passed, gradient) if gradient.requires_grad else passed, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> None:
        raise ConfigError(_NO_TANGENT)


@cache
def _named(name: str) -> type[_Differentiable]:
    """The function under a name, which the engine's errors and profiles call it by."""
    return type(name, (_Differentiable,), {}) if name else _Differentiable


class _Once(torch.autograd.Function):
    """A gradient whose own gradient nobody knows: better an error than a wrong number."""

    @staticmethod
    def forward(ctx: Any, passed: Tensor, gradient: Tensor) -> Tensor:
        return passed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        raise ConfigError("the gradient of a transition can't be differentiated again: leave create_graph=True out")


def differentiable(
    tensor: Tensor,
    forward: Callable[[Tensor], tuple[Tensor, Any]],
    backward: Callable[[Tensor, Any], Tensor],
    name: str = "",
) -> Tensor:
    """See `core.backend.Autograd`. What `forward` keeps lives as long as the graph; it must not hold the result itself,
    which would keep the graph alive."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _named(name).apply(tensor, (forward, backward))
    if forward_ad.unpack_dual(tensor).tangent is not None:  # it would get lost on the way
        raise ConfigError(_NO_TANGENT)
    with torch.no_grad():
        return forward(tensor)[0]


def deliver(parameter: Parameter, gradient: Tensor) -> None:
    """See `core.backend.Autograd`. Runs the user's post-accumulate hooks, which the engine would have run."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
    for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)


def forget_gradient(parameter: Parameter) -> None:
    """See `core.backend.Autograd`."""
    parameter.grad = None


def on_gradient(tensor: Tensor, callback: Callable[[], None]) -> None:
    """See `core.backend.Autograd`."""

    def hook(gradients: Any) -> None:
        if torch.is_grad_enabled():
            raise ConfigError("fully sharded gradients can't be differentiated again; leave create_graph=True out")
        callback()

    if tensor._is_view() and tensor._base.grad_fn is not None:
        # Writing to a view later puts it behind another node, and its own hooks would come too late.
        tensor._base.grad_fn.register_prehook(hook)
    else:
        tensor.register_hook(hook)


def watch_leaf(parameter: Parameter, callback: Callable[[], None]) -> HookHandle:
    """See `core.backend.Autograd`. What is delivered reaches no hook."""
    return parameter.register_hook(lambda gradient: callback())


def follows_casts() -> bool:
    """See `core.backend.Autograd`."""
    return True


def queue_final_callback(callback: Callable[[], None]) -> None:
    """See `core.backend.Autograd`. The engine's own queue, as PyTorch's DDP and FSDP use it."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def graph_is_kept() -> bool:
    """See `core.backend.Autograd`. As PyTorch's own compiler asks, before it reuses what it has saved."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def in_backward() -> bool:
    """See `core.backend.Autograd`."""
    return torch._C._current_graph_task_id() != -1


def differentiates_empty_tensors() -> bool:
    """See `core.backend.Autograd`."""
    return True


def runs_in_threads() -> bool:
    """See `core.backend.Autograd`."""
    return True


def value_and_grad(
    function: Callable[..., Tensor], parameters: Sequence[Parameter]
) -> Callable[..., tuple[Tensor, list[Tensor | None]]]:
    """See `core.backend.Autograd`."""

    def run(*args: Any, **kwargs: Any) -> tuple[Tensor, list[Tensor | None]]:
        kept = [parameter.grad for parameter in parameters]
        try:
            for parameter in parameters:
                parameter.grad = None
            value = function(*args, **kwargs)
            value.backward()
            return value.detach(), [parameter.grad for parameter in parameters]
        finally:
            for parameter, gradient in zip(parameters, kept):
                parameter.grad = gradient

    return run
