"""One fully sharded parameter: its shard at rest, its buffer, and the moves between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Callable, NamedTuple, Sequence

from hyper_parallel.core.backend import Backend, Group, Module, ParameterUse, Tensor, Work
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.fsdp.counts import Counts
from hyper_parallel.core.fsdp.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from hyper_parallel.core.fsdp.spec import ShardSpec
from hyper_parallel.core.identity import IdentityMap
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import BATCH_AXES, DeviceMesh

layouts = IdentityMap()
"""The layout of each parameter at rest."""


def ranks_with_samples(mesh: DeviceMesh) -> int:
    """Ranks whose gradients are averaged: those that see different samples, or other tokens of them."""
    return prod(mesh.axis_size(axis) for axis in (*BATCH_AXES, "context"))


class Listed(NamedTuple):
    """A place in a list or tuple of a module, beside its registry, that holds a parameter. Modules make such lists
    anew, so it is looked up each time."""

    owner: Module
    attribute: str
    index: int
    kind: type

    def get(self) -> Tensor:
        """What is there."""
        return vars(self.owner)[self.attribute][self.index]

    def put(self, tensor: Tensor) -> None:
        """Put a tensor there. A tuple becomes another one, of no kind of its own: those hold parameters only."""
        held = vars(self.owner)[self.attribute]
        if isinstance(held, list):
            held[self.index] = tensor
        else:
            vars(self.owner)[self.attribute] = (*held[: self.index], tensor, *held[self.index + 1 :])

    def settle(self) -> None:
        """Make it what it was, now that it holds parameters."""
        held = vars(self.owner)[self.attribute]
        if type(held) is not self.kind:
            vars(self.owner)[self.attribute] = self.kind(held)


@dataclass(frozen=True)
class Holding:
    """How a unit holds one parameter, with every use of it.

    `spec` is its split over `shard`, of the part that modules see; `layout` how the shard lies in the whole parameter.
    The gradient of the part is a sum over the mesh axes `pending`, besides the mean over all ranks with samples of
    their own. Where `shown` is given, modules see what it makes of the full tensor. The policies tell the dtypes, and
    where the shard lives. With `early_all_reduce` the sum over replicas begins behind the reduce-scatter.
    """

    uses: Sequence[ParameterUse]
    spec: ShardSpec
    layout: Layout
    pending: tuple[str, ...] = ()
    shown: Callable[[Tensor], Tensor] | None = None
    precision: MixedPrecisionPolicy = MixedPrecisionPolicy()
    offload: OffloadPolicy = OffloadPolicy()
    early_all_reduce: bool = False
    lists: Sequence[Listed] = ()


class ShardedParameter:
    """The shard at rest, and a persistent buffer of which the full parameter is a view.

    The buffer's storage exists only while the parameter is gathered. Tensors over it, those that autograd saved
    included, stay the same objects and become valid again with the next gather. A parameter that is whole on every
    rank, and is computed with as it is, has no buffer: its full tensor is itself.

    Where a gather takes pieces of one size only, the shard at rest has room behind it, up to that size: so it is sent
    from where it is.
    """

    def __init__(self, backend: Backend, held: Holding):
        self.spec = spec = held.spec
        self.uses = uses = list(held.uses)
        self.lists = tuple(held.lists)
        self.layout = held.layout
        self.shown = held.shown
        self._precision = held.precision
        self.offload = held.offload
        self.early_all_reduce = held.early_all_reduce
        self.divisor = ranks_with_samples(spec.layout.mesh)
        sums = spec.layout.mesh.groups(("replicate", *held.pending))
        self.sum_group: Group = backend.collectives.groups(sums, apart=held.early_all_reduce)
        self.counts = Counts()
        self._tensors = backend.tensors
        self._collectives = backend.collectives
        self._modules = backend.modules
        self._exact = self._collectives.gathers_uneven()
        self._part: Tensor | None = None  # of the buffer, kept after forward for a smaller group
        self._part_group: Group | None = None
        self.parameter = uses[0].parameter
        self.has_values = self._tensors.has_values(self.parameter)
        self._hold(self._at_rest(self.parameter))
        # The pieces of a leading dim lie in the buffer as they came, with the padding behind the full parameter.
        fits = self._exact or spec.is_even or self._tensors.reads_parts_in_place()
        self._direct = spec.dim == 0 and fits
        self.is_reduced = spec.pieces > 1 or self.sum_group.size > 1 or self.divisor > 1
        """Its gradient takes more than what autograd does."""
        self._choose_dtypes()

    def _choose_dtypes(self) -> None:
        """What follows from the dtype of the shard."""
        spec = self.spec
        self.full_dtype = self._precision.full_dtype(spec.dtype)
        self.reduced_dtype = self._precision.reduced_dtype(spec.dtype)
        self._buffer: Tensor | None = None
        if not (spec.is_whole and self.full_dtype == spec.dtype and not self.is_offloaded):
            numel = spec.sent_numel(self._exact) if self._direct else spec.numel
            self._buffer = self._tensors.empty((numel,), self.full_dtype)
            self.free()
        self.is_gathered = self._buffer is not None
        """Modules see a buffer that is filled and emptied, not the parameter's own memory."""
        self.needs_unit = self.is_gathered or self.is_reduced
        """It is right in a forward of its unit only, which gathers it or takes its gradient."""

    @property
    def is_served(self) -> bool:
        """False for what modules read, and autograd serves, as it is: there is nothing to gather, reduce or follow."""
        return self.needs_unit or self.shown is not None

    def as_shown(self, full: Tensor) -> Tensor:
        """What modules see in the place of the full parameter."""
        return full if self.shown is None else self.shown(full)

    @property
    def buffer_key(self) -> tuple:
        """What has to be alike for gradients to lie in one buffer and be summed together."""
        return self.sum_group.ranks, self.reduced_dtype, self.spec.dtype, self.offload

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
        """Start filling the buffer. A leading-dim shard lands where it belongs; others are put together afterwards."""
        spec, exact = self.spec, self._exact
        if self._buffer is None:
            return Gathering()
        self._tensors.restore_storage(self._buffer)
        if self._part is not None:
            return self._gather_parts()
        if spec.is_whole:
            self._fill()
            return Gathering()
        piece, pieces = self._piece(), spec.sent_pieces(exact)
        self.counts.gathered += spec.received_numel(exact) * piece.itemsize
        if self._direct:
            work = self._collectives.all_gather(self._buffer, piece, group, async_op=True, pieces=pieces)
            return Gathering(work, piece)
        gathered = self._tensors.empty((spec.sent_numel(exact),), self.full_dtype)
        work = self._collectives.all_gather(gathered, piece, group, async_op=True, pieces=pieces)
        return Gathering(work, piece, lambda: self._put_together(gathered))

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
            self.counts.gather_copied += part.nbytes
        self._tensors.release_storage(self._buffer)

    def pretend_part(self, group: Group | None) -> None:
        """Have something to give when the ranks of `group` gather their parts, or all ranks (None) their shards."""
        self._part, self._part_group = None, group
        if group is not None and self._buffer is not None and self.spec.numel:
            self._part = self._tensors.buffer(self._buffer, ceil(prod(self._buffer.shape) / group.size), zero=True)

    def free(self) -> None:
        """Give the buffer's memory back, and what is kept of it."""
        self._part = None
        if self._buffer is not None:
            self._tensors.release_storage(self._buffer)

    def pieces_of(self, gradient: Tensor) -> Tensor:
        """A full gradient as the flat pieces of all ranks; the gradient's own storage where it fits."""
        spec, exact = self.spec, self._collectives.scatters_uneven()
        flat = self.flat(gradient)
        if spec.dim == 0 and (exact or spec.is_even):
            return flat
        numel = spec.sent_numel(exact)
        pieces = self._tensors.buffer(flat, numel, zero=numel > spec.numel)
        self._tensors.move_(pieces, flat, spec.take_apart(exact))
        self.counts.reduce_copied += flat.nbytes
        return pieces

    def flat(self, gradient: Tensor) -> Tensor:
        """A full gradient as a 1-D tensor; over its own storage where its elements lie in order."""
        flat = self._tensors.flat(gradient)
        if not gradient.is_contiguous():
            self.counts.reduce_copied += flat.nbytes
        return flat

    @property
    def is_offloaded(self) -> bool:
        """The shard lives on the host."""
        return isinstance(self.offload, CPUOffloadPolicy)

    def load(self, local: Tensor) -> None:
        """Overwrite the shard, which needs no values yet, with a tensor of its shape."""
        if not self.has_values:
            self.has_values = True
            self._hold(self._placed(local))
        elif self.spec.local_numel:
            self._tensors.copy_(self.parameter, local)

    def is_usable(self) -> bool:
        """Tell whether the shard has values, of the dtype that it is gathered from."""
        return self.has_values and not self.was_cast()

    def was_cast(self) -> bool:
        """Tell whether the model has been cast since."""
        return self._tensors.dtype_name(self.parameter) != self.spec.dtype

    def follow_cast(self) -> None:
        """Take the dtype over that the shard has now. Nothing may be left of what was gathered in the one before."""
        self.spec = replace(self.spec, dtype=self._tensors.dtype_name(self.parameter))
        self._hold(self._placed(self.parameter))
        self._choose_dtypes()

    def require_values(self, name: str) -> None:
        """Raise a ConfigError that tells how to give the parameter `name` values, if it has none."""
        self.adopt()
        if not self.has_values:
            raise ConfigError(
                f"the parameter {name} has no values yet; before the first forward, call model.to_empty(device=...) "
                "and initialise it (PyTorch), or hyper_parallel.load_full_parameters(model, values)"
            )

    def adopt(self) -> None:
        """Where there was no shard, take what others have made for it, if they have: `to_empty`, or whoever has put
        something in its place.

        Raises:
            ConfigError: it has another shape.
        """
        use = self.uses[0]
        found = None if self.has_values else self._modules.registered(use.owner, use.attribute)
        if found is None or not self._tensors.has_values(found):
            return
        if tuple(found.shape) != self.spec.local_shape:
            raise ConfigError(
                f"the parameter {use.name} was given the shape {tuple(found.shape)}, its shard on this rank has "
                f"{self.spec.local_shape}; give whole values to hyper_parallel.load_full_parameters(model, values)"
            )
        self.has_values = True
        layouts.pop(self.parameter)
        self.parameter = found
        self.uses = [each._replace(parameter=found) for each in self.uses]
        self._hold(self._placed(found))

    def _hold(self, local: Tensor) -> None:
        """Let modules hold `local` as the shard, wherever they use it: `to_empty` unties what was tied."""
        held = (self._modules.registered(use.owner, use.attribute) for use in self.uses)
        if local is not self.parameter or any(each is not local for each in held):
            layouts.pop(self.parameter)
            self.replace(local)
        layouts.set(self.parameter, self.layout)

    def replace(self, local: Tensor) -> None:
        """Let modules hold another tensor, of any shape, as the parameter."""
        self.parameter = self._modules.replace_parameter(self.uses, local)
        self.uses = [use._replace(parameter=self.parameter) for use in self.uses]
        for place in self.lists:
            place.put(self.parameter)

    def _at_rest(self, parameter: Tensor) -> Tensor:
        """This rank's part of a whole parameter, where and as it is to lie between steps."""
        if not self.has_values:
            return self._tensors.on_meta(self.spec.local_shape, self.spec.dtype)
        return self._placed(parameter if self.spec.is_whole else self._cut(parameter))

    def _placed(self, local: Tensor) -> Tensor:
        """The same shard in memory as it is to lie in."""
        spec, tensors = self.spec, self._tensors
        roomy = not self._exact and tensors.reads_parts_in_place()
        numel = spec.own_numel(exact=not roomy)
        if self.is_offloaded:
            storage = tensors.on_host(numel, spec.dtype, self.offload.pin_memory)
        elif numel > spec.local_numel:
            storage = tensors.empty((numel,), spec.dtype)
        else:
            return tensors.to_device(local)
        if spec.local_numel:
            tensors.copy_(tensors.alias(storage, 0, (spec.local_numel,)), tensors.flat(local))
        return tensors.alias(storage, 0, spec.local_shape)

    def _cut(self, full: Tensor) -> Tensor:
        part, dim = self.spec.layout.slices(self.spec.rank)[self.spec.dim], self.spec.dim
        lengths = [part.start, part.stop - part.start, self.spec.shape[dim] - part.stop]
        return self._tensors.chunk_rows(full, dim, lengths)[1]

    def _piece(self) -> Tensor:
        """What this rank sends: the shard from where it lies, where dtype and room allow it."""
        spec, tensors = self.spec, self._tensors
        held, numel = spec.local_numel, spec.own_numel(self._exact)
        if self.full_dtype == spec.dtype:
            piece = None
            if self.parameter.is_contiguous():
                piece = tensors.stretched(self.parameter, numel)
            if piece is not None:
                return self._on_device(piece)
        piece = tensors.empty((numel,), self.full_dtype)
        if held:
            tensors.copy_(tensors.alias(piece, 0, (held,)), self._on_device(tensors.flat(self.parameter)))
        self._count_written(held)
        return piece

    def _fill(self) -> None:
        """The full parameter where it is whole on every rank."""
        self._tensors.copy_(self._buffer, self._on_device(self._tensors.flat(self.parameter)))
        self._count_written(self.spec.numel)

    def _on_device(self, flat: Tensor) -> Tensor:
        placed = self._tensors.to_device(flat)
        if placed is not flat:
            self.counts.moved += flat.nbytes
        return placed

    def _count_written(self, numel: int) -> None:
        written = numel * self._tensors.item_bytes(self.full_dtype)
        if self.full_dtype != self.spec.dtype:
            self.counts.cast += written
        else:
            self.counts.gather_copied += written

    def _gather_parts(self) -> Gathering:
        total, numel, group = prod(self._buffer.shape), prod(self._part.shape), self._part_group
        self.counts.gathered += (group.size - 1) * self._part.nbytes
        if numel * group.size == total:
            work = self._collectives.all_gather(self._buffer, self._part, group, async_op=True)
            return Gathering(work, self._part)
        gathered = self._tensors.buffer(self._buffer, numel * group.size)
        work = self._collectives.all_gather(gathered, self._part, group, async_op=True)

        def finish() -> None:
            self._tensors.copy_(self._buffer, self._tensors.alias(gathered, 0, (total,)))
            self.counts.gather_copied += self._buffer.nbytes

        return Gathering(work, self._part, finish)

    def _put_together(self, gathered: Tensor) -> None:
        self._tensors.move_(self._buffer, gathered, self.spec.put_together(self._exact))
        self.counts.gather_copied += self._buffer.nbytes


class Gathering:
    """A gather in flight; `wait` returns when the full parameter may be read. Keeps what is being sent."""

    def __init__(self, work: Work | None = None, sent: Tensor | None = None, finish: Callable[[], None] | None = None):
        self._work = work
        self._sent = sent
        self._finish = finish

    def wait(self) -> None:
        """Wait for the collective, then put the pieces where they belong."""
        if self._work is not None:
            self._work.wait()
        self._sent = None
        if self._finish is not None:
            self._finish()
