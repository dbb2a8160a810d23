"""What the workers do in `test_pool.py`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Callable

from hyper_parallel.core.backend import Backend


def place(backend: Backend, *args: Any, **kwargs: Any) -> tuple[int, int, tuple, dict]:
    return backend.collectives.rank(), backend.collectives.world_size(), args, kwargs


def process(backend: Backend) -> tuple[int, int]:
    """Process id and number of compute threads."""
    import torch

    return os.getpid(), torch.get_num_threads()


def raise_in_a_collective(backend: Backend, who: int) -> None:
    """One rank fails while the others wait for it."""
    if backend.collectives.rank() == who:
        _deep_inside()
    backend.collectives.barrier()


def _deep_inside() -> None:
    raise ValueError("the cause of it all")


def raise_one_after_another(backend: Backend, order: list[int]) -> None:
    """Every rank fails, in this order, a while apart."""
    time.sleep(0.3 * order.index(backend.collectives.rank()))
    raise RuntimeError(f"failure of rank {backend.collectives.rank()}")


def exit_in_a_collective(backend: Backend, who: int) -> None:
    if backend.collectives.rank() == who:
        print("last words")
        os._exit(3)
    backend.collectives.barrier()


def be_killed(backend: Backend, who: int) -> None:
    if backend.collectives.rank() == who:
        os.kill(os.getpid(), signal.SIGKILL)
    backend.collectives.barrier()


def oversleep(backend: Backend, who: int) -> None:
    if backend.collectives.rank() == who:
        time.sleep(600)


def result_that_cannot_travel(backend: Backend) -> Callable:
    return lambda: None
