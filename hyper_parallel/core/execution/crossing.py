"""One contract, compiled: a function from the local tensor outside of a module to that inside, or the way out.

Nothing about layouts is worked out twice: the transition of a local shape is kept, and later calls look it up.
"""

from __future__ import annotations

from typing import Mapping

from hyper_parallel.core.backend import Backend, Tensor
from hyper_parallel.core.errors import ContractError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Placement, Replicate, Shard, StridedShard
from hyper_parallel.core.plan.contracts import FEATURES, SEQUENCE, Contract
from hyper_parallel.core.regions import chunk_bounds
from hyper_parallel.core.replay import Redistribution, redistribution

WHOLE = Replicate()


class Tokens:
    """How many samples and tokens of each a part of a sequence belongs to.

    A local part does not tell the whole length where it does not divide evenly. Every sequence is cut by a crossing,
    which notes what it cuts; crossings that meet a part look it up.
    """

    def __init__(self, ranks: int = 1, place: int = 0):
        self._ranks = ranks
        self._place = place
        self._length_of_part: dict[int, int] = {}
        self._samples_of_rows: dict[int, int] = {}
        self._samples_of_part_rows: dict[int, int] = {}

    def note(self, samples: int, length: int) -> None:
        """A sequence is being cut."""
        start, stop = chunk_bounds(length, self._ranks, self._place)
        self._length_of_part[stop - start] = length
        self._samples_of_rows[samples * length] = samples
        self._samples_of_part_rows[samples * (stop - start)] = samples

    def length(self, part: int) -> int:
        """Tokens of the sequence of which `part` are here, the latest one; what divides evenly where none was cut."""
        return self._length_of_part.get(part, part * self._ranks)

    def samples(self, rows: int, cut: bool) -> int | None:
        """Samples in `rows` flattened tokens of whole sequences, or of parts of them; None where none was cut."""
        return (self._samples_of_part_rows if cut else self._samples_of_rows).get(rows)


class Crossing:
    """A contract on this rank. `crossing(local)` gives the local tensor on the other side, recorded by autograd.

    It lies on the part of the mesh along the axes on which the contract changes the tensor or its gradient. All ranks
    of that part call together. `where` names the module and the side, for errors.
    """

    def __init__(self, backend: Backend, contract: Contract, mesh: DeviceMesh, tokens: Tokens, where: str):
        self._backend = backend
        self._contract = contract
        self._where = where
        self._tokens = tokens
        self.axes = changed_axes(contract, mesh)
        self._rank = backend.collectives.rank()
        self._mesh = mesh.submesh(self.axes, self._rank)
        self._cut_before, self._cut_after = (
            any(side.get(axis) == Shard(SEQUENCE) for axis in self.axes) for side in (contract.before, contract.after)
        )
        self._compiled: dict[tuple, Redistribution] = {}

    def __call__(self, local: Tensor) -> Tensor:
        """The local tensor on the other side.

        Raises:
            ContractError: `local` is not of a shape that the contract speaks of.
        """
        shape = tuple(local.shape)
        tokens = self._tokens_of(shape) if self._cut_before or self._cut_after else None
        run = self._compiled.get((shape, tokens))
        if run is None:
            run = self._compiled[shape, tokens] = self._compile(shape, tokens)
        return run(local, self._where)

    def _tokens_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Samples, and tokens of each, of the whole that a local tensor is a part of."""
        if len(shape) > 2:
            if self._cut_before:
                return shape[0], self._tokens.length(shape[1])
            self._tokens.note(*shape[:2])
            return shape[0], shape[1]
        rows = shape[0]
        samples = self._tokens.samples(rows, self._cut_before)
        if samples is None:
            raise ContractError(
                f"{self._where} is {list(shape)}, tokens of all samples in a row, and nothing tells how many samples; "
                "pass it as [samples, tokens, features], or run the whole model"
            )
        part = rows // samples
        return samples, self._tokens.length(part) if self._cut_before else part

    def _compile(self, shape: tuple[int, ...], tokens: tuple[int, int] | None) -> Redistribution:
        contract = self._contract
        if len(shape) not in (2, 3):
            raise ContractError(
                f"{self._where} has the shape {list(shape)}; the plan speaks of [samples, tokens, {contract.size}]"
            )
        flattened = len(shape) == 2
        whole = list(shape)
        if tokens is not None:
            whole[: len(shape) - 1] = [tokens[0] * tokens[1]] if flattened else tokens
        whole[-1] = contract.size
        samples = tokens[0] if tokens else 1
        sides = contract.before, contract.source_gradient, contract.after, contract.gradient
        before, source_gradient, after, gradient = (self._placed(side, flattened, samples) for side in sides)
        source = Layout(self._mesh, before, whole, gradient=source_gradient)
        target = Layout(self._mesh, after, whole, gradient=gradient)
        if source.local_shape(self._rank) != shape:
            raise ContractError(
                f"{self._where} has the shape {list(shape)} on rank {self._rank}; by the plan it is "
                f"{list(source.local_shape(self._rank))}, the part of {source}"
            )
        return redistribution(self._backend, source, target)

    def _placed(self, side: Mapping[str, Placement], flattened: bool, samples: int) -> dict[str, Placement]:
        """The placements of a side on dims as the tensor has them: `[samples * tokens, features]` where flattened."""
        placed = {axis: side.get(axis, WHOLE) for axis in self.axes}
        if not flattened:
            return placed
        rows = Shard(0) if samples == 1 else StridedShard(0, samples)
        named = {Shard(SEQUENCE): rows, Shard(FEATURES): Shard(1)}
        return {axis: named.get(each, each) for axis, each in placed.items()}


def changed_axes(contract: Contract, mesh: DeviceMesh) -> tuple[str, ...]:
    """The axes of several ranks on which a contract changes the tensor or its gradient."""
    sides = (contract.before, contract.after), (contract.source_gradient, contract.gradient)
    return tuple(
        axis
        for axis, size in zip(mesh.names, mesh.shape)
        if size > 1 and any(one.get(axis, WHOLE) != other.get(axis, WHOLE) for one, other in sides)
    )
