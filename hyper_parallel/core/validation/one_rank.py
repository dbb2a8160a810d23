"""One rank of many, without the others: collectives give shapes, and no element moves."""

from __future__ import annotations

from typing import Any, Sequence

from hyper_parallel.core import collective_checks as checks
from hyper_parallel.core.backend import Tensor
from hyper_parallel.core.execution.joined import DONE, Done, JoinedRank
from hyper_parallel.core.job import Call, RankGroup


class OneRankCollectives(JoinedRank):
    """`core.backend.Collectives` of `rank` among `ranks`. Outputs keep what they hold, and are checked to have the
    right sizes; so nothing may be made of their values."""

    def __init__(self, rank: int, ranks: int):
        super().__init__(RankGroup(tuple(range(ranks)), rank), "simulation")

    def groups(self, partition: Sequence[Sequence[int]], apart: bool = False) -> RankGroup | None:
        """See `core.backend.Collectives`. Nothing travels, so one group will do."""
        return self._job.groups(partition, lambda ranks, index: None)

    def all_gather(
        self,
        output: Tensor,
        input: Tensor,
        group: RankGroup,
        async_op: bool = False,
        pieces: Sequence[int] | None = None,
    ) -> Done:
        """See `core.backend.Collectives`."""
        checks.check_all_gather(Call("all_gather", group), output, input, pieces)
        return DONE

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        group: RankGroup,
        async_op: bool = False,
        pieces: Sequence[int] | None = None,
        scale: float = 1.0,
    ) -> Done:
        """See `core.backend.Collectives`."""
        checks.check_reduce_scatter(Call("reduce_scatter", group), output, input, pieces)
        return DONE

    def all_reduce(self, tensor: Tensor, group: RankGroup, async_op: bool = False) -> Done:
        """See `core.backend.Collectives`."""
        checks.check_all_reduce(Call("all_reduce", group), tensor)
        return DONE

    def broadcast(self, tensor: Tensor, source: int, group: RankGroup, async_op: bool = False) -> Done:
        """See `core.backend.Collectives`."""
        checks.check_broadcast(Call("broadcast", group), tensor, source)
        return DONE

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        group: RankGroup,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Done:
        """See `core.backend.Collectives`."""
        checks.check_all_to_all(Call("all_to_all", group), output, input, output_splits, input_splits)
        return DONE

    def send(self, tensor: Tensor, destination: int, group: RankGroup, async_op: bool = False) -> Done:
        """See `core.backend.Collectives`."""
        checks.check_peer(Call("send", group), tensor, "destination", destination)
        return DONE

    def receive(self, tensor: Tensor, source: int, group: RankGroup, async_op: bool = False) -> Done:
        """See `core.backend.Collectives`."""
        checks.check_peer(Call("receive", group), tensor, "source", source)
        return DONE

    def barrier(self, group: RankGroup | None = None) -> None:
        """Nobody to wait for."""

    def gather_objects(self, value: Any, group: RankGroup | None = None) -> list[Any]:
        """This rank's value for every rank: all are taken to be alike."""
        return [value] * (group or self.world()).size
