"""Where the ranks of a job sit: asked of the program, of files, of the launcher, of the machines' names, in this order.

The first that knows tells:

1. what the program gives to `hyper_parallel.initialize(topology=...)`
2. the file that `HYPER_PARALLEL_TOPOLOGY` names in the environment
3. the rank table that `RANK_TABLE_FILE` names
4. the launcher, where it says how many ranks share a machine (`LOCAL_WORLD_SIZE`) and all ranks hear the same
5. the names of the machines, which ranks that have joined tell each other

The last two know machines only, which are then taken as supernodes of their own: a link is called fast where that is
known.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace
from typing import Any, Mapping

from hyper_parallel.core.backend import Backend
from hyper_parallel.core.errors import ConfigError, HyperParallelError
from hyper_parallel.core.identity import IdentityMap
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.topology import FAST, Topology
from hyper_parallel.core.topology_files import EXAMPLE, from_mapping, read_topology

FILE = "HYPER_PARALLEL_TOPOLOGY"
_known = IdentityMap()  # the group of all ranks of a job -> its topology


def find_topology(backend: Backend, given: Any = None, environment: Mapping[str, str] | None = None) -> Topology:
    """Find where the ranks sit and remember it for the job. Called by every rank, once joined; all get the same.

    Args:
        backend: whose ranks have joined.
        given: a `Topology`, a mapping from ranks to supernodes, or the path of a file.
        environment: the process's own by default.

    Raises:
        ConfigError: what is given or found is not right, on any rank, or differs between ranks.
        LayoutError: a machine in two supernodes.
    """
    collectives = backend.collectives
    size, found, error = collectives.world_size(), None, None
    try:
        found = _told(size, given, os.environ if environment is None else environment)
    except HyperParallelError as raised:
        error = raised
    if size > 1:
        found = _agreed(
            collectives.gather_objects((found, None if error is None else str(error), socket.gethostname())), error
        )
    elif error is not None:
        raise error
    topology = found or replace(Topology.single_machine(size), source="there being one rank")
    _known.set(collectives.world(), topology)
    return topology


def topology_of(backend: Backend) -> Topology | None:
    """Where the ranks of this job sit; None where nobody has asked `find_topology`."""
    return _known.get(backend.collectives.world())


@dataclass(frozen=True)
class Crossing:
    """A `shard` axis that crosses supernodes: in words, and the mesh that shards inside them and replicates between
    them, where there is one."""

    words: str
    inside: DeviceMesh | None


def crossing_of(topology: Topology | None, mesh: DeviceMesh) -> Crossing | None:
    """What is wrong with the `shard` axis of a mesh; None where it stays inside supernodes, or nobody knows them."""
    if topology is None or topology.axis_tier(mesh, ("shard",)) == FAST:
        return None
    group = next(each for each in mesh.groups(("shard",)) if topology.tier(each) != FAST)
    homes = sorted({topology.supernodes[rank] for rank in group})
    words = (
        f"the axis 'shard' of the mesh {mesh} crosses supernodes: its ranks {_short(group)} are in "
        f"the supernodes {_short(homes)} ({topology}), so that every parameter would travel over slow links in each "
        "forward and backward"
    )
    return Crossing(words, _inside_supernodes(topology, mesh))


def check_shard_axis(topology: Topology | None, mesh: DeviceMesh, allowed: bool, where: str) -> None:
    """Refuse a mesh whose `shard` axis crosses supernodes, unless that is `allowed`.

    Raises:
        ConfigError: it does; says what to write instead.
    """
    crossing = None if allowed else crossing_of(topology, mesh)
    if crossing is None:
        return
    inside = crossing.inside
    instead = "" if inside is None else f"shard inside supernodes and replicate between them, mesh={inside!r}, or "
    raise ConfigError(
        f"{where}: {crossing.words}. Write {instead}allow_shard_across_supernodes=True if the model needs the memory "
        "of them all; if those links are fast, tell so: initialize(topology=...)"
    )


def _told(size: int, given: Any, environment: Mapping[str, str]) -> Topology | None:
    """What this rank knows without asking others."""
    if given is not None:
        return _fitting(_given(given), size)
    if path := environment.get(FILE):
        return _fitting(read_topology(path), size)
    if path := environment.get("RANK_TABLE_FILE"):
        return _fitting(read_topology(path), size)
    return Topology.from_environment(environment, size) if "LOCAL_WORLD_SIZE" in environment else None


def _given(given: Any) -> Topology:
    if isinstance(given, Topology):
        return given
    if isinstance(given, Mapping):
        return from_mapping(given)
    if isinstance(given, (str, os.PathLike)):
        return read_topology(given)
    raise ConfigError(f"topology is {given!r}; write a Topology, the path of a file, or a mapping such as {EXAMPLE}")


def _fitting(topology: Topology, size: int) -> Topology:
    if topology.world_size != size:
        raise ConfigError(
            f"the topology has places for {topology.world_size} ranks, by {topology.source}, but {size} have joined"
        )
    return topology


def _agreed(answers: list[tuple[Topology | None, str | None, str]], own: HyperParallelError | None) -> Topology:
    """The same topology on every rank, from what each knows, the error that it has found and its machine's name."""
    if own is not None:
        raise own
    for rank, (_, error, _) in enumerate(answers):
        if error is not None:
            raise ConfigError(f"rank {rank} can't tell where it sits: {error}")
    found = [topology for topology, _, _ in answers]
    if all(each is not None and each == found[0] for each in found):
        return found[0]
    strange = next((rank for rank, each in enumerate(found) if each != found[0]), None)
    launchers = [each is None or each.source.startswith("torchrun") for each in found]
    if strange is not None and not all(launchers):
        raise ConfigError(f"ranks disagree on where they sit: rank 0 has {found[0]}, rank {strange} {found[strange]}")
    return Topology.from_names([host for _, _, host in answers], source="the names of the machines")


def _inside_supernodes(topology: Topology, mesh: DeviceMesh) -> DeviceMesh | None:
    """The mesh that shards inside supernodes and replicates between them; None where they are not alike."""
    homes: dict[int, list[int]] = {}
    for rank in sorted(mesh.ranks):
        homes.setdefault(topology.supernodes[rank], []).append(rank)
    rows = list(homes.values())
    alike = len({len(row) for row in rows}) == 1
    if not alike or any(list(column) != sorted(column) for column in zip(*rows)):
        return None
    if len(mesh.names) > 2 or not set(mesh.names) <= {"replicate", "shard"}:
        return None
    return DeviceMesh((len(rows), len(rows[0])), ("replicate", "shard"), [rank for row in rows for rank in row])


def _short(numbers: Any) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown}, ..." if len(numbers) > 8 else shown
