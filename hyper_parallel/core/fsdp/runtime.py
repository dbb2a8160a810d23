"""Carries the schedule's events out on real units, through a backend."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Callable, Iterable, Sequence

from hyper_parallel.core.backend import Backend, Group, Tensor, Work

if TYPE_CHECKING:
    from hyper_parallel.core.fsdp.parameter import Gathering, ShardedParameter
    from hyper_parallel.core.fsdp.unit import Unit


class UnitReduction:
    """The gradients of one unit on their way from full and local to sharded and global.

    `shards` holds one tensor per parameter, of its local shape. They are allocated at once, filled by the
    collectives, and final when the reduction is settled. What is summed over the same ranks lies in one buffer, so that
    it is summed together. A parameter without a gradient counts as zero: another rank may have one.
    """

    def __init__(self, unit: Unit, parameters: Sequence[ShardedParameter], gradients: Sequence[Tensor | None]):
        self.unit = unit
        self.parameters = list(parameters)
        self._tensors = unit.backend.tensors
        self.gradients: list[Tensor | None] = list(gradients)
        self.works: list[Work] = []
        self.buffers: list[tuple[Tensor, Group]] = []
        self.outputs: list[Tensor] = [None] * len(self.parameters)
        for members in self._summed_together():
            self._allocate(members)
        self.shards = [
            self._tensors.alias(output, 0, each.spec.local_shape) for each, output in zip(self.parameters, self.outputs)
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
        """The gradient of a parameter as autograd gave it; zeros when it gave none."""
        gradient, spec = self.gradients[index], self.parameters[index].spec
        return self._tensors.zeros(spec.shape, spec.dtype) if gradient is None else gradient

    def wait(self) -> None:
        """Wait for everything issued so far."""
        works, self.works = self.works, []
        for work in works:
            work.wait()


class BackendRuntime:
    """The `Runtime` of the schedule on a backend."""

    def __init__(self, backend: Backend):
        self._backend = backend
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

    def free(self, unit: Unit) -> None:
        """Let modules see the shards again, and empty the buffers."""
        unit.hide()
        for each in unit.parameters:
            each.free()

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
        divisor = reduction.parameters[0].divisor
        for buffer, _ in reduction.buffers if divisor > 1 else ():
            self._backend.tensors.scale_(buffer, 1.0 / divisor)

    def issue_all_reduce(self, reduction: UnitReduction) -> None:
        """One all-reduce a buffer, over replicas and over the ranks that have computed parts of its gradients."""
        with self._backend.autograd.no_grad():
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
            for parameter, shard in zip(reduction.parameters, reduction.shards):
                self._backend.autograd.deliver(parameter.parameter, shard)

    def in_backward(self) -> bool:
        """Ask the engine."""
        return self._backend.autograd.in_backward()

    def call_at_end_of_backward(self, callback: Callable[[], None]) -> None:
        """Ask the engine."""
        self._backend.autograd.queue_final_callback(callback)

    def _copy(self, output: Tensor, gradient: Tensor) -> None:
        self._backend.tensors.copy_(output, self._backend.tensors.flat(gradient))
