"""Random operands for arithmetic on distributed tensors, and derivatives by hand."""

from __future__ import annotations

import operator
from itertools import product
from typing import Sequence

import numpy as np

from hyper_parallel import DeviceMesh, Layout, Partial, Replicate
from tests.core.strategies import Draw, draw_layout, draw_shape

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}

# Derivatives of `x symbol y` by one side.
BY_LEFT = {"+": lambda x, y: 1, "-": lambda x, y: 1, "*": lambda x, y: y, "/": lambda x, y: 1 / y}
BY_RIGHT = {"+": lambda x, y: 1, "-": lambda x, y: -1, "*": lambda x, y: x, "/": lambda x, y: -x / y**2}


def draw_sides(draw: Draw, mesh: DeviceMesh) -> tuple[Layout, Layout]:
    """Layouts of two tensors whose shapes broadcast, with pending sums and averages."""
    shape = draw_shape(draw)
    kept = shape[draw(0, len(shape)) :] if draw(0, 1) else shape
    shapes = [shape, tuple(1 if draw(0, 2) == 2 else size for size in kept)]
    if draw(0, 1):
        shapes.reverse()
    left, right = (draw_layout(draw, mesh, each, partial_ops=("sum", "avg")) for each in shapes)
    return left, right


def contributions(layout: Layout, random: np.random.Generator, axes: Sequence[str]) -> list[np.ndarray]:
    """Local arrays of the ranks, in the mesh's order, that differ along `axes`: float64, whole numbers from 1 to 4."""
    whole = layout.with_placements([Replicate() if isinstance(each, Partial) else each for each in layout.placements])
    here = [layout.mesh.names.index(axis) for axis in axes]
    arrays = {
        places: random.integers(1, 5, layout.shape).astype(np.float64)
        for places in product(*(range(layout.mesh.shape[axis]) for axis in here))
    }
    return [
        whole.shard(arrays[tuple(layout.mesh.place(rank)[axis] for axis in here)], rank) for rank in layout.mesh.ranks
    ]


def pending_axes(layout: Layout) -> list[str]:
    """Axes along which a reduction is pending."""
    return [axis for axis, each in zip(layout.mesh.names, layout.placements) if isinstance(each, Partial)]


def some_value(layout: Layout, random: np.random.Generator) -> list[np.ndarray]:
    """Local arrays of a tensor, every contribution of a pending reduction another one."""
    return contributions(layout, random, pending_axes(layout))


def summed_to(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """The gradient of a tensor of `shape` from that of what it was broadcast to."""
    array = array.sum(axis=tuple(range(array.ndim - len(shape))))
    return array.sum(axis=tuple(dim for dim, size in enumerate(shape) if size == 1), keepdims=True).reshape(shape)
