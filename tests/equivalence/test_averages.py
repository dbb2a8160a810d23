"""Averages on real ranks: no overflow, no more than one rounding; and gradients that share no memory."""

import numpy as np
import pytest

from tests.equivalence import average_bodies


@pytest.mark.parametrize("scattered", [False, True])
def test_an_average_of_large_halves_is_finite(pool, backend_name, scattered):
    values = np.full(6, 60000.0, dtype=np.float16)
    for found in pool(backend_name, 3).run(average_bodies.averages, values, "float16", scattered):
        # Each share and the sum round once: three times half an ulp of 20000, and half an ulp of 60000.
        np.testing.assert_allclose(found.astype(np.float64), 60000.0, atol=3 * 8 + 16)


def test_an_average_of_equal_numbers_is_that_number_up_to_one_rounding(pool, backend_name):
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    for found in pool(backend_name, 3).run(average_bodies.averages, values, "float32", False):
        # The sum of three rounds once more than that of two, the quotient once.
        np.testing.assert_allclose(found, values, rtol=2 * np.finfo(np.float32).eps, atol=0)


def test_two_summands_have_gradients_of_their_own(pool):
    for gradients in pool("torch", 2).run(average_bodies.accumulated, 3):
        for found in gradients:
            np.testing.assert_array_equal(found, 3 * np.arange(4.0))
