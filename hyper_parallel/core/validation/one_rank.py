"""One rank of many, without the others: collectives give shapes, and no element moves."""

from __future__ import annotations

from typing import Any, Sequence

from hyper_parallel.core import collective_checks as checks
from hyper_parallel.core.backend import Launch, Tensor
from hyper_parallel.core.job import Call, Job, RankGroup


class _Done:
    """Work that is over when the call returns."""

    def wait(self) -> None:
        """Nothing to wait for."""


_DONE = _Done()


class OneRankCollectives:
    """`core.backend.Collectives` of `rank` among `ranks`. Outputs keep what they hold, and are checked to have the
    right sizes; so nothing may be made of their values."""

    def __init__(self, rank: int, ranks: int):
        self._job = Job()
        launch = Launch(rank=rank, world_size=ranks, launcher="simulation")
        self._job.enter(launch, RankGroup(tuple(range(ranks)), rank), "the simulation")

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

    def groups(self, partition: Sequence[Sequence[int]]) -> RankGroup | None:
        """See `core.backend.Collectives`."""
        return self._job.groups(partition, lambda ranks, index: None)

    def all_gather(self, output: Tensor, input: Tensor, group: RankGroup, async_op: bool = False) -> _Done:
        """See `core.backend.Collectives`."""
        checks.check_all_gather(Call("all_gather", group), output, input)
        return _DONE

    def reduce_scatter(self, output: Tensor, input: Tensor, group: RankGroup, async_op: bool = False) -> _Done:
        """See `core.backend.Collectives`."""
        checks.check_reduce_scatter(Call("reduce_scatter", group), output, input)
        return _DONE

    def all_reduce(self, tensor: Tensor, group: RankGroup, async_op: bool = False) -> _Done:
        """See `core.backend.Collectives`."""
        checks.check_all_reduce(Call("all_reduce", group), tensor)
        return _DONE

    def broadcast(self, tensor: Tensor, source: int, group: RankGroup, async_op: bool = False) -> _Done:
        """See `core.backend.Collectives`."""
        checks.check_broadcast(Call("broadcast", group), tensor, source)
        return _DONE

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        group: RankGroup,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> _Done:
        """See `core.backend.Collectives`."""
        checks.check_all_to_all(Call("all_to_all", group), output, input, output_splits, input_splits)
        return _DONE

    def send(self, tensor: Tensor, destination: int, group: RankGroup, async_op: bool = False) -> _Done:
        """See `core.backend.Collectives`."""
        checks.check_peer(Call("send", group), tensor, "destination", destination)
        return _DONE

    def receive(self, tensor: Tensor, source: int, group: RankGroup, async_op: bool = False) -> _Done:
        """See `core.backend.Collectives`."""
        checks.check_peer(Call("receive", group), tensor, "source", source)
        return _DONE

    def barrier(self, group: RankGroup | None = None) -> None:
        """Nobody to wait for."""

    def gather_objects(self, value: Any, group: RankGroup | None = None) -> list[Any]:
        """This rank's value for every rank: all are taken to be alike."""
        return [value] * (group or self.world()).size
