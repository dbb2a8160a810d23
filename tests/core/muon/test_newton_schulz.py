"""Settings of Newton-Schulz, their costs, and the iteration itself, on numpy in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hyper_parallel.core.errors import ConfigError, LayoutError
from hyper_parallel.core.muon.iteration import iterate, matrix_batch
from hyper_parallel.core.muon.newton_schulz import COEFFICIENTS, NewtonSchulz
from hyper_parallel.core.muon.scaling import scale_of
from tests.core.muon.reference import NumpyProducts, distance, gaussian, orthogonalized, with_condition

TRIPLE = (3.0, -3.2, 1.2)


def iterated(matrix, settings):
    """What `iterate` makes of one matrix in float64, and the products that it took."""
    products = NumpyProducts()
    x = matrix[None] / (np.linalg.norm(matrix) + settings.eps)
    return iterate(products, x, settings)[0], products


# Settings


def test_a_name_has_its_first_steps_used_and_its_last_triple_repeated():
    asym5 = COEFFICIENTS["asym5"]
    assert NewtonSchulz("asym5").schedule == asym5
    assert NewtonSchulz("asym5", steps=3).schedule == asym5[:3]
    assert NewtonSchulz("asym5", steps=7).schedule == (*asym5, asym5[-1], asym5[-1])
    assert NewtonSchulz("legacy").schedule == ((3.4445, -4.7750, 2.0315),) * 5


def test_given_triples_are_taken_in_order_and_the_last_is_repeated():
    assert NewtonSchulz([TRIPLE]).schedule == (TRIPLE,) * 5
    assert NewtonSchulz(TRIPLE, steps=2).schedule == (TRIPLE,) * 2
    assert NewtonSchulz([(1, 2, 3), TRIPLE], steps=3).schedule == ((1.0, 2.0, 3.0), TRIPLE, TRIPLE)


def test_given_triples_are_never_left_out():
    with pytest.raises(ConfigError, match="6 triples .* for 5 steps: write steps=6"):
        NewtonSchulz([TRIPLE] * 6)


def test_settings_are_values():
    assert NewtonSchulz([list(TRIPLE)]) == NewtonSchulz((TRIPLE,)) != NewtonSchulz()
    assert len({NewtonSchulz(), NewtonSchulz(), NewtonSchulz([TRIPLE]), NewtonSchulz((TRIPLE,))}) == 2


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"coefficients": "quintic"}, '"legacy", "asym5", "polar_express"'),
        ({"coefficients": []}, "a list of"),
        ({"coefficients": [(1.0, 2.0)]}, "a list of"),
        ({"coefficients": [(1.0, 2.0, "3")]}, "a list of"),
        ({"coefficients": (1.0, 2.0, math.nan)}, "a list of"),
        ({"coefficients": 3.0}, "a list of"),
        ({"steps": 0}, "whole number from 1"),
        ({"steps": 2.0}, "whole number from 1"),
        ({"steps": True}, "whole number from 1"),
        ({"dtype": "float64"}, "bfloat16, float16, float32"),
        ({"eps": 0.0}, "above 0"),
        ({"eps": "1e-7"}, "above 0"),
        ({"method": "svd"}, "auto, direct, gram"),
        ({"method": "gram"}, 'write dtype="float16" or "float32"'),
    ],
)
def test_a_wrong_setting_is_an_error_that_says_what_to_write(wrong, says):
    with pytest.raises(ConfigError, match=says):
        NewtonSchulz(**wrong)


@pytest.mark.parametrize(
    ("steps", "lengths"), [(1, [1]), (2, [2]), (3, [2, 1]), (5, [2, 3]), (6, [2, 3, 1]), (10, [2, 3, 3, 2])]
)
def test_gram_begins_anew_after_two_steps_and_then_after_every_three(steps, lengths):
    settings = NewtonSchulz("polar_express", steps, "float32")
    assert [len(segment) for segment in settings.segments] == lengths
    assert sum(settings.segments, ()) == settings.schedule


def test_gram_is_chosen_where_it_takes_fewer_flops_and_the_dtype_bears_it():
    settings = NewtonSchulz(dtype="float32")
    assert settings.method_for(512, 512) == "direct"
    assert settings.method_for(512, 767) == settings.method_for(767, 512) == "direct"
    assert settings.method_for(512, 769) == settings.method_for(769, 512) == "gram"
    assert NewtonSchulz(dtype="float16").method_for(1, 9) == "gram"
    assert NewtonSchulz(dtype="bfloat16").method_for(64, 6400) == "direct"
    assert NewtonSchulz(dtype="float32", method="direct").method_for(64, 6400) == "direct"
    assert NewtonSchulz(dtype="float32", method="gram").method_for(64, 64) == "gram"


def test_float16_comes_and_goes_in_float32():
    assert [NewtonSchulz(dtype=dtype).wire_dtype for dtype in ("bfloat16", "float16", "float32")] == [
        "bfloat16",
        "float32",
        "float32",
    ]


# The iteration


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 6, 10])
@pytest.mark.parametrize("shape", [(4, 4), (3, 11), (1, 7)])
@pytest.mark.parametrize("method", ["direct", "gram"])
def test_flops_are_those_of_the_products_that_are_made(steps, shape, method):
    settings = NewtonSchulz("asym5", steps, "float32", method=method)
    _, products = iterated(gaussian(*shape), settings)
    assert products.flops == settings.flops(*shape) == settings.flops(*reversed(shape))


def test_flops_of_real_sizes():
    """512 x 512, 4096 x 11008 and 2048 x 8192 as counted by hand, in billions."""
    sizes = [(512, 512), (4096, 11008), (2048, 8192)]
    direct, gram = (NewtonSchulz(dtype="float32", method=method) for method in ("direct", "gram"))
    assert [round(direct.flops(*size) / 1e9, 2) for size in sizes] == [4.03, 4380.87, 773.09]
    assert [round(gram.flops(*size) / 1e9, 2) for size in sizes] == [4.83, 3401.61, 515.4]
    assert direct.flops(0, 5) == gram.flops(0, 5) == 0


@pytest.mark.parametrize("method", ["direct", "gram"])
def test_memory_is_taken_once_however_many_steps_there_are(method):
    rooms = [
        iterated(gaussian(4, 6), NewtonSchulz("asym5", steps, "float32", method=method))[1].rooms for steps in (2, 9)
    ]
    assert rooms == ([3, 3] if method == "direct" else [5, 5])


@pytest.mark.parametrize("coefficients", [*COEFFICIENTS, (TRIPLE, (2.0, -1.5, 0.5))])
@pytest.mark.parametrize("matrix", [gaussian(6, 6), gaussian(5, 12), with_condition(8, 8, 1e4), gaussian(1, 4)])
@pytest.mark.parametrize("steps", [2, 5, 8])
def test_both_methods_compute_the_polynomials(coefficients, matrix, steps):
    direct, gram = (NewtonSchulz(coefficients, steps, "float32", method=method) for method in ("direct", "gram"))
    wanted = orthogonalized(matrix[None], direct)[0]
    assert distance(iterated(matrix, direct)[0], wanted) < 1e-12
    assert distance(iterated(matrix, gram)[0], wanted) < 1e-11  # what is small in X is squared in its gram


@pytest.mark.parametrize(
    ("name", "steps", "smallest", "low", "high"),
    [
        ("legacy", 5, 1e-2, 0.682, 1.134),
        ("legacy", 5, 1e-3, 0.471, 1.202),
        ("asym5", 5, 1e-2, 0.978, 1.032),
        ("asym5", 5, 1e-3, 0.475, 1.145),
        ("polar_express", 5, 1e-2, 0.846, 1.124),
        ("polar_express", 5, 1e-3, 0.729, 1.124),
        ("asym5", 8, 1e-2, 0.988, 0.990),
        ("polar_express", 8, 1e-2, 1.035, 1.075),
    ],
)
def test_singular_values_come_where_the_coefficients_promise(name, steps, smallest, low, high):
    values = np.geomspace(smallest, 1, 20001)
    for a, b, c in NewtonSchulz(name, steps).schedule:
        values = a * values + b * values**3 + c * values**5
    assert (round(values.min(), 3), round(values.max(), 3)) == (low, high)


def test_a_batch_has_three_dims():
    assert matrix_batch((2, 3, 4)) == (2, 3, 4)
    with pytest.raises(LayoutError, match=r"a batch \[k, m, n\], not in the shape \[3, 4\]"):
        matrix_batch((3, 4))


# Scaling


@pytest.mark.parametrize(
    ("scale", "wide", "tall"),
    [
        ("match_rms", 0.2 * math.sqrt(2048), 0.2 * math.sqrt(2048)),
        ("original", 1.0, 2.0),
        ("spectral", math.sqrt(2048), math.sqrt(2048)),
        ("unit_rms", 0.5, 2.0),
        (0.3, 0.3, 0.3),
    ],
)
def test_updates_are_scaled_by_outputs_and_inputs(scale, wide, tall):
    assert scale_of(scale, (512, 2048)) == pytest.approx(wide)
    assert scale_of(scale, (2048, 512)) == pytest.approx(tall)
    assert scale_of(scale, (0, 512)) in (1.0, scale)


@pytest.mark.parametrize("wrong", ["rms", 0, -1.0, math.inf, True, None])
def test_an_unknown_scale_is_an_error_that_names_the_known_ones(wrong):
    with pytest.raises(ConfigError, match='"match_rms", "original", "spectral", "unit_rms", or a number'):
        scale_of(wrong, (2, 2))
