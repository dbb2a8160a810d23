"""PyTorch's default generators: the host's, and that of this process's device."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np
import torch


def states() -> tuple[np.ndarray, ...]:
    """See `core.backend.Randomness`."""
    return tuple(each.get_rng_state().numpy() for each in _homes())


def restore(states: Sequence[np.ndarray]) -> None:
    """See `core.backend.Randomness`."""
    for home, state in zip(_homes(), states):
        home.set_rng_state(torch.from_numpy(state))


def seed(value: int) -> None:
    """See `core.backend.Randomness`."""
    torch.manual_seed(value)


def last_seed() -> int:
    """See `core.backend.Randomness`."""
    return torch.initial_seed()


def draw() -> int:
    """See `core.backend.Randomness`."""
    return int(torch.randint(1 << 31, (), device="cpu"))


def _homes() -> list[Any]:
    """Where functions about generators stand."""
    if not torch.accelerator.is_available():
        return [torch]
    return [torch, torch.get_device_module(torch.accelerator.current_accelerator())]
