"""MindSpore's default generator, and the seed that operators without a generator draw from.

The state of the generator is two numbers, a seed and how much has been drawn. Operators of `ops` that ask no generator
(on a CPU all of them) draw from `set_seed`; that stream has no state that could be read, so it begins anew, from what
the generator's state says, whenever the generator is set. A layer that has taken seeds when it was made (`nn.Dropout`)
is reached by neither.
"""

from __future__ import annotations

import hashlib
from typing import Sequence

import mindspore as ms
import numpy as np


def states() -> tuple[np.ndarray, ...]:
    """See `core.backend.Randomness`."""
    return (ms.get_rng_state().asnumpy().copy(),)


def restore(states: Sequence[np.ndarray]) -> None:
    """See `core.backend.Randomness`."""
    (state,) = states
    ms.set_rng_state(ms.Tensor(state))
    _seed_the_others(_digest(state))


def seed(value: int) -> None:
    """See `core.backend.Randomness`."""
    ms.manual_seed(value)
    _seed_the_others(value)


def last_seed() -> int:
    """See `core.backend.Randomness`."""
    return ms.initial_seed()


def draw() -> int:
    """See `core.backend.Randomness`. What is drawn is made of the state, and the generator is seeded anew: drawing on
    a device would have to wait for it, and on a CPU the state would stay as it is."""
    number = _digest(*states())
    ms.manual_seed(number >> 1)
    return number & 0x7FFFFFFF


def _digest(state: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(state.tobytes(), digest_size=8).digest(), "little")


def _seed_the_others(value: int) -> None:
    """`set_seed`, which takes 32 bits and seeds numpy too: that is the user's."""
    theirs = np.random.get_state()
    ms.set_seed(value & 0xFFFFFFFF)
    np.random.set_state(theirs)
