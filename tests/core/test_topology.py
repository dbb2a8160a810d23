"""Where ranks sit: read from what programs, clusters and launchers say, and what follows for a mesh."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hyper_parallel
from hyper_parallel import ConfigError, DeviceMesh, LayoutError, Topology
from hyper_parallel.backends import load
from hyper_parallel.core.execution.apply import apply_plan
from hyper_parallel.core.execution.inprocess import InProcessWorld
from hyper_parallel.core.fsdp import build
from hyper_parallel.core.topology import FAST, SLOW
from hyper_parallel.core.topology_files import from_mapping, from_rank_table, read_topology
from hyper_parallel.core.topology_sources import check_shard_axis, find_topology, topology_of

DATA = Path(__file__).parents[1] / "data" / "topology"
TWO_PODS = {"0-1": "left", "2-3": "right"}


@pytest.mark.parametrize(
    "file, machines, supernodes",
    [
        ("servers_v1.0.json", (0, 0, 1, 1), (0, 0, 1, 1)),
        ("super_pods_v1.2.json", (0, 0, 1, 1, 2, 2, 3, 3), (0, 0, 0, 0, 1, 1, 1, 1)),
        ("groups.json", (0, 0, 1, 1), (0, 0, 1, 1)),
        ("groups_of_single_devices.json", (0, 0, 1), (0, 0, 1)),
        ("by_hand.yaml", (0, 0, 1, 1, 2, 2), (0, 0, 0, 0, 1, 1)),
    ],
)
def test_files_say_where_ranks_sit(file, machines, supernodes):
    topology = read_topology(DATA / file)
    assert (topology.machines, topology.supernodes) == (machines, supernodes)
    assert topology.source == str(DATA / file)


def test_a_server_outside_all_supernodes_is_one_of_its_own():
    table = {
        "server_list": [{"server_id": name, "device": [{"rank_id": rank}]} for rank, name in enumerate("abc")],
        "super_pod_list": [{"super_pod_id": "a", "server_list": [{"server_id": "b"}, {"server_id": "c"}]}],
    }
    assert from_rank_table(table).supernodes == (0, 1, 1)


SERVER = {"server_id": "a", "device": [{"rank_id": "0"}]}


@pytest.mark.parametrize(
    "table, message",
    [
        ({"status": "initializing", "server_list": []}, "its status is 'initializing'"),
        ({"rank_list": []}, "neither 'server_list' nor 'group_list' but 'rank_list'; say .* with a mapping"),
        ({"server_list": [{"device": []}]}, "'server_id' is missing"),
        ({"server_list": [{"server_id": "a"}]}, "'device' should be a list, found None in {'server_id': 'a'}"),
        ({"server_list": [SERVER, SERVER]}, "rank 0 stands twice"),
        ({"server_list": [{"server_id": "a", "device": [{"rank_id": "1"}]}]}, "names 1 ranks, up to 1, but not rank 0"),
        ({"server_list": [{"server_id": "a", "device": [{"rank_id": "x"}]}]}, "a rank_id is 'x'"),
        (
            {
                "server_list": [SERVER],
                "super_pod_list": [{"super_pod_id": pod, "server_list": [{"server_id": "a"}]} for pod in "xy"],
            },
            "the server a is in the supernodes x and y",
        ),
    ],
)
def test_a_rank_table_that_does_not_say_it_is_refused(table, message):
    with pytest.raises(ConfigError, match=message):
        from_rank_table(table, "table.json")


@pytest.mark.parametrize(
    "mapping, message",
    [
        ({}, "a topology is a mapping such as"),
        ({"0-1": "a", 1: "b"}, "rank 1 stands twice"),
        ({0: "a", 2: "a"}, "but not rank 1"),
        ({"3-1": "a"}, "'3-1' is no rank"),
        ({0: {"pod": "a"}}, "rank 0 is said to be in {'pod': 'a'}; write the name of a supernode"),
    ],
)
def test_a_mapping_that_does_not_place_each_rank_once_is_refused(mapping, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping(mapping)
    with pytest.raises(LayoutError, match="machine 0 lies in supernode 0 and, by rank 1, in 1"):
        from_mapping({0: {"machine": "a", "supernode": "x"}, 1: {"machine": "a", "supernode": "y"}})


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="nowhere.yaml can't be read"):
        read_topology(tmp_path / "nowhere.yaml")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match="broken.json can't be read"):
        read_topology(tmp_path / "broken.json")


def on_ranks(ranks, body):
    """What `body` gives on each of so many ranks."""
    return InProcessWorld(load("torch"), ranks).run(body)


def test_what_is_closest_to_the_program_tells():
    table, file = str(DATA / "servers_v1.0.json"), str(DATA / "groups.json")
    environment = {"HYPER_PARALLEL_TOPOLOGY": file, "RANK_TABLE_FILE": table, "LOCAL_WORLD_SIZE": "2"}
    sources = ["the program", file, table, "torchrun's LOCAL_WORLD_SIZE=2", "the names of the machines"]

    def body(backend):
        found = [find_topology(backend, TWO_PODS, environment)]
        for name in (None, *environment):
            environments = dict(environment)
            for each in list(environment)[: [None, *environment].index(name)]:
                del environments[each]
            found.append(find_topology(backend, None, environments))
        return [topology.source for topology in found], topology_of(backend)

    for found, last in on_ranks(4, body):
        assert found == sources
        assert last == Topology.single_machine(4)


def test_ranks_that_hear_different_things_are_refused_together_unless_machines_differ_in_size():
    def body(backend):
        rank = backend.collectives.rank()
        counts = {"LOCAL_WORLD_SIZE": "1" if rank == 2 else "2"}
        source = find_topology(backend, None, counts).source
        with pytest.raises(ConfigError) as caught:
            find_topology(backend, {0: "a"} if rank == 1 else None, {})
        return source, str(caught.value)

    def disagreement(backend):
        topology = {0: "a", 1: "b", 2: "b"} if backend.collectives.rank() else {0: "a", 1: "a", 2: "b"}
        with pytest.raises(ConfigError, match="ranks disagree on where they sit: rank 0 has 3 ranks on 2 machines"):
            find_topology(backend, topology, {})

    on_ranks(3, disagreement)
    found = on_ranks(3, body)
    assert [source for source, _ in found] == ["the names of the machines"] * 3
    assert found[1][1] == "the topology has places for 1 ranks, by the program, but 3 have joined"
    assert found[0][1] == f"rank 1 can't tell where it sits: {found[1][1]}"


def test_the_tier_of_each_axis_follows():
    topology = from_mapping(TWO_PODS)
    assert topology.tiers(DeviceMesh((2, 2), ("replicate", "shard"))) == {"replicate": SLOW, "shard": FAST}
    assert str(topology) == "4 ranks on 2 machines in 2 supernodes, by the program"


def test_a_shard_axis_across_supernodes_is_refused_with_the_mesh_to_write():
    topology, mesh = from_mapping(TWO_PODS), DeviceMesh((4,), ("shard",))
    with pytest.raises(ConfigError) as caught:
        check_shard_axis(topology, mesh, False, "fully_shard")
    message = str(caught.value)
    assert (
        "the axis 'shard' of the mesh shard=4 crosses supernodes: its ranks 0, 1, 2, 3 are in the supernodes 0, 1"
        in (message)
    )
    assert "mesh=DeviceMesh((2, 2), ('replicate', 'shard')), or allow_shard_across_supernodes=True" in message
    check_shard_axis(topology, mesh, True, "fully_shard")
    check_shard_axis(topology, DeviceMesh((2, 2), ("replicate", "shard")), False, "fully_shard")
    check_shard_axis(None, mesh, False, "fully_shard")


def test_the_mesh_to_write_follows_where_ranks_sit():
    crossed = from_mapping({0: "a", 1: "b", 2: "a", 3: "b"})
    with pytest.raises(ConfigError, match=r"mesh=DeviceMesh\(.*, ranks=\(0, 2, 1, 3\)\), or"):
        check_shard_axis(crossed, DeviceMesh((4,), ("shard",)), False, "fully_shard")
    uneven = from_mapping({"0-2": "a", 3: "b"})
    with pytest.raises(ConfigError, match="Write allow_shard_across_supernodes=True"):
        check_shard_axis(uneven, DeviceMesh((4,), ("shard",)), False, "fully_shard")


def test_fully_shard_asks_for_it_by_name():
    def body(backend):
        find_topology(backend, TWO_PODS, {})
        with pytest.raises(ConfigError, match="fully_shard: the axis 'shard' of the mesh shard=4 crosses supernodes"):
            build.fully_shard(backend, [torch.nn.Linear(4, 4)])
        build.fully_shard(backend, [torch.nn.Linear(4, 4)], allow_shard_across_supernodes=True)
        build.fully_shard(backend, [torch.nn.Linear(4, 4)], DeviceMesh((2, 2), ("replicate", "shard")))

    on_ranks(4, body)


def test_so_does_parallelize():
    plan = hyper_parallel.plan(torch.nn.Linear(4, 4), DeviceMesh((4,), ("shard",)))

    def body(backend):
        find_topology(backend, TWO_PODS, {})
        model = torch.nn.Linear(4, 4)
        with pytest.raises(ConfigError, match="parallelize: the axis 'shard' of the mesh shard=4 crosses supernodes"):
            apply_plan(backend, model, plan)
        assert model.weight.shape == (4, 4)
        apply_plan(backend, model, plan, allow_shard_across_supernodes=True)
        assert model.weight.shape == (1, 4)

    on_ranks(4, body)
