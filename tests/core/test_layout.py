"""Layouts against an oracle that cuts arrays up the slow way."""

import pickle
import re
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel import DeviceMesh, Layout, LayoutError, Partial, Replicate, Shard
from hyper_parallel.core.mesh import AXES
from hyper_parallel.core.placement import RaggedShard, StridedShard
from tests.core import oracle
from tests.core.strategies import CASES, cases, layouts
from tests.work import work


def test_at_least_twenty_thousand_random_cases_are_tried():
    assert sum(CASES.values()) >= 20_000


# Against the oracle


def numbers_of(layout, rank):
    """The numbers of the global elements in the local tensor, from the layout's pieces."""
    local = np.full(layout.local_shape(rank), -1).reshape(-1)
    numbers = np.arange(prod(layout.shape)).reshape(layout.shape)
    for box, start, strides in layout.pieces(rank):
        for inside in np.ndindex(*(part.stop - part.start for part in box)):
            position = start + sum(at * stride for at, stride in zip(inside, strides))
            assert local[position] == -1, "two pieces overlap"
            local[position] = numbers[tuple(part.start + at for part, at in zip(box, inside))]
    return local.reshape(layout.local_shape(rank))


@cases("what a rank holds")
@given(layouts(), st.data())
def test_a_rank_holds_what_the_definitions_say(layout, data):
    ranks = layout.mesh.ranks
    rank, other = (ranks[data.draw(st.integers(0, len(ranks) - 1))] for _ in range(2))
    expected = oracle.indices(layout, rank)
    assert layout.local_shape(rank) == expected.shape and layout.local_numel(rank) == expected.size
    np.testing.assert_array_equal(numbers_of(layout, rank), expected)
    boxes = layout.boxes(rank)
    assert [piece.box for piece in layout.pieces(rank)] == boxes
    if len(boxes) > 1:
        with pytest.raises(LayoutError, match=re.escape(f"rank {rank} holds {len(boxes)} boxes of {layout}")):
            layout.slices(rank)
    else:
        numbers = np.arange(prod(layout.shape)).reshape(layout.shape)
        np.testing.assert_array_equal(numbers[layout.slices(rank)].reshape(expected.shape), expected)
    replicated = oracle.axes_of(layout, Replicate)
    same = all(
        one == another
        for axis, (one, another) in enumerate(zip(oracle.place_of(layout, rank), oracle.place_of(layout, other)))
        if axis not in replicated
    )
    assert (other in layout.copies(rank)) == same
    assert len(layout.copies(rank)) == prod(layout.mesh.shape[axis] for axis in replicated)


@cases("arrays")
@given(layouts(), st.integers(0, 9))
def test_arrays_are_sharded_and_assembled(layout, seed):
    random = np.random.default_rng(seed)
    array = random.integers(1, 100, layout.shape).astype(np.float64)
    shards = [layout.shard(array, rank) for rank in layout.mesh.ranks]
    np.testing.assert_array_equal(oracle.value(layout, shards), array)
    np.testing.assert_array_equal(layout.assemble(shards), array)
    # Multiples of the mesh's size: averages of them are whole numbers, whatever is averaged first.
    parts = oracle.contributions(layout, lambda: random.integers(-9, 9, layout.shape) * float(layout.mesh.size))
    locals_ = oracle.spread(layout, parts)
    np.testing.assert_array_equal(layout.assemble(locals_), oracle.reduced(layout, parts)[()])
    if not any(isinstance(placement, Partial) for placement in layout.placements):
        for shard, local in zip([layout.shard(parts[()], rank) for rank in layout.mesh.ranks], locals_):
            np.testing.assert_array_equal(shard, local)


@given(layouts())
def test_layouts_are_values(layout):
    twin = Layout(
        DeviceMesh(layout.mesh.shape, layout.mesh.names, layout.mesh.ranks),
        dict(zip(layout.mesh.names, layout.placements)),
        list(layout.shape),
        dict(zip(layout.mesh.names, layout.gradient_placements)),
    )
    for copy in (twin, pickle.loads(pickle.dumps(layout))):
        assert copy == layout and hash(copy) == hash(layout) and str(copy) == str(layout)
        assert copy.gradient == layout.gradient
    assert layout != Layout(layout.mesh, [Replicate()] * len(layout.mesh.names), (*layout.shape, 2))
    with pytest.raises(AttributeError):
        layout.shape = ()


@given(layouts())
def test_negative_dims_are_resolved(layout):
    for placement in layout.placements:
        assert getattr(placement, "dim", 0) >= 0


@given(layouts())
def test_a_gradient_lies_where_its_tensor_does(layout):
    gradient = layout.gradient
    assert (gradient.mesh, gradient.shape) == (layout.mesh, layout.shape)
    for placement, of in zip(layout.placements, gradient.placements):
        if isinstance(placement, Replicate):
            assert of in (Replicate(), Partial())
        elif isinstance(placement, Partial):
            assert of == (Replicate() if placement.op == "sum" else Partial())
        else:
            assert of == placement


# Cases that are easily got wrong


def mesh_of(**sizes):
    return DeviceMesh.from_sizes(sizes)


def first_dims(layout):
    """The slice of dim 0 that each rank holds, as (start, stop)."""
    return [(layout.slices(rank)[0].start, layout.slices(rank)[0].stop) for rank in layout.mesh.ranks]


def test_five_rows_over_four_ranks_keep_all_five():
    layout = Layout(mesh_of(shard=4), [Shard(0)], (5, 2))
    assert [layout.local_shape(rank) for rank in range(4)] == [(2, 2), (2, 2), (1, 2), (0, 2)]
    array = np.arange(10.0).reshape(5, 2)
    np.testing.assert_array_equal(layout.assemble([layout.shard(array, rank) for rank in range(4)]), array)


def test_two_axes_on_one_dim_split_it_outer_axis_first():
    layout = Layout(mesh_of(shard=2, tensor=2), [Shard(0), Shard(0)], (6,))
    assert first_dims(layout) == [(0, 2), (2, 3), (3, 5), (5, 6)]


def test_a_strided_shard_splits_after_the_axis_to_its_right():
    layout = Layout(mesh_of(shard=2, tensor=2), [StridedShard(0, 2), Shard(0)], (6,))
    assert first_dims(layout) == [(0, 2), (3, 5), (2, 3), (5, 6)]


def test_three_axes_split_one_dim_in_any_order():
    mesh = mesh_of(replicate=2, shard=2, tensor=2)
    in_the_middle = Layout(mesh, [StridedShard(0, 2), StridedShard(0, 2), Shard(0)], (8,))
    assert first_dims(in_the_middle) == [(0, 1), (4, 5), (1, 2), (5, 6), (2, 3), (6, 7), (3, 4), (7, 8)]
    last = Layout(mesh, [StridedShard(0, 4), StridedShard(0, 2), Shard(0)], (8,))
    assert first_dims(last) == [(0, 1), (4, 5), (2, 3), (6, 7), (1, 2), (5, 6), (3, 4), (7, 8)]


def test_a_strided_shard_alone_takes_a_part_of_every_block():
    layout = Layout(mesh_of(tensor=2), [StridedShard(0, 2)], (6, 3))
    assert layout.boxes(0) == [(slice(0, 2), slice(0, 3)), (slice(3, 5), slice(0, 3))]
    assert layout.boxes(1) == [(slice(2, 3), slice(0, 3)), (slice(5, 6), slice(0, 3))]


def test_a_ragged_shard_may_end_inside_a_row():
    layout = Layout(mesh_of(shard=3), [RaggedShard((0, 1), (2, 0, 1))], (2, 3, 2))
    assert [layout.local_shape(rank) for rank in range(3)] == [(4, 2), (0, 2), (2, 2)]
    assert layout.boxes(0) == [(slice(0, 1), slice(0, 3), slice(0, 2)), (slice(1, 2), slice(0, 1), slice(0, 2))]
    assert layout.boxes(1) == []


@given(st.integers(1, 9), st.integers(0, 40))
def test_equal_units_split_as_a_shard_does(ranks, length):
    mesh = mesh_of(shard=ranks)
    for units in ([1] * ranks, [3] * ranks):
        ragged, even = Layout(mesh, [RaggedShard(0, units)], (length,)), Layout(mesh, [Shard(0)], (length,))
        if units[0] == 1 or length % (3 * ranks) == 0:
            assert [ragged.local_shape(rank) for rank in mesh.ranks] == [even.local_shape(rank) for rank in mesh.ranks]


def test_a_tensor_smaller_than_the_mesh_leaves_ranks_empty():
    layout = Layout(mesh_of(shard=3, tensor=4), [Shard(0), Shard(1)], (1, 2))
    assert [rank for rank in range(12) if layout.local_numel(rank)] == [0, 1]
    assert layout.slices(11) == (slice(1, 1), slice(2, 2))


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), StridedShard(0, 3), Partial(), RaggedShard(0, (5,))])
def test_an_axis_of_size_one_does_nothing(placement):
    layout = Layout(mesh_of(shard=1, tensor=2), [placement, Shard(0)], (5,))
    assert first_dims(layout) == [(0, 3), (3, 5)]


def test_a_scalar_can_be_replicated_and_partial():
    layout = Layout(mesh_of(replicate=2, shard=2), [Replicate(), Partial()], ())
    assert layout.local_shape(3) == () and layout.slices(3) == () and layout.copies(3) == (1, 3)
    assert layout.assemble([np.float32(each) for each in (1, 10, 1, 10)]) == 11


def test_pending_values_are_reduced():
    locals_ = [np.array([1.0, 7.0]), np.array([4.0, -2.0]), np.array([10.0, 1.0])]
    expected = {"sum": [15, 6], "avg": [5, 2], "max": [10, 7], "min": [1, -2]}
    for op, values in expected.items():
        layout = Layout(mesh_of(tensor=3), [Partial(op)], (2,))
        np.testing.assert_array_equal(layout.assemble(locals_), values)


def test_what_is_not_named_is_replicated():
    layout = Layout(mesh_of(replicate=2, shard=2), {"shard": Shard(-1)}, (3, 4))
    assert layout.placements == (Replicate(), Shard(1))
    assert layout.placement("tensor") == Replicate()
    assert str(layout) == "[3, 4] on (replicate: replicate, shard: shard(1))"


def test_a_layout_tells_an_unusual_gradient():
    mesh = mesh_of(tensor=2)
    layout = Layout(mesh, [Replicate()], (3,), gradient={"tensor": Partial()})
    assert str(layout) == "[3] on (tensor: replicate) with gradient on (tensor: partial)"
    assert layout != Layout(mesh, [Replicate()], (3,)) and layout.gradient == Layout(mesh, [Partial()], (3,))
    assert Layout(mesh, [Replicate()], (3,), gradient={"tensor": Replicate()}) == Layout(mesh, [Replicate()], (3,))


# Refusals


TWO_AXES = DeviceMesh((2, 3), ("shard", "tensor"))


@pytest.mark.parametrize(
    "placements, shape, message",
    [
        (
            [Shard(2), Replicate()],
            (4, 5),
            "axis 'shard': shard(2) names dim 2, which a tensor of shape [4, 5] does not have",
        ),
        ([Shard(-3), Replicate()], (4, 5), "axis 'shard': shard(-3) names dim -3, which a tensor of shape [4, 5]"),
        ([Replicate(), Shard(0)], (), "axis 'tensor': shard(0) names dim 0, which a tensor of shape [] does not have"),
        ([StridedShard(1, 3), Replicate()], (4,), "axis 'shard': strided_shard(1, 3) names dim 1, which a tensor"),
        (
            [StridedShard(0, 2), Shard(0)],
            (4,),
            "axis 'shard': strided_shard(0, 2) does not fit the axes to its right that split dim 0 (tensor=3); "
            "split_factor is the product of the sizes of those that split first, one of [1, 3]",
        ),
        (
            [RaggedShard((1,), (1, 1)), Replicate()],
            (4, 5),
            "axis 'shard': ragged_shard([1], [1, 1]) flattens the dims [1]; they must be the first ones in order, [0]",
        ),
        ([RaggedShard((1, 0), (1, 1)), Replicate()], (4, 5), "flattens the dims [1, 0]; they must be the first ones"),
        ([RaggedShard((0, 3), (1, 1)), Replicate()], (4, 5), "axis 'shard': ragged_shard([0, 3], [1, 1]) names dim 3"),
        (
            [Replicate(), RaggedShard(0, (1, 1))],
            (4,),
            "axis 'tensor': ragged_shard([0], [1, 1]) on dim 0 gives units for 2 ranks, but the axis has 3",
        ),
        (
            [RaggedShard((0, 1), (1, 2)), Shard(1)],
            (4, 5),
            "axis 'shard': ragged_shard([0, 1], [1, 2]) can't share dim 1 with shard(1) on axis 'tensor'; "
            "a ragged shard has its dims for itself",
        ),
        (
            [Shard(0), RaggedShard(0, (1, 2, 0))],
            (4,),
            "axis 'shard': shard(0) can't share dim 0 with ragged_shard([0], ",
        ),
        ([StridedShard(0, 1), RaggedShard(0, (1, 2, 0))], (4,), "axis 'shard': strided_shard(0, 1) can't share dim 0"),
        ([RaggedShard(0, (1, 2)), RaggedShard(0, (1, 2, 0))], (4,), "ragged_shard([0], [1, 2]) can't share dim 0 with"),
        (
            [Partial("max"), Partial()],
            (4,),
            "partial(max) on axis 'shard' and partial on axis 'tensor' can't be pending together",
        ),
        ([Partial("max"), Partial("min")], (4,), "partial(max) on axis 'shard' and partial(min) on axis 'tensor'"),
        ([Partial("avg"), Partial("min")], (4,), "partial(avg) on axis 'shard' and partial(min) on axis 'tensor'"),
        ([Shard(0)], (4,), "the mesh shard=2xtensor=3 needs 2 placements, found 1"),
        (
            {"context": Shard(0)},
            (4,),
            "a placement names the axis 'context', which the mesh shard=2xtensor=3 does not have",
        ),
        (["shard(0)", Replicate()], (4,), "axis 'shard': 'shard(0)' is no placement; write for example Shard(0)"),
        ([Replicate(), Replicate()], (4, -1), "a tensor can't have the shape [4, -1]; the least size is 0"),
        ([Replicate(), Replicate()], 4, "a shape is a list of whole numbers, found 4"),
        ([Replicate(), Replicate()], (2.9,), "a shape is a list of whole numbers, found (2.9,)"),
        ([Replicate(), Replicate()], (True,), "a shape is a list of whole numbers, found (True,)"),
        ([Replicate(), Replicate()], "43", "a shape is a list of whole numbers, found '43'"),
        (Shard(0), (4,), "placements are a list with one for each axis, or {axis: placement}, found Shard(dim=0)"),
        (None, (4,), "placements are a list with one for each axis, or {axis: placement}, found None"),
        ("shard(0)", (4,), "found 'shard(0)'; write for example [Shard(0)]"),
        (3, (4,), "placements are a list with one for each axis, or {axis: placement}, found 3"),
        (["shard(0)", Replicate()], (4,), 'Shard(0) or Replicate(), or parse_placement("shard(0)")'),
        ([None, Replicate()], (4,), "axis 'shard': None is no placement"),
    ],
)
def test_what_has_no_meaning_is_refused_with_axis_and_dim(placements, shape, message):
    with pytest.raises(LayoutError, match=re.escape(message)):
        Layout(TWO_AXES, placements, shape)


@pytest.mark.parametrize("second", [Partial(), Partial("avg")])
def test_linear_reductions_may_be_pending_together(second):
    assert Layout(TWO_AXES, [Partial("avg"), second], (4,)).placements == (Partial("avg"), second)


@pytest.mark.parametrize(
    "placement, gradient, message",
    [
        (Shard(0), {"shard": Partial()}, "axis 'shard': the gradient of shard(0) is shard(0), found partial"),
        (Partial(), {"shard": Partial()}, "axis 'shard': the gradient of partial is replicate, found partial"),
        (
            Partial("max"),
            {"shard": Replicate()},
            "axis 'shard': the gradient of partial(max) is partial, found replicate",
        ),
        (Replicate(), {"shard": Shard(0)}, "axis 'shard': the gradient of replicate is replicate, found shard(0)"),
        (Replicate(), {"context": Partial()}, "a gradient names the axis 'context', which the mesh"),
        (Replicate(), [Partial()], "the mesh shard=2xtensor=3 needs 2 placements, found 1"),
        (Replicate(), Partial(), "placements are a list with one for each axis, or {axis: placement}, found Partial"),
        (Replicate(), {"shard": "partial"}, "axis 'shard': 'partial' is no placement"),
    ],
)
def test_a_gradient_that_can_not_be_is_refused(placement, gradient, message):
    with pytest.raises(LayoutError, match=re.escape(message)):
        Layout(TWO_AXES, {"shard": placement}, (4,), gradient)


def test_the_gradient_may_be_given_for_all_axes_in_order():
    by_name = Layout(TWO_AXES, {"tensor": Shard(1)}, (4, 5), {"shard": Partial()})
    assert Layout(TWO_AXES, {"tensor": Shard(1)}, (4, 5), [Partial(), Shard(-1)]) == by_name


@pytest.mark.parametrize("mesh", [None, "shard=2", (2, 3)])
def test_a_layout_needs_a_mesh(mesh):
    with pytest.raises(LayoutError, match="a layout needs a hyper_parallel.DeviceMesh, found"):
        Layout(mesh, [Shard(0)], (4,))


def test_sizes_may_be_whole_numbers_of_numpy():
    shape = Layout(TWO_AXES, {}, np.array([4, 5])).shape
    assert shape == (4, 5) and all(type(size) is int for size in shape)


def test_wrong_arrays_are_refused_with_both_shapes():
    layout = Layout(mesh_of(shard=2), [Shard(0)], (4,))
    with pytest.raises(LayoutError, match=r"\(4,\), found an array of shape \(3,\)"):
        layout.shard(np.zeros(3), 0)
    with pytest.raises(LayoutError, match=r"rank 1 holds a local array of shape \(2,\).*found \(3,\)"):
        layout.assemble([np.zeros(2), np.zeros(3)])
    with pytest.raises(LayoutError, match="the mesh shard=2 has 2 ranks, found 1 local arrays"):
        layout.assemble([np.zeros(2)])


@pytest.mark.parametrize("question", ["local_shape", "pieces", "boxes", "slices", "copies"])
def test_a_rank_outside_the_mesh_is_refused(question):
    layout = Layout(DeviceMesh((2,), ("shard",), ranks=(4, 5)), [Shard(0)], (4,))
    with pytest.raises(LayoutError, match="rank 0 is not in the mesh shard=2, which holds the ranks 4, 5"):
        getattr(layout, question)(0)


# Cost


def six_axes(size: int, huge: int) -> tuple[Layout, Layout]:
    """Two layouts of some huge**5 elements on size**6 ranks: one that splits its dims over and over, one ragged."""
    mesh = DeviceMesh((size,) * 6, AXES)
    placements = [StridedShard(0, size * size), Shard(0), Shard(1), Shard(-1), Shard(0), Partial()]
    layout = Layout(mesh, placements, (huge, huge + 1, 3, huge, huge - 1, huge))
    ragged = RaggedShard((0, 1), (1, 0, 2, 5)[-size:])
    return layout, Layout(mesh, {"shard": ragged, "tensor": Shard(2)}, (huge, huge, huge))


def ask(layout: Layout, ragged: Layout, rank: int) -> None:
    """Every question about a rank, and whether the answers agree."""
    bounds = layout.slices(rank)
    assert layout.local_shape(rank) == tuple(part.stop - part.start for part in bounds)
    assert layout.local_numel(rank) == prod(layout.local_shape(rank))
    sizes = [prod(part.stop - part.start for part in box) for box in ragged.boxes(rank)]
    assert sum(sizes) == ragged.local_numel(rank)


def test_questions_about_a_rank_do_not_count_elements_or_ranks():
    """Six axes, 4096 ranks and 10**60 elements are asked for in as many lines as 64 ranks and 10**15 elements."""
    huge = 10**12
    few, many = six_axes(2, 10**3), six_axes(4, huge)
    ask(*few, rank=0)
    for rank in range(0, 4096, 41):
        ask(*many, rank)
    assert work(ask, *many, 1) < 1.2 * work(ask, *few, 1)
    layout, ragged = many
    assert layout.local_shape(0) == (huge // 64, huge // 4 + 1, 3, huge, huge - 1, huge // 4)
    assert ragged.local_numel(4095) == huge * huge * 5 // 8 * (huge // 4)
