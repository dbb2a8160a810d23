"""Plans of Muon against one device: what every rank gets, what travels, and who does what."""

from __future__ import annotations

import pickle
from functools import cache
from math import prod
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel import ConfigError, DeviceMesh, Layout, LayoutError, Partial, Shard, Topology
from hyper_parallel.core.muon import interpret as interpreting
from hyper_parallel.core.muon.matrices import split_rows, usual_view
from hyper_parallel.core.muon.newton_schulz import NewtonSchulz
from hyper_parallel.core.muon.parameters import MuonParameter, MuonPolicy
from hyper_parallel.core.muon.plan import MuonPlan, make_plan
from hyper_parallel.core.muon.schedule import Event, events
from hyper_parallel.core.plan.model import ITEM_BYTES
from tests.core.muon.plan_cases import (
    Outcome,
    draw_plan,
    interpreted,
    linear,
    newton_schulz,
    on_one_device,
    transformer,
    values_of,
)

seeds = st.integers(0, 10**9)
ROWS = {"shard": Shard(0)}


@cache
def drawn(seed: int) -> tuple[MuonPlan, list[np.ndarray], Outcome]:
    """A random plan, values, and what a step makes of them on all ranks."""
    plan = draw_plan(Random(seed).randint)
    values = values_of(plan)
    return plan, values, interpreted(plan, values, linear)


def plan_of(
    mesh: DeviceMesh, topology: Topology | None = None, policy: MuonPolicy | None = None, **layouts
) -> MuonPlan:
    """Of bfloat16 parameters by name: shape, placements and, where it is not the usual one, the view."""
    parameters = []
    for name, (shape, placements, *view) in layouts.items():
        layout = Layout(mesh, placements, shape)
        view = view[0] if view else usual_view(shape)
        parameters.append(MuonParameter(name, layout, view, "bfloat16", NewtonSchulz()))
    return make_plan(parameters, topology, policy)


def check_slices(plan: MuonPlan, values: list[np.ndarray], outcome: Outcome, function, skipped=(), **bounds) -> None:
    """Every rank has its slice of what one device gets, or, of what is skipped, what it had."""
    for index, (each, value) in enumerate(zip(plan.parameters, values)):
        expected = value if index in skipped else on_one_device(each.view, value, function)
        for rank in each.layout.mesh.ranks:
            found = outcome.shards[rank][index]
            np.testing.assert_allclose(found, each.layout.shard(expected, rank), **(bounds or {"rtol": 0, "atol": 0}))


# What every rank gets


@given(seeds)
@settings(max_examples=150, deadline=None)
def test_every_rank_gets_its_slice_of_what_one_device_gets(seed):
    check_slices(*drawn(seed), linear)


@given(seeds)
@settings(max_examples=30, deadline=None)
def test_so_it_is_for_newton_schulz(seed):
    plan = draw_plan(Random(seed).randint)
    random = np.random.default_rng(seed)
    values = [random.standard_normal(each.layout.shape) for each in plan.parameters]
    outcome = interpreted(plan, values, newton_schulz)
    # A batch may be computed in another order than a single matrix: some units in the last place of float64, times the
    # slope of the polynomials at 0, which is 485.
    check_slices(plan, values, outcome, newton_schulz, rtol=0, atol=1e-11)


@given(seeds)
@settings(max_examples=30, deadline=None)
def test_what_is_skipped_stays_as_it_is_and_disturbs_nobody(seed):
    plan = draw_plan(Random(seed).randint)
    values, skipped = values_of(plan), range(0, len(plan.parameters), 2)
    check_slices(plan, values, interpreted(plan, values, linear, skipped), linear, skipped)


# Who does what


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_every_matrix_is_orthogonalized_once_for_the_copies_that_share_work(seed):
    plan, _, outcome = drawn(seed)
    made = dict(outcome.traffic.computed)
    for index, each in enumerate(plan.parameters):
        kind = plan.kinds[plan.kind_of[index]]
        for number, matrix in enumerate(each.view.matrices):
            for plane in range(each.view.planes if prod(matrix.core_shape) else 0):
                clusters = [c for c in kind.clusters if kind.domain.counts[c.cell, :, plane, number].any()]
                ranks = made.pop((index, number, plane))
                assert len(ranks) == len(clusters)
                for cluster in clusters:
                    assert sum(rank in copy for copy in cluster.copies for rank in ranks) == 1
    assert not made
    assert sum(plan.computations.values()) == sum(map(len, outcome.traffic.computed.values()))


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_what_is_computed_again_is_computed_in_the_same_batches(seed):
    """So that it is the same bit for bit, whatever a batched product does with its neighbours."""
    plan = draw_plan(Random(seed).randint)
    company: dict[tuple, tuple] = {}
    for batch in (batch for rank in plan.ranks for batch in plan.program(rank).batches):
        for slot in batch.slots:
            assert company.setdefault(slot, batch.slots) == batch.slots


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_momentum_exists_once_for_the_copies_that_share_work(seed):
    plan = draw_plan(Random(seed).randint)
    expected = sum(
        int(kind.domain.cells[cluster.cell].counts.sum()) * ITEM_BYTES["float32"]
        for kind in (plan.kinds[number] for number in plan.kind_of)
        for cluster in kind.clusters
    )
    assert sum(plan.state_bytes.values()) == expected
    for rank in plan.ranks:
        assert sum(kept.numel for kept in plan.program(rank).kept) * ITEM_BYTES["float32"] == plan.state_bytes[rank]


@given(seeds, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_order_of_parameters_makes_no_difference(seed, random):
    plan = draw_plan(Random(seed).randint)
    parameters = list(plan.parameters)
    random.shuffle(parameters)
    other = make_plan(parameters, plan.topology, plan.policy)
    assert other == plan and other.fingerprint == plan.fingerprint
    for rank in plan.ranks:
        assert other.program(rank) == plan.program(rank)


def test_another_process_makes_the_same_of_a_plan():
    plan = draw_plan(Random(3).randint)
    other = pickle.loads(pickle.dumps(plan))
    assert other == plan and other.fingerprint == plan.fingerprint
    assert [other.program(rank) for rank in plan.ranks] == [plan.program(rank) for rank in plan.ranks]


@pytest.mark.parametrize("size", ["0.6B", "8B", "30B of experts"])
@pytest.mark.parametrize(
    "axes", [{"shard": 4}, {"shard": 16}, {"replicate": 2, "shard": 2}, {"replicate": 4, "shard": 4}]
)
def test_flops_and_momentum_are_even_for_sizes_in_use(size, axes):
    plan = make_plan(transformer(size, DeviceMesh.from_sizes(axes)))
    assert max(plan.imbalance.values()) <= 1.15


# What travels


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_bytes_by_axis_and_tier_are_those_that_the_plan_tells(seed):
    plan, _, outcome = drawn(seed)
    assert dict(outcome.traffic.bytes) == plan.bytes


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_along_one_axis_only_that_travels_which_the_owner_lacks(seed):
    plan, _, outcome = drawn(seed)
    straight = all(len(batch.hops) <= 1 for rank in plan.ranks for batch in plan.program(rank).batches)
    expected = 0
    for (index, matrix, plane), ranks in outcome.traffic.computed.items():
        each = plan.parameters[index]
        domain = plan.kinds[plan.kind_of[index]].domain
        size = 2 * ITEM_BYTES[each.settings.wire_dtype]
        for rank in ranks:
            cell, _, place = (int(where) for where in np.argwhere(domain.grid == rank)[0])
            counts = domain.counts[cell, :, plane, matrix]
            expected += size * int(counts.sum() - counts[place])
    sent = sum(count for (axis, _), count in outcome.traffic.bytes.items())
    published = sum(
        (len(cluster.copies) - 1) * int(kind.domain.cells[cluster.cell].counts.sum()) * ITEM_BYTES["float32"]
        for kind in (plan.kinds[number] for number in plan.kind_of)
        for cluster in kind.clusters
    )
    assert sent - published == expected if straight else sent - published >= expected


def test_even_shards_send_the_lower_bound():
    plan = plan_of(DeviceMesh((4,), ("shard",)), a=((64, 32), ROWS), b=((32, 64), ROWS))
    assert plan.bytes == {("shard", "fast"): 2 * (64 * 32 * 2 * 3 // 4) * 2}  # both ways, bfloat16, all but a quarter


def test_nothing_travels_along_the_axis_of_experts():
    mesh = DeviceMesh((2, 4), ("shard", "expert"))
    placements = {"expert": Shard(0), "shard": Shard(1)}
    plan = plan_of(mesh, up=((8, 6, 4), placements), whole=((8, 6, 4), {"expert": Shard(0)}))
    assert {axis for axis, _ in plan.bytes} == {"shard"}
    alone = plan_of(DeviceMesh((4,), ("expert",)), up=((8, 6, 4), {"expert": Shard(0)}))
    assert alone.bytes == {} and alone.computations == {"up": 8}


def test_complete_matrices_stay_where_they_are():
    heads = split_rows((12, 8), (4, 4, 4), ("query", "key", "value"))
    plan = plan_of(DeviceMesh((3,), ("tensor",)), qkv=((12, 8), {"tensor": Shard(0)}, heads))
    assert plan.bytes == {} and plan.computations == {"qkv": 3}


def test_under_the_canonical_mapping_nothing_is_sent_on_the_slow_tier():
    """Shards inside supernodes, replicas between them: all is computed again in each."""
    plan = make_plan(transformer("0.6B", DeviceMesh((2, 4), ("replicate", "shard"))), Topology.regular(8, 4))
    assert {tier for _, tier in plan.bytes} == {"fast"} and {axis for axis, _ in plan.bytes} == {"shard"}
    assert set(plan.computations.values()) == {2}


def test_momentum_is_divided_by_shards_and_by_the_replicas_of_a_supernode():
    mesh = DeviceMesh((4, 2), ("replicate", "shard"))
    layouts = {f"p{number}": ((8, 6), ROWS) for number in range(4)}
    whole = 4 * 8 * 6 * 4
    assert set(plan_of(mesh, Topology.regular(8, 8), **layouts).state_bytes.values()) == {whole // (2 * 4)}
    assert set(plan_of(mesh, Topology.regular(8, 4), **layouts).state_bytes.values()) == {whole // (2 * 2)}
    assert set(plan_of(mesh, Topology.regular(8, 2), **layouts).state_bytes.values()) == {whole // 2}
    everywhere = plan_of(mesh, None, MuonPolicy(replicas="everywhere"), **layouts)
    assert set(everywhere.state_bytes.values()) == {whole // 2} and {axis for axis, _ in everywhere.bytes} == {"shard"}


# The topology as it is


def test_permuted_ranks_share_work_with_those_of_their_supernode():
    topology = Topology((0, 0, 1, 1, 0, 0, 1, 1), (0, 0, 1, 1, 0, 0, 1, 1))
    plan = plan_of(DeviceMesh((4, 2), ("replicate", "shard")), topology, a=((8, 6), ROWS))
    copies = [cluster.copies for cluster in plan.kinds[0].clusters]
    assert copies == [((0, 1), (4, 5)), ((2, 3), (6, 7))]
    assert {tier for _, tier in plan.bytes} == {"fast"}
    assert "copies 0, 2 on the ranks 0, 1, 4, 5: supernode 0 (not neighbours in the mesh" in plan.describe()


def test_where_supernodes_hold_different_numbers_of_replicas_all_share_alike():
    mesh, topology = DeviceMesh((6, 1), ("replicate", "shard")), Topology((0, 0, 0, 0, 1, 1), (0, 0, 0, 0, 1, 1))
    plan = plan_of(mesh, topology, a=((8, 6), {}), b=((8, 6), {}))
    copies = [cluster.copies for cluster in plan.kinds[0].clusters]
    assert copies == [((0,), (1,)), ((2,), (3,)), ((4,), (5,))]
    assert "2 of which share work, although 4 are of one supernode" in plan.describe()


def test_a_machine_that_spans_two_shard_groups_is_told_and_refused():
    mesh, topology = DeviceMesh((2, 3), ("replicate", "shard")), Topology.regular(6, 2)
    with pytest.raises(ConfigError, match=r"the ranks 0, 1, 2 that hold pieces of one lie in the supernodes 0, 1"):
        plan_of(mesh, topology, a=((9, 6), ROWS))
    plan = plan_of(mesh, topology, MuonPolicy(slow_shard="hierarchical"), a=((9, 6), ROWS))
    assert [cluster.copies for cluster in plan.kinds[0].clusters] == [((0, 1, 2),), ((3, 4, 5),)]
    assert "machine 1 also of other subgroups" in plan.describe()


def test_a_piece_crosses_the_slow_tier_once_on_each_way_in_one_message_for_two_supernodes():
    mesh, topology = DeviceMesh((6,), ("shard",)), Topology.regular(6, 3)
    plan = plan_of(
        mesh, topology, MuonPolicy(slow_shard="hierarchical"), **{f"p{i}": ((12, 6), ROWS) for i in range(6)}
    )
    outcome = interpreted(plan, values_of(plan), linear)
    assert plan.bytes["shard across supernodes", "slow"] == 2 * 6 * (12 * 6 // 2) * 2  # the half that lies elsewhere
    slow = {
        (sender, receiver)
        for _, sender, receiver in outcome.traffic.elements
        if topology.supernodes[sender] != topology.supernodes[receiver]
    }
    assert slow == {(rank, (rank + 3) % 6) for rank in range(6)}


# Batches


def test_batches_are_of_one_shape_bounded_and_the_largest_come_first():
    mesh = DeviceMesh((2,), ("shard",))
    layouts = {f"small{i}": ((4, 6), ROWS) for i in range(5)}
    layouts |= {"wide": ((6, 8), ROWS), "tall": ((8, 6), ROWS)}
    plan = plan_of(mesh, None, MuonPolicy(batch_elements=2 * 24), complete=((2, 3), {}), **layouts)
    batches = plan.assignment.batches
    shapes = [batch.alike.shape for batch in batches]
    assert shapes == [(2, 3), (6, 8), (6, 8), (4, 6), (4, 6), (4, 6)]  # what is complete does not wait for pieces
    assert [len(blocks) for batch in batches for blocks in batch.blocks.values()] == [1, 1, 1, 2, 2, 1]


def test_a_step_in_order():
    steps = [" ".join(map(str, each)) for each in events(3)]
    assert steps == (
        "send 0, receive 0, send 1, compute 0, return 0, "
        "receive 1, send 2, compute 1, land 0, return 1, apply 0, publish 0, "
        "receive 2, compute 2, land 1, return 2, apply 1, publish 1, "
        "land 2, apply 2, publish 2, settle 2"
    ).split(", ")
    assert list(events(0)) == []


@pytest.mark.parametrize(
    "early, late", [("send 1", "receive 0"), ("return 1", "land 0"), ("receive 1", "send 1"), ("land 0", "return 0")]
)
def test_the_interpreter_notices_what_is_touched_in_flight(monkeypatch, early, late):
    plan = plan_of(DeviceMesh((2,), ("shard",)), a=((8, 6), ROWS), b=((4, 6), ROWS))

    def wrong(count: int) -> list[Event]:
        order = list(events(count))
        moved = next(each for each in order if " ".join(map(str, each)) == early)
        order.remove(moved)
        order.insert(next(i for i, each in enumerate(order) if " ".join(map(str, each)) == late), moved)
        return order

    interpreted(plan, values_of(plan), linear)
    monkeypatch.setattr(interpreting, "events", wrong)
    with pytest.raises((RuntimeError, AttributeError)):
        interpreted(plan, values_of(plan), linear)


def test_a_rank_of_many_meets_those_of_its_supernode_only():
    mesh = DeviceMesh((24, 8, 4), ("replicate", "shard", "expert"))
    plan = make_plan(transformer("30B of experts", mesh, layers=2), Topology.regular(768, 8, 4))
    program = plan.program(5)
    assert {rank for batch in program.batches for hop in batch.hops for rank in hop.group} <= set(range(32))
    assert set(plan.state_bytes.values()) == {plan.state_bytes[5]} and len(plan.flops) == 768


# What is wrong


def test_what_can_not_be_planned_is_refused():
    mesh = DeviceMesh((2,), ("shard",))
    layout, view, newton = Layout(mesh, ROWS, (4, 6)), usual_view((4, 6)), NewtonSchulz()
    with pytest.raises(ConfigError, match=r"w: its matrices are those of a tensor of shape \[6, 4\], but .* \[4, 6\]"):
        MuonParameter("w", layout, usual_view((6, 4)), "float32", newton)
    with pytest.raises(LayoutError, match=r"w: partial.* along 'shard' .* write Replicate\(\) or Shard\(dim\)"):
        MuonParameter("w", Layout(mesh, [Partial()], (4, 6)), view, "float32", newton)
    each = MuonParameter("w", layout, view, "float32", newton)
    with pytest.raises(ConfigError, match="w is named twice"):
        make_plan([each, each])
    with pytest.raises(LayoutError, match="rank 1 is not in the topology, which has 1 ranks"):
        make_plan([each], Topology.single_machine(1))
    with pytest.raises(LayoutError, match="rank 2 holds none of the 1 parameters"):
        make_plan([each]).program(2)
    for wrong in ({"slow_shard": "maybe"}, {"replicas": "some"}, {"batch_elements": 0}, {"batch_elements": 2.5}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is "):
            MuonPolicy(**wrong)


def test_a_plan_describes_itself():
    plan = plan_of(DeviceMesh((2, 2), ("replicate", "shard")), Topology.regular(4, 4), a=((8, 6), ROWS), b=((4, 4), {}))
    text = plan.describe()
    assert "Muon: 2 parameters with 2 matrices on 4 ranks" in text
    assert "1 matrix is cut along shard: one owner among 2 ranks for each" in text
    assert "pieces go to owners along shard; slices go back the same way" in text
    assert "buffers of rank 0: " in text and f"pieces {4 * 6 * 2} bytes" in text  # its rows, in bfloat16
    assert "along replicate: 2 copies, 2 of which share work; each matrix is orthogonalized 1 time" in text
    assert f"{plan.bytes['shard', 'fast']:,} bytes per step along shard on the fast tier" in text
    assert "1: 1 matrix of 6 x 8, direct in bfloat16, cut along shard; by rank" in text
    assert "a [8, 6]: momentum on 0, 1, orthogonalized on" in text
