"""Where the members of a fused gradient buffer lie: arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

ALIGNMENT = 512
"""Bytes. What begins and ends at a multiple of it travels at full speed on the links between supernodes."""


@dataclass(frozen=True)
class FusedBuffer:
    """One buffer of gradients that are reduced together: `sizes` elements for each member, one after the other, of
    `item_bytes` bytes each.

    It begins at a multiple of 512 bytes and is as long as a multiple of 512 bytes; the elements at its end that belong
    to no member hold zeros, which a sum leaves alone.
    """

    sizes: tuple[int, ...]
    item_bytes: int

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first element of each member."""
        return tuple(accumulate(self.sizes, initial=0))[:-1]

    @cached_property
    def used(self) -> int:
        """Elements of all members."""
        return sum(self.sizes)

    @cached_property
    def numel(self) -> int:
        """Elements of the buffer, its padding included."""
        return -(-self.used // self._step) * self._step

    @property
    def allocated(self) -> int:
        """Elements to allocate, so that a first element can be chosen."""
        return self.numel + self._step - 1 if self.numel else 0

    def first(self, address: int) -> int:
        """The element of an allocation that begins at `address` (a multiple of an element's bytes) from which on the
        buffer lies."""
        return -address % ALIGNMENT // self.item_bytes if self.numel else 0

    @property
    def _step(self) -> int:
        return ALIGNMENT // self.item_bytes
