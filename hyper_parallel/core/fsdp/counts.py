"""What a parameter has cost, counted in bytes: what its collectives have brought this rank, and what came on top."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, fields
from time import perf_counter
from typing import TYPE_CHECKING, Iterable, Iterator

if TYPE_CHECKING:
    from hyper_parallel.core.fsdp.parameter import ShardedParameter


@dataclass
class Counts:
    """Bytes since the unit was made."""

    gathered: int = 0
    """What gathers have received from other ranks, padding of pieces included."""
    scattered: int = 0
    """What reduce-scatters have."""
    summed: float = 0
    """What all-reduces have: `2 (k - 1) / k` of what is summed over k ranks."""

    gather_copied: int = 0
    """Copies on the way from the shard to the full parameter: padded, taken apart, or put together."""
    reduce_copied: int = 0
    """Copies on the way from the gradient that autograd gave to what is reduced."""
    cast: int = 0
    """What changes its dtype: parameters before they are gathered, gradients before, while (on CPUs, where they travel
    in the narrower dtype) or after they are reduced; as many bytes as it takes afterwards."""
    scaled: int = 0
    """Passes that do nothing but scale."""
    moved: int = 0
    """Copies between the host and the device."""

    @property
    def copied(self) -> int:
        """All bytes that were copied around collectives."""
        return self.gather_copied + self.reduce_copied


class Waits:
    """How often, and how long in seconds, this rank has waited for gathers, reduce-scatters ("scatter") and all-reduces
    ("sum") of a tree of units: the communication that nothing hides. On a CPU, MindSpore's collectives are over when
    they have been issued, so that there is nothing to see here."""

    def __init__(self) -> None:
        self.times: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()

    @contextmanager
    def waiting_for(self, kind: str) -> Iterator[None]:
        """Count what happens inside."""
        begun = perf_counter()
        try:
            yield
        finally:
            self.times[kind] += 1
            self.seconds[kind] += perf_counter() - begun


def total(parameters: Iterable[ShardedParameter]) -> Counts:
    """The counts of several parameters, added up."""
    counts = [each.counts for each in parameters]
    return Counts(**{each.name: sum(getattr(count, each.name) for count in counts) for each in fields(Counts)})
