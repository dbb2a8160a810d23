"""Muon's kernels in MindSpore: values, batches, what a CPU lacks, and PyTorch's kernels beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyper_parallel import backends
from hyper_parallel.backends.mindspore import tensors  # before mindspore is used: it sets launch_blocking
from hyper_parallel.backends.mindspore.muon import _Products
from hyper_parallel.core.muon.newton_schulz import NewtonSchulz
from tests.core.muon.kernel_checks import KernelChecks, orthogonalize
from tests.core.muon.reference import distance, gaussian


@pytest.fixture
def backend():
    return backends.load("mindspore")


@pytest.fixture
def torch_backend():
    """PyTorch on one thread: several only wait for each other at such sizes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield backends.load("torch")
    torch.set_num_threads(threads)


class TestKernels(KernelChecks):
    """See `KernelChecks`."""


@pytest.mark.parametrize("shape", [(7, 24, 40), (5, 40, 24), (3, 16, 16)])
def test_a_batch_is_computed_as_its_matrices_bit_for_bit(backend, shape):
    """But for matrices of one row: MindSpore adds up other numbers first there, according to how many there are."""
    for dtype in ("float32", "bfloat16"):
        settings = NewtonSchulz("asym5", dtype=dtype)
        together = orthogonalize(backend, gaussian(*shape), settings)
        alone = [orthogonalize(backend, matrix[None], settings)[0] for matrix in gaussian(*shape)]
        np.testing.assert_array_equal(together, np.stack(alone))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_are_rounded_as_a_cast_rounds_them(dtype):
    halves = 1 + np.arange(64) * 2.0**-12  # ties of either dtype among them
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 3.3895e38, 3.4e38, 65519.0, 65520.0, 1e-40, 6e-8, -1e-39]
    given = np.float32([*halves, *-halves, *gaussian(500), *special])
    found = tensors.to_numpy(_Products(dtype).rounded(tensors.from_numpy(given)))
    with np.errstate(over="ignore"):
        wanted = given.astype(tensors.numpy_dtype(dtype)).astype(np.float32)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("dtype", "method", "bound"),
    [
        ("float32", "direct", 1e-5),
        ("float32", "gram", 3e-4),  # each of both is as far from float64
        ("float16", "direct", 8e-3),
        ("bfloat16", "direct", 3e-2),
    ],
)
def test_both_frameworks_orthogonalize_alike(backend, torch_backend, dtype, method, bound):
    for coefficients in ("legacy", "asym5", "polar_express"):
        settings = NewtonSchulz(coefficients, dtype=dtype, method=method)
        for shape in ((3, 24, 40), (2, 48, 20), (2, 32, 32)):
            one, other = (orthogonalize(each, gaussian(*shape), settings) for each in (backend, torch_backend))
            assert distance(one, other.astype(np.float64)) < bound


def test_both_frameworks_go_the_same_way(backend, torch_backend):
    """Twenty steps with all that there is, in float32."""

    def run(backend):
        tensors, muon = backend.tensors, backend.muon
        parameter, buffer = tensors.from_numpy(gaussian(12, 20), "float32"), tensors.zeros((12, 20), "float32")
        second, settings = tensors.zeros((1, 12), "float32"), NewtonSchulz("asym5", dtype="float32", method="direct")
        for step in range(20):
            gradient = tensors.from_numpy(gaussian(12, 20, seed=step), "float32")
            (ahead,) = muon.momenta_([buffer], [gradient], 0.95, "ema", True)
            update = muon.newton_schulz(tensors.alias(tensors.flat(ahead), 0, (1, 12, 20)), settings)
            muon.normalize_rows_(update, second, 0.95, 1e-10)
            muon.apply_([parameter], [tensors.alias(tensors.flat(update), 0, (12, 20))], 0.02, [0.9], 0.1)
            muon.scale_blocks_(parameter, [(slice(0, 6), slice(0, 20))], [0.99])
        return tensors.to_numpy(parameter)

    np.testing.assert_allclose(run(backend), run(torch_backend), rtol=0, atol=1e-5)
