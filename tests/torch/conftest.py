"""Fixtures for tests in PyTorch."""

from __future__ import annotations

from typing import Iterator

import pytest
import torch

from hyper_parallel import backends
from tests.torch.all_ranks import double_precision

backends.load("torch")  # before a test puts other functions in the place of PyTorch's, which it knows by identity


@pytest.fixture
def in_double_precision() -> Iterator[None]:
    """All of float64, and one thread for each rank that is a thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with double_precision():
        yield
    torch.set_num_threads(threads)
