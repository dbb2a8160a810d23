"""The gradients of one unit on their way from full and local to sharded and global."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Iterator, NamedTuple, Sequence

from hyper_parallel.core.backend import Group, Tensor, Tensors, Work
from hyper_parallel.core.fsdp.buffers import FusedBuffer

if TYPE_CHECKING:
    from hyper_parallel.core.fsdp.parameter import ShardedParameter
    from hyper_parallel.core.fsdp.unit import Unit


class Arranged(NamedTuple):
    """Parameters, by index, whose gradients share dtypes and the ranks over which they are summed, and where they lie
    in the buffer that they have in common."""

    members: tuple[int, ...]
    places: FusedBuffer


def arrange(tensors: Tensors, parameters: Sequence[ShardedParameter], exact: bool) -> list[Arranged]:
    """The buffers of a reduction of `parameters`; `exact` as in `ShardSpec`. The same at every step."""
    together: dict[tuple, list[int]] = {}
    for index, each in enumerate(parameters):
        together.setdefault(each.buffer_key, []).append(index)
    arranged = []
    for members in together.values():
        sizes = tuple(parameters[index].spec.own_numel(exact) for index in members)
        item_bytes = tensors.item_bytes(parameters[members[0]].reduced_dtype)
        arranged.append(Arranged(tuple(members), FusedBuffer(sizes, item_bytes)))
    return arranged


@dataclass(frozen=True)
class Fused:
    """What is summed over the ranks of `group` together: a buffer, and the same elements as they are handed over, which
    is another tensor where they are cast or moved to the host at the end."""

    buffer: Tensor
    group: Group
    handed_over: Tensor


class UnitReduction:
    """One unit's gradients of one backward.

    `shards` holds one tensor per parameter, of its local shape. They are allocated at once, filled by the
    collectives, and final when the reduction is settled. What is summed over the same ranks lies in one buffer, so that
    it is summed together; what is scattered lands in its place there. A parameter without a gradient counts as zero:
    another rank may have one. Where the unit only keeps its gradients (`kind` "none") nothing is allocated, and where
    it keeps their pieces ("scatter"), no shards are.
    """

    def __init__(self, unit: Unit, parameters: Sequence[ShardedParameter], gradients: Sequence[Tensor | None]):
        self.unit = unit
        self.kind = unit.accumulation
        self.parameters = list(parameters)
        self._tensors = unit.backend.tensors
        self.gradients: list[Tensor | None] = list(gradients)
        self.scatters: list[Work] = []
        self.sums: list[Work] = []
        self.fused: list[Fused] = []
        self.outputs: list[Tensor] = [None] * len(self.parameters)
        """Flat, one per parameter: where its reduced piece lies in its buffer."""
        self.shards: list[Tensor] = [None] * len(self.parameters)
        if self.kind != "none":
            for members, places in unit.arranged(self.parameters):
                self._allocate(members, places)

    def _allocate(self, members: Sequence[int], places: FusedBuffer) -> None:
        """One buffer, and each member's part of it."""
        tensors, first = self._tensors, self.parameters[members[0]]
        buffer = self._aligned(places, first.reduced_dtype)
        handed_over = self._to_hand_over(buffer, first) if self.kind == "all" else buffer
        self.fused.append(Fused(buffer, first.sum_group, handed_over))
        for index, size, start in zip(members, places.sizes, places.starts):
            self.outputs[index] = tensors.alias(buffer, start, (size,))
            self.shards[index] = tensors.alias(handed_over, start, self.parameters[index].spec.local_shape)

    def _to_hand_over(self, buffer: Tensor, parameter: ShardedParameter) -> Tensor:
        """Where the elements of a buffer go that holds such parameters' gradients: nowhere, if they may stay."""
        dtype, numel = parameter.spec.dtype, buffer.numel()
        if parameter.is_offloaded:
            return self._tensors.on_host(numel, dtype, parameter.offload.pin_memory)
        return buffer if parameter.reduced_dtype == dtype else self._tensors.empty((numel,), dtype)

    def _aligned(self, places: FusedBuffer, dtype: str) -> Tensor:
        tensors = self._tensors
        storage = tensors.empty((places.allocated,), dtype)
        buffer = tensors.alias(storage, places.first(tensors.address(storage)), (places.numel,))
        if places.used < places.numel:
            tensors.zero_(tensors.alias(buffer, places.used, (places.numel - places.used,)))
        return buffer

    def full_gradient(self, index: int) -> Tensor:
        """The gradient of a parameter as autograd gave it, and what is kept of earlier ones; zeros when there is
        neither."""
        parameter = self.parameters[index]
        gradient = self.unit.kept.take_full(parameter, self.gradients[index])
        return self._tensors.zeros(parameter.spec.shape, parameter.full_dtype) if gradient is None else gradient

    def scale(self, parameter: ShardedParameter) -> float:
        """What makes the mean of a sum, over all ranks that contribute or by the factor that the user has set."""
        return 1.0 / (self.unit.gradient_divide_factor or parameter.divisor)

    def returned(self) -> Iterator[Tensor]:
        """What an engine that returns gradients is to return: the shards, or zeros where nothing is handed over."""
        if self.kind == "all":
            return iter(self.shards)
        return (self._tensors.zeros(each.spec.local_shape, each.spec.dtype) for each in self.parameters)
