"""DTensor: a local tensor of the framework and the layout that says what it is a part of."""

from __future__ import annotations

import operator
from numbers import Number
from typing import Any, Callable

import numpy as np

from hyper_parallel.core import random
from hyper_parallel.core.arithmetic import arrange, counts, refuse_nonlinear_scalar
from hyper_parallel.core.backend import Backend, Tensor
from hyper_parallel.core.distribute import check_mesh, filled, target_layout
from hyper_parallel.core.errors import ConfigError, LayoutError
from hyper_parallel.core.layout import Layout, Placements
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Partial, Placement, Replicate, whole_numbers
from hyper_parallel.core.random import Generator
from hyper_parallel.core.replay import redistribution

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}


class DTensor:
    """A tensor that is spread over a device mesh: what this rank holds of it, and how all of it lies.

    A plain Python object on both backends. Autograd and operators see the local tensor only, so whatever a framework
    does with tensors works on `to_local()`, and gradients flow through every method here. All ranks of the mesh make
    the same calls in the same order.

    Arithmetic (`+ - * /` with numbers and with distributed tensors of the same mesh) gives the distributed tensor that
    the global tensors would give, shapes broadcast. A replicated side is cut to the shard of the other; of two
    different shards the right one is redistributed to the left one. What is added to a pending sum is counted once.
    What is not linear in a pending value is refused; redistribute it to replicate or shard first.

    Made by `from_local`, `distribute_tensor` and the factories (`zeros`, `rand`, ...).
    """

    __array_ufunc__ = None  # numpy would add its elements to the DTensor one by one; now it asks the methods below

    def __init__(self, backend: Backend, layout: Layout, local: Tensor):
        """For the library: nothing is checked. `local` is this rank's part as `layout` says."""
        self.backend = backend
        self.layout = layout
        self._local = local

    def __repr__(self) -> str:
        return f"DTensor({self.layout}, local {list(self.local_shape)} {self.backend.tensors.dtype_name(self._local)})"

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that the tensor is spread over."""
        return self.layout.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each mesh axis, dims counted from the start."""
        return self.layout.placements

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.layout.shape

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's local tensor."""
        return tuple(self._local.shape)

    @property
    def ndim(self) -> int:
        """Number of dims of the global tensor."""
        return len(self.layout.shape)

    @property
    def dtype(self) -> Any:
        """The framework's own dtype."""
        return self._local.dtype

    @property
    def requires_grad(self) -> bool:
        """Tell whether a gradient flows to the local tensor."""
        return self.backend.autograd.takes_part(self._local)

    def size(self, dim: int | None = None) -> tuple[int, ...] | int:
        """The global shape, or the global size of one dim, counted from the end where negative.

        Raises:
            LayoutError: the tensor lacks the dim.
        """
        if dim is None:
            return self.shape
        (dim,) = whole_numbers((dim,), "size takes the number of a dim")
        if not -self.ndim <= dim < self.ndim:
            raise LayoutError(f"size: dim {dim} is none of a tensor of shape {list(self.shape)}")
        return self.shape[dim]

    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return int(np.prod(self.layout.shape, dtype=object))

    # To and from plain tensors

    def to_local(self, *, grad_placements: Placements | None = None) -> Tensor:
        """This rank's local tensor, of the framework, which shares its memory. Gradients flow back; no communication
        in forward.

        Args:
            grad_placements: how the gradient that comes back lies, when not as `layout.gradient` says:
                `{"tensor": Partial()}` where the tensor is replicated and each rank computes a part of the loss from
                it. It is then brought to `layout.gradient` in backward.

        Raises:
            LayoutError: the gradient of these placements can't lie so.
        """
        if grad_placements is None:
            return self._local
        return self._moved(self._target(self.device_mesh, self.placements, grad_placements))

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Placements | None = None,
        *,
        grad_placements: Placements | None = None,
    ) -> DTensor:
        """The same tensor in another layout. The gradient takes the conjugate transition.

        The result may share memory with this tensor, where this rank has nothing to do; write to neither, or to a copy.

        Args:
            device_mesh: another mesh over the same ranks; the tensor's own when not given.
            placements: one for each axis in order, or `{axis: placement}` where what is not named is replicated.
            grad_placements: how the gradient of the result lies, where it is replicated and may be pending.

        Raises:
            LayoutError: no placements, placements that do not fit, or a mesh over other ranks.
        """
        if placements is None:
            hint = "for example [Shard(0)] or {'tensor': Replicate()}"
            if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
                hint = "and the mesh comes first: write redistribute(placements=...) to stay on the tensor's own"
            raise LayoutError(f"redistribute needs placements, {hint}")
        device_mesh = self.device_mesh if device_mesh is None else device_mesh
        check_mesh(self.backend, device_mesh)
        target = self._target(device_mesh, placements, grad_placements)
        return type(self)(self.backend, target, self._moved(target))

    def full_tensor(self, *, grad_placements: Placements | None = None) -> Tensor:
        """The whole tensor on every rank, as a plain tensor of the framework, reductions done. Gradients flow back.

        It may share memory with this tensor, as the result of `redistribute` does.
        The incoming gradient is taken to be replicated, or as `grad_placements` say; see `to_local`.
        """
        return self._moved(self._target(self.device_mesh, {}, grad_placements))

    def detach(self) -> DTensor:
        """The same tensor without autograd history; it shares memory where the local tensor is contiguous."""
        tensors = self.backend.tensors
        local = tensors.alias(tensors.flat(self._local), 0, self.local_shape)
        return type(self)(self.backend, self.layout, local)

    def _target(self, mesh: DeviceMesh, placements: Placements, grad_placements: Placements | None) -> Layout:
        return target_layout(mesh, placements, self.shape, grad_placements)

    def _moved(self, target: Layout) -> Tensor:
        """The local tensor in another layout."""
        return redistribution(self.backend, self.layout, target)(self._local)

    # What would be taken for the whole tensor, but sees the local one or needs communication

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise ConfigError("a DTensor is no array: several ranks hold its parts; use full_tensor() or to_local() before")

    def __bool__(self) -> bool:
        raise ConfigError("the truth value of a DTensor is that of its full tensor: use bool(x.full_tensor())")

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        autograd = self.backend.autograd
        if autograd.takes_part(self._local) and not autograd.is_leaf(self._local):
            raise ConfigError("the result of a recorded operation can't be copied with its history; use detach()")
        return type(self)(self.backend, self.layout, autograd.deep_copy(self._local, memo))

    # In place

    def normal_(self, mean: float = 0.0, std: float = 1.0, *, generator: Generator | None = None) -> DTensor:
        """Overwrite with normal numbers. An element's value depends on the generator's seed, its draw number and the
        place in the global tensor only: it is the same on any mesh and on both backends.

        Raises:
            ConfigError: no floating-point dtype, or the local tensor is the recorded result of an operation.
            LayoutError: a reduction is pending.
        """
        return self._overwrite("normal_", random.normal, generator, mean=mean, std=std)

    def uniform_(self, low: float = 0.0, high: float = 1.0, *, generator: Generator | None = None) -> DTensor:
        """Overwrite with numbers spread evenly over `[low, high)`; see `normal_`."""
        return self._overwrite("uniform_", random.uniform, generator, low=low, high=high)

    def bernoulli_(self, p: float = 0.5, *, generator: Generator | None = None) -> DTensor:
        """Overwrite with 1 (or True), with probability `p`, or 0; see `normal_`."""
        return self._overwrite("bernoulli_", random.bernoulli, generator, p=p)

    def fill_(self, value: float) -> DTensor:
        """Overwrite with a number. Of a pending sum the first rank holds it and the others zero."""
        self._require_writable("fill_")
        tensors = self.backend.tensors
        tensors.copy_(self._local, filled(self.backend, self.layout, value, tensors.dtype_name(self._local)))
        return self

    def zero_(self) -> DTensor:
        """Overwrite with zeros."""
        self._require_writable("zero_")
        self.backend.tensors.zero_(self._local)
        return self

    def _overwrite(self, name: str, draw: Callable, generator: Generator | None, **how: float) -> DTensor:
        self._require_writable(name)
        tensors = self.backend.tensors
        dtype = tensors.dtype_name(self._local)
        tensors.copy_(self._local, drawn(self.backend, self.layout, draw, generator, dtype, **how))
        return self

    def _require_writable(self, name: str) -> None:
        """Before anything else: a call that is refused takes no draw."""
        if self.backend.autograd.requires_grad(self._local):
            raise ConfigError(f"{name} would overwrite the result of a recorded operation; use detach() before")
        if self.backend.tensors.repeats_elements(self._local):
            raise ConfigError(f"{name} would write several values to one place: the local tensor is an expanded one")

    # Arithmetic

    def __neg__(self) -> DTensor:
        refuse_nonlinear_scalar("-", self.layout, scalar_first=True)
        return type(self)(self.backend, self.layout, -self._local)

    def __add__(self, other: Any) -> DTensor:
        return _arithmetic("+", self, other)

    def __radd__(self, other: Any) -> DTensor:
        return _arithmetic("+", other, self)

    def __sub__(self, other: Any) -> DTensor:
        return _arithmetic("-", self, other)

    def __rsub__(self, other: Any) -> DTensor:
        return _arithmetic("-", other, self)

    def __mul__(self, other: Any) -> DTensor:
        return _arithmetic("*", self, other)

    def __rmul__(self, other: Any) -> DTensor:
        return _arithmetic("*", other, self)

    def __truediv__(self, other: Any) -> DTensor:
        return _arithmetic("/", self, other)

    def __rtruediv__(self, other: Any) -> DTensor:
        return _arithmetic("/", other, self)


def drawn(
    backend: Backend, layout: Layout, draw: Callable, generator: Generator | None, dtype: str, **how: float
) -> Tensor:
    """This rank's part of a random tensor: `draw` is a function of `core.random`."""
    generator = random.default_generator if generator is None else generator
    return backend.tensors.from_numpy(draw(layout, backend.collectives.rank(), generator, dtype=dtype, **how), dtype)


def dropout(x: DTensor, p: float, generator: Generator | None) -> DTensor:
    """See `hyper_parallel.dropout`."""
    mask = mask_for(x.backend, x.layout, x.backend.tensors.dtype_name(x.to_local()), p, generator)
    return type(x)(x.backend, x.layout, x.to_local() * mask)


def mask_for(backend: Backend, layout: Layout, dtype: str, p: float, generator: Generator | None) -> Tensor:
    """What this rank multiplies its part of a tensor with to drop elements of it. Where a reduction is pending all
    contributions of an element share its fate."""
    if generator is None and backend.autograd.in_backward():
        raise ConfigError(
            "dropout runs in a recompute and would draw another mask than forward did; pass a generator whose state is "
            "set before each of the two"
        )
    settled = layout.with_placements([Replicate() if isinstance(each, Partial) else each for each in layout.placements])
    return drawn(backend, settled, random.dropout_mask, generator, dtype, p=p)


def _arithmetic(symbol: str, left: Any, right: Any) -> DTensor:
    """`left symbol right`, of which at least one is a DTensor."""
    if isinstance(left, DTensor) and isinstance(right, DTensor):
        return _of_two(symbol, left, right)
    tensor, other = (left, right) if isinstance(left, DTensor) else (right, left)
    if isinstance(other, np.generic):
        other = other.item()
    if isinstance(other, Number):
        return _with_number(symbol, tensor, other, number_first=tensor is right)
    if tensor.backend.tensors.is_tensor(other) or isinstance(other, np.ndarray):
        raise LayoutError(
            f"{symbol} can't mix a DTensor with a plain tensor of shape {tuple(other.shape)}, which says nothing about "
            "the other ranks; distribute it first, with distribute_tensor or DTensor.from_local"
        )
    return NotImplemented


def _with_number(symbol: str, tensor: DTensor, number: Any, number_first: bool) -> DTensor:
    layout, local = tensor.layout, tensor.to_local()
    refuse_nonlinear_scalar(symbol, layout, number_first)
    if symbol in "+-" and not counts(layout, tensor.backend.collectives.rank()):
        number = type(number)(0)  # and not nothing: the dtype of the result may depend on the number's type
    operation = _OPERATIONS[symbol]
    result = operation(number, local) if number_first else operation(local, number)
    return type(tensor)(tensor.backend, layout, result)


def _of_two(symbol: str, left: DTensor, right: DTensor) -> DTensor:
    backend = left.backend
    if right.backend is not backend:
        raise LayoutError(f"{symbol} can't mix a DTensor of {backend.name} with one of {right.backend.name}")
    arrangement = arrange(symbol, left.layout, right.layout)
    shape = arrangement.result.local_shape(backend.collectives.rank())
    ours = _repeated(backend, left._moved(arrangement.left), shape)
    theirs = _repeated(backend, right._moved(arrangement.right), shape)
    return type(left)(backend, arrangement.result, _OPERATIONS[symbol](ours, theirs))


def _repeated(backend: Backend, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`local`, unless this rank holds nothing of the result: then nothing of `local` is repeated. Its gradient is zero,
    which frameworks do not all make of a sum over no elements."""
    own = tuple(local.shape)
    if 0 not in shape or own == shape:
        return local
    tensors = backend.tensors
    return backend.autograd.differentiable(
        local,
        lambda tensor: (tensors.empty(shape, tensors.dtype_name(tensor)), None),
        lambda gradient, _: tensors.zeros(own, tensors.dtype_name(gradient)),
    )
