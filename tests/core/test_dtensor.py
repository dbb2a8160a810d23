"""What distributed tensors decide without a framework: how sides of an operation lie, and the shape of the whole."""

import subprocess
import sys
from math import prod

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hyper_parallel as hp
from hyper_parallel import ConfigError, DeviceMesh, Layout, LayoutError, Partial, RaggedShard, Replicate, Shard, lower
from hyper_parallel.core.arithmetic import arrange
from hyper_parallel.core.distribute import global_shape
from hyper_parallel.core.interpret import interpret, interpret_gradient
from tests.core.arithmetic_cases import (
    BY_LEFT,
    BY_RIGHT,
    OPERATIONS,
    contributions,
    draw_sides,
    pending_axes,
    some_value,
    summed_to,
)
from tests.core.strategies import draw_mesh, layouts
from tests.pool import REPOSITORY

MESH = DeviceMesh((4,), ("tensor",))
R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def layout(placements, shape, mesh=MESH, **gradient):
    return Layout(mesh, placements, shape, gradient)


def tried(times):
    return settings(max_examples=times, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# Arithmetic, against numpy


def some_gradient(result, random):
    """Local gradients of a result: anything where it is pending, equal shares where an average is."""
    averaged = [axis for axis, each in zip(result.mesh.names, result.placements) if each == Partial("avg")]
    pending = [
        axis
        for axis, each, gradient in zip(result.mesh.names, result.placements, result.gradient_placements)
        if each == Replicate() and gradient == Partial()
    ]
    shares = prod(result.mesh.axis_size(axis) for axis in averaged)
    return [local / shares for local in contributions(result.gradient, random, pending)]


def expected_refusal(symbol, left, right):
    """Part of the message with which an operation is refused, if it has to be."""
    pending = [{axis for axis in pending_axes(each) if each.mesh.axis_size(axis) > 1} for each in (left, right)]
    if symbol == "*" and pending[0] & pending[1]:
        return "a product of sums is no sum of products"
    return "nothing can be divided by a value that is still pending" if symbol == "/" and pending[1] else None


@tried(1500)
@given(st.randoms(use_true_random=False), st.sampled_from("+-*/"))
def test_arithmetic_is_that_of_the_whole_tensors_and_so_are_its_gradients(chance, symbol):
    draw = chance.randint
    random = np.random.default_rng(draw(0, 2**32))
    mesh = draw_mesh(draw)
    left, right = draw_sides(draw, mesh)
    refusal = expected_refusal(symbol, left, right)
    try:
        arrangement = arrange(symbol, left, right)
    except LayoutError as error:
        ragged = any(
            isinstance(each, RaggedShard) and len(each.dims) > 1 for each in left.placements + right.placements
        )
        assert (refusal or "can't repeat a tensor") in str(error) and (refusal or ragged)
        return
    assert refusal is None
    result = arrangement.result
    assert arrangement.left.shape == left.shape and arrangement.right.shape == right.shape

    locals_ = some_value(left, random), some_value(right, random)
    transitions = lower(left, arrangement.left), lower(right, arrangement.right)
    ours, theirs = (interpret(*each) for each in zip(transitions, locals_))
    found = result.assemble([OPERATIONS[symbol](*sides) for sides in zip(ours, theirs)])
    wholes = left.assemble(locals_[0]), right.assemble(locals_[1])
    expected = OPERATIONS[symbol](*wholes)
    # Quotients and averages are rounded, in another order: by some ulps of the operands, also where they cancel.
    largest = max(np.abs(each).max(initial=0.0) for each in wholes)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15 * 8 * largest)

    gradients = some_gradient(result, random)
    gradient = result.gradient.assemble(gradients)
    for side, derivative in enumerate((BY_LEFT[symbol], BY_RIGHT[symbol])):
        source, target = transitions[side].source, transitions[side].target
        own = [
            summed_to(local * derivative(*sides), target.local_shape(rank))
            for rank, local, *sides in zip(mesh.ranks, gradients, ours, theirs)
        ]
        back = source.gradient.assemble(interpret_gradient(transitions[side], locals_[side], own))
        whole = summed_to(gradient * derivative(*wholes), source.shape)
        # Terms of both signs are added in another order, up to a few thousand of size below 2500.
        np.testing.assert_allclose(back, whole, rtol=1e-12, atol=1e-8)


# Arithmetic, the cases that matter


@pytest.mark.parametrize("symbol", "+-")
def test_a_bias_is_added_to_a_pending_sum_once(symbol):
    left, right, result = arrange(symbol, layout([P], (6, 8)), layout([R], (8,)))
    assert (left.placements, right.placements, result.placements) == ((P,), (P,), (P,))


def test_a_bias_beside_sharded_rows_has_a_pending_gradient():
    for gradient in ({}, {"tensor": P}):
        arrangement = arrange("+", layout([S0], (6, 8)), layout([R], (8,), **gradient))
        assert arrangement.right == layout([R], (8,), tensor=P)
        assert arrangement.result == layout([S0], (6, 8))


def test_a_replicated_side_is_cut_for_free():
    for one, other in (([R], [S1]), ([S1], [R])):
        arrangement = arrange("*", layout(one, (6, 8)), layout(other, (6, 8)))
        assert {each.placements for each in arrangement} == {(S1,)}
    assert arrange("+", layout([S1], (6, 8)), layout([R], (8,))).right.placements == (S0,)


def test_of_two_shards_the_left_one_stays():
    assert {each.placements for each in arrange("+", layout([S1], (6, 8)), layout([S0], (6, 8)))} == {(S1,)}


def test_shards_on_different_axes_stand_together():
    mesh = DeviceMesh((2, 2), ("shard", "tensor"))
    left, right, result = arrange("+", layout([S0, R], (6, 8), mesh), layout([R, S0], (8,), mesh))
    assert (left.placements, result.placements) == ((S0, S1), (S0, S1))
    assert right == layout([R, S0], (8,), mesh, shard=P)


def test_shards_that_exclude_each_other_are_those_of_the_left_side():
    mesh = DeviceMesh((2, 2), ("shard", "tensor"))
    ragged = RaggedShard((0,), (1, 3))
    assert arrange("+", layout([ragged, R], (6,), mesh), layout([R, S0], (6,), mesh)).result.placements == (ragged, R)
    assert arrange("+", layout([R, S0], (6,), mesh), layout([ragged, R], (6,), mesh)).result.placements == (R, S0)


def test_a_sharded_dim_of_one_element_is_gathered_before_it_is_repeated():
    left, right, result = arrange("*", layout([S0], (1, 8)), layout([R], (6, 8)))
    assert (left.placements, right.placements, result.placements) == ((R,), (R,), (R,))


def test_the_factor_of_a_pending_sum_has_a_pending_gradient():
    left, right, result = arrange("*", layout([P], (6, 8)), layout([R], (8,)))
    assert (left.placements, result.placements) == ((P,), (P,)) and right == layout([R], (8,), tensor=P)


def test_pending_sums_along_different_axes_may_be_multiplied():
    mesh = DeviceMesh((2, 2), ("shard", "tensor"))
    assert arrange("*", layout([P, R], (8,), mesh), layout([R, P], (8,), mesh)).result.placements == (P, P)


def test_the_gradient_of_a_result_is_pending_where_both_sides_ask_for_it():
    pending, done = layout([R], (8,), tensor=P), layout([R], (8,))
    assert arrange("+", pending, pending).result == pending
    assert arrange("+", pending, done).result == done and arrange("+", pending, done).left == done


def test_an_axis_of_size_one_is_no_obstacle():
    mesh = DeviceMesh((1, 4), ("shard", "tensor"))
    largest = layout([Partial("max"), S0], (8,), mesh)
    assert arrange("*", largest, largest).result.placements == (R, S0)


@pytest.mark.parametrize(
    ("symbol", "left", "right", "says"),
    [
        ("*", [P], [P], r"axis 'tensor': partial \* partial can't be computed from the parts"),
        ("+", [Partial("max")], [R], r"axis 'tensor': \+ is not defined while partial\(max\) is pending"),
        ("-", [R], [Partial("min")], r"axis 'tensor': - is not defined while partial\(min\) is pending"),
        ("/", [R], [P], "axis 'tensor': nothing can be divided by a value that is still pending as partial"),
        ("/", [P], [Partial("avg")], r"still pending as partial\(avg\)"),
    ],
)
def test_what_is_not_linear_is_refused(symbol, left, right, says):
    with pytest.raises(LayoutError, match=says) as refusal:
        arrange(symbol, layout(left, (8,)), layout(right, (8,)))
    assert "redistribute" in str(refusal.value)


def test_shapes_and_meshes_have_to_fit():
    with pytest.raises(LayoutError, match=r"the shapes \[6, 8\] and \[6\] do not fit"):
        arrange("+", layout([R], (6, 8)), layout([R], (6,)))
    with pytest.raises(LayoutError, match="on one mesh, found tensor=4 and tensor=4 over the ranks 3, 2, 1, 0"):
        arrange("+", layout([R], (6,)), layout([R], (6,), DeviceMesh((4,), ("tensor",), ranks=(3, 2, 1, 0))))
    with pytest.raises(LayoutError, match=r"can't repeat a tensor of shape \[1, 8\] along the dims that ragged_shard"):
        arrange("+", layout([RaggedShard((0, 1), (1, 0, 2, 1))], (6, 8)), layout([R], (1, 8)))


# The shape of the whole


@tried(500)
@given(layouts())
def test_local_shapes_tell_the_global_shape(whole):
    shapes = {rank: whole.local_shape(rank) for rank in whole.mesh.ranks}
    if any(isinstance(each, RaggedShard) and len(each.dims) > 1 for each in whole.placements):
        with pytest.raises(LayoutError, match="do not tell the sizes of the dims that ragged_shard.*pass shape="):
            global_shape(whole.mesh, whole.placements, shapes)
    else:
        assert global_shape(whole.mesh, whole.placements, shapes) == whole.shape


def test_one_local_shape_is_enough_where_nothing_is_sharded():
    assert global_shape(MESH, [P], {2: (3, 5)}) == (3, 5)
    assert global_shape(MESH, {}, {2: ()}) == ()
    with pytest.raises(LayoutError, match=r"the size of dim 1 under shard\(1\); pass shape=, or leave run_check on"):
        global_shape(MESH, [Shard(-1)], {2: (3, 5)})


def test_most_ranks_are_right():
    assert global_shape(MESH, [R], {0: (2, 5), 1: (3, 5), 2: (3, 5), 3: (3, 5)}) == (3, 5)
    with pytest.raises(LayoutError, match=r"rank 0 gives a local tensor of shape \(15,\), others have 2 dims"):
        global_shape(MESH, [R], {0: (15,), 1: (3, 5), 2: (3, 5), 3: (3, 5)})


# Without a job


def test_importing_distributed_tensors_imports_no_framework():
    code = "import sys; from hyper_parallel import DTensor, zeros; print({'torch', 'mindspore'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert done.stdout.strip() == "set()", done.stderr


def test_factories_need_a_backend_that_has_joined():
    with pytest.raises(ConfigError, match="no backend has joined: call hyper_parallel.initialize"):
        hp.zeros(2, 3, device_mesh=MESH, placements=[S0])


def test_what_is_no_tensor_is_refused():
    with pytest.raises(ConfigError, match="not a tensor: found numpy.ndarray, expected a torch.Tensor or"):
        hp.DTensor.from_local(np.zeros(3), MESH, [S0])
    with pytest.raises(ConfigError, match="dropout takes a distributed tensor, found ndarray"):
        hp.dropout(np.zeros(3))
