"""Where ranks sit: which machine, which supernode, and so which tier a group of ranks lives on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Mapping, Sequence

from hyper_parallel.core.errors import ConfigError, LayoutError
from hyper_parallel.core.mesh import DeviceMesh

FAST, SLOW = "fast", "slow"
"""The tiers: inside a supernode, and between supernodes."""


@dataclass(frozen=True)
class Topology:
    """The machine and the supernode of every rank.

    Args:
        machines: machine (host) number of rank 0, 1, 2, ...
        supernodes: supernode number of rank 0, 1, 2, ...; ranks of one machine share a supernode.
        source: where this is known from, for messages. It makes no difference between two topologies.

    Raises:
        LayoutError: the two differ in length, or a machine lies in two supernodes.
    """

    machines: tuple[int, ...]
    supernodes: tuple[int, ...]
    source: str = field(default="the program", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "machines", tuple(self.machines))
        object.__setattr__(self, "supernodes", tuple(self.supernodes))
        if len(self.machines) != len(self.supernodes):
            raise LayoutError(
                f"a topology names a machine and a supernode for each rank, found {len(self.machines)} machines and "
                f"{len(self.supernodes)} supernodes"
            )
        home: dict[int, int] = {}
        for rank, (machine, supernode) in enumerate(zip(self.machines, self.supernodes)):
            if home.setdefault(machine, supernode) != supernode:
                raise LayoutError(
                    f"machine {machine} lies in supernode {home[machine]} and, by rank {rank}, in {supernode}; "
                    "a machine belongs to one supernode"
                )

    @classmethod
    def single_machine(cls, world_size: int) -> Topology:
        """All ranks on one machine."""
        return cls((0,) * world_size, (0,) * world_size)

    @classmethod
    def regular(cls, world_size: int, ranks_per_machine: int, machines_per_supernode: int | None = None) -> Topology:
        """Contiguous ranks: so many on each machine, so many machines in each supernode (default: each its own).

        Raises:
            ConfigError: a count below one.
        """
        for name, count in (
            ("ranks_per_machine", ranks_per_machine),
            ("machines_per_supernode", machines_per_supernode),
        ):
            if count is not None and count < 1:
                raise ConfigError(f"{name} is {count}; the least is 1")
        machines = tuple(rank // ranks_per_machine for rank in range(world_size))
        return cls(machines, tuple(machine // (machines_per_supernode or 1) for machine in machines))

    @classmethod
    def from_local_ranks(cls, local_ranks: Sequence[int]) -> Topology:
        """Machines from every rank's number on its machine, in rank order: a new one begins wherever that is 0.

        Launchers give the ranks of a machine consecutive numbers; exchange yours with the others to call this.
        Machines are taken as supernodes of their own.

        Raises:
            LayoutError: the numbers are not those of consecutive ranks.
        """
        machines: list[int] = []
        for rank, local in enumerate(local_ranks):
            if local not in (0, local_ranks[rank - 1] + 1 if rank else 0):
                raise LayoutError(
                    f"rank {rank} is number {local} on its machine and the rank before it is number "
                    f"{local_ranks[rank - 1] if rank else 'none'}; expected 0 or the next number. "
                    "Give an explicit mapping instead"
                )
            machines.append((machines[-1] if machines else -1) + (local == 0))
        return cls(tuple(machines), tuple(machines))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], world_size: int) -> Topology:
        """Read what the launcher left in the environment.

        `torchrun` says how many ranks share a machine. Machines are taken as supernodes of their own, which is the
        careful answer: a link is called fast only where that is known. Without a launcher all ranks are on one machine.

        Raises:
            ConfigError: `LOCAL_WORLD_SIZE` is not a positive number, or the launcher is one that leaves it out
                (`msrun`, a rank table).
        """
        if "LOCAL_WORLD_SIZE" in environment:
            count = _positive("LOCAL_WORLD_SIZE", environment["LOCAL_WORLD_SIZE"])
            return replace(cls.regular(world_size, count), source=f"torchrun's LOCAL_WORLD_SIZE={count}")
        silent = [name for name in ("MS_ROLE", "RANK_TABLE_FILE") if name in environment]
        if silent:
            raise ConfigError(
                f"the launcher that set {silent[0]} does not say how many ranks share a machine; "
                "give Topology(machines, supernodes), or each rank's number on its machine to Topology.from_local_ranks"
            )
        return cls.single_machine(world_size)

    @classmethod
    def from_names(cls, machines: Sequence[str], supernodes: Sequence[str] | None = None, source: str = "") -> Topology:
        """Names instead of numbers; machines are supernodes of their own where those are not given."""
        numbers = _numbered(machines)
        return cls(numbers, numbers if supernodes is None else _numbered(supernodes), source or cls.source)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.machines)

    def __str__(self) -> str:
        machines, supernodes = len(set(self.machines)), len(set(self.supernodes))
        return f"{_counted(self.world_size, 'rank')} on {_counted(machines, 'machine')} in " + (
            f"{_counted(supernodes, 'supernode')}, by {self.source}"
        )

    def tier(self, ranks: Sequence[int]) -> str:
        """`FAST` when all ranks share a supernode, else `SLOW`.

        Raises:
            LayoutError: a rank that the topology does not know.
        """
        unknown = [rank for rank in ranks if not 0 <= rank < self.world_size]
        if unknown:
            raise LayoutError(f"rank {unknown[0]} is not in the topology, which has {self.world_size} ranks")
        return FAST if len({self.supernodes[rank] for rank in ranks}) <= 1 else SLOW

    def axis_tier(self, mesh: DeviceMesh, axes: Sequence[str]) -> str:
        """The slowest tier that any group of the mesh along `axes` lives on."""
        return SLOW if any(self.tier(group) == SLOW for group in mesh.groups(axes)) else FAST

    def tiers(self, mesh: DeviceMesh) -> dict[str, str]:
        """The tier of every axis of a mesh."""
        return {axis: self.axis_tier(mesh, (axis,)) for axis in mesh.names}


def _positive(name: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ConfigError(f"{name} is {text!r} in the environment; it must be a positive number of ranks")
    return value


def _numbered(names: Sequence[str]) -> tuple[int, ...]:
    """Every name's number, counted in the order in which they first appear."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")
