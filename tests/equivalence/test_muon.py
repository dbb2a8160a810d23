"""Muon on four ranks against one device in float64, with gradients that are given: full rank, the same on all meshes.

A tiny batch gives gradients without full rank, whose null directions are rounding noise times 500; so none is used.
"""

import numpy as np
import pytest

import hyper_parallel as hp
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.muon.matrices import LogicalMatrix, MatrixView, split_rows
from hyper_parallel.core.placement import parse_placement
from tests.equivalence import muon_bodies as bodies
from tests.equivalence.muon_oracle import Muon as OneDevice
from tests.equivalence.test_decoder import random_case

# float32: twenty steps of 0.02 of updates whose elements are off by some 1e-6 of their size after Newton-Schulz.
BOUND = 1e-5
# bfloat16 Newton-Schulz turns a rounded input into an update that is off by 1 % (docs/muon.md), relative to its norm.
HALF_BOUND = 3e-2
RATE = 0.02

VIEWS = {
    "fused": split_rows((24, 8), [8, 4, 12]),
    "transposed": MatrixView((8, 12), 0, 1, (LogicalMatrix((range(8),), (range(12),), transposed=True),)),
    "interleaved": MatrixView(
        (12, 5), 0, 1, tuple(LogicalMatrix((range(start, 12, 2),), (range(5),)) for start in (0, 1))
    ),
}
SHAPES = {
    "even": (16, 12),
    "uneven": (10, 7),
    "few rows": (3, 8),
    "columns": (6, 12),
    "whole": (8, 6),
    "experts": (4, 6, 8),
    "inside experts": (4, 6, 8),
    "one row each": (4, 1, 6),
    "kernel": (8, 3, 2, 2),
    "fused": (24, 8),
    "transposed": (8, 12),
    "interleaved": (12, 5),
    "ragged": (9, 8),
    "ragged in two": (4, 6, 5),
    "in blocks": (16, 4),
}
VECTOR = {"vector": (7,)}
# Placements along each axis of a mesh; what a mesh does not name lies as the first four do.
MESHES = {
    "shard": (
        {"shard": 4},
        {
            "columns": ["shard(1)"],
            "whole": ["replicate"],
            "inside experts": ["shard(1)"],
            "ragged": ["ragged_shard([0], [1, 0, 2, 1])"],
            "ragged in two": ["ragged_shard([0, 1], [6, 3, 5, 10])"],
            "in blocks": ["strided_shard(0, 2)"],
        },
    ),
    "replica": ({"replicate": 4}, dict.fromkeys(SHAPES, ["replicate"])),
    "both": (
        {"replicate": 2, "shard": 2},
        {
            "columns": ["replicate", "shard(1)"],
            "whole": ["replicate", "replicate"],
            "inside experts": ["replicate", "shard(2)"],
            "ragged": ["replicate", "ragged_shard([0], [5, 0])"],
            "in blocks": ["replicate", "strided_shard(0, 4)"],
        },
    ),
    "with tensor": (
        {"shard": 2, "tensor": 2},
        {
            "even": ["shard(0)", "shard(1)"],
            "uneven": ["strided_shard(0, 2)", "shard(0)"],
            "columns": ["shard(1)", "shard(1)"],
            "whole": ["replicate", "replicate"],
            "experts": ["shard(0)", "shard(2)"],
            "inside experts": ["shard(1)", "shard(2)"],
            "fused": ["strided_shard(0, 2)", "shard(0)"],
            "transposed": ["replicate", "shard(1)"],
        },
    ),
    "with expert": (
        {"shard": 2, "expert": 2},
        {
            "whole": ["replicate", "replicate"],
            "experts": ["replicate", "shard(0)"],
            "inside experts": ["shard(1)", "shard(0)"],
            "one row each": ["shard(2)", "shard(0)"],
            "even": ["shard(0)", "replicate"],
        },
    ),
}


def layouts_on(sizes, placements, names=SHAPES):
    """A layout for each shape; by default rows are cut along the innermost axis that is no replica's."""
    mesh = DeviceMesh.from_sizes(sizes)
    usual = ["replicate"] * (len(sizes) - 1) + ["shard(0)"]
    return {
        name: Layout(mesh, [parse_placement(each) for each in placements.get(name, usual)], (SHAPES | VECTOR)[name])
        for name in names
    }


def whole(name):
    return bodies.drawn(0, name, SHAPES[name])


def on_one_device(names=SHAPES, count=bodies.STEPS, **options):
    """The oracle after some steps with the gradients that all ranks get."""
    oracle = OneDevice({name: whole(name) for name in names}, VIEWS, lr=RATE, **options)
    for step in range(1, 1 + count):
        oracle.step({name: bodies.drawn(step, name, SHAPES[name]) for name in names})
    return oracle


def views(names=SHAPES):
    return {name: view for name, view in VIEWS.items() if name in names}


def assembled(results, layouts):
    """The whole parameters from what all ranks hold; copies are the same, bit for bit."""
    for name, layout in layouts.items():
        for rank, held in enumerate(results):
            first = min(layout.copies(rank))
            np.testing.assert_array_equal(held[name], results[first][name], err_msg=f"{name}: ranks {first}, {rank}")
    return {name: layout.assemble([held[name] for held in results]) for name, layout in layouts.items()}


def steps_of(backend_name, mesh=""):
    """Twenty; in MindSpore, whose operators take ten times as long on a CPU, on one mesh only: plan and order are the
    core's."""
    return bodies.STEPS if backend_name == "torch" or mesh == "with tensor" else 4


@pytest.mark.parametrize("mesh", MESHES)
def test_steps_on_any_layout_are_those_of_one_device(pool, backend_name, mesh):
    layouts, steps = layouts_on(*MESHES[mesh]), steps_of(backend_name, mesh)
    results = pool(backend_name, 4).run(bodies.train, layouts, steps, lr=RATE, ns_dtype="float32", matrices=VIEWS)
    found, expected = assembled(results, layouts), on_one_device(count=steps).values
    for name in SHAPES:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=BOUND, err_msg=name)


def test_replicas_without_elements_take_part_in_every_agreement(pool, backend_name):
    """They send nothing to each other, so they have fewer groups of ranks than the others."""
    mesh = DeviceMesh.from_sizes({"replicate": 2, "shard": 2})
    layout = Layout(
        mesh, [parse_placement("replicate"), parse_placement("ragged_shard([0], [9, 0])")], SHAPES["ragged"]
    )
    layouts = {"ragged": layout}
    results = pool(backend_name, 4).run(bodies.train, layouts, 2, lr=RATE, ns_dtype="float32")
    expected = on_one_device(["ragged"], 2).values["ragged"]
    np.testing.assert_allclose(assembled(results, layouts)["ragged"], expected, rtol=0, atol=BOUND)


def test_bfloat16_stays_within_the_documented_bound(pool, backend_name):
    names = ("even", "uneven", "fused", "experts", "kernel")
    layouts = layouts_on(*MESHES["with tensor"], names)
    steps = steps_of(backend_name)
    results = pool(backend_name, 4).run(bodies.train, layouts, steps, lr=RATE, matrices=views(names))
    found, expected = assembled(results, layouts), on_one_device(names, steps).values
    for name in names:
        moved = np.linalg.norm(expected[name] - whole(name))
        assert np.linalg.norm(found[name] - expected[name]) < HALF_BOUND * moved, name


RULES = {
    "heavy ball, row norms": dict(momentum_form="heavy_ball", second_moment=hp.NorMuon()),
    "row norms, without look-ahead": dict(second_moment=hp.NorMuon(0.9), nesterov=False, scale="unit_rms"),
    "other coefficients": dict(coefficients="polar_express", steps=6, scale="original", weight_decay=0.0),
}


@pytest.mark.parametrize("rule", RULES)
def test_stages_may_be_replaced_without_touching_the_plan(pool, backend_name, rule):
    names = ("even", "uneven", "transposed", "fused", "experts")
    layouts = layouts_on(*MESHES["both"], names)
    options, steps = dict(ns_dtype="float32", matrices=views(names)) | RULES[rule], steps_of(backend_name)
    results = pool(backend_name, 4).run(bodies.train, layouts, steps, lr=RATE, **options)
    found, expected = assembled(results, layouts), on_one_device(names, steps, **RULES[rule]).values
    for name in names:
        # Coefficients with a slope of 800 at zero instead of 485 make twice as much of a rounding.
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=2 * BOUND, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_computed_again_in_each_supernode_is_the_same_bit_for_bit(pool, backend_name, dtype):
    names = ("even", "uneven", "fused", "experts")
    layouts, found = layouts_on(*MESHES["both"], names), []
    # Both copies in one supernode, where one of them computes; each in its own; and where every replica computes.
    for supernodes in ((0, 0, 0, 0), (0, 0, 1, 1)):
        options = dict(ns_dtype=dtype, matrices=views(names), topology=hp.Topology(range(4), supernodes))
        results = pool(backend_name, 4).run(bodies.train, layouts, 3, lr=RATE, **options)
        found.append(assembled(results, layouts))
    everywhere = dict(ns_dtype=dtype, matrices=views(names), replicas="everywhere")
    found.append(assembled(pool(backend_name, 4).run(bodies.train, layouts, 3, lr=RATE, **everywhere), layouts))
    for name in names:
        for other in found[1:]:
            np.testing.assert_array_equal(found[0][name], other[name], err_msg=name)


STATE = ("even", "uneven", "few rows", "fused", "experts", "transposed")


@pytest.mark.parametrize(("one", "other"), [("torch", "mindspore"), ("mindspore", "torch")])
def test_state_goes_from_one_mesh_and_framework_to_others(pool, one, other):
    """Momentum that one of two replicas keeps is neither lost nor doubled; that of the other form is converted."""
    options = dict(lr=RATE, ns_dtype="float32", matrices=views(STATE), second_moment=hp.NorMuon(), adamw_lr=0.01)
    vector = Layout(DeviceMesh((4,), ("shard",)), [parse_placement("shard(0)")], (7,))
    first = layouts_on(*MESHES["shard"], STATE) | {"vector": vector}
    held = pool(one, 4).run(bodies.go_on, first, 3, **options)
    values = assembled([values for values, _ in held], first)
    state = held[0][1]
    for _, theirs in held[1:]:
        bodies.assert_same(state["parameters"], theirs["parameters"])
    mesh = DeviceMesh((2, 2), ("replicate", "shard"))
    second = layouts_on(*MESHES["both"], STATE) | {"vector": Layout(mesh, {"shard": hp.Shard(0)}, (7,))}
    options["momentum_form"] = "heavy_ball"
    found = pool(other, 4).run(bodies.go_on, second, 3, first=4, start=values, state=state, **options)
    there = assembled([values for values, _ in found], second)
    expected = on_one_device(STATE, 6, second_moment=hp.NorMuon()).values
    for name in STATE:
        np.testing.assert_allclose(there[name], expected[name], rtol=0, atol=BOUND, err_msg=name)
    # On one rank the whole of it fits as well, and goes on as on four.
    alone = {name: Layout(DeviceMesh((1,), ("shard",)), {}, layout.shape) for name, layout in second.items()}
    [(single, _)] = pool(one, 1).run(bodies.go_on, alone, 3, first=4, start=values, state=state, **options)
    for name in there:
        np.testing.assert_allclose(single[name], there[name], rtol=0, atol=BOUND, err_msg=name)


def test_float32_copies_stay_with_their_owners_and_go_to_other_meshes(pool, backend_name):
    names = ("even", "few rows", "experts")
    options = dict(lr=RATE, adamw_lr=0.01, ns_dtype="float32", master_dtype="float32", dtype="float16")
    both, shards = (layouts_on(*MESHES[mesh], (*names, "vector")) for mesh in ("both", "shard"))
    workers = pool(backend_name, 4)
    first = workers.run(bodies.go_on, both, 2, **options)
    through = workers.run(bodies.go_on, both, 4, **options)
    start = assembled([values for values, _ in first], both)
    after = workers.run(bodies.go_on, shards, 2, first=3, start=start, state=first[0][1], **options)
    expected = OneDevice({name: halved(whole(name)) for name in names}, lr=RATE)
    for step in range(1, 5):
        expected.step({name: halved(bodies.drawn(step, name, SHAPES[name])) for name in names})
    values = assembled([values for values, _ in after], shards)
    for name in both:
        copy, other = (each[0][1]["parameters"][name]["master"] for each in (after, through))
        np.testing.assert_allclose(copy, other, rtol=0, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(values[name], halved(copy), err_msg=name)
        if name != "vector":
            np.testing.assert_allclose(copy, expected.values[name], rtol=0, atol=BOUND, err_msg=name)


def halved(values):
    """As float16 has them."""
    return values.astype(np.float16).astype(np.float32)


def test_what_is_wrong_on_one_rank_is_told_on_all_and_nothing_changes(pool, backend_name):
    names = ("even", "few rows", "experts")
    layouts = layouts_on({"replicate": 2, "shard": 2}, {}, names)
    told = pool(backend_name, 4).run(bodies.refusals, layouts, second_moment=hp.NorMuon())
    for rank, each in enumerate(told):
        assert "GradientError: Muon: the gradient of few rows on rank 1 is not finite" in each["not finite"]
        assert "GradientError: Muon: the gradient of few rows on rank 0 is missing, but other" in each["missing"]
        if backend_name == "mindspore":  # PyTorch itself refuses such a gradient
            assert "GradientError" in each["another shape"] and "few rows has the shape [2, 2]" in each["another shape"]
        assert "ConfigError" in each["an option"] and "steps=5" in each["an option"]
        assert "have made different plans" in each["another plan"], rank


MODELS = {
    "under a plan, with tensor": ("plan", {"shard": 2, "tensor": 2}),
    "plain, told to be replicas": ("plain", {"replicate": 4}),
    "experts": ("experts", {"shard": 2, "expert": 2}),
    "fully sharded, but for one": ("fully_shard", {"replicate": 2, "shard": 2}),
}


@pytest.mark.parametrize("model", MODELS)
def test_steps_of_a_model_are_those_of_one_device(pool, backend_name, model):
    how, sizes = MODELS[model]
    case, steps = random_case(), steps_of(backend_name)
    results = pool(backend_name, 4).run(bodies.train_model, how, case, sizes, steps, lr=RATE, ns_dtype="float32")
    before, after, names = results[0]
    assert 0 < len(names) < len(before)
    oracle = OneDevice({name: before[name] for name in names}, model_views(how, before), lr=RATE)
    for step in range(1, steps + 1):
        oracle.step({name: bodies.drawn(step, name, before[name].shape) for name in names})
    for rank, (_, found, _) in enumerate(results):
        for name, value in found.items():
            wanted = oracle.values.get(name, before[name])  # AdamW's rate is zero
            np.testing.assert_allclose(value, wanted, rtol=0, atol=BOUND, err_msg=f"rank {rank}: {name}")


def model_views(how, values):
    """The matrices of packed gates and ups; all else is a matrix, or experts, as it is."""
    return {
        name: split_rows(each.shape, [each.shape[1] // 2] * 2, lead=1)
        for name, each in values.items()
        if name.endswith("gate_up_proj")
    }


def test_a_layout_that_has_changed_is_told_on_every_rank(pool, backend_name):
    case = random_case()
    for told in pool(backend_name, 2).run(bodies.changed_layouts, case, {"shard": 2}):
        assert len(told) == 2 and all("LayoutError" in each and "has changed since" in each for each in told)
