"""Autograd glue for MindSpore's PyNative engine. Parts of it have no public door; each is used here only."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from functools import cache
from typing import Any, Callable, ContextManager, Iterable, Iterator, Sequence

import mindspore as ms
from mindspore.common._grad_function import _Function
from mindspore.graph.api import _pynative_executor as _engine

from hyper_parallel.backends.mindspore.tensors import copy_, dtype_name, empty, squared_norm
from hyper_parallel.core.backend import HookHandle, Parameter, Tensor
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.identity import IdentityMap


def grad_enabled() -> bool:
    """See `core.backend.Autograd`."""
    return _engine.requires_grad()  # `grad_flag` stays on under `no_grad`


def no_grad() -> ContextManager[None]:
    """See `core.backend.Autograd`."""
    return ms._no_grad()


@contextmanager
def enable_grad() -> Iterator[None]:
    """See `core.backend.Autograd`. As MindSpore's own recompute does it."""
    before = _engine.grad_flag(), _engine.enable_grad()
    _engine.set_grad_flag(True)
    _engine.set_enable_grad(True)
    try:
        yield
    finally:
        _engine.set_grad_flag(before[0])
        _engine.set_enable_grad(before[1])


def requires_grad(tensor: Tensor) -> bool:
    """See `core.backend.Autograd`."""
    return bool(tensor._requires_grad) and tensor._grad_node is not None


def takes_part(tensor: Tensor) -> bool:
    """See `core.backend.Autograd`."""
    return bool(tensor._requires_grad)


def is_leaf(tensor: Tensor) -> bool:
    """See `core.backend.Autograd`."""
    return isinstance(tensor, ms.Parameter) and tensor.requires_grad


def as_leaf(tensor: Tensor, like: Tensor) -> Tensor:
    """See `core.backend.Autograd`. Always a parameter, with the name of `like`: nothing else asks for a gradient."""
    return ms.Parameter(tensor, name=like.name) if isinstance(like, ms.Parameter) else ms.Parameter(tensor)


def deep_copy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """See `core.backend.Autograd`. MindSpore's own deep copy of a tensor that is no parameter shares its memory."""
    if isinstance(tensor, ms.Parameter):
        return copy.deepcopy(tensor, memo)
    if id(tensor) not in memo:
        memo[id(tensor)] = made = empty(tensor.shape, dtype_name(tensor))
        copy_(made, tensor)
    return memo[id(tensor)]


def cast(tensor: Tensor, dtype: str) -> Tensor:
    """See `core.backend.Autograd`."""
    return tensor.astype(getattr(ms, dtype))


class _Handover:
    """What is handed over while one `value_and_grad` runs, and what is to be done once its backward is through.

    The gradient of a parameter whose unit took part is the one that `deliver` brings, or None, whatever the engine
    returns; so a sum that earlier backwards have begun is returned by the one that ends it.
    """

    def __init__(self) -> None:
        self.gradients: dict[int, Tensor | None] = {}
        self.returned: dict[int, list[Tensor]] = {}  # to the engine, once for each run of a unit's node
        self.callbacks: list[Callable[[], None]] = []


_handovers: list[_Handover] = []  # of the calls that run now, innermost last; the engine runs in one thread


class _Attach(_Function):
    """Identity from parameters to their full tensors; returns the shards of the gradients, which settlement fills."""

    @staticmethod
    def forward(
        ctx: Any, on_gradients: Callable, fulls: Sequence[Tensor], *parameters: Parameter
    ) -> tuple[Tensor, ...]:
        ctx.on_gradients = on_gradients
        ctx.parameters = parameters
        ctx.set_materialize_grads(False)
        return tuple(fulls)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        returned = tuple(ctx.on_gradients(list(gradients)))
        for parameter, shard in zip(ctx.parameters, returned) if _handovers else ():
            _handovers[-1].gradients.setdefault(id(parameter), None)
            _handovers[-1].returned.setdefault(id(parameter), []).append(shard)
        return None, None, *returned


def attach(
    parameters: Sequence[Parameter],
    fulls: Sequence[Tensor],
    on_gradients: Callable[[list[Tensor | None]], Iterable[Tensor]],
) -> list[Tensor]:
    """See `core.backend.Autograd`."""
    attached = _Attach.apply(on_gradients, list(fulls), *parameters)
    return list(attached) if isinstance(attached, tuple) else [attached]


class _Differentiable(_Function):
    """Any function of one tensor together with its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Callable, backward: Callable) -> Tensor:
        result, ctx.kept = forward(tensor)
        ctx.backward_of_forward = backward
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with ms._no_grad():
            passed = ctx.backward_of_forward(gradient, ctx.kept)
        if grad_enabled() and gradient._requires_grad:
            passed = _Once.apply(passed, gradient)
        return passed, None, None


@cache
def _named(name: str) -> type[_Differentiable]:
    """The function under a name, which the engine's errors and profiles call it by."""
    return type(name, (_Differentiable,), {}) if name else _Differentiable


class _Once(_Function):
    """A gradient whose own gradient nobody knows: better an error than a wrong number."""

    @staticmethod
    def forward(ctx: Any, passed: Tensor, gradient: Tensor) -> Tensor:
        return passed.copy()  # the engine forgets this node when it returns the input itself

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        raise ConfigError("the gradient of a transition can't be differentiated again: take no gradient of a gradient")


def differentiable(
    tensor: Tensor,
    forward: Callable[[Tensor], tuple[Tensor, Any]],
    backward: Callable[[Tensor, Any], Tensor],
    name: str = "",
) -> Tensor:
    """See `core.backend.Autograd`. What `forward` keeps lives as long as the graph; it must not hold the result itself,
    which would keep the graph alive."""
    if grad_enabled() and tensor._requires_grad:
        return _named(name).apply(tensor, forward, backward)
    with ms._no_grad():
        return forward(tensor)[0]


def deliver(parameter: Parameter, gradient: Tensor) -> None:
    """See `core.backend.Autograd`. MindSpore's own `value_and_grad` returns the tensors that `_Attach.backward` gave
    it; ours what has been delivered."""
    if _handovers:
        gradients = _handovers[-1].gradients
        earlier = gradients.get(id(parameter))
        with ms._no_grad():
            gradients[id(parameter)] = gradient if earlier is None else earlier + gradient


def forget_gradient(parameter: Parameter) -> None:
    """See `core.backend.Autograd`. The engine returns gradients; parameters hold none."""


def on_gradient(tensor: Tensor, callback: Callable[[], None]) -> None:
    """See `core.backend.Autograd`."""
    tensor.register_hook(lambda gradient: callback())


class _Watch:
    """A parameter, from `watch_leaf` on, until it is taken away."""

    def __init__(self, parameter: Parameter, callback: Callable[[], None]):
        self.callback: Callable[[], None] | None = callback
        _watched.set(parameter, self)

    def remove(self) -> None:
        """See `core.backend.HookHandle`."""
        self.callback = None


_watched = IdentityMap()  # parameter -> its `_Watch`


def watch_leaf(parameter: Parameter, callback: Callable[[], None]) -> HookHandle:
    """See `core.backend.Autograd`. The engine's own hooks can't tell; `value_and_grad` sees what the engine returns."""
    return _Watch(parameter, callback)


def _check_leaves(parameters: Sequence[Parameter], gradients: Sequence[Tensor], handover: _Handover) -> None:
    """Tell of gradients that are not, or not only, what the node of `attach` has returned. It returns a tensor that
    settlement fills: the engine hands the same one on, unless it has added something to it."""
    for parameter, gradient in zip(parameters, gradients):
        watch, returned = _watched.get(parameter), handover.returned.get(id(parameter))
        if watch is None or watch.callback is None or (returned is not None and len(returned) > 1):
            continue
        if returned is None:
            past = squared_norm([gradient]) != 0
        else:
            past = gradient.data_ptr() != returned[0].data_ptr()
        if past:
            watch.callback()


def follows_casts() -> bool:
    """See `core.backend.Autograd`."""
    return False


def queue_final_callback(callback: Callable[[], None]) -> None:
    """See `core.backend.Autograd`. Runs before `value_and_grad` returns; what it changes in place is seen there.

    The engine's queue is private; where it is missing, `hyper_parallel.value_and_grad` calls back instead."""
    if hasattr(_engine, "queue_backward_final_callback"):
        _engine.queue_backward_final_callback(callback)
    elif _handovers:
        _handovers[-1].callbacks.append(callback)
    else:
        raise ConfigError(
            "this version of MindSpore does not tell when a backward ends; take gradients with "
            "hyper_parallel.value_and_grad instead of the framework's own"
        )


def graph_is_kept() -> bool:
    """See `core.backend.Autograd`. The engine does not tell."""
    return True


def in_backward() -> bool:
    """See `core.backend.Autograd`."""
    return _engine.get_current_autodiff_engine_id() != -1


def differentiates_empty_tensors() -> bool:
    """See `core.backend.Autograd`. A sum over nothing is what the memory held before."""
    return False


def runs_in_threads() -> bool:
    """See `core.backend.Autograd`."""
    return False


def value_and_grad(
    function: Callable[..., Tensor], parameters: Sequence[Parameter]
) -> Callable[..., tuple[Tensor, list[Tensor | None]]]:
    """See `core.backend.Autograd`."""
    differentiated = ms.value_and_grad(function, None, weights=list(parameters))

    def run(*args: Any, **kwargs: Any) -> tuple[Tensor, list[Tensor | None]]:
        handover = _Handover()
        _handovers.append(handover)
        try:
            value, gradients = differentiated(*args, **kwargs)
            for callback in handover.callbacks:
                callback()
        except BaseException:
            # After an exception in forward the engine takes all that follows for a part of the graph that it has begun,
            # in which tensors can't be indexed by whole numbers.
            _engine.set_grad_flag(False)
            _engine.clear_res()
            raise
        finally:
            _handovers.remove(handover)
        _check_leaves(parameters, gradients, handover)
        handed = handover.gradients
        return value, [handed.get(id(each), gradient) for each, gradient in zip(parameters, gradients)]

    return run
