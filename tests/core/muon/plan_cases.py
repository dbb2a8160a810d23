"""Random plans of Muon, the same step on one device, and on all ranks by the interpreter."""

from __future__ import annotations

from math import prod
from random import Random
from typing import Callable, Mapping, NamedTuple, Sequence

import numpy as np

from hyper_parallel import DeviceMesh, Layout, Shard
from hyper_parallel.core.muon.interpret import Traffic, interpret
from hyper_parallel.core.muon.matrices import LogicalMatrix, MatrixView, split_rows, usual_view
from hyper_parallel.core.muon.newton_schulz import NewtonSchulz
from hyper_parallel.core.muon.parameters import MuonParameter, MuonPolicy
from hyper_parallel.core.muon.plan import MuonPlan, make_plan
from tests.core.strategies import Draw, draw_layout, draw_mesh, draw_topology, pick

SETTINGS = (NewtonSchulz(dtype="float32"), NewtonSchulz(), NewtonSchulz(steps=3, dtype="float16"))
SIZES = {2: (5, 1, 2, 3, 4, 7, 6), 3: (3, 1, 2, 4, 5, 0), 4: (2, 1, 3, 4)}

Function = Callable[[np.ndarray], np.ndarray]
"""Of matrices [k, m, n], m <= n, each by itself."""


def linear(matrices: np.ndarray) -> np.ndarray:
    """Every element of the result depends on every element of the matrix; exact for small whole numbers."""
    count, rows, columns = matrices.shape
    mixed = np.random.default_rng(1000 * rows + columns).integers(-2, 3, (rows * columns,) * 2)
    return (matrices.reshape(count, -1) @ mixed.astype(matrices.dtype)).reshape(matrices.shape)


def small(matrices: np.ndarray) -> np.ndarray:
    """The same, in numbers from -8 to 8, which every dtype holds."""
    return linear(matrices) % 17 - 8


def newton_schulz(matrices: np.ndarray) -> np.ndarray:
    """The quintic, in the dtype of the matrices."""
    norms = np.sqrt((matrices**2).sum(axis=(1, 2), keepdims=True))
    x = matrices / (norms + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(0, 2, 1)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def draw_view(draw: Draw, shape: Sequence[int]) -> MatrixView:
    """Whole planes, transposed or not, or with their rows in another order; planes in two, one below the other, side by
    side, row by row, or by groups of rows."""
    lead = draw(0, len(shape) - 2)
    split = draw(lead + 1, len(shape) - 1)
    rows, columns = range(prod(shape[lead:split])), range(prod(shape[split:]))
    kind = pick(draw, ("whole", "transposed", "below", "beside", "interleaved", "reordered", "grouped"))
    at = draw(1, max(1, (len(columns) if kind == "beside" else len(rows)) - 1))
    groups = [rows[start : start + at] for start in range(0, len(rows), at)] + [rows[:0]] * 2
    parts = {
        "whole": [((rows,), columns, False)],
        "transposed": [((rows,), columns, True)],
        "below": [((rows[:at],), columns, False), ((rows[at:],), columns, True)],
        "beside": [((rows,), columns[:at], False), ((rows,), columns[at:], False)],
        "interleaved": [((rows[::2],), columns, False), ((rows[1::2],), columns, False)],
        "reordered": [((rows[at:], rows[:at]), columns, False)],
        "grouped": [(tuple(groups[::2]), columns, False), (tuple(groups[1::2]), columns, True)],
    }
    return MatrixView(shape, lead, split, tuple(LogicalMatrix(r, (c,), t) for r, c, t in parts[kind]))


def draw_plan(draw: Draw, ranks: Sequence[int] | None = None, most: int = 4) -> MuonPlan:
    """Any mesh, or two over the same ranks, any layouts, any views, any topology."""
    mesh, parameters = draw_mesh(draw, ranks), []
    meshes = (mesh, mesh, draw_mesh(draw, Random(draw(0, 9)).sample(mesh.ranks, mesh.size)))
    for number in range(draw(1, most)):
        dims = pick(draw, (2, 3, 2, 4))
        shape = tuple(pick(draw, SIZES[dims]) for _ in range(dims))
        layout, view = draw_layout(draw, pick(draw, meshes), shape, partial_ops=()), draw_view(draw, shape)
        parameters.append(MuonParameter(f"p{number}", layout, view, "float32", pick(draw, SETTINGS)))
    topology = pick(draw, (None, draw_topology(draw, mesh.ranks)))
    policy = MuonPolicy("hierarchical", pick(draw, ("owner", "owner", "everywhere")), pick(draw, (2**29, 1, 40)))
    return make_plan(parameters, topology, policy)


def values_of(plan: MuonPlan, seed: int = 0) -> list[np.ndarray]:
    """Small whole numbers for every parameter."""
    random = np.random.default_rng(seed)
    return [random.integers(-5, 6, each.layout.shape).astype(float) for each in plan.parameters]


def on_one_device(view: MatrixView, value: np.ndarray, function: Function) -> np.ndarray:
    """`function` of each logical matrix of a whole parameter."""
    planes = value.reshape(view.planes, *view.plane)
    result = np.zeros_like(planes)
    for matrix in view.matrices:
        where = np.ix_(
            *(np.concatenate([np.array(each, dtype=int) for each in r]) for r in (matrix.rows, matrix.columns))
        )
        for plane, into in zip(planes, result):
            whole = plane[where]
            if whole.size:
                tall = whole.shape[0] > whole.shape[1]
                made = function((whole.T if tall else whole)[None])[0]
                into[where] = made.T if tall else made
    return result.reshape(value.shape)


class Outcome(NamedTuple):
    """What all ranks hold after a step in which `shard = update`, and what crossed between them."""

    shards: Mapping[int, list[np.ndarray]]
    traffic: Traffic


def interpreted(
    plan: MuonPlan, values: Sequence[np.ndarray], function: Function, skipped: Sequence[int] = ()
) -> Outcome:
    """One step on all ranks, from the shards of `values`; a parameter becomes its update. Copies that a replica is to
    receive hold nothing before."""
    shards, inputs = {}, {}
    for rank in plan.ranks:
        kept = plan.program(rank).kept
        own = [_local(each.layout, value, rank) for each, value in zip(plan.parameters, values)]
        inputs[rank] = {number: part_of(own[each.index], each).copy() for number, each in enumerate(kept)}
        shards[rank] = [
            own[index] if index in skipped else np.full_like(own[index], np.nan) for index in range(len(own))
        ]

    def apply(rank: int, number: int, update: np.ndarray) -> None:
        each = plan.program(rank).kept[number]
        part_of(shards[rank][each.index], each)[...] = update

    by_index = {rank: dict(enumerate(each)) for rank, each in shards.items()}
    traffic = interpret(plan, inputs, lambda rank, batch, matrices: function(matrices), apply, by_index, skipped)
    return Outcome(shards, traffic)


def _local(layout: Layout, value: np.ndarray, rank: int) -> np.ndarray:
    """What a rank holds; nothing where it is not in the mesh."""
    return layout.shard(value, rank) if rank in layout.mesh.ranks else np.zeros(0)


def part_of(shard: np.ndarray, kept) -> np.ndarray:
    """The part of a local shard that is kept, over its memory."""
    return shard.reshape(-1)[kept.start : kept.start + kept.numel].reshape(kept.local_shape)


MODELS = {
    "0.6B": (28, 1024, 2048, 1024, 3072),
    "8B": (36, 4096, 4096, 1024, 12288),
    "30B of experts": (48, 2048, 4096, 512, 768),
}
"""Layers, width, width of queries, of keys and values, and inside of an MLP."""


def transformer(size: str, mesh: DeviceMesh, layers: int | None = None) -> list[MuonParameter]:
    """A decoder's matrices, of sizes in use, cut by rows over `shard`; packed, 128 experts, over `expert` too."""
    count, width, queries, keys, inner = MODELS[size]
    rows, made = {"shard": Shard(0)}, []
    shapes = {"q": (queries, width), "k": (keys, width), "v": (keys, width), "o": (width, queries)}
    if "experts" not in size:
        shapes |= {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    else:
        shapes |= {"gate_up": (128, 2 * inner, width), "down": (128, width, inner)}
    for layer in range(layers or count):
        for name, shape in shapes.items():
            packed = {"shard": Shard(1)} | ({"expert": Shard(0)} if "expert" in mesh.names else {})
            view = split_rows(shape, (inner, inner), lead=1) if name == "gate_up" else usual_view(shape)
            layout = Layout(mesh, packed if len(shape) == 3 else rows, shape)
            made.append(MuonParameter(f"layers.{layer}.{name}", layout, view, "bfloat16", NewtonSchulz()))
    return made
