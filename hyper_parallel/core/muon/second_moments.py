"""NorMuon's second moments: one number for each row of a logical matrix, kept where the matrix is orthogonalized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Iterator

import numpy as np

from hyper_parallel.core.backend import Tensor
from hyper_parallel.core.muon.options import NorMuon
from hyper_parallel.core.muon.program import RankBatch, Slot

if TYPE_CHECKING:
    from hyper_parallel.core.muon.lane import Lane


@dataclass(frozen=True)
class Run:
    """Neighbours in a batch, from `start` on, that lie the same way and have the same rule; `values` [slots, rows]."""

    start: int
    slots: tuple[Slot, ...]
    rule: NorMuon
    values: Tensor


class SecondMoments:
    """Those of the matrices that this rank orthogonalizes. Always float32."""

    def __init__(self, lane: Lane):
        self._lane = lane
        self.runs = {batch.number: self._runs(batch) for batch in lane.replay.program.batches}

    def normalize(self, batch: RankBatch, updates: Tensor, skipped: set[int]) -> None:
        """Divide rows of orthogonalized matrices [k, m, n], in place. Those of skipped parameters don't count."""
        backend = self._lane.backend
        tensors, (rows, columns) = backend.tensors, batch.shape
        for run in self.runs[batch.number]:
            held = tensors.duplicate(run.values) if any(slot.index in skipped for slot in run.slots) else None
            shape = (len(run.slots), rows, columns)
            part = tensors.alias(tensors.flat(updates), run.start * rows * columns, shape)
            flipped = run.slots[0].flipped
            backend.muon.normalize_rows_(part, run.values, run.rule.beta2, run.rule.eps, transposed=flipped)
            for place, slot in enumerate(run.slots):
                if held is not None and slot.index in skipped:
                    tensors.copy_(self._row(run, place), self._row_of(held, place))

    def all_runs(self) -> Iterator[Run]:
        """Of all batches, in order."""
        for runs in self.runs.values():
            yield from runs

    def rows(self) -> Iterator[tuple[Slot, Tensor]]:
        """Every matrix with its row of values, a view that may be written to with `tensors.copy_`."""
        for run in self.all_runs():
            for place, slot in enumerate(run.slots):
                yield slot, self._row(run, place)

    def full(self, index: int) -> np.ndarray:
        """Those of parameter `index` that this rank has, and zeros for the others: [planes, rows of all matrices]."""
        result = np.zeros(self.shape(index), np.float32)
        for slot, row in self.rows():
            if slot.index == index:
                result[slot.plane, self.place(slot)] = self._lane.backend.tensors.to_numpy(row)
        return result

    def shape(self, index: int) -> tuple[int, int]:
        """Planes, and rows of all logical matrices of a plane, [out, in], of a parameter."""
        view = self._lane.plan.parameters[index].view
        return view.planes, sum(each.shape[0] for each in view.matrices)

    def place(self, slot: Slot) -> slice:
        """Where the rows of a matrix stand among those of its plane."""
        lengths = [each.shape[0] for each in self._lane.plan.parameters[slot.index].view.matrices]
        start = sum(lengths[: slot.matrix])
        return slice(start, start + lengths[slot.matrix])

    def _runs(self, batch: RankBatch) -> list[Run]:
        runs: list[tuple[int, list[Slot], NorMuon]] = []
        for place, slot in enumerate(batch.slots):
            rule = self._lane.rule_of(slot.index)
            last = runs[-1] if runs else None
            alike = last and last[2] == rule and last[1][0].flipped == slot.flipped
            if alike and last[0] + len(last[1]) == place:
                last[1].append(slot)
            elif rule is not None:
                runs.append((place, [slot], rule))
        made = []
        for start, slots, rule in runs:
            rows = batch.shape[1] if slots[0].flipped else batch.shape[0]
            made.append(Run(start, tuple(slots), rule, self._lane.backend.tensors.zeros((len(slots), rows), "float32")))
        return made

    def _row(self, run: Run, place: int) -> Tensor:
        return self._row_of(run.values, place)

    def _row_of(self, values: Tensor, place: int) -> Tensor:
        tensors, length = self._lane.backend.tensors, values.shape[1]
        return tensors.alias(tensors.flat(values), place * length, (length,))
