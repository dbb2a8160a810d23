"""Distributed tensors for users: find the backend, call the core."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import numpy as np

from hyper_parallel import backends
from hyper_parallel.core import distribute, dtensor, random
from hyper_parallel.core.backend import Backend, Tensor
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.execution.dropout import dropout as plain_dropout
from hyper_parallel.core.layout import Layout, Placements
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.random import Generator
from hyper_parallel.core.replay import redistribution
from hyper_parallel.core.topology import Topology


class DTensor(dtensor.DTensor):
    __doc__ = dtensor.DTensor.__doc__

    @staticmethod
    def from_local(
        local: Tensor,
        device_mesh: DeviceMesh,
        placements: Placements | None = None,
        *,
        shape: Sequence[int] | None = None,
        grad_placements: Placements | None = None,
        run_check: bool = True,
    ) -> DTensor:
        """The distributed tensor of which `local` is this rank's part. Called by all ranks of the mesh.

        It shares memory with `local`, and gradients flow back to it as `layout.gradient` says.

        Args:
            local: a `torch.Tensor` or `mindspore.Tensor`, a parameter or a result with history included.
            device_mesh: a mesh that holds this rank.
            placements: one for each mesh axis in order, or `{axis: placement}` where what is not named is replicated;
                all replicated when not given.
            shape: the global shape. Found from all local shapes when not given, which needs `run_check`; sizes of dims
                that a `RaggedShard` flattens together can't be found.
            grad_placements: for replicated axes, how the gradient lies: `Replicate()`, or `Partial()` where every
                rank gets a part of it.
            run_check: exchange shapes and dtypes, so that a wrong local tensor on one rank is refused by all. Without
                it each rank checks its own shape, and nothing is sent.

        Raises:
            LayoutError: a local tensor is not of the shape that the layout gives its rank (the message names the rank
                and both shapes), dtypes or arguments differ between ranks, or the global shape can't be told.
            ConfigError: `local` is no tensor, or `device_mesh` no mesh.
        """
        backend = backends.of_tensor(local)
        placements = {} if placements is None else placements
        layout = distribute.layout_of_locals(backend, local, device_mesh, placements, shape, grad_placements, run_check)
        return DTensor(backend, layout, local)

    def __reduce__(self) -> tuple:
        """What this rank holds travels; read it on a rank of the same place in the mesh."""
        return _restored, (self.backend.name, self.layout, self.to_local())


def _restored(backend: str, layout: Layout, local: Tensor) -> DTensor:
    return DTensor(backends.load(backend), layout, local)


def distribute_tensor(
    tensor: Tensor, device_mesh: DeviceMesh, placements: Placements | None = None, *, src_data_rank: int | None = 0
) -> DTensor:
    """Spread a whole tensor over a mesh. Called by all ranks of the mesh.

    Of a pending sum one rank holds everything and the others zeros.

    Args:
        tensor: a `torch.Tensor` or `mindspore.Tensor` of the same shape and dtype on every rank.
        device_mesh: a mesh that holds this rank.
        placements: one for each mesh axis in order, or `{axis: placement}` where what is not named is replicated;
            all replicated when not given.
        src_data_rank: the rank whose values count, as its place in the mesh; the others may hold anything. The result
            has no history; where the giving rank's tensor is a leaf that asks for a gradient (in MindSpore: a
            parameter), every rank's local tensor is a new one. With None every rank cuts its own copy, which must be
            equal to the others': nothing is sent, gradients flow back to every rank's tensor, and memory is shared with
            it where nothing is cut.

    Raises:
        LayoutError: shapes, dtypes or arguments differ between ranks, or placements do not fit.
        ConfigError: `tensor` is no tensor, or the result of a recorded operation while `src_data_rank` is not None.
    """
    backend = backends.of_tensor(tensor)
    placements = {} if placements is None else placements
    return DTensor(backend, *distribute.distribute(backend, tensor, device_mesh, placements, src_data_rank))


def redistribute(local: Tensor, source: Layout, target: Layout, topology: Topology | None = None) -> Tensor:
    """Bring this rank's plain local tensor from one layout to another. Called by all ranks of the mesh.

    Differentiable: the gradient of the result lies as `target.gradient` says and comes back as `source.gradient` says.
    The transition is worked out at the first call and replayed afterwards.

    Args:
        local: of shape `source.local_shape(rank)`.
        source: how the tensor lies.
        target: how it shall lie, on the same mesh or another one over the same ranks.
        topology: where ranks sit, to spare slow links.

    Returns:
        A tensor of shape `target.local_shape(rank)`; `local` itself where nothing has to be done.

    Raises:
        LayoutError: `local` is not of the source's local shape, or the layouts differ in shape or ranks.
    """
    return redistribution(backends.of_tensor(local), source, target, topology)(local)


def zeros(
    *size: int | Sequence[int],
    device_mesh: DeviceMesh,
    placements: Placements | None = None,
    dtype: Any = "float32",
    backend: str | None = None,
) -> DTensor:
    """A distributed tensor of zeros: `zeros(4, 8, device_mesh=mesh, placements=[Shard(0)])`, or `zeros((4, 8), ...)`.

    Each rank makes its own part. This holds for all factories, and they take the same arguments.

    Args:
        size: the global shape.
        device_mesh: a mesh that holds this rank.
        placements: one for each mesh axis in order, or `{axis: placement}` where what is not named is replicated;
            all replicated when not given.
        dtype: by its numpy spelling ("float32", "bfloat16", "int64", ...), numpy's, or the framework's own; float32
            for None.
        backend: "torch" or "mindspore"; needed when both have joined.

    Raises:
        ConfigError: an unknown dtype, or no backend has joined.
        LayoutError: placements that do not fit the mesh or the shape, or a mesh without this rank.
    """
    return full(_shape(size), 0, device_mesh=device_mesh, placements=placements, dtype=dtype, backend=backend)


def ones(
    *size: int | Sequence[int],
    device_mesh: DeviceMesh,
    placements: Placements | None = None,
    dtype: Any = "float32",
    backend: str | None = None,
) -> DTensor:
    """A distributed tensor whose value is one everywhere, also while a reduction is pending; see `zeros`."""
    return full(_shape(size), 1, device_mesh=device_mesh, placements=placements, dtype=dtype, backend=backend)


def full(
    size: Sequence[int],
    fill_value: float,
    *,
    device_mesh: DeviceMesh,
    placements: Placements | None = None,
    dtype: Any = "float32",
    backend: str | None = None,
) -> DTensor:
    """A distributed tensor whose value is `fill_value` everywhere, also while a reduction is pending; see `zeros`."""

    def make(found: Backend, layout: Layout) -> Tensor:
        return distribute.filled(found, layout, fill_value, _dtype_name(dtype))

    return _made(_shape((size,)), device_mesh, placements, backend, make)


def empty(
    *size: int | Sequence[int],
    device_mesh: DeviceMesh,
    placements: Placements | None = None,
    dtype: Any = "float32",
    backend: str | None = None,
) -> DTensor:
    """A distributed tensor with undefined values, not even equal where replicated until it is filled; see `zeros`."""

    def make(found: Backend, layout: Layout) -> Tensor:
        return found.tensors.empty(layout.local_shape(found.collectives.rank()), _dtype_name(dtype))

    return _made(_shape(size), device_mesh, placements, backend, make)


def rand(
    *size: int | Sequence[int],
    device_mesh: DeviceMesh,
    placements: Placements | None = None,
    dtype: Any = "float32",
    backend: str | None = None,
    generator: Generator | None = None,
) -> DTensor:
    """A distributed tensor of numbers spread evenly over [0, 1), equal bit for bit on any mesh and on one device.

    Floating-point dtypes; not while a reduction is pending. `generator` is the default one when not given. See `zeros`.
    """
    return _random(size, random.uniform, generator, device_mesh, placements, dtype, backend)


def randn(
    *size: int | Sequence[int],
    device_mesh: DeviceMesh,
    placements: Placements | None = None,
    dtype: Any = "float32",
    backend: str | None = None,
    generator: Generator | None = None,
) -> DTensor:
    """A distributed tensor of standard normal numbers; see `rand`."""
    return _random(size, random.normal, generator, device_mesh, placements, dtype, backend)


def dropout(
    x: DTensor | Tensor,
    p: float = 0.5,
    training: bool = True,
    *,
    generator: Generator | None = None,
    layout: Layout | None = None,
) -> DTensor | Tensor:
    """Zero each element with probability `p` and multiply the others by `1 / (1 - p)`. Gradients flow back.

    Which elements are dropped depends on the generator and on their place in the global tensor only. A recompute must
    drop the same ones: give it a generator and set its state (`load_state_dict`) before forward and before recompute.

    Args:
        x: a distributed tensor of a floating-point dtype, in any layout; or, in a model's own code, a plain tensor
            that is this rank's part.
        p: from 0 to 1.
        training: False returns `x` itself, without a draw.
        generator: the default one when not given.
        layout: for a plain tensor, how the whole lies of which it is a part. The shape is that of the whole, the
            samples of all ranks included, cut over `replicate`, `shard` and `expert`: an element's place among all
            samples decides. In validation it is held against what is known of the tensor along the other axes.

    Raises:
        ConfigError: `x` is neither, `p` is out of range, the dtype is not a floating one, the default generator would
            be used in a recompute, or the ranks of the layout have not joined.
        LayoutError: a plain tensor has not the shape that the layout gives this rank.
        ContractError: in validation, a tensor lies otherwise than the layout says.
    """
    if layout is not None and not isinstance(x, dtensor.DTensor):
        return plain_dropout(backends.of_tensor(x), x, p, generator, layout) if training else x
    if not isinstance(x, dtensor.DTensor):
        raise ConfigError(
            f"dropout takes a distributed tensor, found {type(x).__name__}; use DTensor.from_local before, or say with "
            "layout= how the whole tensor lies of which this is a part"
        )
    return dtensor.dropout(x, p, generator) if training else x


def _random(
    size: Sequence[int | Sequence[int]],
    draw: Callable,
    generator: Generator | None,
    device_mesh: DeviceMesh,
    placements: Placements | None,
    dtype: Any,
    backend: str | None,
) -> DTensor:
    def make(found: Backend, layout: Layout) -> Tensor:
        return dtensor.drawn(found, layout, draw, generator, _dtype_name(dtype))

    return _made(_shape(size), device_mesh, placements, backend, make)


def _made(
    shape: Sequence[int],
    device_mesh: DeviceMesh,
    placements: Placements | None,
    backend: str | None,
    make: Callable[[Backend, Layout], Tensor],
) -> DTensor:
    found = backends.joined(backend)
    distribute.check_mesh(found, device_mesh)
    layout = Layout(device_mesh, {} if placements is None else placements, shape)
    return DTensor(found, layout, make(found, layout))


def _shape(size: Sequence[int | Sequence[int]]) -> Sequence[int]:
    """A shape that was given as one sequence, or number by number."""
    if len(size) == 1 and isinstance(size[0], (list, tuple)):
        return size[0]
    return size


def _dtype_name(dtype: Any) -> str:
    """The numpy spelling of a name, of a dtype of numpy (`np.float32`) or of a framework (`torch.float32`,
    `mindspore.float32`); "float32" for None."""
    if dtype is None:
        return "float32"
    if isinstance(dtype, (type, np.dtype)):
        try:
            return np.dtype(dtype).name
        except TypeError as error:
            raise ConfigError(f'{dtype!r} is no dtype: write "float32", "bfloat16", "int64", ...') from error
    return str(dtype).rpartition(".")[2].lower()
