"""Collectives for the code of opaque regions: differentiable, along one axis of the mesh, on plain local tensors.

Whoever parallelizes a model leaves such an object on every module of it; one that nobody has parallelized gets one of
a single device, on which every function gives back what it got.
"""

from __future__ import annotations

import weakref
from math import prod
from typing import NamedTuple, Protocol, Sequence

from hyper_parallel.core.backend import NO_COPY, Backend, Module, Tensor
from hyper_parallel.core.errors import ConfigError, ContractError, LayoutError
from hyper_parallel.core.execution.adaptations import Adaptations
from hyper_parallel.core.execution.facts import Facts, is_in
from hyper_parallel.core.execution.travel import Travel
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import MODEL_AXES, DeviceMesh
from hyper_parallel.core.placement import Partial, Placement, Replicate, Shard
from hyper_parallel.core.regions import chunk_bounds
from hyper_parallel.core.replay import Redistribution, redistribution

_ATTRIBUTE = "_hyper_parallel_collectives"

GRADIENTS: dict[str, Placement] = {"replicate": Replicate(), "partial": Partial()}
"""How the gradient of what is the same on every rank may lie."""


Counts = tuple[Sequence[int], Sequence[int]]
"""What is sent to each rank, and what comes from each."""


class Look(Protocol):
    """What validation does around a call. It raises on every rank of the axis, or on none. `is_real` says that there
    are other ranks, which tell what they do."""

    is_real: bool

    def agree(self, where: str, axis: str, told: tuple, counts: Counts | None, problem: str | None) -> None:
        """Hold what the ranks say of one call against each other: `told` has to be the same on all, what one sends what
        another receives, and none may have a problem."""

    def same(self, where: str, axis: str, tensor: Tensor) -> None:
        """Hold the values that the ranks have of what is said to be the same against each other."""

    def same_gradient(self, where: str, axis: str, tensor: Tensor) -> None:
        """The same of the gradient of `tensor`, when it comes."""


class _Way(NamedTuple):
    """Where a tensor comes from and where it goes along one axis, with the gradients of both; None is the usual one."""

    before: Placement
    after: Placement
    source_gradient: Placement | None = None
    gradient: Placement | None = None


class RegionCollectives:
    """The other ranks, for the forward of a module. `hyper_parallel.collectives(module)` gives one.

    All functions take plain local tensors and give new ones, or their argument where the axis has one rank. All ranks
    along the axis call the same functions in the same order, in forward, and so their gradients come back in the same
    order too. `axis` is "expert", "context" or "tensor"; an axis that the mesh lacks has one rank.

    Errors, on top of those named at a function: `ConfigError` for an axis that is none of these, a module that stands
    in no opaque region, or after `restore`; `LayoutError` for a dim that the tensor lacks, a size that does not divide,
    or a local size that is not this rank's part.
    """

    def __init__(
        self, backend: Backend, module: Module, name: str = "", mesh: DeviceMesh | None = None, opaque: bool = True
    ):
        self.look: Look | None = None
        self._backend = backend
        self._module = weakref.ref(module)  # a module holds this object
        self._name = name or type(module).__name__
        self._mesh = mesh
        self._opaque = opaque
        self._travel = None if mesh is None else Travel(backend, mesh)
        self._compiled: dict[tuple, Redistribution] = {}

    def __deepcopy__(self, memo: dict) -> RegionCollectives:
        raise ConfigError(NO_COPY)

    def __reduce__(self) -> tuple:
        raise ConfigError(NO_COPY)

    # who is there

    def size(self, axis: str) -> int:
        """Number of ranks along an axis."""
        if axis not in MODEL_AXES:
            raise ConfigError(
                f"collectives of {self._name}: the axis is {axis!r}; a region communicates over {', '.join(MODEL_AXES)}"
            )
        return 1 if self._mesh is None else self._mesh.axis_size(axis)

    def rank(self, axis: str) -> int:
        """This rank's place along an axis, counted from 0."""
        if self.size(axis) == 1:
            return 0
        return self._mesh.coordinates(self._backend.collectives.rank())[axis]

    def part(self, length: int, axis: str) -> tuple[int, int]:
        """Start and stop of this rank's part of `length` elements, cut by ceil-chunk as everywhere in a plan."""
        return chunk_bounds(length, self.size(axis), self.rank(axis))

    # what is the same on every rank, parts and summands

    def all_reduce(self, tensor: Tensor, axis: str, *, gradient: str) -> Tensor:
        """The sum of the ranks' tensors, on each.

        Args:
            tensor: of one shape on all ranks: this rank's summand.
            gradient: how the gradient of the sum lies when it comes back. "replicate": each rank has all of it, since
                what follows is the same on every rank; it is handed on. "partial": each has a part of it, since what
                follows works on this rank's part of something; the parts are summed up.
        """
        way = _Way(Partial(), Replicate(), gradient=self._gradient("all_reduce", gradient))
        return self._run("all_reduce", tensor, axis, way, same_gradient=gradient == "replicate")

    def sum_gradient(self, tensor: Tensor, axis: str) -> Tensor:
        """The tensor itself; its gradient, of which each rank computes a part, is summed up.

        Args:
            tensor: the same on every rank. What follows works on this rank's part of something: its heads, its columns.
        """
        way = _Way(Replicate(), Replicate(), gradient=Partial())
        return self._run("sum_gradient", tensor, axis, way, same=True)

    def all_gather(self, tensor: Tensor, axis: str, dim: int, *, gradient: str, length: int | None = None) -> Tensor:
        """The ranks' parts, joined along `dim`, on each.

        Args:
            tensor: this rank's part.
            gradient: how that of the whole lies when it comes back. "replicate": each rank has all of it, and takes
                that of its part. "partial": each has a summand of it; they are summed up and dealt out.
            length: elements along `dim` of all parts together, cut by ceil-chunk. By default all have as many as this.
        """
        dim = self._dim("all_gather", tensor, dim)
        way = _Way(Shard(dim), Replicate(), gradient=self._gradient("all_gather", gradient))
        return self._run("all_gather", tensor, axis, way, length, same_gradient=gradient == "replicate")

    def reduce_scatter(self, tensor: Tensor, axis: str, dim: int, *, uneven: bool = False) -> Tensor:
        """This rank's part along `dim` of the sum of the ranks' tensors. The gradient of the part is that of the part,
        and every rank gets all of it.

        Args:
            tensor: of one shape on all ranks: this rank's summand.
            uneven: cut a size that does not divide by ceil-chunk; else it is refused.
        """
        dim = self._dim("reduce_scatter", tensor, dim)
        return self._run("reduce_scatter", tensor, axis, _Way(Partial(), Shard(dim)), uneven=uneven)

    def split(self, tensor: Tensor, axis: str, dim: int, *, gradient: str, uneven: bool = False) -> Tensor:
        """This rank's part along `dim` of a tensor that is the same on every rank; nothing is sent.

        Args:
            tensor: the same on every rank.
            gradient: how that of `tensor` is to lie. "replicate": all of it on every rank; the parts are gathered.
                "partial": each rank has that of its part, and zeros elsewhere, and somebody sums them up.
            uneven: as for `reduce_scatter`.
        """
        dim = self._dim("split", tensor, dim)
        way = _Way(Replicate(), Shard(dim), source_gradient=self._gradient("split", gradient))
        return self._run("split", tensor, axis, way, uneven=uneven, same=True)

    def all_to_all(
        self,
        tensor: Tensor,
        axis: str,
        split_dim: int,
        concat_dim: int,
        *,
        length: int | None = None,
        uneven: bool = False,
    ) -> Tensor:
        """Of a tensor that is cut along `concat_dim` the part along `split_dim`: heads for tokens, tokens for heads.
        The gradient goes the same way back.

        Args:
            tensor: this rank's part along `concat_dim`, all of `split_dim`.
            split_dim: the dim of which each rank gets a part.
            concat_dim: the dim that is whole afterwards.
            length: elements along `concat_dim` of all parts together, cut by ceil-chunk. By default all have as many as
                this.
            uneven: cut a `split_dim` that does not divide by ceil-chunk; else it is refused.
        """
        split_dim, concat_dim = (self._dim("all_to_all", tensor, each) for each in (split_dim, concat_dim))
        if split_dim == concat_dim:
            raise LayoutError(
                f"all_to_all in {self._name}: it would split and join the same dim {split_dim}; name two dims"
            )
        return self._run("all_to_all", tensor, axis, _Way(Shard(concat_dim), Shard(split_dim)), length, uneven)

    # what goes from one rank to another

    def shift(self, tensor: Tensor, axis: str, by: int = 1) -> Tensor:
        """What the rank `by` places before this one holds, the first after the last: a step round the ring. The
        gradient goes `by` places back.

        Args:
            tensor: of one shape on all ranks.
        """
        ranks, place, name = self.size(axis), self.rank(axis), "shift"
        shape = tuple(int(size) for size in tensor.shape)
        self._begin(name, axis, tensor, (by % ranks, shape))
        if by % ranks == 0:
            return tensor
        going, coming = ([prod(shape) * ((place + to) % ranks == rank) for rank in range(ranks)] for to in (by, -by))
        return self._travel.elements(tensor, axis, shape, going, coming, f"{name} in {self._name}")

    def counts(self, sent: Sequence[int], axis: str) -> list[int]:
        """How many rows come from each rank, when this one sends `sent[r]` to rank r. They are read on the host."""
        self._begin("counts", axis, None, (), self._wrong_counts("sent", sent, axis))
        if self.size(axis) == 1:
            return [int(each) for each in sent]
        if self.look is not None and not self.look.is_real:
            return [int(sent[self.rank(axis)])] * self.size(axis)  # the others are taken to send as this one does
        return self._travel.counts(sent, axis)

    def exchange(self, rows: Tensor, axis: str, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rows for those that come from each rank, in rank order. The gradient of a row goes back where it came from.

        Where nothing comes there is one row of zeros, so that what follows always has something to run on: gradients
        travel on every rank or on none, and so the result must not be left unused on any.

        Args:
            rows: `[sum(sent), ...]`, those for rank 0 first; one row of zeros that `exchange` has given, for nothing.
            sent: how many go to each rank.
            received: how many come from each, as `counts` tells.
        """
        problem = self._wrong_counts("sent", sent, axis) or self._wrong_counts("received", received, axis)
        if problem is None and int(rows.shape[0]) != sum(sent) and (sum(sent) or int(rows.shape[0]) != 1):
            problem = f"there are {int(rows.shape[0])} rows, and {sum(sent)} are to be sent"
        width = tuple(int(size) for size in rows.shape[1:])
        self._begin("exchange", axis, rows, width, problem, (sent, received))
        if self.size(axis) == 1:
            return rows
        return self._travel.rows(rows, axis, sent, received, f"exchange in {self._name}")

    # how

    def _run(
        self,
        call: str,
        tensor: Tensor,
        axis: str,
        way: _Way,
        length: int | None = None,
        uneven: bool = False,
        same: bool = False,
        same_gradient: bool = False,
    ) -> Tensor:
        """The tensor on the other side. `same` says that it has to be the same on every rank, `same_gradient` that the
        gradient of the result has."""
        shape = tuple(int(size) for size in tensor.shape)
        whole, problem = self._whole(shape, axis, way, length, uneven)
        self._begin(call, axis, tensor, (whole, *map(str, way)), problem)
        if self.size(axis) == 1:
            return tensor
        if same and self.look is not None:
            self.look.same(f"{call} in {self._name}", axis, tensor)
        key = (axis, whole, way)
        run = self._compiled.get(key)
        if run is None:
            run = self._compiled[key] = self._compile(axis, whole, way)
        result = run(tensor, f"{call} in {self._name}")
        if same_gradient and self.look is not None and result is not tensor:
            self.look.same_gradient(f"{call} in {self._name}", axis, result)
        return result

    def _compile(self, axis: str, whole: tuple[int, ...], way: _Way) -> Redistribution:
        mesh = self._mesh.submesh((axis,), self._backend.collectives.rank())
        before, after, source_gradient, gradient = (None if each is None else {axis: each} for each in way)
        source = Layout(mesh, before, whole, gradient=source_gradient)
        return redistribution(self._backend, source, Layout(mesh, after, whole, gradient=gradient))

    def _whole(
        self, shape: tuple[int, ...], axis: str, way: _Way, length: int | None, uneven: bool
    ) -> tuple[tuple[int, ...], str | None]:
        """The shape of all parts together, and what is wrong with this rank's."""
        ranks, whole, problem = self.size(axis), list(shape), None
        if isinstance(way.before, Shard):
            dim = way.before.dim
            whole[dim] = shape[dim] * ranks if length is None else length
            start, stop = self.part(whole[dim], axis)
            if stop - start != shape[dim]:
                problem = (
                    f"it has {shape[dim]} elements along dim {dim}, and of length={length} this rank's part is "
                    f"{stop - start}, elements [{start}, {stop})"
                )
        if isinstance(way.after, Shard) and whole[way.after.dim] % ranks and not uneven:
            size = whole[way.after.dim]
            parts = [stop - start for start, stop in (chunk_bounds(size, ranks, place) for place in range(ranks))]
            problem = (
                f"its dim {way.after.dim} of {size} does not divide by the {ranks} ranks of {axis}; write uneven=True "
                f"to cut it into {parts}"
            )
        return tuple(whole), problem

    def _begin(
        self,
        call: str,
        axis: str,
        tensor: Tensor | None,
        told: tuple,
        problem: str | None = None,
        counts: Counts | None = None,
    ) -> None:
        """Raise what is wrong with a call; in validation on all ranks, before anything of a size that it tells."""
        ranks, module = self.size(axis), self._module()
        where = f"{call} over {axis} in {self._name}"
        bound = None if module is None else vars(module).get(_ATTRIBUTE)
        if bound is not (None if self._mesh is None else self):
            raise ConfigError(
                f"{where}: the model has been parallelized or restored since these collectives were asked for; call "
                "hyper_parallel.collectives(self) in forward, each time"
            )
        if ranks > 1 and not self._opaque:
            raise ConfigError(
                f"{where}: the module stands in no opaque region, and ranks may communicate there only; write below "
                f"`regions:` {self._name}: {{kind: opaque}}"
            )
        if ranks > 1 and tensor is not None and self._is_followed(tensor):
            raise ContractError(
                f"{where}: it is given a tensor that validation follows, so it is not called by the forward of an "
                "opaque region; write the module that calls it below `regions:` with {kind: opaque}"
            )
        if ranks > 1 and self.look is not None:
            dtype = "" if tensor is None else self._backend.tensors.dtype_name(tensor)
            self.look.agree(where, axis, (call, dtype, *told), counts, problem)
        if problem is not None:
            raise LayoutError(f"{where}: {problem}")

    def _is_followed(self, tensor: Tensor) -> bool:
        interception = self._backend.interception
        return interception is not None and interception.track_of(tensor) is not None

    def _wrong_counts(self, name: str, counts: Sequence[int], axis: str) -> str | None:
        ranks = self.size(axis)
        if len(counts) == ranks and min(counts) >= 0:
            return None
        return f"{name} is {list(counts)}; it has a count of at least 0 for each of the {ranks} ranks"

    def _dim(self, call: str, tensor: Tensor, dim: int) -> int:
        dims = len(tensor.shape)
        if not -dims <= dim < dims:
            raise LayoutError(f"{call} in {self._name}: there is no dim {dim} in {list(tensor.shape)}")
        return dim % dims

    def _gradient(self, call: str, gradient: str) -> Placement:
        if gradient not in GRADIENTS:
            raise ConfigError(
                f'{call} in {self._name}: gradient is {gradient!r}; write "replicate" or "partial", as it comes back'
            )
        return GRADIENTS[gradient]


def collectives_of(backend: Backend, module: Module) -> RegionCollectives:
    """What `parallelize` has left on a module, or that of a single device."""
    return vars(module).get(_ATTRIBUTE) or RegionCollectives(backend, module)


def find_collectives(facts: Facts, found: Adaptations) -> None:
    """Give every module of the model its collectives, which it may use in an opaque region."""
    opaque = [each.module for each in facts.plan.boundaries if each.region == "opaque"]
    made: set[int] = set()
    for name, module in facts.modules.items():
        if id(module) not in made:
            made.add(id(module))
            inside = any(is_in(name, region) for region in opaque)
            collectives = RegionCollectives(facts.backend, module, name, facts.plan.mesh, inside)
            found.collectives.append(collectives)
            found.show(module, _ATTRIBUTE, collectives)
