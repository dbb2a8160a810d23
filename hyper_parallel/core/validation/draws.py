"""Whether ranks that have to draw the same random numbers do."""

from __future__ import annotations

from functools import partial
from typing import Sequence

from hyper_parallel.core.execution.randomness import Axes, Randomness
from hyper_parallel.core.validation.agreement import Agreement
from hyper_parallel.core.validation.messages import generators_error


class Draws:
    """Compares generators over the ranks of an axis, each time that they have been seeded, or the model has begun, and
    an operator draws for what is the same on all of them."""

    def __init__(self, randomness: Randomness, agreement: Agreement):
        self._randomness = randomness
        self._agreement = agreement
        self._seen: dict[str, int] = {}

    def apart(self) -> Axes:
        """The axes along which each rank draws for itself now."""
        return self._randomness.apart()

    def begin(self) -> None:
        """The model begins: what was seen before says nothing of now."""
        self._seen.clear()

    def check(self, module: str, op: str, axes: Sequence[str]) -> None:
        """Before `op` draws what has to be the same along `axes`.

        Raises:
            ContractError: the ranks would draw other numbers.
        """
        seed = self._randomness.generators.last_seed()
        for axis in axes:
            if self._seen.get(axis) != seed:
                self._seen[axis] = seed
                fail = partial(generators_error, module, op, axis)
                self._agreement.check_bytes(self._randomness.fingerprint(), axis, fail)
