"""One contract, compiled: a function from the local tensor outside of a module to that inside, or the way out.

Nothing about layouts is worked out twice: the transition of a local shape is kept, and later calls look it up.
"""

from __future__ import annotations

from typing import Mapping

from hyper_parallel.core.backend import Backend, Tensor
from hyper_parallel.core.errors import ContractError
from hyper_parallel.core.execution.tokens import Sequences, Tokens
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Placement, Replicate, Shard, StridedShard
from hyper_parallel.core.plan.contracts import FEATURES, SEQUENCE, Contract
from hyper_parallel.core.replay import Redistribution, redistribution

WHOLE = Replicate()


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
        if len(shape) not in (2, 3):
            raise ContractError(
                f"{self._where} has the shape {list(shape)}; the plan speaks of "
                f"[samples, tokens, {self._contract.size}]"
            )
        whole = self._sequences_in(shape) if self._cut_before or self._cut_after else None
        run = self._compiled.get((shape, whole))
        if run is None:
            run = self._compiled[shape, whole] = self._compile(shape, whole)
        return run.replay(local, self._where)

    def _sequences_in(self, shape: tuple[int, ...]) -> Sequences:
        """The whole sequences that a local tensor is, or is a part of."""
        if len(shape) == 2:
            return self._tokens.of_rows(shape[0], self._cut_before, self._where)
        if self._cut_before:
            return self._tokens.of_part(shape[0], shape[1], self._where)
        whole = Sequences(shape[0], shape[1])
        self._tokens.cut(whole, self._where)
        return whole

    def _compile(self, shape: tuple[int, ...], sequences: Sequences | None) -> Redistribution:
        contract, flattened = self._contract, len(shape) == 2
        samples, length = sequences or (1, 1)
        whole = list(shape)
        if sequences is not None:
            whole[:-1] = [samples * length] if flattened else sequences
        whole[-1] = contract.size
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
