"""Cuts: what placements do to each tensor dim, in the order in which it happens."""

from __future__ import annotations

from math import prod
from typing import NamedTuple, Sequence

from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Placement, RaggedShard, Shard, StridedShard


class Cut(NamedTuple):
    """One mesh axis's split of a tensor dim, or of several leading ones."""

    axis: int
    blocks: int = 1
    ragged: RaggedShard | None = None


def cuts_of(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> tuple[tuple[Cut, ...], ...]:
    """For each tensor dim its cuts, the first to be applied first. Axes of size one cut nothing.

    Args:
        mesh: the mesh.
        placements: one for each axis, dims counted from the start.
        shape: the global shape.

    Raises:
        LayoutError: a split factor that fits no axes to the right, or a ragged shard that shares a dim.
    """
    orders: list[list[Cut]] = [[] for _ in shape]
    for axis in reversed(range(len(mesh.names))):
        placement = placements[axis]
        if mesh.shape[axis] == 1:
            continue
        if isinstance(placement, Shard):
            _refuse_beside_ragged(mesh, placements, axis, orders, (placement.dim,))
            orders[placement.dim].insert(0, Cut(axis))
        elif isinstance(placement, StridedShard):
            _refuse_beside_ragged(mesh, placements, axis, orders, (placement.dim,))
            _insert_strided(mesh, placement, axis, orders[placement.dim])
        elif isinstance(placement, RaggedShard):
            _refuse_beside_ragged(mesh, placements, axis, orders, placement.dims, all_cuts=True)
            for dim in placement.dims:
                orders[dim].append(Cut(axis, 1, placement))
    return tuple(map(tuple, orders))


def _insert_strided(mesh: DeviceMesh, placement: StridedShard, axis: int, order: list[Cut]) -> None:
    """Put the cut behind those whose sizes multiply to its split factor."""
    before = [prod(mesh.shape[cut.axis] for cut in order[:place]) for place in range(len(order) + 1)]
    if placement.split_factor in before:
        order.insert(before.index(placement.split_factor), Cut(axis))
    elif not order:
        order.append(Cut(axis, placement.split_factor))
    else:
        right = ", ".join(f"{mesh.names[cut.axis]}={mesh.shape[cut.axis]}" for cut in order)
        raise LayoutError(
            f"axis {mesh.names[axis]!r}: {placement} does not fit the axes to its right that split dim "
            f"{placement.dim} ({right}); split_factor is the product of the sizes of those that split first, "
            f"one of {before}"
        )


def _refuse_beside_ragged(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    axis: int,
    orders: Sequence[Sequence[Cut]],
    dims: Sequence[int],
    all_cuts: bool = False,
) -> None:
    for dim in dims:
        other = next((cut for cut in orders[dim] if cut.ragged or all_cuts), None)
        if other is not None:
            raise LayoutError(
                f"axis {mesh.names[axis]!r}: {placements[axis]} can't share dim {dim} with "
                f"{placements[other.axis]} on axis {mesh.names[other.axis]!r}; a ragged shard has its dims for itself"
            )
