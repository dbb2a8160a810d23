"""Dropout by global indices inside of a plan: on a plain tensor that is this rank's part, or on a followed one."""

from __future__ import annotations

from hyper_parallel.core.backend import Backend, Tensor
from hyper_parallel.core.dtensor import mask_for
from hyper_parallel.core.errors import ConfigError, LayoutError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.random import Generator
from hyper_parallel.core.rules.state import WHOLE
from hyper_parallel.core.validation.messages import layout_error
from hyper_parallel.core.validation.watch import Track


def dropout(backend: Backend, x: Tensor, p: float, generator: Generator | None, layout: Layout) -> Tensor:
    """See `hyper_parallel.dropout`, of a tensor that lies as `layout` says.

    Raises:
        ConfigError: `layout` is none, or its ranks have not joined.
        LayoutError: `x` is not this rank's part.
        ContractError: a followed tensor lies otherwise.
    """
    if not isinstance(layout, Layout):
        raise ConfigError(
            f"dropout: layout is {layout!r}; write hyper_parallel.Layout(mesh, placements, shape) with the shape of "
            "the whole tensor, all samples of all ranks included, or pass a distributed tensor"
        )
    track = backend.interception.track_of(x)
    if track is not None:
        backend = track.watch.backend  # of the rank that is run, which in a simulation is not this process's
    _check(backend, x, layout)
    dtype = backend.tensors.dtype_name(x)
    if backend.tensors.has_values(x):
        mask = mask_for(backend, layout, dtype, p, generator)
    else:
        mask = backend.tensors.without_values(tuple(x.shape), dtype)
    return x * (mask if track is None else _followed(backend, mask, x, track, layout))


def _check(backend: Backend, x: Tensor, layout: Layout) -> None:
    collectives = backend.collectives
    if layout.mesh.size > collectives.world_size():
        raise ConfigError(
            f"dropout: the layout is one of {layout.mesh.size} ranks, and {collectives.world_size()} have joined, so "
            "nothing tells which part this is; ranks that are threads can't drop by global indices"
        )
    expected = layout.local_shape(collectives.rank())
    if tuple(x.shape) != expected:
        raise LayoutError(
            f"dropout: this rank's tensor has the shape {list(x.shape)}, and {layout} gives rank {collectives.rank()} "
            f"{list(expected)}; the layout says how the whole tensor lies, its samples over replicate, shard and expert"
        )


def _followed(backend: Backend, mask: Tensor, x: Tensor, track: Track, layout: Layout) -> Tensor:
    """The mask, which lies as the tensor does: of a pending sum all ranks have the same."""
    planned = dict(zip(layout.mesh.names, layout.placements))
    states = []
    for axis, state in zip(track.watch.axes, track.states):
        if planned.get(axis) != state.placement:
            raise layout_error(track.watch.module, track.watch.found(x, "x"), axis, str(planned.get(axis, "replicate")))
        states.append(WHOLE if state.cut is None else state)
    return backend.interception.follow(mask, Track(track.watch, tuple(states), "", live=False))
