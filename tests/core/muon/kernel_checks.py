"""What `core.backend.Orthogonalizing` promises, held against numpy in float64. `tests/torch` and `tests/mindspore` run
these checks, each with a fixture `backend`."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.errors import ConfigError, LayoutError
from hyper_parallel.core.muon.newton_schulz import COEFFICIENTS, NewtonSchulz
from tests.core.muon.reference import distance, gaussian, orthogonalized, with_condition

SHAPES = [(3, 24, 40), (2, 48, 20), (2, 32, 32), (5, 1, 9), (3, 9, 1), (1, 1, 1)]
ALL = [*COEFFICIENTS, ((3.4, -4.7, 2.0), (3.0, -3.2, 1.2))]

# The largest relative errors of Gaussian matrices, of those with one row, and of those with condition numbers of up to
# 1e4, by norm: what is seen on 1 to 256 rows with either framework, and up to twice that. Steps multiply small singular
# values, and what rounding has left there, by 3 to 8 each; gram forms square them first; with one row the terms of a
# polynomial, up to 20 times as large as its value, cancel.
BOUNDS = {
    ("float32", "direct"): (1e-5, 1e-5, 1e-5),
    ("float32", "gram"): (3e-4, 1e-5, 3e-4),
    ("float16", "direct"): (4e-3, 8e-3, 3e-2),
    ("float16", "gram"): (4e-2, 3e-2, 6e-2),
    ("bfloat16", "direct"): (3e-2, 0.1, 0.2),
}


def rounded(backend, array, dtype):
    """The nearest numbers that a dtype has."""
    return backend.tensors.to_numpy(backend.tensors.from_numpy(np.float32(array), dtype))


def orthogonalize(backend, array, settings, dtype="float32"):
    """What the backend makes of an array, which comes as a tensor of `dtype`."""
    result = backend.muon.newton_schulz(backend.tensors.from_numpy(np.asarray(array), dtype), settings)
    assert backend.tensors.dtype_name(result) == settings.wire_dtype and result.is_contiguous()
    return backend.tensors.to_numpy(result)


class KernelChecks:
    """The checks."""

    # Newton-Schulz

    @pytest.mark.parametrize("coefficients", ALL)
    @pytest.mark.parametrize(("dtype", "method"), list(BOUNDS))
    def test_newton_schulz_of_any_shape(self, backend, coefficients, dtype, method):
        settings = NewtonSchulz(coefficients, dtype=dtype, method=method)
        for shape in SHAPES:
            batch = rounded(backend, gaussian(*shape), settings.wire_dtype)
            found = orthogonalize(backend, batch, settings, settings.wire_dtype)
            assert found.shape == shape
            bound = BOUNDS[dtype, method][1 if 1 in shape[1:] else 0]
            assert distance(found, orthogonalized(batch, settings)) < bound, shape

    @pytest.mark.parametrize("coefficients", COEFFICIENTS)
    @pytest.mark.parametrize(("dtype", "method"), list(BOUNDS))
    def test_newton_schulz_of_matrices_with_small_singular_values(self, backend, coefficients, dtype, method):
        settings = NewtonSchulz(coefficients, dtype=dtype, method=method)
        for rows, columns in ((64, 64), (64, 160)):
            for condition in (1e2, 1e4):
                batch = rounded(backend, with_condition(rows, columns, condition)[None], settings.wire_dtype)
                error = distance(orthogonalize(backend, batch, settings), orthogonalized(batch, settings))
                assert error < BOUNDS[dtype, method][2], (rows, columns, condition)

    @pytest.mark.parametrize(("dtype", "method"), [("float32", "auto"), ("float16", "auto"), ("bfloat16", "auto")])
    def test_a_batch_of_another_dtype_is_cast_and_left_as_it_is(self, backend, dtype, method):
        settings = NewtonSchulz(dtype=dtype, method=method)
        batch = gaussian(2, 8, 20).astype(np.float32)
        given = backend.tensors.from_numpy(batch)
        found = backend.muon.newton_schulz(given, settings)
        cast = backend.tensors.from_numpy(batch, settings.wire_dtype)
        again = backend.muon.newton_schulz(cast, settings)
        np.testing.assert_array_equal(backend.tensors.to_numpy(found), backend.tensors.to_numpy(again))
        np.testing.assert_array_equal(backend.tensors.to_numpy(given), batch)
        np.testing.assert_array_equal(
            backend.tensors.to_numpy(cast), rounded(backend, batch, settings.wire_dtype)
        )  # not even where the batch has the dtype already

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_a_transposed_batch_gives_the_transposed_result_bit_for_bit(self, backend, dtype):
        batch = gaussian(2, 33, 20)
        settings = NewtonSchulz(dtype=dtype)
        tall = orthogonalize(backend, batch, settings)
        wide = orthogonalize(backend, np.ascontiguousarray(batch.transpose(0, 2, 1)), settings)
        np.testing.assert_array_equal(tall, wide.transpose(0, 2, 1))

    def test_zeros_stay_zeros_and_a_matrix_of_rank_one_keeps_its_direction(self, backend):
        """Rounding makes singular values where there are none, and they grow 500 times: in half precision they show, so
        what is compared is the part along the matrix."""
        rank_one = np.outer(gaussian(12), gaussian(20, seed=1))
        rank_one /= np.linalg.norm(rank_one)
        for dtype, bound in (("float32", 1e-5), ("float16", 1e-2), ("bfloat16", 1e-1)):
            settings = NewtonSchulz("asym5", dtype=dtype)
            found = orthogonalize(backend, np.stack([0 * rank_one, rank_one]), settings)
            assert not found[0].any()
            assert np.vdot(found[1], rank_one) == pytest.approx(0.97835, abs=bound)  # the polynomials of 1
            assert np.linalg.norm(np.float64(found[1]), 2) < 1.2

    @pytest.mark.parametrize("shape", [(0, 3, 4), (0, 4, 3), (2, 0, 4), (2, 4, 0), (0, 0, 0)])
    def test_a_batch_without_elements_gives_one(self, backend, shape):
        for dtype in ("float32", "bfloat16"):
            assert orthogonalize(backend, np.zeros(shape), NewtonSchulz(dtype=dtype)).shape == shape

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    @pytest.mark.parametrize("method", ["auto", "direct"])
    def test_what_is_not_finite_spoils_its_own_matrix_and_all_of_it(self, backend, dtype, method):
        settings = NewtonSchulz(dtype=dtype, method=method)
        for shape in ((4, 6, 16), (4, 16, 6), (4, 1, 5)):
            batch = gaussian(*shape)
            wanted = orthogonalize(backend, batch, settings)
            for place, value in ((1, np.nan), (2, np.inf), (3, 1e30)):  # whose square float32 does not have
                batch[place, 0, -1] = value
            found = orthogonalize(backend, batch, settings)
            np.testing.assert_array_equal(found[0], wanted[0])
            assert np.isnan(found[1:]).all()

    def test_gradients_too_small_for_float16_are_orthogonalized_in_it(self, backend):
        settings = NewtonSchulz("asym5", dtype="float16")
        batch = gaussian(1, 8, 24)
        for size in (1e-9, 1e6):
            error = distance(orthogonalize(backend, size * batch, settings, "float32"), orthogonalized(batch, settings))
            assert error < BOUNDS["float16", "gram"][0]  # eps is half a percent of the smaller norm

    def test_a_batch_of_two_dims_is_refused(self, backend):
        with pytest.raises(LayoutError, match=r"a batch \[k, m, n\], not in the shape \[3, 4\]"):
            orthogonalize(backend, np.ones((3, 4)), NewtonSchulz())

    # Momentum

    @pytest.mark.parametrize("form", ["ema", "heavy_ball"])
    @pytest.mark.parametrize("nesterov", [True, False])
    @pytest.mark.parametrize("momentum", [0.95, 0.3, 0.0])
    def test_momentum_of_either_form(self, backend, form, nesterov, momentum):
        shapes = [(4, 6), (0, 3), (5,), (2, 3, 4)]
        buffers = [backend.tensors.zeros(shape, "float32") for shape in shapes]
        wanted = [np.zeros(shape) for shape in shapes]
        for step in range(3):
            gradients = [gaussian(*shape, seed=step).astype(np.float32) for shape in shapes]
            given = [backend.tensors.from_numpy(gradient) for gradient in gradients]
            ahead = backend.muon.momenta_(buffers, given, momentum, form, nesterov)
            for place, gradient in enumerate(gradients):
                share = 1 - momentum if form == "ema" else 1.0
                wanted[place] = momentum * wanted[place] + share * gradient
                u = share * gradient + momentum * wanted[place] if nesterov else wanted[place]
                np.testing.assert_allclose(backend.tensors.to_numpy(buffers[place]), wanted[place], rtol=0, atol=1e-6)
                np.testing.assert_allclose(backend.tensors.to_numpy(ahead[place]), u, rtol=0, atol=1e-6)
                np.testing.assert_array_equal(backend.tensors.to_numpy(given[place]), gradient)

    def test_both_forms_of_momentum_differ_by_a_factor(self, backend):
        found = {}
        for form in ("ema", "heavy_ball"):
            buffers = [backend.tensors.zeros((6, 9), "float32")]
            for step in range(4):
                gradient = backend.tensors.from_numpy(gaussian(6, 9, seed=step), "float32")
                ahead = backend.muon.momenta_(buffers, [gradient], 0.9, form, True)
            found[form] = [backend.tensors.to_numpy(each) for each in (buffers[0], ahead[0])]
        for ema, heavy in zip(*found.values()):
            np.testing.assert_allclose(ema, heavy * 0.1, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("nesterov", [True, False])
    @pytest.mark.parametrize("foreach", [True, False])
    def test_what_is_to_be_orthogonalized_is_cast_and_no_alias(self, backend, nesterov, foreach):
        tensors = backend.tensors
        buffers = [tensors.from_numpy(gaussian(3, 4), "float32") for _ in range(2)]
        gradients = [tensors.from_numpy(gaussian(3, 4, seed=1), dtype) for dtype in ("bfloat16", "float32")]
        for dtype in ("bfloat16", "float32", None):
            ahead = backend.muon.momenta_(buffers, gradients, 0.9, "ema", nesterov, dtype, foreach)
            assert [tensors.dtype_name(each) for each in ahead] == [dtype or "float32"] * 2
            kept = [tensors.to_numpy(each) for each in buffers]
            for each in ahead:
                tensors.zero_(each)
            assert all(np.array_equal(tensors.to_numpy(each), was) for each, was in zip(buffers, kept))
        assert tensors.to_numpy(gradients[0]).all()

    def test_lists_are_computed_as_their_elements_bit_for_bit(self, backend):
        tensors = backend.tensors

        def run(foreach):
            parameters = [tensors.from_numpy(gaussian(3, 5), dtype) for dtype in ("float32", "bfloat16", "float32")]
            buffers = [tensors.zeros((3, 5), "float32") for _ in parameters]
            gradients = [tensors.from_numpy(gaussian(3, 5, seed=7), "float32") for _ in parameters]
            ahead = backend.muon.momenta_(buffers, gradients, 0.95, "ema", True, "bfloat16", foreach)
            backend.muon.apply_(parameters, ahead, 0.02, [0.3, 0.3, 1.7], 0.1, foreach)
            return [tensors.to_numpy(each) for each in (*parameters, *buffers, *ahead)]

        for one, other in zip(run(True), run(False)):
            np.testing.assert_array_equal(one, other)
        assert backend.muon.momenta_([], [], 0.9, "ema", True) == []
        backend.muon.apply_([], [], 0.1, [], 0.0)

    def test_an_unknown_form_of_momentum_is_refused(self, backend):
        with pytest.raises(ConfigError, match='"ema" or "heavy_ball"'):
            backend.muon.momenta_([], [], 0.9, "nesterov", True)

    # Applying

    def test_decay_goes_by_the_plain_learning_rate_and_comes_first(self, backend):
        shapes, factors = [(4, 6), (3,), (0, 2)], [1.5, 0.25, 2.0]
        values = [gaussian(*shape) for shape in shapes]
        updates = [gaussian(*shape, seed=1) for shape in shapes]
        parameters = [backend.tensors.from_numpy(value, "float32") for value in values]
        backend.muon.apply_(
            parameters, [backend.tensors.from_numpy(each, "float32") for each in updates], 0.1, factors, 0.5
        )
        for parameter, value, update, factor in zip(parameters, values, updates, factors):
            wanted = 0.95 * value - 0.1 * factor * update
            np.testing.assert_allclose(backend.tensors.to_numpy(parameter), wanted, rtol=0, atol=1e-6)

    def test_a_parameter_in_half_precision_is_rounded_once(self, backend):
        value, update = rounded(backend, gaussian(64), "bfloat16"), rounded(backend, gaussian(64, seed=1), "bfloat16")
        parameter = backend.tensors.from_numpy(value, "bfloat16")
        backend.muon.apply_([parameter], [backend.tensors.from_numpy(update, "bfloat16")], 0.02, [0.5], 0.15)
        exact = np.float32(0.997) * value - np.float32(0.01) * update
        np.testing.assert_array_equal(backend.tensors.to_numpy(parameter), rounded(backend, exact, "bfloat16"))

    def test_an_update_of_another_shape_is_refused(self, backend):
        parameter, update = backend.tensors.zeros((2, 3), "float32"), backend.tensors.zeros((3,), "float32")
        with pytest.raises(LayoutError, match=r"update 0 has the shape \[3\], its parameter \[2, 3\]"):
            backend.muon.apply_([parameter], [update], 0.1, [1.0], 0.0)

    # NorMuon

    @pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("bfloat16", 2**-8)])  # bfloat16 rounds once
    @pytest.mark.parametrize("transposed", [False, True])
    def test_rows_are_normalized_by_their_second_moment(self, backend, dtype, bound, transposed):
        tensors, eps = backend.tensors, 1e-10
        moment = np.zeros((3, 4))
        second = tensors.zeros((3, 4), "float32")
        for step in range(3):
            update = gaussian(3, 4, 10, seed=step) * np.array([1.0, 0.1, 3.0, 0.0])[:, None]
            update[2] = 0.0
            update = rounded(backend, update, dtype).astype(np.float64)
            moment = 0.95 * moment + 0.05 * (update**2).mean(2)
            wanted = update / (np.sqrt(moment) + eps)[..., None]
            sizes = [np.sqrt((each**2).sum((1, 2), keepdims=True)) for each in (update, wanted)]
            wanted = wanted * sizes[0] / np.maximum(sizes[1], 1e-30)
            stored = np.ascontiguousarray(update.transpose(0, 2, 1)) if transposed else update
            given = tensors.from_numpy(stored, dtype)
            backend.muon.normalize_rows_(given, second, 0.95, eps, transposed)
            found = tensors.to_numpy(given)
            found = found.transpose(0, 2, 1) if transposed else found
            np.testing.assert_allclose(tensors.to_numpy(second), moment, rtol=1e-5, atol=1e-12)
            np.testing.assert_allclose(found, wanted, rtol=bound, atol=1e-6)
            assert not found[2].any()

    def test_nothing_is_normalized_where_there_is_nothing(self, backend):
        second = backend.tensors.zeros((2, 3), "float32")
        backend.muon.normalize_rows_(backend.tensors.zeros((2, 3, 0), "float32"), second, 0.9, 1e-10)
        assert not backend.tensors.to_numpy(second).any()

    # Checking and clipping

    def test_tensors_with_infinities_or_nan_are_told(self, backend):
        arrays = [gaussian(3, 4) for _ in range(6)]
        arrays[1][2, 3], arrays[3][0, 0], arrays[4][1, 1] = np.nan, np.inf, -np.inf
        arrays[5] = np.zeros((0, 4))
        for dtype in ("float32", "bfloat16"):
            given = [backend.tensors.from_numpy(array, dtype) for array in arrays]
            assert backend.muon.all_finite(given) == [True, False, True, False, False, True]
        assert backend.muon.all_finite([]) == []
        assert backend.muon.all_finite([given[-1]]) == [True]

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_blocks_are_scaled_in_place(self, backend, dtype):
        parameter = backend.tensors.from_numpy(np.ones((4, 6)), dtype)
        boxes = [(slice(0, 2), slice(0, 6)), (slice(3, 4), slice(2, 4)), (slice(2, 2), slice(0, 6))]
        backend.muon.scale_blocks_(parameter, boxes, [0.5, 0.25, 7.0])
        wanted = np.ones((4, 6))
        wanted[:2] = 0.5
        wanted[3, 2:4] = 0.25
        np.testing.assert_array_equal(backend.tensors.to_numpy(parameter), wanted)
