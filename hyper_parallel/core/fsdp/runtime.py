"""Carries the schedule's events out on real units, through a backend."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Callable, Container, Iterator, Sequence

from hyper_parallel.core.backend import Backend, Group, Tensor, Work
from hyper_parallel.core.behind import Works
from hyper_parallel.core.fsdp.counts import Waits
from hyper_parallel.core.fsdp.reduction import UnitReduction

if TYPE_CHECKING:
    from hyper_parallel.core.fsdp.parameter import Gathering, ShardedParameter
    from hyper_parallel.core.fsdp.unit import Unit


class BackendRuntime:
    """The `Runtime` of the schedule on a backend."""

    disagreements = 0

    def __init__(self, backend: Backend, units: Sequence[Unit]):
        self._backend = backend
        self._units = list(units)
        self._gathering: dict[Unit, list[Gathering]] = {}
        self.waits = Waits()

    def issue_gather(self, unit: Unit) -> None:
        """Start the gathers of all parameters of a unit together."""
        with self._backend.autograd.no_grad():
            if not all(each.is_usable() for each in unit.parameters):
                unit.make_usable()
            self._gathering[unit] = [each.issue_gather(unit.shard_group) for each in unit.parameters]

    def wait_gather(self, unit: Unit) -> None:
        """Wait for them one by one; the full parameters are readable then."""
        with self._backend.autograd.no_grad(), self.waits.waiting_for("gather"):
            for gathering in self._gathering.pop(unit):
                gathering.wait()

    def shrink(self, unit: Unit) -> None:
        """As `free`, but for a part of each parameter."""
        unit.sight.hide()
        with self._backend.autograd.no_grad():
            for each in unit.parameters:
                each.shrink(unit.part_group)

    def free(self, unit: Unit) -> None:
        """Let modules see the shards again, and empty the buffers."""
        unit.sight.hide()
        for each in unit.parameters:
            each.free()

    def retain(self, unit: Unit) -> None:
        """Let modules see the shards again; the buffers stay as they are."""
        unit.sight.hide()

    def keep(self, reduction: UnitReduction) -> None:
        """Add the full gradients to those that the unit keeps."""
        with self._backend.autograd.no_grad():
            for parameter, gradient in zip(reduction.parameters, reduction.gradients):
                reduction.unit.kept.add_full(parameter, gradient)
        reduction.gradients = []

    def accumulate(self, reduction: UnitReduction) -> None:
        """Add the shards to those that the unit keeps."""
        with self._backend.autograd.no_grad():
            for parameter, output in zip(reduction.parameters, reduction.outputs):
                reduction.unit.kept.add_piece(parameter, output)

    def left_behind(self, reduced: Container[Unit]) -> Iterator[UnitReduction]:
        """Reductions of what is kept and has to be reduced now: of units that this backward has not come to, and of
        parameters that have been frozen since."""
        for unit in self._units:
            if unit.kept and unit.accumulation == "all":
                trainable = unit.trainable()
                left = [
                    each
                    for each in unit.parameters
                    if (each in trainable and unit not in reduced) or (each in unit.kept and each not in trainable)
                ]
                if left:
                    yield UnitReduction(unit, left, [None] * len(left))

    def forget_kept(self) -> None:
        """Drop what units keep."""
        for unit in self._units:
            unit.kept.forget()

    def issue_reduce_scatter(self, reduction: UnitReduction) -> None:
        """One reduce-scatter a parameter, which takes the mean along: over all ranks that contribute."""
        group = reduction.unit.shard_group
        with self._backend.autograd.no_grad():
            for index, (parameter, output) in enumerate(zip(reduction.parameters, reduction.outputs)):
                gradient = reduction.full_gradient(index)
                if parameter.spec.is_whole:
                    self._put(parameter, output, gradient, reduction.scale(parameter))
                    self._count_summed(parameter, output, group)
                    if group.size > 1:
                        work = self._backend.collectives.all_reduce(output, group, async_op=True)
                        reduction.scatters.append(work)
                else:
                    self._scatter(reduction, parameter, output, parameter.pieces_of(gradient))

    def _scatter(self, reduction: UnitReduction, parameter: ShardedParameter, output: Tensor, pieces: Tensor) -> None:
        collectives, group, counts = self._backend.collectives, reduction.unit.shard_group, parameter.counts
        uneven = parameter.spec.sent_pieces(collectives.scatters_uneven())
        scale = reduction.scale(parameter)
        work = collectives.reduce_scatter(output, pieces, group, async_op=True, pieces=uneven, scale=scale)
        reduction.scatters.append(work)
        counts.scattered += (group.size - 1) * output.numel() * min(pieces.itemsize, output.itemsize)
        casts = pieces.dtype != output.dtype
        if casts:
            counts.cast += pieces.numel() * output.itemsize
        if not collectives.folds_scale(casts):
            counts.scaled += output.nbytes

    def wait_reduce_scatter(self, reduction: UnitReduction) -> None:
        """Wait, and let go of the full gradients."""
        with self.waits.waiting_for("scatter"):
            Works(reduction.scatters).wait()
        reduction.gradients = []

    def issue_all_reduce(self, reduction: UnitReduction) -> None:
        """One all-reduce a buffer, over replicas and over the ranks that have computed parts of its gradients; behind
        its reduce-scatter where the unit asks for early ones."""
        kept = [reduction.unit.kept.take_piece(each) for each in reduction.parameters]
        for parameter, output in zip(reduction.parameters, reduction.outputs):
            self._count_summed(parameter, output, parameter.sum_group)
        start = partial(self._sum, reduction, kept)
        if not reduction.unit.early_all_reduce:
            reduction.sums = start()
            return
        scattered, summed = self._backend.collectives.behind(reduction.scatters, start)
        reduction.scatters, reduction.sums = [scattered], [summed]

    def _sum(self, reduction: UnitReduction, kept: Sequence[Tensor | None]) -> list[Work]:
        """Start the all-reduces, of what is kept as well."""
        with self._backend.autograd.no_grad():
            for output, piece in zip(reduction.outputs, kept):
                if piece is not None:
                    self._backend.tensors.add_(output, piece)
            return [
                self._backend.collectives.all_reduce(each.buffer, each.group, async_op=True)
                for each in reduction.fused
                if each.group.size > 1
            ]

    def wait_all_reduce(self, reduction: UnitReduction) -> None:
        """Wait for the sums."""
        with self.waits.waiting_for("sum"):
            Works(reduction.sums).wait()

    def settle(self, reduction: UnitReduction) -> None:
        """Hand each shard of a gradient to its parameter, in its dtype and where it lives."""
        with self._backend.autograd.no_grad():
            if not reduction.unit.needs_reduction:
                for index, (parameter, output) in enumerate(zip(reduction.parameters, reduction.outputs)):
                    self._put(parameter, output, reduction.full_gradient(index), reduction.scale(parameter))
                reduction.gradients = []
            if reduction.unit.all_reduce_hook is not None:
                for each in reduction.fused:
                    reduction.unit.all_reduce_hook(each.buffer)
            self._hand_over(reduction)
            for parameter, shard in zip(reduction.parameters, reduction.shards):
                self._backend.autograd.deliver(parameter.parameter, shard)

    def end_pass(self) -> None:
        """One rank has nobody to agree with."""

    def in_backward(self) -> bool:
        """Ask the engine."""
        return self._backend.autograd.in_backward()

    def call_at_end_of_backward(self, callback: Callable[[], None]) -> None:
        """Ask the engine."""
        self._backend.autograd.queue_final_callback(callback)

    def _count_summed(self, parameter: ShardedParameter, output: Tensor, group: Group) -> None:
        parameter.counts.summed += 2 * (group.size - 1) * output.nbytes / group.size

    def _put(self, parameter: ShardedParameter, output: Tensor, gradient: Tensor, scale: float) -> None:
        """A gradient of which every rank keeps all, in its place."""
        self._backend.tensors.copy_(output, parameter.flat(gradient), scale)
        if gradient.dtype != output.dtype:
            parameter.counts.cast += output.nbytes
        else:
            parameter.counts.reduce_copied += output.nbytes

    def _hand_over(self, reduction: UnitReduction) -> None:
        for each in reduction.fused:
            if each.handed_over is not each.buffer:
                self._backend.tensors.copy_(each.handed_over, each.buffer)
        for parameter, shard in zip(reduction.parameters, reduction.shards):
            if parameter.reduced_dtype != parameter.spec.dtype:
                parameter.counts.cast += shard.nbytes
            elif parameter.is_offloaded:
                parameter.counts.moved += shard.nbytes
