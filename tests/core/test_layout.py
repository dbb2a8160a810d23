"""Layouts, with numpy as the oracle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel import DeviceMesh, Layout, LayoutError, Partial, Replicate, Shard
from hyper_parallel.core.placement import parse_placement
from tests.core.test_mesh import meshes


@st.composite
def layouts(draw):
    mesh = draw(meshes())
    shape = draw(st.lists(st.integers(0, 7), max_size=3))
    choices = [st.just(Replicate()), st.just(Partial())]
    if shape:
        choices.append(st.integers(-len(shape), len(shape) - 1).map(Shard))
    return Layout(mesh, [draw(st.one_of(*choices)) for _ in mesh.names], shape)


@given(layouts())
def test_assembling_what_was_sharded_gives_the_array_back(layout):
    array = np.arange(1, np.prod(layout.shape) + 1, dtype=np.float64).reshape(layout.shape)
    pieces = [layout.shard(array, rank) for rank in layout.mesh.ranks]
    assert [piece.shape for piece in pieces] == [layout.local_shape(rank) for rank in layout.mesh.ranks]
    np.testing.assert_array_equal(layout.assemble(pieces), array)


@given(layouts())
def test_copies_hold_the_same_slices(layout):
    for rank in layout.mesh.ranks:
        assert rank in layout.copies(rank)
        assert {layout.slices(other) == layout.slices(rank) for other in layout.copies(rank)} == {True}


def test_five_rows_over_four_ranks_keep_all_five():
    layout = Layout(DeviceMesh((4,), ("shard",)), [Shard(0)], (5, 2))
    assert [layout.local_shape(rank) for rank in range(4)] == [(2, 2), (2, 2), (1, 2), (0, 2)]


def test_two_axes_on_one_dim_split_it_outer_axis_first():
    layout = Layout(DeviceMesh((2, 2), ("shard", "tensor")), [Shard(0), Shard(0)], (6,))
    assert [layout.slices(rank)[0] for rank in range(4)] == [slice(0, 2), slice(2, 3), slice(3, 5), slice(5, 6)]


def test_partial_summands_add_up():
    layout = Layout(DeviceMesh((3,), ("tensor",)), {"tensor": Partial()}, (2,))
    total = layout.assemble([np.array([1.0, 2.0]), np.array([10.0, 20.0]), np.array([100.0, 200.0])])
    np.testing.assert_array_equal(total, [111.0, 222.0])


def test_placements_by_axis_name_leave_the_rest_replicated():
    mesh = DeviceMesh((2, 2), ("replicate", "shard"))
    layout = Layout(mesh, {"shard": Shard(-1)}, (3, 4))
    assert layout.placements == (Replicate(), Shard(1))
    assert layout.placement("tensor") == Replicate()
    assert str(layout) == "[3, 4] on (replicate: replicate, shard: shard(1))"


@pytest.mark.parametrize("placement", [Replicate(), Partial(), Shard(2), Shard(-1)])
def test_the_text_form_parses_back(placement):
    assert parse_placement(str(placement)) == placement


@pytest.mark.parametrize("text", ["", "shard", "shard(x)", "Shard(0)", "partial(mean)"])
def test_other_text_is_refused(text):
    with pytest.raises(LayoutError, match="is no placement"):
        parse_placement(text)


def test_illegal_layouts_name_the_axis_and_the_dim():
    mesh = DeviceMesh((2,), ("shard",))
    with pytest.raises(LayoutError, match=r"axis 'shard': shard\(1\) names dim 1, which a tensor of shape \[4\] does not have"):
        Layout(mesh, [Shard(1)], (4,))
    with pytest.raises(LayoutError, match="axis 'tensor'"):
        Layout(mesh, {"tensor": Shard(0)}, (4,))
    with pytest.raises(LayoutError, match="needs 1 placements, found 2"):
        Layout(mesh, [Shard(0), Shard(0)], (4,))


def test_wrong_arrays_are_refused_with_both_shapes():
    layout = Layout(DeviceMesh((2,), ("shard",)), [Shard(0)], (4,))
    with pytest.raises(LayoutError, match=r"\(4,\), found an array of shape \(3,\)"):
        layout.shard(np.zeros(3), 0)
    with pytest.raises(LayoutError, match=r"rank 1 holds a local array of shape \(2,\).*found \(3,\)"):
        layout.assemble([np.zeros(2), np.zeros(3)])
