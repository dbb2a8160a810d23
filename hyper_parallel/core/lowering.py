"""From two layouts to the cheapest list of steps between them.

Every rank of a grid of ranks does the same kind of thing, so a few shapes of path hold the optimum: cut first what is
replicated, reduce as early as the pieces allow, and let elements travel last, in one exchange that brings each rank
exactly what it lacks. The candidates are priced by the elements that cross each tier; the cheapest path wins, then the
one with fewer collectives.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Iterable, Iterator, Sequence

from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.placement import Partial, Placement, RaggedShard, Replicate, Shard, StridedShard
from hyper_parallel.core.topology import FAST, SLOW, Topology
from hyper_parallel.core.traffic import elements, volume
from hyper_parallel.core.wire import Step

SLOW_COST = 10
"""How much more an element costs on the slow tier; links inside a supernode are about ten times faster."""

Path = tuple[Step, ...]


def plain(layout: Layout) -> Layout:
    """The layout with axes of size one replicated, and the usual gradient."""
    placements = [
        Replicate() if size == 1 else placement for size, placement in zip(layout.mesh.shape, layout.placements)
    ]
    return Layout(layout.mesh, placements, layout.shape)


def cheapest_path(source: Layout, target: Layout, topology: Topology | None) -> Path:
    """The steps from `source` to `target`, layouts of one shape over the same ranks."""
    source, target = plain(source), plain(target)
    if (aligned := on_mesh_of(source, target)) is not None:
        paths = _paths(source, plain(aligned), topology)
    else:
        paths = _paths_between_meshes(source, target, topology)
    return min(paths, key=lambda path: _cost(path, topology))


def _cost(path: Path, topology: Topology | None) -> tuple[int, int, int]:
    moved = 0
    for step in path:
        crossing = elements(step, topology)
        moved += crossing[FAST] + SLOW_COST * crossing[SLOW]
    return moved, sum(step.travels for step in path), len(path)


def on_mesh_of(source: Layout, target: Layout) -> Layout | None:
    """The target on the mesh of the source, when the two meshes differ in nothing but names and axes of size one."""
    if source.mesh == target.mesh:
        return target
    wide = [place for place, size in enumerate(source.mesh.shape) if size > 1]
    others = [place for place, size in enumerate(target.mesh.shape) if size > 1]
    alike = [source.mesh.shape[place] for place in wide] == [target.mesh.shape[place] for place in others]
    if source.mesh.ranks != target.mesh.ranks or not alike:
        return None
    placements: list[Placement] = [Replicate()] * len(source.mesh.shape)
    for place, other in zip(wide, others):
        placements[place] = target.placements[other]
    return Layout(source.mesh, placements, target.shape)


# On one mesh


def _paths(source: Layout, target: Layout, topology: Topology | None) -> Iterator[Path]:
    """Candidates on one mesh. Averages are sums that are scaled once."""
    reduced = [
        axis
        for axis, (before, after) in enumerate(zip(source.placements, target.placements))
        if isinstance(before, Partial) and not _stays_pending(before, after)
    ]
    pending = {axis: placement for axis, placement in enumerate(source.placements) if isinstance(placement, Partial)}
    sizes = source.mesh.shape
    division = prod(sizes[axis] for axis in reduced if pending[axis].op == "avg")
    factor, divisor, start, end = 1, 1, list(source.placements), list(target.placements)
    for axis, placement in pending.items():
        if placement.op in ("sum", "avg"):
            start[axis] = Partial()
            if axis not in reduced:
                end[axis] = Partial()
                factor *= sizes[axis] if (placement.op, target.placements[axis].op) == ("sum", "avg") else 1
                divisor *= sizes[axis] if (placement.op, target.placements[axis].op) == ("avg", "sum") else 1
    for axis, placement in enumerate(target.placements):
        if placement == Partial("avg") and _splits(start[axis]):
            # A part among zeros, so many times as there are ranks, is on average that part.
            end[axis] = Partial()
            factor *= sizes[axis]
    before, after = source.with_placements(start), source.with_placements(end)
    scaled = () if factor == divisor else (Step("scale", (), after, target, factor=factor, divisor=divisor),)
    if not reduced:
        for path in _exchanges(before, after, topology):
            yield path + scaled
        return
    for path, middle in _reductions(before, after, reduced, division, topology):
        for rest in _exchanges(middle, after, topology):
            yield path + rest + scaled


def _stays_pending(before: Partial, after: Placement) -> bool:
    linear = ("sum", "avg")
    return isinstance(after, Partial) and (before.op == after.op or (before.op in linear and after.op in linear))


def _exchanges(before: Layout, after: Layout, topology: Topology | None) -> Iterator[Path]:
    """Ways to bring every rank what it lacks, without reductions: at once, or one tier after the other."""
    if before == after:
        yield ()
        return
    direct = _exchange(before, after, topology)
    yield (direct,)
    if topology is None or len(direct.axes) < 2:
        return
    slow = [axis for axis in direct.axes if topology.axis_tier(before.mesh, (axis,)) == SLOW]
    fast = [axis for axis in direct.axes if axis not in slow]
    if not slow or not fast:
        return
    for first in (slow, fast):
        for middle in _middles(before, after, first):
            if middle not in (before, after):
                yield _exchange(before, middle, topology), _exchange(middle, after, topology)


def _middles(before: Layout, after: Layout, first: Sequence[str]) -> Iterator[Layout]:
    """Layouts between two, where the axes `first` have changed and the others have not."""
    mesh = before.mesh
    placements = [
        after.placements[place] if axis in first else before.placements[place] for place, axis in enumerate(mesh.names)
    ]
    yield from _legal(before, placements)
    # Where an outer axis is gathered, what an inner one holds of each of its parts can stay where it is.
    for axis in first:
        place = mesh.names.index(axis)
        dim = getattr(before.placements[place], "dim", None)
        order = [] if dim is None else [cut.axis for cut in before.cuts[dim]]
        if isinstance(after.placements[place], Replicate) and len(order) == 2 and order[0] == place:
            strided = list(placements)
            strided[order[1]] = StridedShard(dim, mesh.shape[place])
            yield from _legal(before, strided)


def _legal(like: Layout, placements: Sequence[Placement]) -> Iterator[Layout]:
    """The layout with these placements, if they may stand together."""
    try:
        yield like.with_placements(placements)
    except LayoutError:
        return


def _exchange(before: Layout, after: Layout, topology: Topology | None = None) -> Step:
    """One step in which elements travel as they are, among as few ranks as hold what is lacking."""
    moved = _moved_axes(before, after)
    names = before.mesh.names
    axes = tuple(names[axis] for axis in sorted(moved))
    axes = tuple(axis for axis in axes if after.placement(axis) != Partial())
    padded = any(one != other and other == Partial() for one, other in zip(before.placements, after.placements))
    step = Step("pad" if padded else "slice", (), before, after)
    if not axes:
        return step
    step = Step(_exchange_kind(before, after, axes), axes, before, after, topology=topology)
    # Cuts that coincide, as on a tensor smaller than the mesh, can leave nothing to send.
    return step if any(elements(step).values()) else replace(step, kind="pad" if padded else "slice", axes=())


def _splits(placement: Placement) -> bool:
    return isinstance(placement, (Shard, StridedShard, RaggedShard))


def _moved_axes(before: Layout, after: Layout) -> set[int]:
    """The axes whose cuts in `before` do not stand behind the same cuts in `after`."""
    moved: set[int] = set()
    for cuts, others in zip(before.cuts, after.cuts):
        same = 0
        while same < min(len(cuts), len(others)) and cuts[same] == others[same]:
            same += 1
        moved.update(cut.axis for cut in cuts[same:])
    return moved


def _exchange_kind(before: Layout, after: Layout, axes: Sequence[str]) -> str:
    gathered = [
        Replicate() if axis in axes else placement for axis, placement in zip(before.mesh.names, before.placements)
    ]
    if tuple(gathered) == after.placements:
        return "all_gather"
    changed = [
        placement for pair in zip(before.placements, after.placements) for placement in pair if pair[0] != pair[1]
    ]
    if any(isinstance(placement, RaggedShard) for placement in changed):
        return "ragged_exchange"
    if len(axes) == 1 and all(isinstance(placement, (Shard, StridedShard)) for placement in changed):
        return "all_to_all"
    return "redistribute"


# Reductions


def _reductions(
    before: Layout, after: Layout, reduced: Sequence[int], division: int, topology: Topology | None
) -> Iterator[tuple[Path, Layout]]:
    """Ways to carry out what is pending on the axes `reduced`, each with the layout that it ends in."""
    op = before.placements[reduced[0]].op
    cut = [
        other if isinstance(one, Replicate) and _splits(other) else one
        for one, other in zip(before.placements, after.placements)
    ]
    bases = [before]
    if op == "sum":  # the shares of a maximum need the whole of what was compared
        bases = [*_legal(before, cut), before]
    seen: set[tuple[Placement, ...]] = set()
    for base in bases:
        for goal in _goals(base, after, reduced, topology):
            if goal.placements in seen:
                continue
            seen.add(goal.placements)
            yield from _reduction(before, base, goal, reduced, op, division, topology)


def _goals(base: Layout, after: Layout, reduced: Sequence[int], topology: Topology | None) -> Iterator[Layout]:
    """Layouts that a reduction may end in: as the target has it, cut last, or whole on every rank."""
    asked = list(base.placements)
    for axis in reduced:
        asked[axis] = after.placements[axis] if _splits(after.placements[axis]) else Replicate()
    yield from _legal(base, asked)
    last: list[Placement] = list(base.placements)
    every: list[Placement] = list(base.placements)
    for axis in reduced:
        last[axis] = every[axis] = Replicate()
    elsewhere = list(every)
    for axis in reduced:
        placement = after.placements[axis]
        _cut_last(base, elsewhere, axis, _best_dim(base, elsewhere, axis))
        if _splits(placement):
            dim = placement.dims[0] if isinstance(placement, RaggedShard) else placement.dim
            _cut_last(base, last, axis, dim)
            _cut_last(base, every, axis, dim)
        else:
            _cut_last(base, every, axis, _best_dim(base, every, axis))
    yield from _legal(base, last)
    yield from _legal(base, [Replicate() if axis in reduced else each for axis, each in enumerate(base.placements)])
    yield from _legal(base, every)
    yield from _legal(base, elsewhere)
    names = base.mesh.names
    slow = [] if topology is None else [a for a in reduced if topology.axis_tier(base.mesh, (names[a],)) == SLOW]
    if slow:
        # The slow tier carries the least when the fast axes have been reduced to pieces before, copies included.
        small = [Replicate() if axis in reduced else each for axis, each in enumerate(base.placements)]
        for axis in range(len(names)):
            is_copy = isinstance(base.placements[axis], Replicate) or axis in reduced
            if base.mesh.shape[axis] > 1 and is_copy and axis not in slow:
                _cut_last(base, small, axis, _best_dim(base, small, axis))
        yield from _legal(base, small)


def _cut_last(base: Layout, placements: list[Placement], axis: int, dim: int | None) -> None:
    """Let the axis cut the dim after every axis that does so already."""
    if dim is None:
        return
    sizes = base.mesh.shape
    right = [place for place in range(axis + 1, len(sizes)) if getattr(placements[place], "dim", None) == dim]
    factor = prod(sizes[place] for place in right)
    placements[axis] = Shard(dim) if factor == 1 else StridedShard(dim, factor)


def _best_dim(base: Layout, placements: Sequence[Placement], axis: int) -> int | None:
    """The dim that the axis cuts most evenly, preferring long ones; None when no dim can be cut."""
    taken = {dim for placement in placements if isinstance(placement, RaggedShard) for dim in placement.dims}
    size, best = base.mesh.shape[axis], None
    for dim, length in enumerate(base.shape):
        cuts = [place for place, each in enumerate(placements) if getattr(each, "dim", None) == dim]
        rest = -(-length // prod(base.mesh.shape[place] for place in cuts))
        rank = (rest % size == 0 and rest > 0, rest)
        if dim not in taken and (best is None or rank > best[0]):
            best = (rank, dim)
    return None if best is None else best[1]


def _reduction(
    before: Layout,
    base: Layout,
    goal: Layout,
    reduced: Sequence[int],
    op: str,
    division: int,
    topology: Topology | None,
) -> Iterator[tuple[Path, Layout]]:
    """The steps from `before` to `goal`, by way of `base` where a cut can't be part of the first reduction."""
    names = before.mesh.names
    scattered = [axis for axis in reduced if _splits(goal.placements[axis])]
    whole = [axis for axis in reduced if axis not in scattered]
    if op != "sum":  # at once: every piece to one rank, or everything to every rank
        others_stay = all(
            one == other
            for axis, (one, other) in enumerate(zip(before.placements, goal.placements))
            if axis not in reduced
        )
        if others_stay and not (scattered and whole):
            if _refines(before, goal):
                axes = tuple(names[axis] for axis in reduced)
                yield (Step("reduce_scatter", axes, before, goal, op),), goal
        return
    # What is not scattered is summed on the pieces; cuts of copies come first, or with the scatter.
    middle = goal.with_placements([Partial() if axis in whole else each for axis, each in enumerate(goal.placements)])
    path: Path = ()
    here = before
    if middle != before and not (scattered and _refines(before, middle)):
        here = base if scattered else middle
        path = () if here == before else (_exchange(before, here),)
        if any(step.travels for step in path) or not _refines(here, middle):
            return
    if scattered:
        last = 1 if whole else division
        path += (Step("reduce_scatter", tuple(names[axis] for axis in scattered), here, middle, divisor=last),)
    if whole:
        path += (Step("all_reduce", tuple(names[axis] for axis in whole), middle, goal, divisor=division),)
    yield path, goal
    if topology is not None and not whole:
        yield from _fast_tier_first(before, goal, scattered, division, topology)


def _fast_tier_first(
    before: Layout, goal: Layout, scattered: Sequence[int], division: int, topology: Topology
) -> Iterator[tuple[Path, Layout]]:
    """Two scatters instead of one: inside the supernodes, then, with the little that is left, between them."""
    mesh = before.mesh
    slow = [axis for axis in scattered if topology.axis_tier(mesh, (mesh.names[axis],)) == SLOW]
    fast = [axis for axis in scattered if axis not in slow]
    if not slow or not fast:
        return
    straight = [Partial() if axis in slow else each for axis, each in enumerate(goal.placements)]
    strided = list(straight)
    for cuts in goal.cuts:
        first = prod(mesh.shape[cut.axis] for cut in cuts if cut.axis in slow)
        later = [cut.axis for cut in cuts if cut.axis in fast]
        if first > 1 and len(later) == 1:
            strided[later[0]] = StridedShard(goal.placements[later[0]].dim, first)
    for placements in (straight, strided):
        for middle in _legal(goal, placements):
            if _holds(before, middle) and _holds(middle, goal):
                axes = [tuple(mesh.names[axis] for axis in each) for each in (fast, slow)]
                yield (
                    (
                        Step("reduce_scatter", axes[0], before, middle),
                        Step("reduce_scatter", axes[1], middle, goal, divisor=division),
                    ),
                    goal,
                )


def _holds(before: Layout, after: Layout) -> bool:
    """As `_refines`, seen from the elements."""
    return all(volume(after.pieces(rank), before.pieces(rank)) == after.local_numel(rank) for rank in before.mesh.ranks)


def _refines(before: Layout, after: Layout) -> bool:
    """Tell whether every rank's part in `after` lies within its part in `before`."""
    return all(after.cuts[dim][: len(cuts)] == cuts for dim, cuts in enumerate(before.cuts))


# Between meshes


def _paths_between_meshes(source: Layout, target: Layout, topology: Topology | None) -> Iterator[Path]:
    """Reduce on the first mesh what is pending there, then send every rank of the second what it lacks."""
    pending = [axis for axis, placement in enumerate(source.placements) if isinstance(placement, Partial)]
    ends: Iterable[tuple[Path, Layout]] = [((), source)]
    if pending:
        start = [Partial() if placement == Partial("avg") else placement for placement in source.placements]
        division = prod(source.mesh.shape[axis] for axis in pending if source.placements[axis].op == "avg")
        whole = [Replicate() if axis in pending else each for axis, each in enumerate(source.placements)]
        ends = _reductions(source.with_placements(start), source.with_placements(whole), pending, division, topology)
    for path, middle in ends:
        step = Step("redistribute", source.mesh.names, middle, target, topology=topology)
        if not any(elements(step).values()):
            step = replace(step, kind="slice", axes=())
        yield (*path, step)
