"""Topologies in files: what a user writes down, and the rank tables of Ascend clusters."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Iterator, Mapping

import yaml

from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.topology import Topology

EXAMPLE = '{0: "pod0", 1: "pod0", 2: "pod1", 3: "pod1"} or {"0-7": {"machine": "node0", "supernode": "pod0"}}'


def from_mapping(mapping: Mapping[Any, Any], source: str = "the program") -> Topology:
    """A topology from who sits where.

    Args:
        mapping: a rank, or several ("0-7"), to the name of its supernode, or to `{"machine": name, "supernode":
            name}`, of which one may be left out: ranks of a supernode are then taken to be on one machine, machines to
            be supernodes of their own.
        source: what to call it in messages.

    Raises:
        ConfigError: something else, a rank that stands twice, or one below the highest that is missing.
        LayoutError: a machine in two supernodes.
    """
    if not isinstance(mapping, Mapping) or not mapping:
        raise ConfigError(f"{source}: a topology is a mapping such as {EXAMPLE}, found {mapping!r}")
    places: dict[int, tuple[str, str]] = {}
    for key, value in mapping.items():
        place = _place(key, value, source)
        for rank in _ranks(key, source):
            _seat(places, rank, place, source)
    return _seated(places, source)


def from_rank_table(table: Mapping[str, Any], source: str = "the rank table") -> Topology:
    """A topology from the rank table of an Ascend cluster.

    Read are `server_list` (versions 1.0 and 1.2: servers, each with devices that have a `rank_id`), with
    `super_pod_list` beside it where servers form supernodes (1.2), and the older `group_list` of instances. Servers
    that no supernode lists are supernodes of their own.

    Raises:
        ConfigError: the table is not completed, of another kind, or ranks are missing or stand twice in it.
    """
    status = table.get("status", "completed")
    if status != "completed":
        raise ConfigError(f"{source}: its status is {status!r}; a table can be used once that is 'completed'")
    if "server_list" in table:
        found = list(_servers(table, source))
    elif "group_list" in table:
        found = list(_instances(table, source))
    else:
        raise ConfigError(
            f"{source}: has neither 'server_list' nor 'group_list' but {', '.join(map(repr, table)) or 'nothing'}; "
            f"say where ranks sit with a mapping instead, such as {EXAMPLE}"
        )
    pods = _pods(table, source)
    places: dict[int, tuple[str, str]] = {}
    for rank, server in found:
        _seat(places, rank, (server, pods.get(server, f"server {server}")), source)
    return _seated(places, source)


def read_topology(path: str | os.PathLike) -> Topology:
    """A topology from a file: a rank table (JSON), or a mapping as `from_mapping` takes it (YAML or JSON).

    Raises:
        ConfigError: the file can't be read, or says something else.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = json.loads(text) if Path(path).suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"the topology {os.fspath(path)} can't be read: {error}") from error
    if isinstance(content, Mapping) and not any(_is_ranks(key) for key in content):
        return from_rank_table(content, os.fspath(path))
    return from_mapping(content, os.fspath(path))


def _place(key: Any, value: Any, source: str) -> tuple[str, str]:
    """Machine and supernode by name."""
    if isinstance(value, Mapping):
        names = {str(name): str(each) for name, each in value.items()}
        if names and names.keys() <= {"machine", "supernode"}:
            machine = names.get("machine", names.get("supernode"))
            return machine, names.get("supernode", machine)
    elif isinstance(value, (str, int)) and not isinstance(value, bool):
        return str(value), str(value)
    raise ConfigError(
        f"{source}: rank {key} is said to be in {value!r}; write the name of a supernode, as in {EXAMPLE}"
    )


def _is_ranks(key: Any) -> bool:
    first, _, last = str(key).partition("-")
    return first.isdecimal() and (not last or last.isdecimal())


def _ranks(key: Any, source: str) -> range:
    first, _, last = str(key).partition("-")
    if not _is_ranks(key) or int(last or first) < int(first):
        raise ConfigError(f'{source}: {key!r} is no rank; write a number from 0 up, or a range such as "0-7"')
    return range(int(first), int(last or first) + 1)


def _servers(table: Mapping[str, Any], source: str) -> Iterator[tuple[int, str]]:
    for server in _listed(table, "server_list", source):
        name = _field(server, "server_id", source)
        for device in _listed(server, "device", source):
            yield _rank(_field(device, "rank_id", source), source), name


def _instances(table: Mapping[str, Any], source: str) -> Iterator[tuple[int, str]]:
    """Where instances don't name their ranks, devices are counted in order."""
    counted = 0
    for group in _listed(table, "group_list", source):
        for instance in _listed(group, "instance_list", source):
            name = instance["server_id"] if "server_id" in instance else _field(instance, "pod_name", source)
            first = _rank(instance["rank_id"], source) if "rank_id" in instance else counted
            devices = _listed(instance, "devices", source)
            for place in range(len(devices)):
                yield first + place, str(name)
            counted += len(devices)


def _pods(table: Mapping[str, Any], source: str) -> dict[str, str]:
    """The supernode of each server that is in one."""
    found: dict[str, str] = {}
    for pod in _listed(table, "super_pod_list", source) if "super_pod_list" in table else ():
        name = _field(pod, "super_pod_id", source)
        for server in _listed(pod, "server_list", source):
            server = _field(server, "server_id", source)
            if found.setdefault(server, name) != name:
                raise ConfigError(f"{source}: the server {server} is in the supernodes {found[server]} and {name}")
    return found


def _listed(holder: Any, key: str, source: str) -> list[Any]:
    found = holder.get(key) if isinstance(holder, Mapping) else None
    if not isinstance(found, list):
        raise ConfigError(f"{source}: {key!r} should be a list, found {found!r} in {str(holder)[:80]}")
    return found


def _field(holder: Any, key: str, source: str) -> str:
    if not isinstance(holder, Mapping) or key not in holder:
        raise ConfigError(f"{source}: {key!r} is missing in {str(holder)[:80]}")
    return str(holder[key])


def _rank(text: Any, source: str) -> int:
    if not str(text).isdecimal():
        raise ConfigError(f"{source}: a rank_id is {text!r}, which is not a whole number")
    return int(text)


def _seat(places: dict[int, tuple[str, str]], rank: int, place: tuple[str, str], source: str) -> None:
    if rank in places:
        raise ConfigError(f"{source}: rank {rank} stands twice, in {places[rank]} and in {place}")
    places[rank] = place


def _seated(places: Mapping[int, tuple[str, str]], source: str) -> Topology:
    missing = [rank for rank in range(len(places)) if rank not in places]
    if missing or not places:
        raise ConfigError(
            f"{source}: names {len(places)} ranks, up to {max(places, default=-1)}, but not rank {[*missing, 0][0]}; "
            "every rank from 0 on has a place"
        )
    machines, supernodes = zip(*(places[rank] for rank in range(len(places))))
    return Topology.from_names(machines, supernodes, source)
