"""The static plan of distributed Muon: pure data for all ranks, made once and replayed unchanged (paper §6).

From parameters' layouts, and nothing else but the topology and a policy:

1. `domains.py`: which axes cut matrices, and which ranks hold pieces of one
2. `subgroups.py`: which replicas share work; `kinds.py`: where each rank sits
3. `owners.py`: who keeps momentum, and who orthogonalizes; 4. `batches.py`: in which batches, in which order
5. `relay.py`, `spans.py`, `exchange.py`: what one rank sends, receives and moves
6. `schedule.py`: the order of events in a step
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Iterable

from hyper_parallel.core.errors import ConfigError, LayoutError
from hyper_parallel.core.muon.batches import Assignment, assign
from hyper_parallel.core.muon.costs import bytes_of, computations_of
from hyper_parallel.core.muon.describe import describe
from hyper_parallel.core.muon.domains import domain_of
from hyper_parallel.core.muon.exchange import program_of
from hyper_parallel.core.muon.kinds import Kind
from hyper_parallel.core.muon.parameters import MuonParameter, MuonPolicy
from hyper_parallel.core.muon.program import Program
from hyper_parallel.core.muon.subgroups import check_shard_groups, clusters_of
from hyper_parallel.core.topology import Topology


@dataclass(frozen=True)
class MuonPlan:
    """Who does what in a step of Muon, for every rank. Two plans are equal if they were made from the same, in whatever
    order the parameters came; `parameters` are sorted by name. What is asked of it is worked out once."""

    parameters: tuple[MuonParameter, ...]
    topology: Topology
    policy: MuonPolicy

    def __reduce__(self) -> tuple:
        return MuonPlan, (self.parameters, self.topology, self.policy)  # the rest is worked out again

    def program(self, rank: int) -> Program:
        """What one rank does in each step.

        Raises:
            LayoutError: the rank holds none of the parameters.
        """
        if rank not in self.flops:
            raise LayoutError(f"rank {rank} holds none of the {len(self.parameters)} parameters of this plan of Muon")
        if rank not in self._programs:
            self._programs[rank] = program_of(
                rank, self.assignment, self.kinds, self.kind_of, self.parameters, self.topology
            )
        return self._programs[rank]

    def check(self) -> None:
        """Raise `ConfigError` for matrices that are cut between supernodes, where the policy refuses that."""
        first = {kind: each for kind, each in reversed(list(zip(self.kind_of, self.parameters)))}
        for number, kind in enumerate(self.kinds):
            check_shard_groups(first[number], kind.domain, kind.clusters, self.topology, self.policy)

    def describe(self) -> str:
        """The plan in words and numbers: what is cut, which replicas share work and why, owners, batches, costs."""
        return describe(self)

    @cached_property
    def fingerprint(self) -> str:
        """Equal where plans are equal, whichever process they are in."""
        kinds = [repr((each.layout.mesh, str(each.layout), each.view)) for each in self.kinds]
        rows = [
            (each.name, kind, each.dtype, repr(each.settings), each.state_dtype)
            for each, kind in zip(self.parameters, self.kind_of)
        ]
        return sha256(repr((kinds, rows, self.topology.supernodes, self.policy)).encode()).hexdigest()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that hold parameters, ascending."""
        return tuple(self.assignment.flops)

    @property
    def flops(self) -> dict[int, int]:
        """FLOPs of orthogonalization by global rank."""
        return self.assignment.flops

    @property
    def state_bytes(self) -> dict[int, int]:
        """Bytes of momentum by global rank."""
        return self.assignment.state

    @cached_property
    def bytes(self) -> dict[tuple[str, str], int]:
        """Bytes that cross between ranks in a step, over all ranks, by `(axis, tier)`: pieces and slices along the axes
        of the relay, updated shards along those of replicas."""
        made = bytes_of(self.assignment, self.kinds, self.kind_of, self.parameters, self.topology)
        return dict(sorted(made.items()))

    @property
    def imbalance(self) -> dict[str, float]:
        """The most loaded rank against the mean of all, in "flops" and in "state"; 1 is even."""
        found = {}
        for name, loads in (("flops", self.flops), ("state", self.state_bytes)):
            total = sum(loads.values())
            found[name] = max(loads.values()) * len(loads) / total if total else 1.0
        return found

    @cached_property
    def computations(self) -> dict[str, int]:
        """How many matrices are orthogonalized for each parameter, over all ranks."""
        counts = computations_of(self.assignment, self.kinds, self.kind_of)
        return {each.name: count for each, count in zip(self.parameters, counts)}

    # What all of this is worked out from

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """What parameters of the same layout and the same matrices have in common."""
        made = {}
        for key in dict.fromkeys((each.layout, each.view) for each in self.parameters):
            domain = domain_of(*key)
            made[key] = Kind(*key, domain, clusters_of(domain, self.topology, self.policy.replicas))
        return tuple(made.values())

    @cached_property
    def kind_of(self) -> list[int]:
        """For each parameter the number of its kind."""
        numbers = {(kind.layout, kind.view): number for number, kind in enumerate(self.kinds)}
        return [numbers[each.layout, each.view] for each in self.parameters]

    @cached_property
    def assignment(self) -> Assignment:
        """All that is decided."""
        return assign(self.kinds, self.kind_of, self.parameters, self.policy.batch_elements)

    @cached_property
    def _programs(self) -> dict[int, Program]:
        return {}


def make_plan(
    parameters: Iterable[MuonParameter], topology: Topology | None = None, policy: MuonPolicy | None = None
) -> MuonPlan:
    """The plan of some parameters.

    Args:
        parameters: in any order; all ranks give the same.
        topology: where ranks sit; all in one supernode when not given.
        policy: what may be decided; `MuonPolicy()` when not given.

    Raises:
        ConfigError: two parameters of one name, or matrices cut between supernodes where the policy refuses that.
        LayoutError: a rank that the topology does not know.
    """
    given = sorted(parameters, key=lambda each: each.name)
    for one, other in zip(given, given[1:]):
        if one.name == other.name:
            raise ConfigError(f"{one.name} is named twice among the parameters of Muon; every matrix is updated once")
    last = max((max(mesh.ranks) for mesh in {each.layout.mesh for each in given}), default=0)
    if topology is None:
        topology = Topology((0,) * (last + 1), (0,) * (last + 1), source="nobody, so that all ranks are taken as near")
    if last >= topology.world_size:
        raise LayoutError(f"rank {last} is not in the topology, which has {topology.world_size} ranks")
    plan = MuonPlan(tuple(given), topology, policy or MuonPolicy())
    plan.check()
    return plan
