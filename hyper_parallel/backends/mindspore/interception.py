"""Following MindSpore's tensors: operators that meet one are looked up before autograd and kernels see the call.

A followed tensor is the local tensor itself, under another class: memory, autograd history and identity are those of
the plain one, and with MindSpore's guard against interception it is a plain one. MindSpore tells a tensor's class of
operators, not of indexing and of reading values, so these are methods here.
"""

from __future__ import annotations

import copy
from typing import Any, Callable

from mindspore import Tensor, mint
from mindspore._c_expression import NoFallbackGuard
from mindspore.common._grad_function import _Function

from hyper_parallel.backends.mindspore.autograd import grad_enabled, in_backward
from hyper_parallel.backends.mindspore.operators import canonical
from hyper_parallel.backends.mindspore.tensors import to_numpy
from hyper_parallel.core.validation.backward import OwnBackward
from hyper_parallel.core.validation.classes import instances, under
from hyper_parallel.core.validation.watch import REFUSALS, Track


class FollowedTensor(Tensor):
    """A local tensor that carries a `Track`."""

    has_init = False
    _track: Track
    _is_recorded: bool
    """Followed while operations were recorded: who followed it knows what is behind it."""

    def __fallback__(self, operator: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(operator, operator, args, kwargs or {})

    def __getitem__(self, index: Any) -> Any:
        return _run("getitem", Tensor.__getitem__, (self, index), {})

    def __setitem__(self, index: Any, value: Any) -> None:
        _run("setitem_", Tensor.__setitem__, (self, index, value), {})

    def __bool__(self) -> bool:
        return _run("read", Tensor.__bool__, (self,), {})

    def __int__(self) -> int:
        return _run("read", Tensor.__int__, (self,), {})

    def __float__(self) -> float:
        return _run("read", Tensor.__float__, (self,), {})

    def __index__(self) -> int:
        return _run("read", Tensor.__index__, (self,), {})

    def item(self, *args: Any) -> Any:
        """One element as a number of Python."""
        return _run("read", Tensor.item, (self,), {}, *args)

    def tolist(self) -> Any:
        """All elements as numbers of Python."""
        return _run("read", Tensor.tolist, (self,), {})

    def asnumpy(self) -> Any:
        """All elements as numpy has them."""
        return _run("read", Tensor.asnumpy, (self,), {})

    # With a plain tensor on the left Python asks here first; MindSpore itself would find no interception there.

    def __radd__(self, other: Any) -> Any:
        return mint.add(other, self) if isinstance(other, Tensor) else super().__radd__(other)

    def __rsub__(self, other: Any) -> Any:
        return mint.sub(other, self) if isinstance(other, Tensor) else super().__rsub__(other)

    def __rmul__(self, other: Any) -> Any:
        return mint.mul(other, self) if isinstance(other, Tensor) else super().__rmul__(other)

    def __rtruediv__(self, other: Any) -> Any:
        return mint.div(other, self) if isinstance(other, Tensor) else super().__rtruediv__(other)

    def __rmatmul__(self, other: Any) -> Any:
        return mint.matmul(other, self)

    def __rpow__(self, other: Any) -> Any:
        return mint.pow(other, self) if isinstance(other, Tensor) else super().__rpow__(other)

    def __repr__(self) -> str:
        with under(Tensor, self):
            return f"{self._track} {Tensor.__repr__(self)}"

    __str__ = __repr__

    def __deepcopy__(self, memo: dict) -> Tensor:
        with under(Tensor, self):
            copied = copy.deepcopy(self, memo)
        return follow(copied, self._track)


def follow(tensor: Tensor, track: Track) -> Tensor:
    """See `core.backend.Interception`. It is the tensor itself."""
    tensor.__class__ = FollowedTensor
    tensor._track = track
    tensor._is_recorded = grad_enabled()
    return tensor


def plain(tensor: Tensor) -> Tensor:
    """See `core.backend.Interception`."""
    if not isinstance(tensor, FollowedTensor):
        return tensor
    with NoFallbackGuard():
        return Tensor._make_subclass(Tensor, tensor)


def track_of(tensor: Any) -> Track | None:
    """See `core.backend.Interception`."""
    return tensor._track if isinstance(tensor, FollowedTensor) else None


def repeated_dims(tensor: Tensor) -> tuple[int, ...]:
    """See `core.backend.Interception`."""
    elements = to_numpy(tensor)
    dims = (dim for dim, size in enumerate(elements.shape) if size > 1)
    return tuple(dim for dim in dims if (elements == elements.take([0], dim)).all())


def is_zero(tensor: Tensor) -> bool:
    """See `core.backend.Interception`."""
    return not to_numpy(tensor).any()


def watch_gradient(tensor: Tensor, callback: Callable[[Tensor], None]) -> None:
    """See `core.backend.Interception`."""
    tensor.register_hook(lambda gradient: callback(plain(gradient)))


def own_backward(tensor: Tensor) -> str:
    """See `core.backend.Interception`: a `_Function`, or a cell with a `bprop`."""
    node = tensor._grad_node
    if isinstance(node, _Function):
        return type(node).__qualname__
    return _BPROP if node is not None and node.name() == "CellCustomBackward" else ""


_BPROP = "a cell's bprop"


def way_to_rule(function: str) -> str:
    """See `core.backend.Interception`. There is no way; but `recompute()` is a `bprop` too, and can do without."""
    return "where it is a recomputation's, recompute(use_reentrant=False), which is followed" * (function == _BPROP)


def follow_backward(tensor: Tensor, made: Callable[[str], OwnBackward]) -> None:
    """See `core.backend.Interception`. MindSpore hands a `bprop` other tensors than are followed, so it is refused;
    what comes out of a `_Function` is not followed at all, unless it is one of ours."""
    if not tensor._is_recorded and own_backward(tensor) == _BPROP:
        made(_BPROP).refuse(tensor)


def _run(operator: Any, function: Callable, args: tuple, kwargs: dict, *more: Any) -> Any:
    """Look an operator up, run it on the local tensors, follow its results."""
    found = None if not grad_enabled() and in_backward() else canonical(operator, args, kwargs)
    if found is None:
        with NoFallbackGuard():
            return function(*args, *more, **kwargs)
    op, arguments = found
    watch = next(instances((args, kwargs), FollowedTensor))._track.watch
    tracks = watch.infer(op, arguments)
    with NoFallbackGuard():
        try:
            result = function(*args, *more, **kwargs)
        except REFUSALS as error:
            watch.explain(op, arguments, error)
            raise
    if op.endswith("_"):
        follow(next(iter(arguments.values())), tracks[0])
    for tensor, track in zip(instances(result, Tensor), tracks):
        follow(tensor, track)
    return result
