"""This process among the others: its place, the groups that it has made, and how it reports a failure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Callable, Sequence

from hyper_parallel.core.backend import Launch
from hyper_parallel.core.errors import CommunicationError, ConfigError

FAILURES = (RuntimeError, ValueError, TypeError)
"""What the frameworks raise when a collective fails."""


@dataclass(frozen=True)
class RankGroup:
    """A `core.backend.Group`. `handle` is what the framework calls it, None for a group of one."""

    ranks: tuple[int, ...]
    index: int
    handle: Any = None

    @cached_property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)


class Call:
    """One collective as this rank makes it. In `with call:` a framework's failure becomes a `CommunicationError`."""

    __slots__ = ("operation", "group")

    def __init__(self, operation: str, group: RankGroup):
        self.operation = operation
        self.group = group

    def error(self, what: str) -> CommunicationError:
        """The error to raise: `what`, and where it happened."""
        ranks = self.group.ranks
        return CommunicationError(f"{self.operation} on ranks {list(ranks)}, at rank {ranks[self.group.index]}: {what}")

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and isinstance(error, FAILURES):
            raise self.error(f"failed: {error}") from error


class Job:
    """What a backend remembers of the job that this process is in, if any. It lives as long as the process."""

    def __init__(self) -> None:
        self.launch: Launch | None = None
        """How this process has joined; None outside a job."""
        self.world = RankGroup(ranks=(0,), index=0)
        """The group of all ranks; this process alone outside a job."""
        self.number = 0
        """How many jobs this process has been in, this one included: the same on all ranks."""
        self._groups: dict[tuple[tuple[int, ...], bool], RankGroup] = {}

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.world.index

    def require_outside(self) -> None:
        """Raise `CommunicationError` inside a job."""
        if self.launch is not None:
            raise CommunicationError(f"rank {self.rank} is initialised already: call shutdown() before initialize()")

    def enter(self, launch: Launch, world: RankGroup, framework: str) -> None:
        """Begin a job. Raises `ConfigError` when the framework sees this process in another place than the launcher."""
        if (world.index, world.size) != (launch.rank, launch.world_size):
            raise ConfigError(
                f"launched as rank {launch.rank} of {launch.world_size} by {launch.launcher!r}, "
                f"but {framework} says rank {world.index} of {world.size}"
            )
        self.launch, self.world = launch, world
        self.number += 1

    def leave(self) -> list[RankGroup]:
        """End the job; returns the groups with a handle of their own that were made in it."""
        made = [group for group in self._groups.values() if group.handle is not None]
        self.launch, self.world, self._groups = None, RankGroup(ranks=(0,), index=0), {}
        return made

    def groups(
        self, partition: Sequence[Sequence[int]], make: Callable[[tuple[int, ...], int], Any], apart: bool = False
    ) -> RankGroup | None:
        """The group of the partition that holds this rank, or None.

        `make(ranks, index)` returns the handle of a new process group of at least two ranks, of which this one has
        place `index`. Each set of ranks has but one, and another one `apart`."""
        ranks = _own_part(partition, self.world)
        if ranks is None:
            return None
        if ranks == self.world.ranks and not apart:
            return self.world
        key = ranks, apart
        if key not in self._groups:
            index = ranks.index(self.rank)
            with Call("groups", RankGroup(ranks, index)):
                handle = make(ranks, index) if len(ranks) > 1 else None
            self._groups[key] = RankGroup(ranks, index, handle)
        return self._groups[key]


def _own_part(partition: Sequence[Sequence[int]], world: RankGroup) -> tuple[int, ...] | None:
    """The ranks of the group that holds this rank; the groups are non-empty, ascending and disjoint."""
    groups = [tuple(int(member) for member in group) for group in partition]
    call = Call("groups", world)
    members = list(chain.from_iterable(groups))
    if not all(groups):
        raise call.error(f"a group without ranks in {groups}: leave it out")
    if strangers := sorted({member for member in members if not 0 <= member < world.size}):
        raise call.error(f"ranks {strangers} do not exist: the world has ranks 0 to {world.size - 1}")
    if twice := sorted({member for member in members if members.count(member) > 1}):
        raise call.error(f"ranks {twice} are named twice: the groups of a partition share no rank")
    for group in groups:
        if list(group) != sorted(group):
            raise call.error(f"group {list(group)} is out of order: write {sorted(group)}")
    return next((group for group in groups if world.index in group), None)
