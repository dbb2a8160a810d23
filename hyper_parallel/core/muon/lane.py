"""What belongs to one plan of an optimizer: the parameters that ranks share, or those that this rank has to itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel.core.backend import Backend, Group, Tensor
from hyper_parallel.core.muon.options import NorMuon
from hyper_parallel.core.muon.plan import MuonPlan
from hyper_parallel.core.muon.program import Kept
from hyper_parallel.core.muon.replay import Replay
from hyper_parallel.core.muon.second_moments import SecondMoments
from hyper_parallel.core.muon.state import MASTER, MOMENTUM

if TYPE_CHECKING:
    from hyper_parallel.core.muon.optimizer import MuonEngine


class Part:
    """What this rank keeps of a parameter of Muon: a part of its shard, the momentum of that, and a float32 copy where
    training keeps one. `member` is the parameter's number among all of the optimizer, `shape` that of its shard."""

    def __init__(self, kept: Kept, member: int, shape: tuple[int, ...], momentum: Tensor):
        self.kept = kept
        self.member = member
        self.shape = shape
        self.momentum = momentum
        self.state = {MOMENTUM: momentum}
        """What the framework's optimizer shows of it."""

    @property
    def master(self) -> Tensor | None:
        """The float32 copy, if there is one and training has begun."""
        return self.state.get(MASTER)

    def keep_master(self, master: Tensor | None) -> None:
        """From now on, or no more."""
        self.state.pop(MASTER, None)
        self.state.update({} if master is None else {MASTER: master})

    @property
    def is_whole(self) -> bool:
        """Tell whether it is all that this rank has of the parameter."""
        return self.kept.start == 0 and self.kept.local_shape == self.shape

    def of(self, backend: Backend, shard: Tensor) -> Tensor:
        """The part of a tensor that lies as the shard; over its memory where that is contiguous."""
        if self.is_whole:
            return shard
        return backend.tensors.alias(backend.tensors.flat(shard), self.kept.start, self.kept.local_shape)


class Lane:
    """A plan, its replay, and what this rank keeps for it. `index` counts the parameters of the plan, `member` those of
    the optimizer."""

    def __init__(self, engine: MuonEngine, plan: MuonPlan):
        self.engine = engine
        self.backend = engine.backend
        self.plan = plan
        numbers = {each.name: number for number, each in enumerate(engine.members)}
        self.member_of = [numbers[each.name] for each in plan.parameters]
        self.replay = Replay(engine.backend, plan)
        self.parts = [self._part(kept) for kept in self.replay.program.kept]
        self.together = self._fed_together()
        self.second_moments = SecondMoments(self)
        self.replicas = self._replica_groups()
        """For each parameter of which replicas share the momentum with this rank those ranks."""

    def rule_of(self, index: int) -> NorMuon | None:
        """The second moment of a parameter."""
        engine = self.engine
        return engine.planned[engine.group_of[self.member_of[index]]]["second_moment"]

    def _part(self, kept: Kept) -> Part:
        member = self.member_of[kept.index]
        shape = self.plan.parameters[kept.index].layout.local_shape(self.replay.program.rank)
        momentum = self.backend.tensors.zeros(kept.local_shape, self.engine.state_dtype(member))
        return Part(kept, member, shape, momentum)

    def _fed_together(self) -> dict[int, list[int]]:
        """For each number of what is kept those whose momentum is taken at once: of one batch, group and dtype."""
        first: dict[int, int] = {}
        for batch in self.replay.program.batches:
            for feed in batch.feeds:
                first.setdefault(feed.kept, batch.number)
        sets: dict[tuple, list[int]] = {}
        for number, part in enumerate(self.parts):
            dtype = self.backend.tensors.dtype_name(part.momentum)
            sets.setdefault((first.get(number), self.engine.group_of[part.member], dtype), []).append(number)
        return {number: numbers for numbers in sets.values() for number in numbers}

    def _replica_groups(self) -> dict[int, Group]:
        found: dict[int, Group] = {}
        for batch in self.replay.program.batches:
            for each in batch.publications:
                group = self.replay.group(each.group)
                found.update({part.index: group for part in (*each.sent, *each.received)})
        return found
