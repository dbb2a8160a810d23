"""Distributed tensors at their edges, on real ranks of both backends: leaves, copies, dtypes, views, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel import DeviceMesh, Layout, Replicate, Shard
from hyper_parallel.core import random
from tests.equivalence import dtensor_edge_bodies as bodies

EVERYWHERE = ["bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
EVERYWHERE += ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
OF_TORCH = ["complex32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]


@pytest.fixture
def run(pool, backend_name):
    """Run a body on two ranks of a backend."""
    return pool(backend_name, 2).run


def test_the_parts_of_a_leaf_are_leaves(run, backend_name):
    array = np.arange(15.0).reshape(5, 3)
    layout = Layout(DeviceMesh((2,), ("tensor",)), [Shard(0)], array.shape)
    found = run(bodies.leaves, array)
    for rank, each in enumerate(found):
        assert each["asks"] == (True, False)
        np.testing.assert_array_equal(each["value"], layout.shard(array, rank))
        np.testing.assert_array_equal(each["gradient"], layout.shard(array + 1, rank))
    if backend_name == "mindspore":
        assert found[0]["name"] == "weight"


ALIKE = ("list or tuple", "by name", "negative", "shape", "gradient", "usual gradient", "distributed")


def test_calls_are_alike_whose_layouts_are_equal(run):
    first, second = run(bodies.own_order)
    assert first == second
    assert [first[name] for name in ALIKE] == ["accepted"] * len(ALIKE)


def test_calls_that_differ_are_refused_by_all_with_what_was_found(run):
    for messages in run(bodies.own_order):
        assert "DeviceMesh((2,), ('tensor',), ranks=(1, 0))" in messages["another order"]
        assert "ranks call from_local alike" in messages["another order"]
        assert "ranks=(1, 0)" in messages["another order, distributed"]
        assert "(replicate) with gradient (partial)" in messages["another gradient"]
        assert "with shape [1, 1]" in messages["another shape"] and "with shape [6, 2]" in messages["another shape"]
        assert "shard(2) names dim 2" in messages["no placement"] and "rank 1 gives" in messages["no placement"]


def test_local_tensors_of_any_strides_are_overwritten(run):
    one = Layout(DeviceMesh((1,), ("tensor",)), {}, (4, 3))
    for found in run(bodies.strided_locals):
        for dtype in ("float32", "bfloat16", "float64"):
            drawn = random.normal(one, 0, random.Generator(5), dtype).T.ravel()
            np.testing.assert_array_equal(found[f"normal_, {dtype}"], drawn)
            np.testing.assert_array_equal(found[f"fill_, {dtype}"], np.full(12, 2.5))
            np.testing.assert_array_equal(found[f"zero_, {dtype}"], np.zeros(12))


def test_a_call_that_is_refused_takes_no_draw(run):
    for found in run(bodies.strided_locals):
        assert found["draw"] == 0
        for name, said in zip(("normal_", "fill_", "zero_"), found["expanded"]):
            assert said == (
                f"ConfigError: {name} would write several values to one place: the local tensor is an expanded one"
            )


def test_copies_have_memory_of_their_own_and_shallow_ones_share_it(run):
    for found in run(bodies.copies):
        for dtype in ("float32", "bfloat16", "int64"):
            assert found[dtype] == {"deep": {3}, "pickle": {3}, "shallow": {0}}
        assert found["leaf"] and found["once"]
        assert found["recorded"].startswith("ConfigError: the result of a recorded operation can't be copied")


def test_numbers_are_filled_in_as_they_are(run):
    for found in run(bodies.filled):
        assert found["minus zero"] == [True]
        assert found["exact"] == [2**62 + 1] and found["large float"] == [2.0**70]
        assert (found["cut"], found["numpy"], found["bool"], found["complex"]) == ([2], [1.5], [True], [1 + 2j])


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("None", "a tensor is filled with a number, found None"),
        ("text", "a tensor is filled with a number, found 'a'"),
        ("array", "a tensor is filled with a number, found [1]"),
        ("complex", "a tensor of float32 can't be filled with 1j"),
        ("large", f"a tensor of int64 can't be filled with {2**70}"),
        ("256", "a tensor of uint8 can't be filled with 256"),
        ("negative", "a tensor of uint8 can't be filled with -1"),
        ("nan", "a tensor of int32 can't be filled with nan"),
        ("beyond", "a tensor of float32 can't be filled with 1148"),
    ],
)
def test_what_no_tensor_holds_is_refused(run, mistake, says):
    for found in run(bodies.filled):
        assert found[f"refused: {mistake}"].startswith(f"ConfigError: {says}")


def test_arguments_are_read_as_users_write_them(run):
    for found in run(bodies.spellings):
        assert found["dtypes"] == ["float32", "int64", "float32", "float32", "bool", "int16", "bool"]
        assert found["placements"] == [(Replicate(),)] * 3
        assert found["size"] == [(4, 6), 6, 4]


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("float", "LayoutError: a shape is a list of whole numbers, found (2.7,)"),
        ("text", "LayoutError: a shape is a list of whole numbers, found ('43',)"),
        ("object", "ConfigError: unknown dtype 'object'"),
        ("loose", "ConfigError: unknown dtype 'float'"),
        ("dim", "LayoutError: size: dim 2 is none of a tensor of shape [4, 6]"),
        ("half a dim", "LayoutError: size takes the number of a dim, found (0.5,)"),
        ("mesh first", "LayoutError: redistribute needs placements, and the mesh comes first: write redistribute("),
        ("one placement", "LayoutError: placements are a list with one for each axis, or {axis: placement}, found"),
        ("array", "ConfigError: a DTensor is no array"),
        ("truth", "ConfigError: the truth value of a DTensor is that of its full tensor"),
    ],
)
def test_arguments_without_a_meaning_are_refused(run, mistake, says):
    for found in run(bodies.spellings):
        assert found["refused"][mistake].startswith(says)


def test_every_dtype_travels_and_is_added_up(run, backend_name):
    dtypes = EVERYWHERE + (OF_TORCH if backend_name == "torch" else [])
    whole, own = np.arange(12).reshape(4, 3) % 8, np.arange(4) % 2
    reduced = {"sum": 2 * own + 2, "max": own + 2, "min": own}
    for found in run(bodies.moves, dtypes):
        for dtype, values in found.items():
            expected = whole.astype(bool) if dtype == "bool" else whole
            assert values[:3] == [expected.tolist()] * 3, dtype
            for (op, expected), both in zip(reduced.items(), values[3:]):
                assert both == [expected.tolist()] * 2, (dtype, op)


def test_conjugate_views_travel_as_what_they_show(pool):
    shown = [[1 - 2j, 3 + 4j], [-2.0, 4.0], [-1 + 2j, -3 - 4j]]
    for gathered, given in pool("torch", 2).run(bodies.conjugates):
        assert gathered == [each * 2 for each in shown]
        assert given == shown


def test_forward_mode_through_a_transition_is_an_error(pool):
    for said in pool("torch", 2).run(bodies.tangents):
        assert said.startswith("ConfigError: a transition has no forward-mode derivative")


def test_a_repeated_redistribution_builds_nothing(run):
    assert run(bodies.kept_targets) == [True, True]
