"""Muon's kernels in PyTorch: values, memory, batches, and PyTorch's own optimizer."""

from __future__ import annotations

import pytest

from hyper_parallel import backends
from tests.core.muon.kernel_checks import KernelChecks


@pytest.fixture
def backend():
    return backends.load("torch")


class TestKernels(KernelChecks):
    """See `KernelChecks`."""
