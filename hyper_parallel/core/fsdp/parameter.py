"""One fully sharded parameter: its shard at rest, its buffer, and the moves between them."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import Callable, Sequence

from hyper_parallel.core.backend import Backend, Group, ParameterUse, Tensor, Work
from hyper_parallel.core.fsdp.spec import ShardSpec
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import BATCH_AXES, DeviceMesh


def ranks_with_samples(mesh: DeviceMesh) -> int:
    """Ranks whose gradients are averaged: those that see different samples, or other tokens of them."""
    return prod(mesh.axis_size(axis) for axis in (*BATCH_AXES, "context"))


@dataclass(frozen=True)
class Holding:
    """How a unit holds one parameter, with every use of it.

    `spec` is its split over `shard`, of the part that modules see; `layout` how the shard lies in the whole parameter.
    The gradient of the part is a sum over the mesh axes `pending`, besides the mean over all ranks with samples of
    their own. Where `shown` is given, modules see what it makes of the full tensor.
    """

    uses: Sequence[ParameterUse]
    spec: ShardSpec
    layout: Layout
    pending: tuple[str, ...] = ()
    shown: Callable[[Tensor], Tensor] | None = None


class ShardedParameter:
    """The shard at rest, and a persistent buffer of which the full parameter is a view.

    The buffer's storage exists only while the parameter is gathered. Tensors over it, those that autograd saved
    included, stay the same objects and become valid again with the next gather. A parameter that is whole on every rank
    has no buffer: its full tensor is itself.
    """

    def __init__(self, backend: Backend, held: Holding):
        self.spec = spec = held.spec
        self.uses = uses = list(held.uses)
        self.layout = held.layout
        self.shown = held.shown
        self.divisor = ranks_with_samples(spec.layout.mesh)
        self.sum_group: Group = backend.collectives.groups(spec.layout.mesh.groups(("replicate", *held.pending)))
        self._tensors = backend.tensors
        self._collectives = backend.collectives
        self.parameter = uses[0].parameter
        self._buffer: Tensor | None = None
        self._part: Tensor | None = None  # of the buffer, kept after forward for a smaller group
        self._part_group: Group | None = None
        local = self._tensors.to_device(self.parameter if spec.is_whole else self._cut(self.parameter))
        if local is not self.parameter:
            self.parameter = backend.modules.replace_parameter(self.uses, local)
        # The pieces of a leading dim lie in the buffer as they came, with the padding behind the full parameter.
        even = spec.gathered_numel == spec.numel
        self._direct = spec.dim == 0 and (even or self._tensors.reads_parts_in_place())
        if not spec.is_whole:
            self._buffer = self._tensors.empty((spec.gathered_numel if self._direct else spec.numel,), spec.dtype)
            self.free()

    @property
    def is_served(self) -> bool:
        """False for what modules read, and autograd serves, as it is: there is nothing to gather, reduce or follow."""
        return self.is_reduced or self.shown is not None

    @property
    def is_reduced(self) -> bool:
        """Tell whether the gradient takes more than what autograd does."""
        return self.spec.pieces > 1 or self.sum_group.size > 1 or self.divisor > 1

    def full(self) -> Tensor:
        """The full parameter as a fresh tensor without history. Read it only while it is gathered."""
        if self._buffer is None:
            return self._tensors.alias(self._tensors.flat(self.parameter), 0, self.spec.shape)
        return self._tensors.alias(self._buffer, 0, self.spec.shape)

    def held_bytes(self) -> int:
        """Bytes of the full parameter that are held now: by the buffer, or what is kept of it."""
        kept = 0 if self._part is None else self._tensors.storage_bytes(self._part)
        return kept + (0 if self._buffer is None else self._tensors.storage_bytes(self._buffer))

    def issue_gather(self, group: Group) -> Gathering:
        """Start filling the buffer. A leading-dim shard lands where it belongs; others are joined afterwards."""
        spec = self.spec
        if self._buffer is None:
            return Gathering(None, lambda: None)
        self._tensors.restore_storage(self._buffer)
        if self._part is not None:
            return self._gather_parts()
        piece = self._pad(self._tensors.flat(self.parameter), spec.piece_numel)
        if self._direct:
            return Gathering(self._collectives.all_gather(self._buffer, piece, group, async_op=True), lambda: None)
        gathered = self._tensors.empty((spec.gathered_numel,), spec.dtype)
        work = self._collectives.all_gather(gathered, piece, group, async_op=True)
        return Gathering(work, lambda: self._join(gathered))

    def shrink(self, group: Group) -> None:
        """Keep this rank's equal part of the buffer, from which the ranks of `group` can gather all of it again."""
        if self._buffer is None or not self.spec.numel:
            return
        total = prod(self._buffer.shape)
        numel = ceil(total / group.size)
        start = min(group.index * numel, total)
        held = min(numel, total - start)
        self._part, self._part_group = self._tensors.buffer(self._buffer, numel, zero=held < numel), group
        if held:
            part = self._tensors.alias(self._part, 0, (held,))
            self._tensors.copy_(part, self._tensors.alias(self._buffer, start, (held,)))
        self._tensors.release_storage(self._buffer)

    def free(self) -> None:
        """Give the buffer's memory back, and what is kept of it."""
        self._part = None
        if self._buffer is not None:
            self._tensors.release_storage(self._buffer)

    def pieces_of(self, gradient: Tensor) -> Tensor:
        """A full gradient as the flat pieces of all ranks, padded; the gradient's own storage where it fits."""
        spec = self.spec
        if spec.dim == 0:
            return self._pad(self._tensors.flat(gradient), spec.gathered_numel)
        parts = self._tensors.chunk_rows(gradient, spec.dim, [shape[spec.dim] for shape in spec.piece_shapes])
        padded = [self._pad(self._tensors.flat(part), spec.piece_numel) for part in parts]
        return self._tensors.concatenate(padded, 0)

    def _cut(self, full: Tensor) -> Tensor:
        part, dim = self.spec.layout.slices(self.spec.rank)[self.spec.dim], self.spec.dim
        lengths = [part.start, part.stop - part.start, self.spec.shape[dim] - part.stop]
        return self._tensors.chunk_rows(full, dim, lengths)[1]

    def _pad(self, flat: Tensor, numel: int) -> Tensor:
        if prod(flat.shape) == numel:
            return flat
        padded = self._tensors.zeros((numel,), self.spec.dtype)
        held = prod(flat.shape)
        if held:
            self._tensors.copy_(self._tensors.alias(padded, 0, (held,)), flat)
        return padded

    def _gather_parts(self) -> Gathering:
        total, numel, group = prod(self._buffer.shape), prod(self._part.shape), self._part_group
        if numel * group.size == total:
            work = self._collectives.all_gather(self._buffer, self._part, group, async_op=True)
            return Gathering(work, lambda: None)
        gathered = self._tensors.buffer(self._buffer, numel * group.size)
        work = self._collectives.all_gather(gathered, self._part, group, async_op=True)
        return Gathering(work, lambda: self._tensors.copy_(self._buffer, self._tensors.alias(gathered, 0, (total,))))

    def _join(self, gathered: Tensor) -> None:
        spec = self.spec
        pieces = [
            self._tensors.alias(gathered, index * spec.piece_numel, shape)
            for index, shape in enumerate(spec.piece_shapes)
        ]
        joined = self._tensors.concatenate(pieces, spec.dim)
        if spec.numel:
            self._tensors.copy_(self._buffer, self._tensors.flat(joined))


class Gathering:
    """A gather in flight; `wait` returns when the full parameter may be read."""

    def __init__(self, work: Work | None, finish: Callable[[], None]):
        self._work = work
        self._finish = finish

    def wait(self) -> None:
        """Wait for the collective, then put the pieces where they belong."""
        if self._work is not None:
            self._work.wait()
        self._finish()
