"""Transitions, replayed for all ranks on numpy, against the oracle."""

import pickle
import re
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel import DeviceMesh, Layout, LayoutError, Partial, Replicate, Shard, Topology
from hyper_parallel.core.interpret import Traffic, interpret, interpret_gradient
from hyper_parallel.core.lowering import SLOW_COST
from hyper_parallel.core.placement import REDUCTIONS, RaggedShard, StridedShard, parse_placement
from hyper_parallel.core.topology import FAST, SLOW
from hyper_parallel.core.transition import Transition, lower
from tests.core import oracle
from tests.core.strategies import cases, pairs, topologies

SEEDS = st.integers(0, 99)


def is_exact(*layouts: Layout) -> bool:
    """Whether whole numbers stay whole numbers on the way."""
    return not any(placement == Partial("avg") for layout in layouts for placement in layout.placements)


def assert_equal(found: np.ndarray, expected: np.ndarray, exact: bool) -> None:
    """Sums of whole numbers are exact. A factor 1/k is rounded, and numbers here are below 1e5: 1e-9 is plenty."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=0 if exact else 1e-9)


def random_locals(layout: Layout, seed: int) -> list[np.ndarray]:
    """Whole numbers for every rank: copies agree, contributions don't."""
    random = np.random.default_rng(seed)
    return oracle.spread(
        layout, oracle.contributions(layout, lambda: random.integers(-9, 10, layout.shape).astype(np.float64))
    )


def check_values(transition: Transition, seed: int) -> Traffic:
    """Every rank ends with what the target says; returns what crossed on the way."""
    source, target, traffic = transition.source, transition.target, Traffic()
    locals_ = random_locals(source, seed)
    before = [local.copy() for local in locals_]
    results = interpret(transition, locals_, traffic)
    exact = is_exact(source, target)
    assert_equal(oracle.value(target, results), oracle.value(source, locals_), exact)
    assert_equal(target.assemble(results), source.assemble(locals_), exact)
    np.testing.assert_equal(locals_, before)
    return traffic


def by_tier(traffic: Traffic, topology: Topology) -> dict[str, int]:
    counts = {FAST: 0, SLOW: 0}
    for pair, count in traffic.elements.items():
        counts[topology.tier(pair)] += count
    return counts


def cost(counts: dict[str, int]) -> int:
    return counts[FAST] + SLOW_COST * counts[SLOW]


def gathering_everything(transition: Transition) -> dict[tuple[int, int], int]:
    """Elements by (sender, receiver) if the ranks that communicate sent each other all they have."""
    source, steps = transition.source, transition.steps
    axes = {axis for step in steps for axis in step.axes}
    if source.mesh != transition.target.mesh:
        axes = {axis for axis, each in zip(source.mesh.names, source.placements) if each != Replicate()}
        if oracle.axes_of(transition.target, Partial):  # one rank along the axis gets the value, perhaps from afar
            axes = set(source.mesh.names)
    return oracle.gathering_everything(source, axes)


# Values, traffic, cost


@cases("forward")
@given(pairs(), SEEDS)
def test_every_rank_ends_with_what_the_target_says(pair, seed):
    source, target = pair
    transition = lower(source, target)
    traffic = check_values(transition, seed)
    assert transition.bytes(1) == {FAST: traffic.total, SLOW: 0}
    assert transition.bytes(8) == {FAST: 8 * traffic.total, SLOW: 0}
    assert traffic.total <= sum(gathering_everything(transition).values())
    if not (oracle.axes_of(source, Partial) or oracle.axes_of(target, Partial)):
        assert traffic.total == oracle.lacking(source, target, source.mesh.ranks)


@cases("between meshes")
@given(pairs(same_mesh=False), SEEDS)
def test_a_tensor_moves_to_another_mesh_over_the_same_ranks(pair, seed):
    source, target = pair
    transition = lower(source, target)
    traffic = check_values(transition, seed)
    assert transition.bytes(1) == {FAST: traffic.total, SLOW: 0}
    assert traffic.total <= sum(gathering_everything(transition).values())
    if not (oracle.axes_of(source, Partial) or oracle.axes_of(target, Partial)):
        assert traffic.total == oracle.lacking(source, target, source.mesh.ranks)


@cases("tiers")
@given(pairs() | pairs(same_mesh=False), SEEDS, st.data())
def test_a_topology_makes_a_transition_cheaper(pair, seed, data):
    source, target = pair
    topology = data.draw(topologies(source.mesh.ranks))
    transition = lower(source, target, topology)
    counts = by_tier(check_values(transition, seed), topology)
    assert transition.bytes(1) == transition.bytes(1, topology) == counts
    assert cost(counts) <= cost(lower(source, target).bytes(1, topology))
    assert cost(counts) <= cost(by_tier(Traffic(gathering_everything(transition)), topology))


# Gradients


@cases("gradient")
@given(pairs() | pairs(dual=True) | pairs(same_mesh=False), SEEDS, st.data())
def test_a_gradient_comes_back_as_the_source_says(pair, seed, data):
    source, target = pair
    topology = data.draw(st.none() | topologies(source.mesh.ranks))
    transition, traffic = lower(source, target, topology), Traffic()
    locals_, gradients = random_locals(source, seed), random_locals(target.gradient, seed + 1)
    found = interpret_gradient(transition, locals_, gradients, traffic)
    exact = is_exact(source, target) and transition.extremum is None  # ties share: thirds
    assert_equal(oracle.value(source.gradient, found), oracle.value(target.gradient, gradients), exact)
    assert sum(transition.conjugate.bytes(1).values()) == traffic.total


def product_of(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    return sum(float(np.sum(left * right)) for left, right in zip(one, other))


@cases("adjoint")
@given(
    pairs(source_ops=["sum"], target_ops=["sum"])
    | pairs(source_ops=["sum"], target_ops=["sum"], dual=True)
    | pairs(source_ops=["sum"], target_ops=["sum"], same_mesh=False),
    SEEDS,
)
def test_conjugates_are_adjoint(pair, seed):
    """The inner product over all ranks is the same before and after. Copies whose gradients are copies too are counted
    once; where every copy has a partial gradient that is no correction at all."""
    source, target = pair
    transition = lower(source, target)
    locals_, gradients = random_locals(source, seed), random_locals(target.gradient, seed + 1)
    after = product_of(interpret(transition, locals_), gradients)
    before = product_of(locals_, interpret_gradient(transition, locals_, gradients))
    assert before * oracle.logical_copies(target) == after * oracle.logical_copies(source)


@cases("derivative")
@given(st.data(), SEEDS)
def test_gradients_are_derivatives(data, seed):
    """Of an average, a maximum and a minimum too. The loss is nudged along a random direction of all contributions.
    They differ by at least one and move by an eighth at most, so that no other becomes the largest."""
    ops = data.draw(st.sampled_from([["avg"], ["max"], ["min"], ["sum", "avg"]]))
    source, target = data.draw(pairs(source_ops=ops, target_ops=["sum"]))
    transition, random = lower(source, target), np.random.default_rng(seed)
    places = list(oracle.contributions(source, lambda: None))
    start = np.argsort(random.random((len(places), *source.shape)), axis=0).astype(np.float64)
    direction = random.integers(-1, 2, start.shape) * 1.0
    cotangent = random.integers(-9, 10, source.shape) * 1.0

    def loss(parts: np.ndarray) -> float:
        results = interpret(transition, oracle.spread(source, dict(zip(places, parts))))
        return float(np.sum(oracle.value(target, results) * cotangent))

    gradients = oracle.spread(target.gradient, split_up(target.gradient, cotangent, random))
    found = interpret_gradient(transition, oracle.spread(source, dict(zip(places, start))), gradients)
    apart = oracle.axes_of(source, Partial)
    by_place = oracle.reduced(source.gradient, oracle.collect(source.gradient, found, apart), apart)
    slope = sum(float(np.sum(by_place[place] * toward)) for place, toward in zip(places, direction))
    # Linear, so that a large step is as good as a small one; 1e-6 is the rounding of sums of a few thousand terms.
    assert loss(start + direction / 8) - loss(start) == pytest.approx(slope / 8, rel=0, abs=1e-6)


def split_up(layout: Layout, array: np.ndarray, random: np.random.Generator) -> dict:
    """Contributions whose sum is the array."""
    parts = oracle.contributions(layout, lambda: random.integers(-9, 10, array.shape) * 1.0)
    first = next(iter(parts))
    parts[first] = array - sum(part for place, part in parts.items() if place != first)
    return parts


# Optima that are known


def layouts_of(mesh: DeviceMesh, shape, source: str, target: str) -> tuple[Layout, Layout]:
    """Two layouts from the text of their placements, with "; " between axes."""
    return tuple(Layout(mesh, [parse_placement(each) for each in side.split("; ")], shape) for side in (source, target))


def kinds(steps) -> list[str]:
    return [step.kind for step in steps]


K, N = 4, 64 * 32


@pytest.mark.parametrize(
    "source, target, expected, received",
    [
        ("shard(0)", "shard(1)", ["all_to_all"], (K - 1) * N // K**2),
        ("shard(1)", "shard(0)", ["all_to_all"], (K - 1) * N // K**2),
        ("partial", "shard(0)", ["reduce_scatter"], (K - 1) * N // K),
        ("partial", "shard(1)", ["reduce_scatter"], (K - 1) * N // K),
        ("partial", "replicate", ["all_reduce"], 2 * (K - 1) * N // K),
        ("partial(avg)", "replicate", ["all_reduce"], 2 * (K - 1) * N // K),
        ("shard(0)", "replicate", ["all_gather"], (K - 1) * N // K),
        ("shard(1)", "replicate", ["all_gather"], (K - 1) * N // K),
        ("ragged_shard([0], [1, 1, 0, 2])", "replicate", ["all_gather"], None),
        ("replicate", "shard(0)", ["slice"], 0),
        ("replicate", "ragged_shard([0, 1], [1, 1, 0, 2])", ["slice"], 0),
        ("replicate", "partial", ["pad"], 0),
        ("replicate", "partial(avg)", ["slice"], 0),
        ("shard(0)", "partial", ["pad"], 0),
        ("partial", "partial(avg)", ["scale"], 0),
        ("strided_shard(0, 2)", "shard(0)", ["all_to_all"], None),
        ("ragged_shard([0], [1, 1, 1, 1])", "shard(0)", ["slice"], 0),
        ("shard(0)", "shard(0)", [], 0),
        ("partial(max)", "partial(max)", [], 0),
    ],
)
def test_the_best_way_along_one_axis_is_taken(source, target, expected, received):
    mesh = DeviceMesh((K,), ("tensor",))
    transition = lower(*layouts_of(mesh, (64, 32), source, target))
    assert kinds(transition.steps) == expected
    if received is not None:
        assert transition.bytes(1)["fast"] == K * received
    check_values(transition, seed=1)


@pytest.mark.parametrize(
    "source, target, expected, fast, slow",
    [
        ("shard(0); shard(0)", "replicate; replicate", None, 6 * N, N),
        ("shard(0); shard(0)", "shard(0); replicate", ["all_gather"], 3 * N, 0),
        ("shard(0); strided_shard(0, 1)", "shard(0); replicate", ["all_gather"], 3 * N, 0),
        ("strided_shard(0, 4); shard(0)", "replicate; shard(0)", ["all_gather"], 0, N),
        ("partial; partial", "shard(0); replicate", None, None, N),
        ("partial; partial", "shard(0); shard(0)", ["reduce_scatter", "reduce_scatter"], 6 * N, N),
        ("partial; partial", "replicate; replicate", ["reduce_scatter", "all_reduce", "all_gather"], 12 * N, 2 * N),
        ("partial; shard(0)", "replicate; shard(0)", ["all_reduce"], 0, 2 * N),
        ("partial; shard(0)", "shard(1); shard(0)", ["reduce_scatter"], 0, N),
        ("replicate; partial", "replicate; shard(1)", ["reduce_scatter"], 6 * N, 0),
        ("partial; replicate", "replicate; shard(0)", ["slice", "all_reduce"], 0, 2 * N),
        ("partial; replicate", "replicate; replicate", ["slice", "all_reduce", "all_gather"], 6 * N, 2 * N),
    ],
)
def test_the_slow_tier_carries_as_little_as_can_be(source, target, expected, fast, slow):
    """The outer axis lies across supernodes. Sums of two supernodes send N over the slow tier if each keeps a half of
    the result, gathers and all-reduces accordingly."""
    mesh, topology = DeviceMesh((2, 4), ("replicate", "shard")), Topology.regular(8, 4)
    transition = lower(*layouts_of(mesh, (64, 32), source, target), topology)
    counts = transition.bytes(1)
    assert expected is None or kinds(transition.steps) == expected
    assert counts[SLOW] == slow and (fast is None or counts[FAST] == fast)
    check_values(transition, seed=2)


def test_a_gather_across_supernodes_brings_every_element_once_to_each():
    mesh, topology = DeviceMesh((2, 4), ("replicate", "shard")), Topology.regular(8, 4)
    source, target = layouts_of(mesh, (64, 32), "shard(0); shard(0)", "replicate; replicate")
    needed = sum(oracle.lacking(source, target, ranks, apart=False) for ranks in (range(4), range(4, 8)))
    assert lower(source, target, topology).bytes(1)[SLOW] == needed


@pytest.mark.parametrize("op", REDUCTIONS)
def test_what_stays_pending_is_left_alone_and_so_is_its_gradient(op):
    layout = Layout(DeviceMesh((2, 2), ("shard", "tensor")), [Replicate(), Partial(op)], (8,))
    transition = lower(layout, layout.with_placements([Shard(0), Partial(op)]))
    assert (kinds(transition.steps), kinds(transition.gradient_steps)) == (["slice"], ["all_gather"])
    assert transition.gradient_steps[0].axes == ("shard",)


def test_copies_are_cut_before_they_are_summed():
    mesh = DeviceMesh((2, 4), ("replicate", "shard"))
    transition = lower(*layouts_of(mesh, (64, 32), "partial; replicate", "replicate; shard(0)"))
    assert (kinds(transition.steps), transition.bytes(1)[FAST]) == (["slice", "all_reduce"], 2 * N)


def test_two_axes_change_one_dim_in_one_exchange():
    mesh = DeviceMesh((2, 2), ("shard", "tensor"))
    transition = lower(*layouts_of(mesh, (8,), "strided_shard(0, 2); shard(0)", "shard(0); shard(0)"))
    assert len(transition.steps) == 1 and transition.bytes(1) == {FAST: 4, SLOW: 0}


def test_a_mesh_with_other_names_for_the_same_axes_moves_nothing():
    source = Layout(DeviceMesh((2, 2), ("shard", "tensor")), [Shard(0), Shard(1)], (4, 4))
    target = Layout(DeviceMesh((2, 1, 2), ("replicate", "shard", "context")), [Shard(0), Partial(), Shard(1)], (4, 4))
    assert lower(source, target).steps == ()


def test_the_nearest_copy_sends_between_meshes():
    source = Layout(DeviceMesh((2, 2), ("replicate", "shard")), [Replicate(), Shard(0)], (4,))
    target = Layout(DeviceMesh((4,), ("shard",), ranks=(1, 0, 3, 2)), [Replicate()], (4,))
    assert lower(source, target, Topology.regular(4, 2)).bytes(1) == {FAST: 8, SLOW: 0}


# Ways to lose a value, and to count it twice


MESH = DeviceMesh((4,), ("tensor",))


def test_partial_replicate_and_partial_again_keep_the_value():
    partial, whole = Layout(MESH, [Partial()], (5,)), Layout(MESH, [Replicate()], (5,))
    locals_ = random_locals(partial, seed=3)
    again = interpret(lower(whole, partial), interpret(lower(partial, whole), locals_))
    np.testing.assert_array_equal(oracle.value(partial, again), oracle.value(partial, locals_))


def test_a_bias_added_to_a_partial_sum_is_counted_once():
    partial, whole = Layout(MESH, [Partial()], (5,)), Layout(MESH, [Replicate()], (5,))
    products, bias = random_locals(partial, seed=4), np.arange(5.0)
    summands = interpret(lower(whole, partial), [bias] * 4)
    total = oracle.value(partial, [product + summand for product, summand in zip(products, summands)])
    np.testing.assert_array_equal(total, oracle.value(partial, products) + bias)


@pytest.mark.parametrize("op", REDUCTIONS)
def test_a_replicated_value_may_become_any_pending_reduction(op):
    whole = Layout(MESH, [Replicate()], (5,))
    check_values(lower(whole, whole.with_placements([Partial(op)])), seed=5)


def test_ties_share_the_gradient_of_a_maximum():
    source, target = Layout(MESH, [Partial("max")], (2,)), Layout(MESH, [Replicate()], (2,))
    locals_ = [np.array(each) for each in ([1.0, 5.0], [3.0, 5.0], [3.0, 5.0], [2.0, 5.0])]
    found = interpret_gradient(lower(source, target), locals_, [np.array([8.0, 4.0])] * 4)
    assert [each.tolist() for each in found] == [[0, 1], [4, 1], [4, 1], [0, 1]]


def test_five_rows_survive_a_walk_over_four_ranks():
    here = Layout(MESH, [Shard(0)], (5, 3))
    locals_, expected = random_locals(here, seed=6), None
    for placement in (Shard(-1), RaggedShard((0, 1), (0, 3, 1, 1)), Partial(), StridedShard(0, 3), Replicate()):
        there = here.with_placements([placement])
        expected = oracle.value(here, locals_) if expected is None else expected
        here, locals_ = there, interpret(lower(here, there), locals_)
        np.testing.assert_array_equal(oracle.value(here, locals_), expected)


def test_a_part_of_a_mesh_is_a_mesh():
    whole = DeviceMesh((2, 3), ("replicate", "shard"))
    for rank in (1, 4):
        part = whole.submesh(("shard",), rank)
        check_values(lower(Layout(part, [Shard(0)], (5,)), Layout(part, [Replicate()], (5,))), seed=7)


# The object


def test_a_transition_is_made_once_and_is_a_value():
    def make() -> Transition:
        return lower(Layout(MESH, [Partial()], (8, 3)), Layout(MESH, [Shard(1)], (8, 3)), Topology.regular(4, 2))

    transition = make()
    assert make() is transition
    copy = pickle.loads(pickle.dumps(transition))
    assert copy == transition and copy.program(2) == transition.program(2)
    assert str(transition).splitlines()[1].startswith("  reduce_scatter along tensor: [8, 3] on (tensor: partial)")


def test_steps_form_a_chain():
    source, target = layouts_of(
        DeviceMesh((2, 4), ("replicate", "shard")), (64, 32), "partial; partial", "shard(0); replicate"
    )
    steps = lower(source, target, Topology.regular(8, 4)).steps
    assert (steps[0].before, steps[-1].after) == (source, target)
    assert [step.before for step in steps[1:]] == [step.after for step in steps[:-1]]


def test_copies_on_a_rank_are_counted():
    whole, rows, columns = (Layout(MESH, [placement], (64, 32)) for placement in (Replicate(), Shard(0), Shard(1)))

    def copied(source: Layout, target: Layout) -> int:
        return lower(source, target).program(1).copied

    assert copied(rows, whole) == 0  # gathered into its place
    assert copied(columns, whole) == N  # joined
    assert copied(whole, rows) == N // K
    assert copied(rows, rows) == 0
    assert copied(whole.with_placements([Partial()]), rows) == 0  # sent as it lies


@pytest.mark.parametrize(
    "target, message",
    [
        (
            Layout(MESH, [Replicate()], (4,)),
            "a transition keeps the shape: found [8, 3] in the source and [4] in the target",
        ),
        (
            Layout(DeviceMesh((2,), ("shard",)), [Replicate()], (8, 3)),
            "a transition stays among the same ranks: the source mesh tensor=4 has [0, 1, 2, 3], "
            "the target mesh shard=2 has [0, 1]",
        ),
    ],
)
def test_layouts_that_do_not_belong_together_are_refused(target, message):
    with pytest.raises(LayoutError, match=re.escape(message)):
        lower(Layout(MESH, [Shard(0)], (8, 3)), target)


def test_wrong_local_arrays_are_refused():
    transition = lower(Layout(MESH, [Shard(0)], (5,)), Layout(MESH, [Replicate()], (5,)))
    with pytest.raises(LayoutError, match="the mesh tensor=4 has 4 ranks, found 3 local arrays"):
        interpret(transition, [np.zeros(2)] * 3)
    with pytest.raises(LayoutError, match=r"rank 2 holds a local array of shape \(1,\) by .*, found \(2,\)"):
        interpret(transition, [np.zeros(2)] * 4)
    with pytest.raises(LayoutError, match=r"rank 0 holds a local array of shape \(5,\) by .*, found \(2,\)"):
        interpret_gradient(transition, [np.zeros(size) for size in (2, 2, 1, 0)], [np.zeros(2)] * 4)


def test_lowering_does_not_count_elements():
    huge = 10**12
    mesh = DeviceMesh((2, 4), ("shard", "tensor"))
    transition = lower(*layouts_of(mesh, (huge, huge), "shard(0); shard(1)", "replicate; shard(0)"))
    assert transition.bytes(2)[FAST] == 2 * (
        8 * huge * huge // 4 - sum(transition.steps[0].sends(r, r) for r in range(8))
    )
    assert prod(transition.program(3).target_shape) == huge * huge // 4


def test_a_part_becomes_an_average_without_travelling():
    mesh = DeviceMesh((K,), ("tensor",))
    transition = lower(*layouts_of(mesh, (64, 32), "shard(0)", "partial(avg)"))
    assert (kinds(transition.steps), transition.bytes(1)["fast"]) == (["pad", "scale"], 0)
    check_values(transition, seed=1)


def test_a_reduction_over_one_rank_says_nothing_about_the_others():
    mesh = DeviceMesh((1, 2), ("shard", "tensor"))
    locals_ = [np.array([1.0, 2.0]), np.array([3.0, 0.0])]
    assert list(Layout(mesh, [Partial(), Partial("max")], (2,)).assemble(locals_)) == [3.0, 2.0]
    assert list(Layout(mesh, [Partial("max"), Partial()], (2,)).assemble(locals_)) == [4.0, 2.0]


def test_the_shares_of_a_maximum_that_is_no_number_are_those_of_a_tie():
    mesh = DeviceMesh((2,), ("tensor",))
    transition = lower(Layout(mesh, [Partial("max")], (2,)), Layout(mesh, [Replicate()], (2,)))
    locals_ = [np.array([np.nan, 1.0]), np.array([np.nan, 2.0])]
    gradients = [np.array([4.0, 4.0])] * 2
    found = interpret_gradient(transition, locals_, gradients)
    assert [list(each) for each in found] == [[2.0, 0.0], [2.0, 4.0]]


def test_lowering_does_not_look_at_pairs_of_ranks():
    """What is counted is asked once for each rank, also where a topology tells tiers apart."""
    mesh, topology = DeviceMesh((512,), ("shard",)), Topology.regular(512, 16)
    for source, target in (("shard(0)", "replicate"), ("partial", "shard(1)"), ("partial(max)", "replicate")):
        transition = lower(*layouts_of(mesh, (1024, 1024), source, target), topology)
        for step in transition.steps:
            assert not step.__dict__.get("_wire"), "moves are for programs"
        moved = transition.bytes(1, topology)
        within = 15 / 511  # of the partners of a rank, those in its supernode
        assert moved["fast"] == pytest.approx(within * sum(moved.values()))
