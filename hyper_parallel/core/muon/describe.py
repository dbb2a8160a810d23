"""A plan of Muon in words and numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterator, Mapping, Sequence

from hyper_parallel.core.muon.batches import Batch
from hyper_parallel.core.muon.kinds import Kind
from hyper_parallel.core.muon.program import RESULTS, Program
from hyper_parallel.core.muon.relay import relay_of
from hyper_parallel.core.muon.subgroups import Cluster, most_near
from hyper_parallel.core.plan.model import ITEM_BYTES
from hyper_parallel.core.topology import Topology

if TYPE_CHECKING:
    from hyper_parallel.core.muon.plan import MuonPlan


def describe(plan: MuonPlan) -> str:
    """See `MuonPlan.describe`."""
    lines = [*_head(plan), *_kinds(plan), *_costs(plan), *_owners(plan)]
    return "\n".join(lines) + "\n"


def _head(plan: MuonPlan) -> Iterator[str]:
    matrices = sum(each.view.planes * len(each.view.matrices) for each in plan.parameters)
    parameters = _count(len(plan.parameters), "parameter")
    yield f"Muon: {parameters} with {_count(matrices, 'matrix', 'matrices')} on {_count(len(plan.ranks), 'rank')}"
    yield f"  topology: {plan.topology}"
    yield (
        f"  slow_shard={plan.policy.slow_shard!r}, replicas={plan.policy.replicas!r}, "
        f"batches of at most {plan.policy.batch_elements:,} elements of a shard group"
    )


# What is cut, and who shares work


def _kinds(plan: MuonPlan) -> Iterator[str]:
    for number, kind in enumerate(plan.kinds):
        members = [each for each, of in zip(plan.parameters, plan.kind_of) if of == number]
        others = f" and {len(members) - 1} like it" if len(members) > 1 else ""
        yield f"{members[0].name}{others}: {kind.layout} over {kind.layout.mesh}"
        yield f"  {_matrices_of(kind)}"
        if any(cell.is_cut for cell in kind.domain.cells):
            axes = ", then ".join(_relay(kind, plan.topology))
            yield f"  pieces go to owners along {axes}; slices go back the same way"
        if kind.domain.spread:
            yield f"  along {_named(kind.domain.spread)}: other matrices on each rank, nothing travels"
        if kind.domain.replicas:
            yield from _subgroups(kind, plan.topology, plan.policy.replicas)


def _matrices_of(kind: Kind) -> str:
    cells = kind.domain.cells
    cut = sum(int((cell.holders > 1).sum()) for cell in cells)
    complete = sum(int((cell.holders == 1).sum()) for cell in cells)
    parts = []
    if cut:
        size = kind.domain.grid.shape[2]
        matrices = _count(cut, "matrix is", "matrices are")
        parts.append(f"{matrices} cut along {_named(kind.domain.axes)}: one owner among {size} ranks for each")
    if complete:
        matrices = _count(complete, "matrix is", "matrices are")
        parts.append(f"{matrices} complete on a rank of each copy, where nothing travels")
    return "; ".join(parts) or "no elements"


def _relay(kind: Kind, topology: Topology) -> tuple[str, ...]:
    """The axes of the relay of the first shard group."""
    sizes = tuple(kind.layout.mesh.axis_size(axis) for axis in kind.domain.axes)
    return relay_of(tuple(kind.domain.grid[0, 0].tolist()), kind.domain.axes, sizes, topology).axes


def _subgroups(kind: Kind, topology: Topology, replicas: str) -> Iterator[str]:
    copies = kind.domain.grid.shape[1]
    along = f"  along {_named(kind.domain.replicas)}: {_count(copies, 'copy', 'copies')}"
    if replicas != "owner":
        yield f"{along}, each of which keeps momentum and computes"
        return
    clusters = [cluster for cluster in kind.clusters if cluster.cell == 0]
    size = len(clusters[0].copies)
    shared = f"{size} of which share work"
    most = most_near(kind.domain, topology)
    if most > size:
        shared += (
            f", although {most} are of one supernode: of others there are fewer, and all compute in the same batches"
        )
    yield f"{along}, {shared}; each matrix is orthogonalized {_count(len(clusters), 'time')}"
    numbers = {tuple(ranks): number for number, ranks in enumerate(kind.domain.grid[0].tolist())}
    for cluster in clusters[:8]:
        yield f"    {_subgroup(cluster, numbers, topology)}"
    if len(clusters) > 8:
        yield f"    ... {len(clusters) - 8} more"


def _subgroup(cluster: Cluster, numbers: Mapping[tuple[int, ...], int], topology: Topology) -> str:
    """Which copies, where they are, and what is strange about that."""
    copies = [numbers[ranks] for ranks in cluster.copies]
    homes = sorted({topology.supernodes[rank] for rank in cluster.copies[0]})
    ranks = sorted(rank for each in cluster.copies for rank in each)
    noun = "copy" if len(copies) == 1 else "copies"
    text = f"{noun} {_short(copies)} on the ranks {_short(ranks)}: supernode{'s' * (len(homes) > 1)} {_short(homes)}"
    notes = []
    if copies != list(range(copies[0], copies[0] + len(copies))):
        notes.append("not neighbours in the mesh: ranks are permuted against supernodes")
    if len(homes) > 1:
        notes.append("a copy spans them, so that only copies that do so at the same places share work")
    shared = [
        machine for machine in sorted({topology.machines[rank] for rank in ranks}) if _spans(machine, ranks, topology)
    ]
    if shared:
        notes.append(f"machine{'s' * (len(shared) > 1)} {_short(shared)} also of other subgroups")
    return text + (f" ({'; '.join(notes)})" if notes else "")


def _spans(machine: int, ranks: Sequence[int], topology: Topology) -> bool:
    """Tell whether a machine has ranks of other subgroups, although its supernode is one."""
    return any(home == machine and rank not in ranks for rank, home in enumerate(topology.machines))


# What it costs


def _costs(plan: MuonPlan) -> Iterator[str]:
    worst = plan.imbalance
    for name, loads, unit in (("flops", plan.flops, "GFLOP"), ("state", plan.state_bytes, "MB of momentum")):
        size = 1e9 if name == "flops" else 1e6
        values = [value / size for value in loads.values()] or [0.0]
        yield (
            f"  {unit} per rank: {min(values):,.3f} to {max(values):,.3f}; "
            f"the most loaded rank has {worst[name]:.3f} times the mean"
        )
    if not plan.bytes:
        yield "  nothing travels"
    for (axis, tier), count in plan.bytes.items():
        yield f"  {count:,} bytes per step along {axis} on the {tier} tier"


# Who does what


def _owners(plan: MuonPlan) -> Iterator[str]:
    kept: list[set[int]] = [set() for _ in plan.parameters]
    computed: list[set[int]] = [set() for _ in plan.parameters]
    for unit in plan.assignment.units:
        grid = plan.kinds[plan.kind_of[unit.index]].grids[unit.cell]
        kept[unit.index].update(grid[:, unit.copy].reshape(-1).tolist())
    yield _count(len(plan.assignment.batches), "batch", "batches")
    for number, batch in enumerate(plan.assignment.batches):
        made: dict[int, int] = {}
        for where, blocks in batch.blocks.items():
            grid = plan.kinds[batch.kind].grids[where.cell][:, where.copy]
            for block in blocks:
                ranks = grid[:, block.owner].tolist()
                computed[plan.assignment.units[block.unit].index].update(ranks)
                for rank in ranks:
                    made[rank] = made.get(rank, 0) + block.last - block.first
        yield f"  {number}: {_batch(batch, made)}"
    if plan.ranks:
        yield f"  buffers of rank {plan.ranks[0]}: {_buffers(plan.program(plan.ranks[0]))}"
    for each, momentum, ranks in zip(plan.parameters, kept, computed):
        owners = f"momentum on {_short(sorted(momentum))}, orthogonalized on {_short(sorted(ranks))}"
        yield f"  {each.name} {list(each.layout.shape)}: {owners}"


def _buffers(program: Program) -> str:
    """Made once, for the largest batch."""
    sizes = [
        f"{name} {numel * ITEM_BYTES[dtype] * (2 if name == RESULTS else 1):,} bytes"
        for (name, dtype), numel in program.capacities.items()
        if numel
    ]
    return ", ".join(sizes) or "none"


def _batch(batch: Batch, made: Mapping[int, int]) -> str:
    alike = batch.alike
    where = f"cut along {_named(alike.axes)}" if alike.is_cut else "complete"
    rows, columns = alike.shape
    matrices = _count(sum(made.values()), "matrix", "matrices")
    owners = ", ".join(f"{rank}: {count}" for rank, count in sorted(made.items())[:16])
    more = ", ..." if len(made) > 16 else ""
    how = f"{alike.settings.method_for(*alike.shape)} in {alike.settings.dtype}"
    return f"{matrices} of {rows} x {columns}, {how}, {where}; by rank {owners}{more}"


def _named(axes: Sequence[str]) -> str:
    return " and ".join(axes)


def _short(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:16]))
    return f"{shown}, ... ({len(numbers)} in all)" if len(numbers) > 16 else shown


def _count(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"
