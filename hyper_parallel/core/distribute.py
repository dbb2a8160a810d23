"""How distributed tensors come to be: from what every rank holds, from what one rank holds, or from one number."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any, Iterable, Mapping, NamedTuple, Sequence

import numpy as np

from hyper_parallel.core.arithmetic import counts
from hyper_parallel.core.backend import Backend, Group, Tensor
from hyper_parallel.core.errors import ConfigError, LayoutError
from hyper_parallel.core.layout import Layout, Placements, in_order
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import RaggedShard
from hyper_parallel.core.replay import redistribution

_SHOWN = 8


def target_layout(
    device_mesh: DeviceMesh, placements: Placements, shape: tuple[int, ...], grad_placements: Placements | None
) -> Layout:
    """The layout, and its gradient's as `grad_placements` say. The same one again where it is asked for again."""
    gradient = None if grad_placements is None else in_order(device_mesh, grad_placements, unnamed=None)
    return _kept_layout(device_mesh, in_order(device_mesh, placements), shape, gradient)


@lru_cache(maxsize=4096)
def _kept_layout(device_mesh: DeviceMesh, placements: tuple, shape: tuple[int, ...], gradient: tuple | None) -> Layout:
    if gradient is None:
        return Layout(device_mesh, placements, shape)
    named = {axis: each for axis, each in zip(device_mesh.names, gradient) if each is not None}
    return Layout(device_mesh, placements, shape, named)


def check_mesh(backend: Backend, device_mesh: Any) -> None:
    """Raise unless `device_mesh` is a mesh that holds this rank, of ranks that there are."""
    if not isinstance(device_mesh, DeviceMesh):
        raise ConfigError(f"device_mesh must be a hyper_parallel.DeviceMesh, found {device_mesh!r}")
    _check_ranks(device_mesh, backend.collectives.rank(), backend.collectives.world_size())


@lru_cache(maxsize=256)
def _check_ranks(device_mesh: DeviceMesh, rank: int, world_size: int) -> None:
    device_mesh.position(rank)
    if max(device_mesh.ranks) >= world_size:
        raise LayoutError(
            f"the mesh {device_mesh} names rank {max(device_mesh.ranks)}, but the job has {world_size} ranks; "
            "call hyper_parallel.initialize first, or make a smaller mesh"
        )


# From what every rank holds


class _Local(NamedTuple):
    """What a rank tells the others about its local tensor and about the layout that it was called with."""

    shape: tuple[int, ...]
    dtype: str
    asked: str


def layout_of_locals(
    backend: Backend,
    local: Tensor,
    device_mesh: DeviceMesh,
    placements: Placements,
    shape: Sequence[int] | None,
    grad_placements: Placements | None,
    run_check: bool,
) -> Layout:
    """The layout of the global tensor of which `local` is this rank's part; see `hyper_parallel.DTensor.from_local`."""
    check_mesh(backend, device_mesh)
    rank = backend.collectives.rank()
    shape = _listed_sizes(shape)
    asked = _asked(device_mesh, placements, (1,) * len(local.shape) if shape is None else shape, grad_placements)
    asked += "" if shape is None else f" with shape {shape}"
    held = {rank: _Local(tuple(local.shape), backend.tensors.dtype_name(local), asked)}
    if run_check:
        held = _from_all(backend, device_mesh, held[rank])
        _refuse_other_ndim({member: each.shape for member, each in held.items()})
        _refuse_difference(held, "asked", "ranks call from_local alike")
        _refuse_difference(held, "dtype", "the parts of a tensor are of one dtype; cast before")
    shapes = {member: each.shape for member, each in held.items()}
    if shape is None:
        shape = global_shape(device_mesh, placements, shapes)
    layout = Layout(device_mesh, placements, shape, grad_placements)
    for member, found in shapes.items():
        if found != layout.local_shape(member):
            raise LayoutError(
                f"rank {member} gives a local tensor of shape {found}, but holds {layout.local_shape(member)} of "
                f"{layout}{_listed(shapes)}"
            )
    return layout


def global_shape(
    device_mesh: DeviceMesh, placements: Placements, shapes: Mapping[int, tuple[int, ...]]
) -> tuple[int, ...]:
    """The global shape that most local shapes speak for: along a dim the parts of a group make up the whole."""
    for placement in in_order(device_mesh, placements):
        if isinstance(placement, RaggedShard) and len(placement.dims) > 1:
            raise LayoutError(f"local shapes do not tell the sizes of the dims that {placement} flattens; pass shape=")
    ndim = _refuse_other_ndim(shapes)
    skeleton = Layout(device_mesh, placements, (1,) * ndim)
    return tuple(_global_size(skeleton, dim, shapes) for dim in range(ndim))


def _refuse_other_ndim(shapes: Mapping[int, tuple[int, ...]]) -> int:
    """The number of dims of all local tensors; raise, on every rank alike, where they differ."""
    ndim = _usual(len(found) for found in shapes.values())
    for rank, found in shapes.items():
        if len(found) != ndim:
            raise LayoutError(
                f"rank {rank} gives a local tensor of shape {found}, others have {ndim} dims{_listed(shapes)}"
            )
    return ndim


def _asked(
    device_mesh: DeviceMesh, placements: Placements, shape: Sequence[int], grad_placements: Placements | None = None
) -> str:
    """What a rank asks for, in the same words however it is written; or what is wrong with it, which each rank tells
    the others before it raises, so that none waits for it."""
    try:
        layout = Layout(device_mesh, placements, shape, grad_placements)
    except LayoutError as error:
        return str(error)
    placed, gradient = (", ".join(map(str, each)) for each in (layout.placements, layout.gradient_placements))
    return f"({placed}) with gradient ({gradient}) on {device_mesh!r}"


def _listed_sizes(shape: Any) -> Any:
    """A shape in one form, whatever sequence it is; `Layout` says what is wrong with anything else."""
    return list(shape) if isinstance(shape, Iterable) and not isinstance(shape, str) else shape


def _global_size(skeleton: Layout, dim: int, shapes: Mapping[int, tuple[int, ...]]) -> int:
    cuts, mesh = skeleton.cuts[dim], skeleton.mesh
    if not cuts:
        return _usual(shape[dim] for shape in shapes.values())
    if len(shapes) < mesh.size:
        raise LayoutError(
            f"one local shape does not tell the size of dim {dim} under {skeleton.placements[cuts[0].axis]}; "
            "pass shape=, or leave run_check on"
        )
    return _usual(
        sum(shapes[rank][dim] for rank in group) for group in mesh.groups([mesh.names[cut.axis] for cut in cuts])
    )


def _from_all(backend: Backend, device_mesh: DeviceMesh, value: Any) -> dict[int, Any]:
    """What every rank of the mesh gives, by rank."""
    group = _group(backend, device_mesh)
    return dict(zip(group.ranks, backend.collectives.gather_objects(value, group)))


def _group(backend: Backend, device_mesh: DeviceMesh) -> Group:
    return backend.collectives.groups([sorted(device_mesh.ranks)])


def _refuse_difference(held: Mapping[int, NamedTuple], field: str, rule: str) -> None:
    """Raise, on every rank alike, when not all ranks gave the same."""
    values = {rank: getattr(each, field) for rank, each in held.items()}
    usual = _usual(values.values())
    for rank, found in values.items():
        if found != usual:
            raise LayoutError(f"rank {rank} gives {found}, others {usual}: {rule}")


def _usual(values: Iterable[Any]) -> Any:
    """The most frequent value, so that one wrong rank is not taken for the right one."""
    return Counter(values).most_common(1)[0][0]


def _listed(shapes: Mapping[int, tuple[int, ...]]) -> str:
    if len(shapes) == 1:
        return ""
    shown = ", ".join(f"{shape} at rank {rank}" for rank, shape in list(shapes.items())[:_SHOWN])
    return f"; found {shown}{', ...' if len(shapes) > _SHOWN else ''}"


# From what one rank holds


class _Whole(NamedTuple):
    """What a rank tells the others about the tensor that it wants distributed."""

    asked: str
    shape: tuple[int, ...]
    dtype: str
    recorded: bool
    leaf: bool


def distribute(
    backend: Backend, tensor: Tensor, device_mesh: DeviceMesh, placements: Placements, src_data_rank: int | None
) -> tuple[Layout, Tensor]:
    """The layout and this rank's part; see `hyper_parallel.distribute_tensor`."""
    check_mesh(backend, device_mesh)
    if src_data_rank is None:
        layout = Layout(device_mesh, placements, tensor.shape)
        return layout, redistribution(backend, layout.with_placements({}), layout)(tensor)
    asked = f"{_asked(device_mesh, placements, tensor.shape)} from {src_data_rank}"
    recorded = backend.autograd.grad_enabled() and backend.autograd.requires_grad(tensor)
    dtype = backend.tensors.dtype_name(tensor)
    leaf = backend.autograd.is_leaf(tensor)
    given = _from_all(backend, device_mesh, _Whole(asked, tuple(tensor.shape), dtype, recorded, leaf))
    _refuse_difference(given, "shape", "every rank passes a tensor of the global shape")
    _refuse_difference(given, "dtype", "every rank passes a tensor of one dtype")
    _refuse_difference(given, "asked", "ranks call distribute_tensor alike")
    if any(each.recorded for each in given.values()):
        raise ConfigError(
            "distribute_tensor: no gradient flows back to the rank that gives the data; pass src_data_rank=None, where "
            "every rank cuts its own copy, or a tensor without history"
        )
    whole = isinstance(src_data_rank, int) and not isinstance(src_data_rank, bool)
    if not whole or not 0 <= src_data_rank < device_mesh.size:
        raise LayoutError(
            f"src_data_rank is {src_data_rank!r}; it counts the ranks of the mesh, 0 to {device_mesh.size - 1}, "
            "or is None"
        )
    layout = Layout(device_mesh, placements, tensor.shape)
    local = _spread(backend, tensor, layout, src_data_rank)
    if given[device_mesh.ranks[src_data_rank]].leaf:
        local = backend.autograd.as_leaf(local, tensor)
    return layout, local


def _spread(backend: Backend, tensor: Tensor, layout: Layout, src_data_rank: int) -> Tensor:
    """Every rank's part of the tensor that one rank holds, each element sent once to each rank that needs it."""
    tensors, mesh = backend.tensors, layout.mesh
    giver = mesh.ranks[src_data_rank]
    if not layout.shape:
        held = tensors.zeros((), tensors.dtype_name(tensor))
        tensors.copy_(held, tensor)
        backend.collectives.broadcast(held, giver, _group(backend, mesh))
        return redistribution(backend, layout.with_placements({}), layout).run(held)
    units = [int(place == src_data_rank) for place in range(mesh.size)]
    line = DeviceMesh((mesh.size,), ("shard",), mesh.ranks)
    source = Layout(line, [RaggedShard(tuple(range(len(layout.shape))), tuple(units))], layout.shape)
    rank = backend.collectives.rank()
    held = tensors.flat(tensor) if rank == giver else tensors.buffer(tensor, 0)
    return redistribution(backend, source, layout).run(tensors.alias(held, 0, source.local_shape(rank)))


# From one number


def filled(backend: Backend, layout: Layout, value: Any, dtype: str) -> Tensor:
    """This rank's part of a tensor that is `value` everywhere; of a pending sum the first rank holds it."""
    rank = backend.collectives.rank()
    shape = layout.local_shape(rank)
    number = _number(value, dtype)
    if not counts(layout, rank) or not any(number.tobytes()):  # a negative zero has a bit that is set
        return backend.tensors.zeros(shape, dtype)
    return backend.tensors.from_numpy(np.full(shape, number), dtype)


def _number(value: Any, dtype: str) -> np.ndarray:
    """A number as it is filled into a tensor of a dtype: cut to a whole number where the dtype has no others."""
    if not isinstance(value, (bool, int, float, complex, np.number, np.bool_)):
        raise ConfigError(f"a tensor is filled with a number, found {value!r}")
    try:
        if dtype == "bool":
            return np.array(bool(value))
        if dtype.startswith(("int", "uint")):
            limits = np.iinfo(dtype)
            if not limits.min <= int(value) <= limits.max:
                raise OverflowError
            return np.array(int(value), dtype)
        return np.array(value, "complex128" if dtype.startswith("complex") else "float64")
    except (OverflowError, TypeError, ValueError) as error:  # too large, complex, or no number (NaN) as a whole one
        raise ConfigError(f"a tensor of {dtype} can't be filled with {value!r}") from error
