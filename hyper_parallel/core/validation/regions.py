"""What validation looks at where the code of an opaque region communicates: the calls, and what shall be the same."""

from __future__ import annotations

from functools import partial

from hyper_parallel.core.backend import Backend, Tensor
from hyper_parallel.core.errors import ContractError
from hyper_parallel.core.execution.region_collectives import Counts
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.peers import group_along
from hyper_parallel.core.validation.agreement import Agreement


class RegionLook:
    """See `core.execution.region_collectives.Look`."""

    def __init__(self, backend: Backend, mesh: DeviceMesh, agreement: Agreement):
        self._backend = backend
        self._mesh = mesh
        self._agreement = agreement
        self.is_real = agreement.is_real

    def agree(self, where: str, axis: str, told: tuple, counts: Counts | None, problem: str | None) -> None:
        """See `Look`."""
        if not self.is_real:
            if problem is not None:
                raise ContractError(f"{where}: {problem}")
            return
        collectives = self._backend.collectives
        group = group_along(collectives, self._mesh, [axis])
        everyone = collectives.gather_objects((told, counts, problem), group)
        for place, (other, _, wrong) in enumerate(everyone):
            if wrong is not None:
                raise ContractError(f"{where}: rank {place} of the axis: {wrong}")
            if other != everyone[0][0]:
                raise ContractError(
                    f"{where}: the ranks of the axis do not call the same: rank 0 calls {_written(everyone[0][0])}, "
                    f"rank {place} {_written(other)}"
                )
        if counts is not None:
            _check_counts(where, [each for _, each, _ in everyone])

    def same(self, where: str, axis: str, tensor: Tensor) -> None:
        """See `Look`."""
        self._agreement.check(tensor, [axis], partial(_fail, f"{where}: what it is given"))

    def same_gradient(self, where: str, axis: str, tensor: Tensor) -> None:
        """See `Look`."""
        if self._backend.autograd.takes_part(tensor):
            fail = partial(_fail, f'{where}: the gradient that comes back, said to be "replicate"')
            check = self._agreement.check
            self._backend.interception.watch_gradient(tensor, lambda gradient: check(gradient, [axis], fail))


def _check_counts(where: str, everyone: list[Counts]) -> None:
    for sender, (sent, _) in enumerate(everyone):
        for receiver, (_, received) in enumerate(everyone):
            if sent[receiver] != received[sender]:
                raise ContractError(
                    f"{where}: rank {sender} of the axis sends {sent[receiver]} rows to rank {receiver}, which counts "
                    f"on {received[sender]}; `counts` tells how many come"
                )


def _written(told: tuple) -> str:
    call, dtype, *more = told
    return f"{call} of {dtype or 'counts'}, {', '.join(map(str, more))}"


def _fail(what: str, problem: str) -> ContractError:
    return ContractError(f"{what}: {problem}")
