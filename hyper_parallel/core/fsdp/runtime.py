"""Carries the schedule's events out on real units, through a backend."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Callable, Container, Iterable, Iterator, Sequence

from hyper_parallel.core.backend import Backend, Group, Tensor, Work

if TYPE_CHECKING:
    from hyper_parallel.core.fsdp.parameter import Gathering, ShardedParameter
    from hyper_parallel.core.fsdp.unit import Unit


class UnitReduction:
    """The gradients of one unit on their way from full and local to sharded and global.

    `shards` holds one tensor per parameter, of its local shape. They are allocated at once, filled by the
    collectives, and final when the reduction is settled. What is summed over the same ranks lies in one buffer, so that
    it is summed together. A parameter without a gradient counts as zero: another rank may have one. Where the unit only
    keeps its gradients (`kind` "none") nothing is allocated.
    """

    def __init__(self, unit: Unit, parameters: Sequence[ShardedParameter], gradients: Sequence[Tensor | None]):
        self.unit = unit
        self.kind = unit.accumulation
        self.parameters = list(parameters)
        self._tensors = unit.backend.tensors
        self.gradients: list[Tensor | None] = list(gradients)
        self.works: list[Work] = []
        self.buffers: list[tuple[Tensor, Group]] = []
        self.outputs: list[Tensor] = [None] * len(self.parameters)
        self.shards: list[Tensor] = []
        if self.kind != "none":
            for members in self._summed_together():
                self._allocate(members)
            self.shards = [
                self._tensors.alias(output, 0, each.spec.local_shape)
                for each, output in zip(self.parameters, self.outputs)
            ]

    def _summed_together(self) -> Iterable[list[int]]:
        """The parameters, by index, that share a dtype and the ranks over which they are summed."""
        together: dict[tuple, list[int]] = {}
        for index, each in enumerate(self.parameters):
            together.setdefault((each.sum_group.ranks, each.spec.dtype), []).append(index)
        return together.values()

    def _allocate(self, members: Sequence[int]) -> None:
        """One buffer, and each member's part of it."""
        specs = [self.parameters[index].spec for index in members]
        sizes = [spec.piece_numel for spec in specs]
        buffer = self._tensors.empty((sum(sizes),), specs[0].dtype)
        self.buffers.append((buffer, self.parameters[members[0]].sum_group))
        for index, size, stop in zip(members, sizes, accumulate(sizes)):
            self.outputs[index] = self._tensors.alias(buffer, stop - size, (size,))

    def full_gradient(self, index: int) -> Tensor:
        """The gradient of a parameter as autograd gave it, and what is kept of earlier ones; zeros when there is
        neither."""
        parameter = self.parameters[index]
        gradient = self.unit.kept.take_full(parameter, self.gradients[index])
        return self._tensors.zeros(parameter.spec.shape, parameter.spec.dtype) if gradient is None else gradient

    def returned(self) -> Iterator[Tensor]:
        """What an engine that returns gradients is to return: the shards, or zeros where nothing is handed over."""
        if self.kind == "all":
            return iter(self.shards)
        return (self._tensors.zeros(each.spec.local_shape, each.spec.dtype) for each in self.parameters)

    def wait(self) -> None:
        """Wait for everything issued so far."""
        works, self.works = self.works, []
        for work in works:
            work.wait()


class BackendRuntime:
    """The `Runtime` of the schedule on a backend."""

    def __init__(self, backend: Backend, units: Sequence[Unit]):
        self._backend = backend
        self._units = list(units)
        self._gathering: dict[Unit, list[Gathering]] = {}

    def issue_gather(self, unit: Unit) -> None:
        """Start the gathers of all parameters of a unit together."""
        with self._backend.autograd.no_grad():
            self._gathering[unit] = [each.issue_gather(unit.shard_group) for each in unit.parameters]

    def wait_gather(self, unit: Unit) -> None:
        """Wait for them one by one; the full parameters are readable then."""
        with self._backend.autograd.no_grad():
            for gathering in self._gathering.pop(unit):
                gathering.wait()

    def shrink(self, unit: Unit) -> None:
        """As `free`, but for a part of each parameter."""
        unit.hide()
        with self._backend.autograd.no_grad():
            for each in unit.parameters:
                each.shrink(unit.part_group)

    def free(self, unit: Unit) -> None:
        """Let modules see the shards again, and empty the buffers."""
        unit.hide()
        for each in unit.parameters:
            each.free()

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
        """Reductions of what is kept by units that this backward has not come to, and which are to reduce now."""
        for unit in self._units:
            if unit.kept and unit.accumulation == "all" and unit not in reduced:
                trainable = unit.trainable()
                yield UnitReduction(unit, trainable, [None] * len(trainable))

    def forget_kept(self) -> None:
        """Drop what units keep."""
        for unit in self._units:
            unit.kept.forget()

    def issue_reduce_scatter(self, reduction: UnitReduction) -> None:
        """One reduce-scatter a parameter; a whole parameter on several shard ranks takes an all-reduce."""
        unit, collectives = reduction.unit, self._backend.collectives
        with self._backend.autograd.no_grad():
            for index, (parameter, output) in enumerate(zip(reduction.parameters, reduction.outputs)):
                gradient = reduction.full_gradient(index)
                if parameter.spec.is_whole:
                    self._copy(output, gradient)
                    work = collectives.all_reduce(output, unit.shard_group, async_op=True)
                else:
                    pieces = parameter.pieces_of(gradient)
                    work = collectives.reduce_scatter(output, pieces, unit.shard_group, async_op=True)
                reduction.works.append(work)

    def wait_reduce_scatter(self, reduction: UnitReduction) -> None:
        """Wait, let go of the full gradients, and take the mean over all ranks that contribute."""
        reduction.wait()
        reduction.gradients = []
        self._divide(reduction)

    def issue_all_reduce(self, reduction: UnitReduction) -> None:
        """One all-reduce a buffer, over replicas and over the ranks that have computed parts of its gradients."""
        with self._backend.autograd.no_grad():
            for parameter, output in zip(reduction.parameters, reduction.outputs):
                reduction.unit.kept.take_piece(parameter, output)
            for buffer, group in reduction.buffers:
                if group.size > 1:
                    reduction.works.append(self._backend.collectives.all_reduce(buffer, group, async_op=True))

    def wait_all_reduce(self, reduction: UnitReduction) -> None:
        """Wait for the sums."""
        reduction.wait()

    def settle(self, reduction: UnitReduction) -> None:
        """Hand each shard of a gradient to its parameter."""
        with self._backend.autograd.no_grad():
            if not reduction.unit.needs_reduction:
                for index, output in enumerate(reduction.outputs):
                    self._copy(output, reduction.full_gradient(index))
                reduction.gradients = []
                self._divide(reduction)
            if reduction.unit.all_reduce_hook is not None:
                for buffer, _ in reduction.buffers:
                    reduction.unit.all_reduce_hook(buffer)
            for parameter, shard in zip(reduction.parameters, reduction.shards):
                self._backend.autograd.deliver(parameter.parameter, shard)

    def in_backward(self) -> bool:
        """Ask the engine."""
        return self._backend.autograd.in_backward()

    def call_at_end_of_backward(self, callback: Callable[[], None]) -> None:
        """Ask the engine."""
        self._backend.autograd.queue_final_callback(callback)

    def _divide(self, reduction: UnitReduction) -> None:
        """Make means of sums, over all ranks that contribute or by the factor that the user has set."""
        divisor = reduction.unit.gradient_divide_factor or reduction.parameters[0].divisor
        for buffer, _ in reduction.buffers if divisor != 1 else ():
            self._backend.tensors.scale_(buffer, 1.0 / divisor)

    def _copy(self, output: Tensor, gradient: Tensor) -> None:
        self._backend.tensors.copy_(output, self._backend.tensors.flat(gradient))
