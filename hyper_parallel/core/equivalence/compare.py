"""What ranks have against what one device has: parameter by parameter, and boundary by boundary."""

from __future__ import annotations

from typing import Iterator, Mapping, NamedTuple, Sequence

import numpy as np

from hyper_parallel.core.equivalence.batch import Batch, data_ranks
from hyper_parallel.core.equivalence.record import INPUT, Key, crossed
from hyper_parallel.core.equivalence.steps import Followed, Raw, Step, sum_of
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import BATCH_AXES
from hyper_parallel.core.placement import Partial, Placement, Replicate, Shard, StridedShard
from hyper_parallel.core.plan.contracts import FEATURES, SEQUENCE, ByAxis, Contract
from hyper_parallel.core.plan.plan import ShardingPlan

SMALLEST = 1e-3
"""A tensor is measured against its own largest element, or, where that is smaller, against this part of the largest of
all. Some gradients are zero but for rounding, such as that of a bias which is added to all keys, and what is left of
them is in proportion to what they are computed from."""


class Error(NamedTuple):
    """The largest absolute difference, the same relative to the largest element of the reference, and the rank on which
    it is. Infinite where shapes differ."""

    absolute: float
    relative: float
    rank: int


def scale_of(arrays: Sequence[np.ndarray | None]) -> float:
    """The largest element of all."""
    return max((float(np.abs(each).max()) for each in arrays if each is not None and each.size), default=0.0)


def production_errors(plan: ShardingPlan, steps: Sequence[Step], expected: Step) -> dict[str, Error]:
    """By parameter how far the gradients that an optimizer would get on any rank are off: each rank's shard against its
    part of the whole."""
    errors, least = {}, SMALLEST * scale_of(list(expected.gradients.values()))
    for name, whole in _wholes(plan, expected).items():
        layout = plan.layout(name)
        found = ((rank, step.gradients.get(name)) for rank, step in zip(plan.mesh.ranks, steps))
        errors[name] = _worst(
            [(rank, gradient, layout.shard(whole, rank)) for rank, gradient in found], scale_of([whole]), least
        )
    return errors


def validation_errors(plan: ShardingPlan, steps: Sequence[Followed], expected: Step) -> dict[str, Error]:
    """By parameter how far raw gradients are off, put together here as their parameter was followed: the mean over
    ranks with samples of their own, the sum along axes on which each rank has a part of the sum."""
    errors, least = {}, SMALLEST * scale_of(list(expected.gradients.values()))
    by_rank = dict(zip(plan.mesh.ranks, steps))
    for name, whole in _wholes(plan, expected).items():
        raw = {rank: step.raw[name] for rank, step in by_rank.items() if name in step.raw}
        if len(raw) == len(by_rank):  # else no unit holds it, which the production's step tells
            errors[name] = _worst(list(_put_together(plan, name, raw, whole)), scale_of([whole]), least)
    return errors


def _wholes(plan: ShardingPlan, expected: Step) -> dict[str, np.ndarray]:
    """The reference of every gradient; zeros where nothing came."""
    wholes = {}
    for each in plan.parameters:
        if each.name in expected.gradients:
            gradient = expected.gradients[each.name]
            wholes[each.name] = np.zeros(each.shape) if gradient is None else gradient
    return wholes


def _put_together(
    plan: ShardingPlan, name: str, raw: Mapping[int, Raw], whole: np.ndarray
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """For each rank what is found, and expected, of what its modules see of a parameter.

    An expert that lies on another rank gets the gradients of all samples there: no mean is taken along that axis. What
    an opaque region has not followed lies as the plan says, which is trusted there."""
    mesh, planned = plan.mesh, plan[name]
    placed = {axis: each for axis, each in planned.placements.items() if axis != "shard"}
    dealt = [axis for axis in BATCH_AXES if axis in placed]
    averaged = [axis for axis in BATCH_AXES if axis in mesh.names and axis not in dealt]
    trusted = [axis for axis in planned.pending if axis not in BATCH_AXES]
    for rank, own in raw.items():
        summed = [axis for axis, (_, is_sum) in own.lies.items() if is_sum] if own.lies else trusted
        lies = placed | {axis: placement for axis, (placement, _) in own.lies.items()}
        part = Layout(mesh, lies, whole.shape).shard(whole, rank)
        found = [raw[other].gradient for other in mesh.group_of(rank, [*averaged, *summed])]
        wrong = next((each for each in found if each is not None and each.shape != part.shape), None)
        if wrong is None:
            yield rank, sum_of(found, part.shape) / _ranks_of(plan, [*averaged, *dealt]), part
        else:
            yield rank, wrong, part


def _ranks_of(plan: ShardingPlan, axes: Sequence[str]) -> int:
    return int(np.prod([plan.mesh.axis_size(axis) for axis in axes]))


def _worst(found: Sequence[tuple[int, np.ndarray | None, np.ndarray]], scale: float, least: float) -> Error:
    """The worst rank of (rank, found, expected); None counts as zeros."""
    worst = Error(0.0, 0.0, found[0][0])
    for rank, gradient, part in found:
        gradient = np.zeros(part.shape) if gradient is None else gradient
        if gradient.shape != part.shape:
            return Error(float("inf"), float("inf"), rank)
        if part.size:
            away = np.abs(gradient - part).max()
            if not away <= worst.absolute:  # a NaN is worst
                worst = Error(float(away), _relative(float(away), max(scale, least)), rank)
    return worst


def _relative(away: float, scale: float) -> float:
    return away / scale if scale > 0 else (0.0 if away == 0 else float("inf"))


# Boundaries


class Difference(NamedTuple):
    """Where a value, or a gradient, is another than on one device. `call` counts the calls of a module from 0."""

    module: str
    side: str
    contract: str
    call: int
    error: Error

    def __str__(self) -> str:
        again = f" (call {self.call + 1})" if self.call else ""
        return f"{self.side} {self.contract!r} of {self.module or 'the model itself'}{again}, {told(self.error)}"


def told(error: Error) -> str:
    """An error in words."""
    if error.absolute == float("inf"):
        return f"of another shape on rank {error.rank}"
    return f"off by {error.absolute:.3g}, {error.relative:.3g} of the largest, on rank {error.rank}"


class Boundaries:
    """What is seen at the boundaries of a plan, by every rank and on one device."""

    def __init__(self, plan: ShardingPlan, batch: Batch, steps: Sequence[Step], expected: Step):
        self._plan = plan
        self._batch = batch
        self._steps = dict(zip(plan.mesh.ranks, steps))
        self._expected = expected
        self._planned = {each.module: each for each in plan.boundaries}
        self._dealt = {each.boundary for each in plan.parameters if "expert" in each.placements}
        self._model_axes = tuple(axis for axis in plan.mesh.names if axis not in BATCH_AXES)

    def first_value(self, bound: float) -> Difference | None:
        """The first in the order of the forward that differs by more than `bound`, relative to its largest element."""
        return self._first(list(self._expected.seen), "value", bound)

    def first_gradient(self, bound: float) -> Difference | None:
        """The first in the order of backward."""
        return self._first(list(reversed(self._expected.seen)), "gradient", bound)

    def _first(self, keys: Sequence[Key], what: str, bound: float) -> Difference | None:
        least = SMALLEST * scale_of([getattr(each, what) for each in self._expected.seen.values()])
        for key in keys:
            contract = self._contract(key)
            if contract is None or not all(key in step.seen for step in self._steps.values()):
                continue
            error = self._error(key, contract, what, least)
            if error is not None and not error.relative <= bound:
                return Difference(key.module, key.side, contract.name, key.call, error)
        return None

    def _contract(self, key: Key) -> Contract | None:
        planned = self._planned.get(key.module)
        contracts = crossed(planned, key.side) if planned is not None else ()
        return contracts[key.number] if key.number < len(contracts) else None

    def _error(self, key: Key, contract: Contract, what: str, least: float) -> Error | None:
        """None where rows are no samples, as the tokens of an expert are: nothing tells which rank should have them."""
        whole = getattr(self._expected.seen[key], what)
        whole = np.zeros_like(self._expected.seen[key].value) if whole is None else whole
        parts = data_ranks(self._plan.mesh)
        if parts > 1 and (whole.shape[0] % self._batch.samples or self._travels(key)):
            return None
        layout = contract.after if what == "value" else contract.gradient
        found = []
        for rank in self._steps:
            own = self._own_rows(whole, rank)
            part = self._part(own, contract, layout, rank)
            found.append((rank, self._summed(key, layout, what, rank, part.shape), part))
        return _worst(found, scale_of([whole]), least)

    def _travels(self, key: Key) -> bool:
        """Tell whether tokens have come from other ranks here: inside of experts that are dealt out."""
        return key.side == INPUT and key.module in self._dealt

    def _own_rows(self, whole: np.ndarray, rank: int) -> np.ndarray:
        rows, each = self._batch.rows(self._plan.mesh, rank), whole.shape[0] // self._batch.samples
        return whole[rows.start * each : rows.stop * each] if data_ranks(self._plan.mesh) > 1 else whole

    def _part(self, own: np.ndarray, contract: Contract, layout: ByAxis, rank: int) -> np.ndarray:
        """What a rank has of the samples that it works on, after all sums."""
        mesh = self._plan.mesh
        if not self._model_axes:
            return own
        placed = {axis: _dims(layout.get(axis, Replicate()), own, contract, self._batch) for axis in self._model_axes}
        return Layout(mesh.submesh(self._model_axes, rank), placed, own.shape).shard(own, rank)

    def _summed(self, key: Key, layout: ByAxis, what: str, rank: int, shape: Sequence[int]) -> np.ndarray | None:
        """What ranks have, with pending sums carried out. In a step of several data ranks each has the gradient of its
        own samples' mean, which counts by its part in that of all."""
        axes = [axis for axis in self._model_axes if isinstance(layout.get(axis), Partial)]
        parts = [getattr(self._steps[other].seen[key], what) for other in self._plan.mesh.group_of(rank, axes)]
        wrong = next((each for each in parts if each is not None and each.shape != tuple(shape)), None)
        if wrong is not None:
            return wrong
        total = sum_of(parts, shape)
        return total / data_ranks(self._plan.mesh) if what == "gradient" else total


def _dims(placement: Placement, own: np.ndarray, contract: Contract, batch: Batch) -> Placement:
    """A placement on the dims that a tensor has: models also make `[samples * tokens, features]` of it. What is pending
    has been summed up."""
    if isinstance(placement, Partial):
        return Replicate()
    if own.ndim == 2 and contract.dims == 3:
        length = next(iter(batch.arrays.values())).shape[1]
        samples = own.shape[0] // length if own.shape[0] % length == 0 else 1
        rows = Shard(0) if samples <= 1 else StridedShard(0, samples)
        return {Shard(SEQUENCE): rows, Shard(FEATURES): Shard(1)}.get(placement, placement)
    return placement
