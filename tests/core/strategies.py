"""Random meshes, placements and layouts, legal by construction.

Everything is made from whole numbers by a `Draw`, so that the same code serves hypothesis, which looks for small
counterexamples, and `random.Random`, from which the tests on real ranks make their pairs.
"""

from __future__ import annotations

from itertools import combinations, product
from math import prod
from random import Random
from typing import Callable, Sequence, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from hyper_parallel import DeviceMesh, Layout, Partial, Replicate, Shard, Topology
from hyper_parallel.core.mesh import AXES
from hyper_parallel.core.placement import REDUCTIONS, Placement, RaggedShard, StridedShard

CASES = {
    "text": 1500,
    "what a rank holds": 4500,
    "arrays": 3500,
    "forward": 4500,
    "between meshes": 1500,
    "tiers": 1500,
    "gradient": 1500,
    "adjoint": 1500,
    "derivative": 1000,
}
"""Random cases of each property. Together at least 20,000; a test says so."""


def cases(name: str) -> settings:
    """How often hypothesis tries a property. Drawing counts as slow where the machine is busy with something else."""
    return settings(max_examples=CASES[name], deadline=None, suppress_health_check=[HealthCheck.too_slow])


Draw = Callable[[int, int], int]
"""`draw(low, high)` is a whole number, both ends included; shrinking leads towards `low`."""

T = TypeVar("T")

MAX_AXES, MAX_RANKS = 4, 24
MESH_SHAPES = [
    sorted(
        (shape for shape in product(range(1, MAX_RANKS + 1), repeat=axes) if prod(shape) <= MAX_RANKS),
        key=lambda shape: (prod(shape), shape),
    )
    for axes in range(MAX_AXES + 1)
]
MESH_SHAPES_UP_TO = {
    (axes, most): [shape for shape in shapes if prod(shape) <= most]
    for axes, shapes in enumerate(MESH_SHAPES)
    for most in (6, 8, 12, MAX_RANKS)
}
AXIS_NAMES = [list(combinations(AXES, axes)) for axes in range(MAX_AXES + 1)]
SIZES = [(), (7, 1, 0, 2, 3, 5, 11, 24, 30), (5, 1, 0, 2, 3, 4, 7, 9), (3, 1, 0, 2, 4, 5), (2, 1, 0, 3, 4)]
"""The sizes of a dim, by the number of dims: odd ones, zero and one, and arrays that stay small."""


def pick(draw: Draw, options: Sequence[T]) -> T:
    """One of several."""
    return options[draw(0, len(options) - 1)]


def draw_ranks(draw: Draw, size: int) -> tuple[int, ...]:
    """Mostly 0, 1, 2, ...; sometimes in another order, and sometimes not from 0."""
    ranks = list(range(size))
    if draw(0, 2) == 2:
        Random(draw(0, 9)).shuffle(ranks)
    first = pick(draw, (0, 0, 3))
    return tuple(first + rank for rank in ranks)


def draw_mesh(draw: Draw, ranks: Sequence[int] | None = None) -> DeviceMesh:
    """Any mesh, or one over the given ranks."""
    if ranks is None:
        axes, most = pick(draw, (1, 2, 3, 4, 2, 3, 0)), pick(draw, (6, 8, 12, MAX_RANKS))
        fitting = MESH_SHAPES_UP_TO[axes, most]
    else:
        axes = draw(1, MAX_AXES)
        fitting = [shape for shape in MESH_SHAPES[axes] if prod(shape) == len(ranks)]
    shape = pick(draw, fitting)
    return DeviceMesh(shape, pick(draw, AXIS_NAMES[axes]), ranks or draw_ranks(draw, prod(shape)))


def draw_shape(draw: Draw) -> tuple[int, ...]:
    """Up to four dims."""
    dims = pick(draw, (1, 2, 3, 4, 2, 3, 0))
    return tuple(pick(draw, SIZES[dims]) for _ in range(dims))


class _Legal:
    """The placements that an axis may have, given those of the axes to its right."""

    def __init__(self, shape: Sequence[int], partial_ops: Sequence[str]):
        self.shape = shape
        self.partial_ops = tuple(partial_ops)
        self.orders: list[list[int]] = [[] for _ in shape]
        self.ragged_dims = 0

    def draw(self, draw: Draw, size: int) -> Placement:
        """A placement for an axis of `size`; what it forbids further left is remembered."""
        makers = [self._replicate]
        if self.ragged_dims < len(self.shape):
            makers += [self._shard, self._strided, self._shard]
        if self.partial_ops:
            makers += [self._partial, self._partial]
        if self._most_ragged_dims(size):
            makers.append(self._ragged)
        return pick(draw, makers)(draw, size)

    def _replicate(self, draw: Draw, size: int) -> Placement:
        return Replicate()

    def _dim(self, draw: Draw) -> tuple[int, int]:
        """A dim that may be cut, as it is written (perhaps negative) and as it is meant."""
        dim = draw(self.ragged_dims, len(self.shape) - 1)
        return (dim - len(self.shape) if draw(0, 3) == 3 else dim), dim

    def _shard(self, draw: Draw, size: int) -> Placement:
        written, dim = self._dim(draw)
        if size > 1:
            self.orders[dim].insert(0, size)
        return Shard(written)

    def _strided(self, draw: Draw, size: int) -> Placement:
        written, dim = self._dim(draw)
        order = self.orders[dim]
        factors = [prod(order[:place]) for place in range(len(order) + 1)] if order else (2, 1, 3, 4)
        factor = pick(draw, factors)
        if size > 1:
            order.insert(factors.index(factor) if order else 0, size)
        return StridedShard(written, factor)

    def _ragged(self, draw: Draw, size: int) -> Placement:
        dims = draw(1, self._most_ragged_dims(size))
        code, units = draw(1, 4**size - 1), []
        for _ in range(size):
            code, unit = divmod(code, 4)
            units.append(unit)
        if size > 1:
            self.ragged_dims = dims
        return RaggedShard(tuple(range(dims)), units)

    def _partial(self, draw: Draw, size: int) -> Placement:
        op = pick(draw, self.partial_ops)
        if size > 1:
            self.partial_ops = tuple(each for each in self.partial_ops if each == op or {each, op} == {"sum", "avg"})
        return Partial(op)

    def _most_ragged_dims(self, size: int) -> int:
        """How many leading dims nothing has cut yet; none when a ragged shard has its own already."""
        if self.ragged_dims and size > 1:
            return 0
        free = 0
        while free < len(self.shape) and not self.orders[free]:
            free += 1
        return free


def draw_layout(
    draw: Draw, mesh: DeviceMesh, shape: Sequence[int], partial_ops: Sequence[str] = REDUCTIONS, dual: bool = False
) -> Layout:
    """A layout. With `dual` every replicated axis has a partial gradient, otherwise some do."""
    legal = _Legal(shape, partial_ops)
    placements = [legal.draw(draw, size) for size in reversed(mesh.shape)][::-1]
    free = [axis for axis, placement in zip(mesh.names, placements) if placement == Replicate()]
    marked = 2 ** len(free) - 1 if dual or not free else draw(0, 2 ** len(free) - 1)
    partial = [axis for place, axis in enumerate(free) if marked >> place & 1]
    return Layout(mesh, placements, shape, gradient={axis: Partial() for axis in partial})


def draw_pair(
    draw: Draw,
    ranks: Sequence[int] | None = None,
    same_mesh: bool = True,
    source_ops: Sequence[str] = REDUCTIONS,
    target_ops: Sequence[str] = REDUCTIONS,
    dual: bool = False,
) -> tuple[Layout, Layout]:
    """Two layouts of one shape over the same ranks, which are the given ones if there are any."""
    mesh, shape = draw_mesh(draw, ranks), draw_shape(draw)
    other = mesh if same_mesh else draw_mesh(draw, Random(draw(0, 9)).sample(mesh.ranks, mesh.size))
    return draw_layout(draw, mesh, shape, source_ops, dual), draw_layout(draw, other, shape, target_ops, dual)


def draw_topology(draw: Draw, ranks: Sequence[int]) -> Topology:
    """One to three supernodes: ranks in blocks, or dealt out like cards."""
    world, nodes = max(ranks) + 1, draw(1, 3)
    if draw(0, 1):
        return Topology(*[[rank % nodes for rank in range(world)]] * 2)
    return Topology.regular(world, -(-world // nodes))


def _from_hypothesis(make: Callable[..., T]) -> Callable[..., st.SearchStrategy[T]]:
    """The strategy that draws what `make(draw, ...)` makes."""

    @st.composite
    def strategy(draw, *args, **kwargs):
        return make(lambda low, high: low if low == high else draw(st.integers(low, high)), *args, **kwargs)

    return strategy


def _layout_on_any_mesh(draw: Draw, **kwargs) -> Layout:
    return draw_layout(draw, draw_mesh(draw), draw_shape(draw), **kwargs)


layouts = _from_hypothesis(_layout_on_any_mesh)
pairs = _from_hypothesis(draw_pair)
topologies = _from_hypothesis(draw_topology)
