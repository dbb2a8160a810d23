"""A rank that has joined as soon as it is made: what its collectives say of it, whatever they do."""

from __future__ import annotations

from typing import Callable, Sequence

from hyper_parallel.core.backend import Launch, Work
from hyper_parallel.core.behind import at_once
from hyper_parallel.core.job import Job, RankGroup


class Done:
    """Work that is over when the call returns."""

    def wait(self) -> None:
        """Nothing to wait for."""


DONE = Done()


class JoinedRank:
    """The part of `core.backend.Collectives` that moves nothing. `launcher` names what the rank belongs to."""

    def __init__(self, world: RankGroup, launcher: str):
        self._job = Job()
        launch = Launch(rank=world.index, world_size=world.size, launcher=launcher)
        self._job.enter(launch, world, f"the {launcher}")

    def initialize(self, launch: Launch) -> None:
        """Refused: the rank has joined when it is made."""
        self._job.require_outside()

    def shutdown(self) -> None:
        """Nothing to leave."""

    def is_initialized(self) -> bool:
        """Always."""
        return True

    def rank(self) -> int:
        """This rank."""
        return self._job.rank

    def world_size(self) -> int:
        """Number of ranks, the others included."""
        return self._job.world.size

    def world(self) -> RankGroup:
        """The group of all ranks."""
        return self._job.world

    def gathers_uneven(self) -> bool:
        """Always: no library stands in between."""
        return True

    def scatters_uneven(self) -> bool:
        """Always, likewise."""
        return True

    def behind(self, works: Sequence[Work], start: Callable[[], Sequence[Work]]) -> tuple[Work, Work]:
        """See `core.backend.Collectives`. Every collective is over when its call returns."""
        return at_once(works, start)

    def folds_scale(self, casts: bool) -> bool:
        """Always."""
        return True
