"""Whether all ranks start with the same model: each keeps its part of the one that it has made, whatever the others."""

from __future__ import annotations

from hashlib import sha256
from typing import Sequence

from hyper_parallel.core.backend import Backend, Module, Tensor
from hyper_parallel.core.validation.messages import other_start_error

_LISTED = 3


def check_same_start(backend: Backend, model: Module) -> None:
    """Compare every parameter and buffer over all ranks, byte by byte. Called by all of them, while each holds the
    whole model; every value goes to the host once, and a digest of 32 bytes to the others.

    Raises:
        ContractError: on every rank, some are different.
    """
    own = _digests(backend, model)
    together = sha256(repr(sorted(own.items())).encode()).digest()
    if len(set(backend.collectives.gather_objects(together))) == 1:
        return
    everyone = backend.collectives.gather_objects(own)
    names = [*own, *sorted(set().union(*everyone) - set(own))]
    found = {name: _others([each.get(name) for each in everyone]) for name in names}
    differ = {name: ranks for name, ranks in found.items() if ranks}
    told = [f"{name} (rank{'s' * (len(ranks) > 1)} {_listed(ranks)})" for name, ranks in differ.items()]
    more = [f"and {len(told) - _LISTED} more"] if len(told) > _LISTED else []
    raise other_start_error(told[:_LISTED] + more)


def _digests(backend: Backend, model: Module) -> dict[str, bytes]:
    """A digest of each parameter and buffer by its first name; what has no values is left out."""
    values = [(use.name, use.parameter) for use in backend.modules.parameter_uses(model)]
    values += [(use.name, use.buffer) for use in backend.modules.buffers(model)]
    seen: set[int] = set()
    found = {}
    for name, value in values:
        if id(value) not in seen and backend.tensors.has_values(value):
            seen.add(id(value))
            found[name] = _digest(backend, value)
    return found


def _digest(backend: Backend, value: Tensor) -> bytes:
    array = backend.tensors.to_numpy(value)
    digest = sha256(f"{backend.tensors.dtype_name(value)} {array.shape}".encode())
    digest.update(memoryview(array).cast("B") if array.size else b"")
    return digest.digest()


def _others(digests: Sequence[bytes | None]) -> list[int]:
    """The ranks that hold something else than rank 0."""
    return [rank for rank, each in enumerate(digests) if each != digests[0]]


def _listed(ranks: Sequence[int]) -> str:
    more = [f"and {len(ranks) - _LISTED} more"] if len(ranks) > _LISTED else []
    return ", ".join([*map(str, ranks[:_LISTED]), *more])
