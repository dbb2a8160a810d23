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
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from hyper_parallel.backends.torch.autograd import in_backward
from hyper_parallel.backends.torch.operators import canonical
from hyper_parallel.core.validation.backward import OwnBackward
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
        return _run(func, args, kwargs, as_it_is=_is_gradient())

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        return f"{self._track} {plain(self)!r}"

    def __format__(self, spec: str) -> str:
        return format(plain(self), spec) if spec and self.dim() == 0 else repr(self)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        with under(torch.Tensor, self):
            copied = copy.deepcopy(self, memo)
        return follow(copied, self._track)


def _run(func: Callable, args: tuple, kwargs: dict, within: OwnBackward | None = None, as_it_is: bool = False) -> Any:
    """Look an operator up, run it on the local tensors, follow its results. With `as_it_is` it is only run; `within` is
    the backward of the model's code in which it runs."""
    found = None if as_it_is or func in _HANDLES else canonical(func, args, kwargs)
    if found is None:
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    op, arguments = found
    watch = next(instances((args, kwargs), FollowedTensor))._track.watch
    tracks = watch.infer(op, arguments, within)
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


def follow(tensor: torch.Tensor, track: Track) -> torch.Tensor:
    """See `core.backend.Interception`. It is the tensor itself. The operation that has made it is told as well, for a
    function with a backward of its own that takes it."""
    tensor.__class__ = FollowedTensor
    tensor._track = track
    if torch.is_grad_enabled():
        with DisableTorchFunctionSubclass():
            if tensor.grad_fn is not None:
                tensor.grad_fn.metadata[_result(tensor.output_nr)] = track
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
    with DisableTorchFunctionSubclass():
        tensor.register_hook(lambda gradient: callback(plain(gradient)))


def own_backward(tensor: torch.Tensor) -> str:
    """See `core.backend.Interception`."""
    with DisableTorchFunctionSubclass():
        node = _own_node(tensor.grad_fn)
    return "" if node is None else node._forward_cls.__qualname__


def way_to_rule(function: str) -> str:
    """See `core.backend.Interception`. PyTorch tells nobody of `apply`."""
    return (
        f"{function} called in a function under torch.overrides.wrap_torch_function, which "
        "hyper_parallel.register_rule then gives a rule"
    )


def follow_backward(tensor: torch.Tensor, made: Callable[[str], OwnBackward]) -> None:
    """See `core.backend.Interception`. What was followed with this operation behind it, as our own transitions are, or
    what an operator with a rule returns, says itself how its gradient lies. A checkpoint computes again what is then
    followed."""
    with DisableTorchFunctionSubclass():
        node, place = _own_node(tensor.grad_fn), tensor.output_nr
    if node is None or _result(place) in node.metadata:
        return
    known, arguments = node.metadata, [_at_edge(*edge) for edge in node.next_functions]
    known[_result(place)] = tensor._track
    if _OWN in known:
        return
    known[_OWN] = own = made(own_backward(tensor))

    def enter(gradients: tuple) -> tuple:
        _Within(own).__enter__()  # the engine takes it back at the end of this operation, whatever happens
        tracks = own.enter([known.get(_result(each)) for each in range(len(gradients))])
        return tuple(map(_another, gradients, tracks))

    def leave(gradients: tuple, results: tuple) -> tuple:
        own.leave(gradients, arguments)
        return tuple(map(plain, gradients))

    node.register_prehook(enter)
    node.register_hook(leave)


class _Within(TorchFunctionMode):
    """Follows a backward of the model's code, and nothing but it. What a function has saved of its results comes back
    as a plain tensor that knows where it is from."""

    def __init__(self, own: OwnBackward):
        super().__init__()
        self._own = own

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if _is_in_kernel():
            return _run(func, args, kwargs, as_it_is=True)
        for tensor in instances((args, kwargs), torch.Tensor):
            if not isinstance(tensor, FollowedTensor) and (track := _at_edge(tensor.grad_fn, tensor.output_nr)):
                follow(tensor, track)
        if next(instances((args, kwargs), FollowedTensor), None) is None:
            return func(*args, **kwargs)
        special = _SPECIAL_WITHIN.get(func) or _SPECIAL.get(func)
        within = None if torch.is_grad_enabled() else self._own  # what is recorded is computed again
        return special(*args, **kwargs) if special else _run(func, args, kwargs, within)


def _at_edge(node: Any, place: int) -> Track | None:
    """What the result at a place of an operation carries; of a leaf, what it carries itself."""
    if node is None:
        return None
    return (
        track_of(node.variable)
        if isinstance(node, torch._C._functions.AccumulateGrad)
        else node.metadata.get(_result(place))
    )


_OWN = "hyper_parallel: own backward"


def _result(place: int) -> str:
    """The name under which an operation keeps what its result at a place carries."""
    return f"hyper_parallel: result {place}"


def _another(tensor: torch.Tensor | None, track: Track | None) -> torch.Tensor | None:
    """A followed tensor beside a plain one, which others may hold; the plain one where there is no track."""
    if tensor is None or track is None:
        return tensor
    with DisableTorchFunctionSubclass():
        return follow(tensor.as_subclass(torch.Tensor), track)


def _is_gradient() -> bool:
    """Tell whether a gradient is computed that is not followed: by the backward of a function which a rule stands for,
    or by a kernel that PyTorch has in Python, as those for tensors without values. What a checkpoint computes again is
    none."""
    if torch.is_grad_enabled() or not in_backward():
        return False
    return _is_in_kernel() or _own_node(torch._C._current_autograd_node()) is not None


def _is_in_kernel() -> bool:
    """Inside backward: tell whether PyTorch runs a kernel in Python; those don't see autograd."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradOther)


def _own_node(node: Any) -> Any:
    """A recorded call of a function with a backward written in Python, but that of a checkpoint; None for others."""
    return node if isinstance(node, BackwardCFunction) and node._forward_cls is not CheckpointFunction else None


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
    if not in_backward():
        _check_starts(tensors, gradients)
    with under(torch.Tensor, *instances((tensors, gradients), FollowedTensor)):
        yield


def _check_starts(tensors: Any, gradients: Any) -> None:
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    gradients = [gradients] if isinstance(gradients, torch.Tensor) else list(gradients or [None] * len(tensors))
    for tensor, gradient in zip(tensors, gradients):
        if isinstance(tensor, FollowedTensor):
            tensor._track.watch.check_start(tensor, gradient)


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


def _backward_within(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    _check_starts(tensors, grad_tensors)
    _backward(tensors, grad_tensors, *args, **kwargs)


def _backward_method_within(tensor: torch.Tensor, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
    _check_starts(tensor, gradient)
    _backward_method(tensor, gradient, *args, **kwargs)


def _grad_within(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> tuple:
    """Gradients that a backward of the model's code asks for, of what it has computed again."""
    _check_starts(outputs, grad_outputs)
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    return tuple(map(_gradient_of, inputs, _grad(outputs, inputs, grad_outputs, *args, **kwargs)))


def _read_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    with DisableTorchFunctionSubclass():
        gradient = tensor.grad
    return _gradient_of(tensor, gradient)


def _gradient_of(tensor: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The gradient of a tensor, followed where the tensor is."""
    track = track_of(tensor)
    return _another(gradient, None if track is None else track.of_gradient())


_SPECIAL_WITHIN: Mapping[Callable, Callable] = {
    torch.Tensor.backward: _backward_method_within,
    torch.autograd.backward: _backward_within,
    torch.autograd.grad: _grad_within,
    torch.Tensor.grad.__get__: _read_gradient,
}
"""Functions about autograd in a backward of the model's code, which goes on with what they give."""


def _register_hook(tensor: torch.Tensor, hook: Callable) -> Any:
    """A hook of the model's code, which may put another gradient in the place of what comes, is followed as well."""
    track = tensor._track
    own = OwnBackward(track.watch, getattr(hook, "__name__", repr(hook)), is_hook=True)

    def followed(gradient: torch.Tensor) -> torch.Tensor | None:
        with _Within(own):
            changed = hook(_another(gradient, *own.enter([track])))
        if changed is not None:
            own.check("the tensor that it hooks", changed, track)
        return plain(changed)

    with DisableTorchFunctionSubclass():
        return tensor.register_hook(followed)


_SPECIAL: Mapping[Callable, Callable] = {
    torch.Tensor.backward: _backward_method,
    torch.autograd.backward: _backward,
    torch.autograd.grad: _grad,
    torch.Tensor.detach: _detach,
    torch.Tensor.register_hook: _register_hook,
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
        torch.Tensor._backward_hooks.__set__,
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
