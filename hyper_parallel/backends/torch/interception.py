"""Following PyTorch's tensors: operators that meet one are looked up before autograd and kernels see the call.

A followed tensor is the local tensor itself, under another class: memory, autograd history and identity are those of
the plain one, and with the interception of its class switched off it is a plain one. So autograd, kernels and what is
saved for backward know nothing of it; operators that write in place or hand their argument on need no care.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Mapping

import torch
from torch._C import DisableTorchFunctionSubclass

from hyper_parallel.backends.torch.autograd import in_backward
from hyper_parallel.backends.torch.operators import canonical
from hyper_parallel.core.validation.classes import instances, under
from hyper_parallel.core.validation.watch import REFUSALS, Track


class FollowedTensor(torch.Tensor):
    """A local tensor that carries a `Track`."""

    _track: Track

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **kwargs)
        found = None if func in _HANDLES or _is_gradient() else canonical(func, args, kwargs)
        if found is None:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        op, arguments = found
        watch = next(instances((args, kwargs), FollowedTensor))._track.watch
        tracks = watch.infer(op, arguments)
        with DisableTorchFunctionSubclass():
            try:
                result = func(*args, **kwargs)
            except REFUSALS as error:
                watch.explain(op, arguments, error)
                raise
            if isinstance(op, str) and op.endswith("_"):
                _write(next(iter(arguments.values())), tracks[0])
            for tensor, track in zip(instances(result, torch.Tensor), tracks):
                follow(tensor, track)
        return result

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        return f"{self._track} {plain(self)!r}"

    def __format__(self, spec: str) -> str:
        return format(plain(self), spec) if spec and self.dim() == 0 else repr(self)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        with under(torch.Tensor, self):
            copied = copy.deepcopy(self, memo)
        return follow(copied, self._track)


def follow(tensor: torch.Tensor, track: Track) -> torch.Tensor:
    """See `core.backend.Interception`. It is the tensor itself."""
    tensor.__class__ = FollowedTensor
    tensor._track = track
    return tensor


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """See `core.backend.Interception`."""
    if not isinstance(tensor, FollowedTensor):
        return tensor
    with DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def track_of(tensor: Any) -> Track | None:
    """See `core.backend.Interception`."""
    return tensor._track if isinstance(tensor, FollowedTensor) else None


def repeated_dims(tensor: torch.Tensor) -> tuple[int, ...]:
    """See `core.backend.Interception`."""
    dims = (dim for dim, size in enumerate(tensor.shape) if size > 1)
    if tensor.is_meta:
        return tuple(dim for dim in dims if tensor.stride(dim) == 0)
    return tuple(dim for dim in dims if bool((tensor == tensor.narrow(dim, 0, 1)).all()))


def is_zero(tensor: torch.Tensor) -> bool:
    """See `core.backend.Interception`."""
    return not tensor.is_meta and not bool(tensor.any())


def watch_gradient(tensor: torch.Tensor, callback: Callable[[torch.Tensor], None]) -> None:
    """See `core.backend.Interception`."""
    tensor.register_hook(lambda gradient: callback(plain(gradient)))


def _is_gradient() -> bool:
    """Tell whether a gradient is being computed, by a function that has saved a followed tensor. How gradients lie
    follows from the states of what they are gradients of. What a checkpoint computes again is recorded, so it is
    none."""
    return not torch.is_grad_enabled() and in_backward()


def _backward_method(tensor: torch.Tensor, gradient: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> None:
    with _starting([tensor], [gradient]):
        tensor.backward(gradient, *args, **kwargs)


def _backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    with _starting(tensors, grad_tensors):
        torch.autograd.backward(tensors, grad_tensors, *args, **kwargs)


@contextmanager
def _starting(tensors: Any, gradients: Any) -> Iterator[None]:
    """Backward may start from these tensors: their gradients, ones where none is given, are theirs on every rank. Not
    asked of a checkpoint, whose backward within backward goes on with gradients that have come so far."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    gradients = [gradients] if isinstance(gradients, torch.Tensor) else list(gradients or [None] * len(tensors))
    if not in_backward():
        for tensor, gradient in zip(tensors, gradients):
            if isinstance(tensor, FollowedTensor):
                tensor._track.watch.check_start(tensor, gradient)
    with under(torch.Tensor, *instances((tensors, gradients), FollowedTensor)):
        yield


def _grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, ...]:
    with under(torch.Tensor, *instances((outputs, inputs), FollowedTensor)):
        return torch.autograd.grad(outputs, inputs, *args, **kwargs)


def _detach(tensor: torch.Tensor) -> torch.Tensor:
    """The same values without a history. What is known of the gradient stays: a checkpoint detaches its inputs, and
    passes the gradients that its own graph gives on."""
    with DisableTorchFunctionSubclass():
        detached = tensor.detach()
    track = tensor._track
    return follow(detached, Track(track.watch, track.states, track.origin, live=False))


def _ask_for_gradient(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    with DisableTorchFunctionSubclass():
        tensor.requires_grad_(*args, **kwargs)
    tensor._track.live = tensor.requires_grad
    return tensor


_SPECIAL: Mapping[Callable, Callable] = {
    torch.Tensor.backward: _backward_method,
    torch.autograd.backward: _backward,
    torch.autograd.grad: _grad,
    torch.Tensor.detach: _detach,
    torch.Tensor.requires_grad_: _ask_for_gradient,
    torch.Tensor.requires_grad.__set__: _ask_for_gradient,
}
"""Functions that are about autograd, not about elements."""


_HANDLES: frozenset[Callable] = frozenset(
    {
        torch.Tensor._is_view,
        torch.Tensor.as_subclass,
        torch.Tensor.grad.__set__,
        torch.Tensor.grad.__delete__,
        torch.Tensor.data.__set__,
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.Tensor._backward_hooks.__get__,
        torch.Tensor.record_stream,
        torch.Tensor.share_memory_,
        torch.Tensor.pin_memory,
    }
)
"""Functions that handle a tensor as a Python object, and look at no element."""


def _write(target: torch.Tensor, track: Track) -> None:
    """An operator has written in place: its target is followed from now on, and so is what the target is a view of."""
    base = target._base
    follow(target, track)
    if isinstance(base, FollowedTensor):
        base._track = track.watch.written_below(base._track, tuple(base.shape), track, tuple(target.shape))
