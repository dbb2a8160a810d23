"""One step of Muon on one rank: what is fed to a replay, and what is done with what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping as AbstractMapping
from typing import Iterator, Sequence

from hyper_parallel.core.backend import Tensor
from hyper_parallel.core.muon.lane import Lane
from hyper_parallel.core.muon.program import RankBatch
from hyper_parallel.core.muon.scaling import scale_of
from hyper_parallel.core.muon.state import Groups


class Step:
    """Momentum before the orthogonalization, row norms and scales after it, then decay and update.

    Options are read once, when it is made. `shards` are the local tensors of the plan's parameters, contiguous.
    """

    def __init__(self, lane: Lane, gradients: Sequence[Tensor | None], nowhere: set[int], groups: Groups):
        self._lane = lane
        self._backend = lane.backend
        self._groups = groups
        self._foreach = lane.engine.settings.foreach is not False
        self.skipped = {index for index, member in enumerate(lane.member_of) if member in nowhere}
        self.inputs = _Inputs(lane, gradients, groups, self._foreach)
        self.shards: dict[int, Tensor] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        for index, member in enumerate(lane.member_of):
            local = lane.engine.local(lane.engine.members[member].parameter)
            if not local.is_contiguous():
                self._copies.append((local, self._backend.tensors.duplicate(local)))
                local = self._copies[-1][1]
            self.shards[index] = local

    def compute(self, batch: RankBatch, matrices: Tensor) -> Tensor:
        """Orthogonalize the matrices of a batch; with row norms where a group asks for them."""
        result = self._backend.muon.newton_schulz(matrices, batch.settings)
        self._lane.second_moments.normalize(batch, result, self.skipped)
        tensors, numel = self._backend.tensors, batch.shape[0] * batch.shape[1]
        for place, slot in enumerate(batch.slots):
            ratio = self._factor(slot.index, slot.matrix) / self._factor(slot.index)
            if ratio != 1.0:
                tensors.scale_(tensors.alias(tensors.flat(result), place * numel, batch.shape), ratio)
        return result

    def apply(self, number: int, update: Tensor) -> None:
        """Decay and update what is kept under a number."""
        part = self._lane.parts[number]
        options = self._lane.engine.options(self._groups, part.member)
        shard = part.of(self._backend, self.shards[part.kept.index])
        target = shard if part.master is None else part.master
        rate, decay, factor = float(options["lr"]), float(options["weight_decay"]), self._factor(part.kept.index)
        self._backend.muon.apply_([target], [update], rate, [factor], decay, self._foreach)
        if part.master is not None:
            self._backend.tensors.copy_(shard, part.master)

    def finish(self) -> None:
        """Bring parameters back whose elements do not lie in order."""
        for local, copy in self._copies:
            self._backend.tensors.copy_(local, copy)

    def _factor(self, index: int, matrix: int = 0) -> float:
        """The scale of a logical matrix. An update is scaled by that of its parameter's first one when it is applied;
        where others differ, they are brought to it before."""
        scale = self._lane.engine.options(self._groups, self._lane.member_of[index])["scale"]
        return scale_of(scale, self._lane.plan.parameters[index].view.matrices[matrix].shape)


class _Inputs(AbstractMapping):
    """What is to be orthogonalized, by number of what is kept: made for a batch at a time, and handed over once."""

    def __init__(self, lane: Lane, gradients: Sequence[Tensor | None], groups: Groups, foreach: bool):
        self._lane = lane
        self._gradients = gradients
        self._groups = groups
        self._foreach = foreach
        self._made: dict[int, Tensor] = {}

    def __getitem__(self, number: int) -> Tensor:
        if number not in self._made:
            self._make(self._lane.together[number])
        return self._made.pop(number)

    def __iter__(self) -> Iterator[int]:
        return (n for n, part in enumerate(self._lane.parts) if self._gradients[part.member] is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _make(self, numbers: Sequence[int]) -> None:
        """Take the gradients of several parts, of one group and alike, into their momentum."""
        lane = self._lane
        parts = {n: lane.parts[n] for n in numbers if self._gradients[lane.parts[n].member] is not None}
        first = next(iter(parts.values()))
        options = lane.engine.options(self._groups, first.member)
        made = lane.backend.muon.momenta_(
            [part.momentum for part in parts.values()],
            [part.of(lane.backend, self._gradients[part.member]) for part in parts.values()],
            options["momentum"],
            options["momentum_form"],
            options["nesterov"],
            lane.plan.parameters[first.kept.index].settings.wire_dtype,
            self._foreach,
        )
        self._made.update(zip(parts, made))
