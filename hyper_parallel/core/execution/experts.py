"""Experts that are dealt out over `expert`: tokens travel to their experts and back.

Ranks along `expert` see different samples, and each holds some of the experts. A module of packed experts is called
with tokens `[N, H]`, the experts chosen for each, `[N, K]`, and their weights, `[N, K]`. Each choice is sent to the
rank that holds the expert; there the module's own code runs on what has come, one choice a row, as if it had those
experts only; the results travel back and are summed up. Gradients travel the other way round.

Some modules are called with all tokens for every expert instead, weighted before, `[E * N, H]`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.backend import Backend, Module, Tensor
from hyper_parallel.core.errors import ContractError
from hyper_parallel.core.execution.adaptations import Adaptations
from hyper_parallel.core.execution.facts import Facts, is_in
from hyper_parallel.core.execution.travel import Travel
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Shard
from hyper_parallel.core.plan.architectures import ALL_TOKENS

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Attributes from which the code of experts reads how many there are."""

WHOLE_NUMBERS = ("int32", "int64")


class _Trip(NamedTuple):
    """Where the rows of one call have gone: how many to each rank, how many have come, the place of each choice among
    those that went, and the shape `[N, K]` of the choices."""

    sent: list[int]
    received: list[int]
    places: Tensor
    shape: tuple[int, int]


class _Around:
    """What stands around a module of experts, of which every rank holds the next `count`."""

    def __init__(self, backend: Backend, name: str, mesh: DeviceMesh, count: int):
        self._backend = backend
        self._name = name
        self._travel = Travel(backend, mesh)
        self._ranks = mesh.axis_size("expert")
        self._count = count


class Dispatch(_Around):
    """Each choice goes to the rank of its expert."""

    _trip: _Trip | None = None

    def enter(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments with what has come for this rank's experts: tokens `[M, H]`, experts counted from this rank's
        first `[M, 1]`, weights `[M, 1]`.

        Raises:
            ContractError: the module was called with something else than tokens, choices and weights.
        """
        named = dict(enumerate(args)) | kwargs
        keys = self._find(named)
        tokens, chosen, weights = (named[key] for key in keys)
        order, owners = self._order(chosen)
        sent = np.bincount(owners, minlength=self._ranks).tolist()
        received = self._travel.counts(sent, "expert")
        from_numpy, shape = self._backend.tensors.from_numpy, tuple(int(size) for size in chosen.shape)
        rows = from_numpy(order)
        self._trip = _Trip(sent, received, from_numpy(np.argsort(order, kind="stable")), shape)
        leaving = (
            tokens[from_numpy(order // shape[1])],
            (chosen % self._count).reshape(-1, 1)[rows],
            weights.reshape(-1, 1)[rows],
        )
        come = (self._travel.rows(each, "expert", sent, received) for each in leaving)
        named |= dict(zip(keys, come))
        return tuple(named[place] for place in range(len(args))), {key: named[key] for key in kwargs}

    def leave(self, output: Tensor) -> Tensor:
        """For each token that this rank has sent the sum of its experts' results, `[N, H]`."""
        trip, self._trip = self._trip, None
        results = self._travel.rows(output, "expert", trip.received, trip.sent)[trip.places]
        return results.reshape((*trip.shape, *results.shape[1:])).sum(1)

    def _find(self, named: dict[Any, Any]) -> tuple[Any, Any, Any]:
        """The keys of tokens, choices and weights among the arguments."""
        tensors = self._backend.tensors
        found = {key: tensors.dtype_name(value) for key, value in named.items() if tensors.is_tensor(value)}
        numbers = [key for key, dtype in found.items() if "float" in dtype]
        chosen = [key for key, dtype in found.items() if dtype in WHOLE_NUMBERS]
        if len(numbers) == 2 and len(chosen) == 1:
            tokens, choices, weights = numbers[0], chosen[0], numbers[1]
            shapes = [tuple(named[key].shape) for key in (tokens, choices, weights)]
            if len(shapes[0]) == len(shapes[1]) == 2 and shapes[1] == shapes[2] and shapes[0][0] == shapes[1][0]:
                return tokens, choices, weights
        told = ", ".join(f"{key}: {dtype} {list(named[key].shape)}" for key, dtype in found.items())
        raise ContractError(
            f"{self._name} was called with {told or 'no tensors'}; experts over the axis expert take tokens [N, H], "
            "the experts chosen for each [N, K], and their weights [N, K]"
        )

    def _order(self, chosen: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """The choices in the order in which they are sent, rank after rank, and the rank of each."""
        experts = self._backend.tensors.to_numpy(chosen).reshape(-1)
        owners = experts // self._count
        if owners.size and not 0 <= owners.min() <= owners.max() < self._ranks:
            raise ContractError(
                f"{self._name}: the router has chosen expert {experts[np.argmax(owners)]} of "
                f"{self._count * self._ranks}"
            )
        return np.argsort(owners, kind="stable"), owners


class InTurns(_Around):
    """All tokens go to all experts: as many rows for each, those of one expert after those of the other."""

    _trip: tuple[list[int], list[int], Tensor] | None = None

    def enter(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments with the rows of all ranks for this rank's experts, `[M, H]`.

        Raises:
            ContractError: the module was called with something else than as many rows for each expert.
        """
        tensors, experts = self._backend.tensors, self._count * self._ranks
        named = dict(enumerate(args)) | kwargs
        found = [key for key, value in named.items() if tensors.is_tensor(value)]
        shapes = [tuple(int(size) for size in named[key].shape) for key in found]
        if len(found) != 1 or len(shapes[0]) != 2 or shapes[0][0] % experts:
            raise ContractError(
                f"{self._name} was called with tensors of the shapes {list(map(list, shapes))}; over the axis expert "
                f"these experts take one tensor, all tokens for each of {experts} experts: [{experts} * N, H]"
            )
        sent = [shapes[0][0] // self._ranks] * self._ranks
        received = self._travel.counts(sent, "expert")
        order = self._by_expert(received)
        self._trip = sent, received, tensors.from_numpy(np.argsort(order))
        come = self._travel.rows(named[found[0]], "expert", sent, received)
        named[found[0]] = come[tensors.from_numpy(order)]
        return tuple(named[place] for place in range(len(args))), {key: named[key] for key in kwargs}

    def leave(self, output: Tensor) -> Tensor:
        """The results for the rows that this rank has sent, in their order, `[E * N, H]`."""
        (sent, received, places), self._trip = self._trip, None
        return self._travel.rows(output[places], "expert", received, sent)[: sum(sent)]

    def _by_expert(self, received: list[int]) -> np.ndarray:
        """The rows that have come, which lie rank after rank, expert after expert."""
        experts = [np.repeat(np.arange(self._count), rows // self._count) for rows in received]
        return np.argsort(np.concatenate(experts), kind="stable")


def find_dispatches(facts: Facts, found: Adaptations) -> None:
    """Let tokens travel around every module of packed experts that `expert` deals out. Below an opaque region they
    travel by the region's own code."""
    regions = [each.module for each in facts.plan.boundaries if each.region == "opaque"]
    ranks = facts.plan.mesh.axis_size("expert")
    for parameter in facts.plan.parameters:
        if parameter.placements.get("expert") == Shard(0):
            for use in facts.uses[parameter.name]:
                name = use.name.rpartition(".")[0]
                if any(name != region and is_in(name, region) for region in regions):
                    continue
                kind = InTurns if facts.backend.modules.class_name(use.owner) in ALL_TOKENS else Dispatch
                found.regions[name] = kind(facts.backend, name, facts.plan.mesh, parameter.shape[0] // ranks)
                _count_own(found, use.owner, parameter.shape[0], ranks)


def _count_own(found: Adaptations, module: Module, experts: int, ranks: int) -> None:
    for attribute in EXPERT_COUNTS:
        if vars(module).get(attribute) == experts:
            found.show(module, attribute, experts // ranks)
