"""Distributed tensors on real ranks of both backends, values and gradients, against numpy."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from random import Random

import numpy as np
import pytest

from hyper_parallel import DeviceMesh, Layout, LayoutError, Partial, RaggedShard, Replicate, Shard, StridedShard
from hyper_parallel.core import random
from hyper_parallel.core.arithmetic import arrange
from tests.core.arithmetic_cases import BY_LEFT, BY_RIGHT, OPERATIONS, draw_sides, some_value, summed_to
from tests.core.strategies import draw_layout, draw_mesh, draw_shape
from tests.equivalence import dtensor_bodies as bodies
from tests.pool import REPOSITORY

CASES = 40
"""Random operations on each backend and each number of ranks."""

ROUNDED = {"rtol": 1e-12, "atol": 1e-9}
"""For float64 results of a few operations, whose terms, at most some hundred of size up to a thousand, may be added in
another order than numpy's."""


@pytest.fixture(params=[2, 3, 4])
def count(request):
    return request.param


@pytest.fixture
def run(pool, backend_name, count):
    """Run a body on `count` ranks of a backend."""
    return pool(backend_name, count).run


def meshes(count):
    """All ranks in a line and, where there are four, in a square, in an order of its own."""
    square = [DeviceMesh((2, 2), ("shard", "tensor"), ranks=(3, 1, 0, 2))] if count == 4 else []
    return [DeviceMesh((count,), ("tensor",)), *square]


def layouts_of(shape, count):
    """Layouts of a tensor with at least two dims: each kind of placement, alone and together."""
    line, *square = meshes(count)
    units = [1, 0, 2, 1][:count]
    placed = [Replicate(), Shard(0), Shard(-1), StridedShard(0, 2), RaggedShard((0,), units), Partial(), Partial("avg")]
    placed += [Partial("max"), Partial("min")]
    pairs = [(Shard(0), Shard(0)), (StridedShard(0, 2), Shard(0)), (Shard(1), Shard(0)), (Partial(), Shard(0))]
    pairs += [(Partial(), Partial("avg")), (Replicate(), Shard(-1))]
    found = [Layout(line, [each], shape) for each in placed]
    return found + [Layout(mesh, pair, shape) for mesh in square for pair in pairs]


def check_gradients(layout, found, whole, what):
    """Local gradients of all ranks, by rank, against the gradient of the whole tensor."""
    locals_ = [found[rank] for rank in layout.mesh.ranks]
    np.testing.assert_allclose(layout.gradient.assemble(locals_), whole, **ROUNDED, err_msg=what)
    if not any(isinstance(each, Partial) for each in layout.gradient_placements):
        for rank, local in zip(layout.mesh.ranks, locals_):
            expected = layout.gradient.shard(whole, rank)
            np.testing.assert_allclose(local, expected, **ROUNDED, err_msg=f"{what}, rank {rank}")


# Arithmetic


def random_cases(count):
    """Operations on any layouts of `count` ranks that are not refused, and what they must give."""
    chance, made = Random(count), np.random.default_rng(count)
    while True:
        mesh = draw_mesh(chance.randint, chance.choice([list(range(count)), list(range(count))[::-1]]))
        left, right = draw_sides(chance.randint, mesh)
        symbol = chance.choice("+-*/")
        try:
            result = arrange(symbol, left, right).result
        except LayoutError:
            continue
        locals_ = some_value(left, made), some_value(right, made)
        yield bodies.Sides(symbol, left, right, locals_, made.integers(-3, 4, result.shape).astype(np.float64)), result


def test_arithmetic_is_that_of_the_whole_tensors(run, count):
    expected = [case for case, _ in zip(random_cases(count), range(CASES))]
    found = run(bodies.arithmetic, [case for case, _ in expected])
    for place, (case, result) in enumerate(expected):
        wholes = case.left.assemble(case.locals[0]), case.right.assemble(case.locals[1])
        what = f"{case.left} {case.symbol} {case.right}"
        for rank in range(count):
            layout, whole, _ = found[rank][place]
            assert layout == result, what
            np.testing.assert_allclose(whole, OPERATIONS[case.symbol](*wholes), **ROUNDED, err_msg=what)
        for side, derivative in enumerate((BY_LEFT[case.symbol], BY_RIGHT[case.symbol])):
            layout = (case.left, case.right)[side]
            gradients = [found[rank][place][2][side] for rank in range(count)]
            check_gradients(layout, gradients, summed_to(case.gradient * derivative(*wholes), layout.shape), what)


SEEN = [
    *((placement, "whole") for placement in (Replicate(), Shard(0), Shard(1), Partial(), Partial("avg"))),
    *((placement, "local") for placement in (Shard(0), Shard(1), Partial())),
    (Replicate(), "parts"),
]
"""Placements of a tensor, and how a loss sees it: whole, each rank its local tensor, or each a part of the whole."""


@pytest.mark.parametrize("pending", [False, True], ids=["gradient replicated", "gradient pending"])
@pytest.mark.parametrize(("placement", "ending"), SEEN, ids=str)
def test_a_bias_counts_once_and_so_does_its_gradient(run, count, placement, ending, pending):
    made = np.random.default_rng(0)
    shapes = {"x": (5, 3), "bias": (3,), "weights": (5, 3)}
    arrays = {name: made.integers(-4, 5, shape).astype(np.float64) for name, shape in shapes.items()}
    mesh = DeviceMesh((count,), ("tensor",))
    x = Layout(mesh, [placement], (5, 3))
    bias = Layout(mesh, [Replicate()], (3,), gradient={"tensor": Partial()} if pending else None)
    found = run(bodies.bias, x, bias, ending, arrays)
    values = [each["value"] for each in found]
    result = x if ending == "local" else x.with_placements({})
    np.testing.assert_allclose(result.assemble(values), arrays["x"] + arrays["bias"], **ROUNDED)
    check_gradients(x, [each["gradients"][0] for each in found], arrays["weights"], "x")
    check_gradients(bias, [each["gradients"][1] for each in found], arrays["weights"].sum(0), "bias")


def test_numbers_count_once(run, count):
    chance, made = Random(count), np.random.default_rng(count)
    layouts = [layout for layout in layouts_of((5, 3), count) if layout.placements[0] not in EXTREMA]
    layouts += [Layout(mesh, {"tensor": Partial()}, ()) for mesh in meshes(count)]
    layouts += [
        draw_layout(chance.randint, draw_mesh(chance.randint, range(count)), draw_shape(chance.randint), ("sum", "avg"))
        for _ in range(10)
    ]
    values = [some_value(layout, made) for layout in layouts]
    for found in run(bodies.numbers, list(zip(layouts, values))):
        for layout, value, results in zip(layouts, values, found):
            x = layout.assemble(value)
            assert ("4 / x" in results) == (
                not any(
                    size > 1 and isinstance(each, Partial) for size, each in zip(layout.mesh.shape, layout.placements)
                )
            )
            for formula in results.keys() - {"gradient"}:
                expected = eval(formula, {"x": x, "np": np})
                np.testing.assert_allclose(results[formula], expected, **ROUNDED, err_msg=f"{formula}, {layout}")


def test_gradients_through_numbers(run, count):
    made = np.random.default_rng(count)
    layouts = [layout for layout in layouts_of((5, 3), count) if layout.placements[0] not in EXTREMA]
    found = run(bodies.numbers, [(layout, some_value(layout, made)) for layout in layouts])
    for place, layout in enumerate(layouts):
        check_gradients(layout, [each[place]["gradient"] for each in found], np.full((5, 3), -2.0), str(layout))


EXTREMA = (Partial("max"), Partial("min"))


def test_what_arithmetic_refuses(run):
    for messages in run(bodies.refusals_of_arithmetic):
        assert "partial * partial can't be computed from the parts" in messages["product of sums"]
        for mistake in ("a number over a sum", "over a sum"):
            assert "nothing can be divided by a value that is still pending as partial" in messages[mistake]
        assert "+ is not defined while partial(max) is pending" in messages["maximum and tensor"]
        assert "* is not defined while partial(max) is pending" in messages["maximum and number"]
        assert "- is not defined while partial(max) is pending" in messages["minus a maximum"]
        for mistake in ("plain tensor", "array before"):
            assert "can't mix a DTensor with a plain tensor of shape (4,)" in messages[mistake]
            assert "distribute it first" in messages[mistake]
        assert messages["plain tensor before"] in ("LayoutError", "TypeError")
        assert messages["text"] == "TypeError"


# Made from local tensors


@pytest.mark.parametrize("shape", [(5, 3), (1, 2), (0, 3), (8, 4, 3)], ids=str)
def test_the_shape_of_the_whole_is_found_from_the_local_ones(run, count, shape):
    layouts = layouts_of(shape, count)
    array = np.arange(np.prod(shape), dtype=np.float64).reshape(shape)
    for rank, found in enumerate(run(bodies.from_locals, layouts, array)):
        for layout, (seen, text, whole) in zip(layouts, found):
            assert seen == layout
            assert text == f"DTensor({layout}, local {list(layout.local_shape(rank))} float64)"
            # The average of three copies of a number is rounded once or twice.
            np.testing.assert_allclose(whole, array, rtol=1e-15, err_msg=str(layout))


def test_a_wrong_local_tensor_on_one_rank_is_refused_by_all(run, count):
    wrong = count - 1
    found = run(bodies.wrong_locals, wrong)
    whole, given = f"[{3 * count}, 4]", f"[{2 * count}, 4]"
    who = f"rank {wrong} gives"
    says = {
        "replicated": f"{who} a local tensor of shape (3, 5), but holds (3, 4) of [3, 4] on (tensor: replicate); found",
        "sharded": f"{who} a local tensor of shape (3, 5), but holds (3, 4) of {whole} on (tensor: shard(0)); found",
        "sharded, shape given": f"{who} a local tensor of shape (7, 4), but holds (2, 4) of {given} on (tensor",
        "dims": f"{who} a local tensor of shape (3,), others have 2 dims; found (3, 4) at rank 0",
        "dtype": f"{who} float16, others float32: the parts of a tensor are of one dtype",
        "placements": "ranks call from_local alike",
        "no dim": "shard(1) names dim 1, which a tensor of shape [1] does not have",
        "ragged": "do not tell the sizes of the dims that ragged_shard([0, 1]",
        "unchecked, no shape": "the size of dim 0 under shard(0); pass shape=, or leave run_check on",
        "no mesh": "ConfigError: device_mesh must be a hyper_parallel.DeviceMesh, found 'mesh'",
        "larger mesh": f"names rank {count}, but the job has {count} ranks",
    }
    for rank, messages in enumerate(found):
        for mistake, text in says.items():
            assert text in messages[mistake]
        assert (messages["unchecked"] == "accepted") == (rank != wrong)
    for mistake in found[0].keys() - {"unchecked"}:
        assert len({messages[mistake] for messages in found}) == 1, mistake


# Moved


def chains(count):
    """Walks from layout to layout that other systems get wrong, and the shapes of the tensors."""
    line = DeviceMesh((count,), ("tensor",))
    turned = DeviceMesh((count,), ("shard",), ranks=range(count)[::-1])
    partial, whole, rows, columns = [Partial()], [Replicate()], [Shard(0)], [Shard(-1)]
    yield (5, 3), [(line, each) for each in (rows, whole, columns, rows, partial, whole)]
    yield (5, 3), [(line, each) for each in (partial, whole, partial, rows, partial, [Partial("avg")], whole)]
    yield (5, 3), [(line, rows), (turned, rows), (turned, columns), (line, partial), (turned, whole)]
    yield (1, 2), [(line, each) for each in (rows, columns, [RaggedShard((0, 1), [1, 0, 2, 1][:count])], whole)]
    yield (), [(line, each) for each in (partial, whole, partial)]
    if count == 4:
        square = DeviceMesh((2, 2), ("shard", "tensor"))
        both = [Shard(0), Shard(0)], [StridedShard(0, 2), Shard(0)], [Shard(-1), Partial()], [Replicate(), Shard(1)]
        yield (5, 3), [(line, rows), *((square, each) for each in both), (line, columns), (square, both[0])]


def test_a_tensor_keeps_its_value_wherever_it_goes(run, count):
    for shape, chain in chains(count):
        layouts = [Layout(mesh, placements, shape) for mesh, placements in chain]
        array = np.arange(1, np.prod(shape) + 1, dtype=np.float64).reshape(shape)
        found = run(bodies.moved, layouts, array)
        gradients = [each[0] for each in found]
        check_gradients(layouts[0], gradients, array + 1, f"gradient of {layouts[0]}")
        for place, layout in enumerate(layouts[1:], start=1):
            held = [found[rank][place] for rank in layout.mesh.ranks]
            np.testing.assert_allclose(layout.assemble(held), array, **ROUNDED, err_msg=str(layout))
        for each in found:
            np.testing.assert_allclose(each[-1], array, **ROUNDED)


def test_a_replicated_tensor_may_have_a_pending_gradient(run, count):
    array = np.arange(15.0).reshape(5, 3)
    layout = Layout(DeviceMesh((count,), ("tensor",)), [Shard(0)], array.shape)
    ranks = sum(range(count))
    for rank, gradients in enumerate(run(bodies.column_parallel, array)):
        for gradient in gradients:
            np.testing.assert_array_equal(gradient, layout.shard(array * ranks, rank))


def test_plain_local_tensors_are_redistributed(run, count):
    array = np.arange(15.0).reshape(5, 3)
    source, target = (Layout(DeviceMesh((count,), ("tensor",)), [Shard(dim)], array.shape) for dim in (0, 1))
    for rank, (gradient, local) in enumerate(run(bodies.plain, source, target, array)):
        np.testing.assert_array_equal(local, target.shard(array, rank))
        np.testing.assert_array_equal(gradient, source.shard(array, rank))


def test_a_mesh_of_some_ranks_is_used_by_them_alone(run, count):
    every, whole = [float(rank + 1) for rank in range(count)], sum(range(1, count + 1))
    for rank, found in enumerate(run(bodies.submesh)):
        full = [every, [float(whole)] * count]
        if rank < 2:
            assert found == [*full, [1.0, 2.0], [3.0, 3.0], *full]
        else:
            assert found[:-1] == [*full, *full]
            assert f"rank {rank} is not in the mesh shard=2, which holds the ranks 0, 1" in found[-1]


# Distributed from one rank


@pytest.mark.parametrize("shape", [(5, 3), (1, 2), (0, 3)], ids=str)
def test_one_rank_gives_the_data(run, count, shape):
    layouts = layouts_of(shape, count)
    array = np.arange(1, np.prod(shape) + 1, dtype=np.float64).reshape(shape)
    for source in (0, count - 1, None):
        found = run(bodies.distributed, layouts, array, source)
        for place, layout in enumerate(layouts):
            held = [each[place] for each in found]
            for rank, local in enumerate(held):
                if not any(isinstance(each, Partial) for each in layout.placements):
                    np.testing.assert_array_equal(local, layout.shard(array, rank), err_msg=f"{layout}, from {source}")
            np.testing.assert_allclose(layout.assemble([held[rank] for rank in layout.mesh.ranks]), array, rtol=1e-15)


def test_a_number_is_distributed_too(run, count):
    layouts = [
        Layout(mesh, [each] * len(mesh.names), ()) for mesh in meshes(count) for each in (Replicate(), Partial())
    ]
    for source in (0, 1, None):
        for rank, found in enumerate(run(bodies.distributed, layouts, np.float64(7), source)):
            assert [local.tolist() for local in found] == [layout.shard(np.float64(7), rank) for layout in layouts]


def test_gradients_reach_every_copy_that_is_cut(run, count):
    array = np.arange(15.0).reshape(5, 3)
    for layout in layouts_of(array.shape, count)[:5]:
        for gradient in run(bodies.distributed_gradient, layout, array):
            np.testing.assert_array_equal(gradient, array, err_msg=str(layout))


def test_what_can_not_be_distributed_is_refused_by_all(run, count):
    found, last = run(bodies.refused_distributions), count - 1
    for messages in found:
        assert (
            f"rank {last} gives (3, 5), others (3, 4): every rank passes a tensor of the global shape"
            in messages["shape"]
        )
        assert f"rank {last} gives float16, others float32" in messages["dtype"]
        assert f"src_data_rank is {count}; it counts the ranks of the mesh, 0 to {last}" in messages["source"]
        assert "names dim 2, which a tensor of shape [3, 4] does not have" in messages["dim"]
        assert "ranks call distribute_tensor alike" in messages["other sources"]
        assert "no gradient flows back to the rank that gives the data; pass src_data_rank=None" in messages["recorded"]
        assert "not a tensor: found numpy.ndarray" in messages["array"]
    assert all(messages == found[0] for messages in found)


# Made from nothing


def test_factories_give_what_one_device_gives(run, count):
    layouts, seed = [*layouts_of((5, 3), count), Layout(DeviceMesh((count,), ("tensor",)), {}, ())], 3
    found = run(bodies.factories, layouts, seed)
    generator, own = random.Generator(seed), random.Generator(seed + 1)
    for place, layout in enumerate(layouts):
        one = Layout(DeviceMesh((1,), ("tensor",)), {}, layout.shape)
        constants = {"zeros": 0, "ones": 1, "full": 2.5, "filled": 3, "zeroed": 0}
        expected = {name: np.full(layout.shape, value) for name, value in constants.items()}
        if not any(isinstance(each, Partial) for each in layout.placements):
            expected["rand"] = random.uniform(one, 0, generator)
            expected["randn"] = random.normal(one, 0, generator, "float64")
            expected["own"] = random.uniform(one, 0, own, "float16")
            expected["normal_"] = random.normal(one, 0, generator, mean=2, std=0.5)
            expected["uniform_"] = random.uniform(one, 0, generator, "bfloat16", -1, 3)
            expected["bernoulli_"] = random.bernoulli(one, 0, own, 0.25)
        for rank in range(count):
            assert found[rank][place].keys() == expected.keys()
            for name, whole in expected.items():
                np.testing.assert_array_equal(
                    found[rank][place][name], layout.shard(whole, rank), err_msg=f"{name}, {layout}, rank {rank}"
                )


@pytest.mark.parametrize(
    "placement",
    [Replicate(), Shard(0), Shard(1), StridedShard(0, 2), Partial(), Partial("avg"), Partial("max")],
    ids=str,
)
def test_dropout_drops_what_one_device_drops(run, count, placement):
    array = np.arange(1.0, 16.0).reshape(5, 3)
    layout = Layout(DeviceMesh((count,), ("tensor",)), [placement], array.shape)
    one = Layout(DeviceMesh((1,), ("tensor",)), {}, array.shape)
    mask = random.dropout_mask(one, 0, random.Generator(9), 0.25, "float64")
    found = run(bodies.dropped, layout, array, 9)
    for each in found:
        np.testing.assert_allclose(each["whole"], array * mask, **ROUNDED)
    check_gradients(layout, [each["gradient"] for each in found], array * mask, "gradient")


def test_what_may_not_be_overwritten_or_drawn(run):
    for messages in run(bodies.refusals_in_place):
        assert (
            "ConfigError: normal_ would overwrite the result of a recorded operation; use detach()"
            in messages["recorded"]
        )
        assert "axis 'tensor': a random value can't be pending as partial" in messages["pending"]
        assert "found 'int32'; draw one of them and cast it" in messages["whole numbers"]
        assert "unknown dtype 'float33'" in messages["dtype"]
        assert "redistribute needs placements" in messages["no placements"]
        assert "LayoutError" in messages["other ranks"]


def test_of_two_joined_backends_one_is_named():
    code = """
        import hyper_parallel as hp
        where = {"device_mesh": hp.DeviceMesh((1,), ("tensor",)), "placements": [hp.Replicate()]}
        hp.initialize("torch")
        print(type(hp.zeros(2, **where).to_local()).__module__)
        hp.initialize("mindspore")
        print(type(hp.zeros(2, backend="mindspore", **where).to_local()).__module__)
        try:
            hp.zeros(2, backend="torch", **where) + hp.zeros(2, backend="mindspore", **where)
        except hp.LayoutError as error:
            print(error)
        hp.zeros(2, **where)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, cwd=REPOSITORY
    )
    said = done.stdout.splitlines()
    assert said == ["torch", "mindspore.common.tensor", "+ can't mix a DTensor of torch with one of mindspore"]
    assert 'ConfigError: both backends have joined; say which one: backend="torch"' in done.stderr


def test_a_recompute_does_not_draw_another_mask_unnoticed(pool):
    (message,) = pool("torch", 1).run(bodies.recompute)
    assert message.startswith("ConfigError: dropout runs in a recompute and would draw another mask")


def test_bfloat16_is_added_in_bfloat16(run, count):
    """A tensor of any dtype is added up by the framework itself."""
    (first, *others) = run(bodies.in_bfloat16)
    assert first == ["bfloat16", [1.5, 3.0]] and all(each == first for each in others)
