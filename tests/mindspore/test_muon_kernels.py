"""Muon's kernels in MindSpore: values, and what a CPU lacks."""

from __future__ import annotations

import pytest

from hyper_parallel import backends
from tests.core.muon.kernel_checks import KernelChecks


@pytest.fixture
def backend():
    return backends.load("mindspore")


class TestKernels(KernelChecks):
    """See `KernelChecks`."""
