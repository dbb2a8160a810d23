"""Meshes and topologies are pure data."""

import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel import DeviceMesh, LayoutError, Topology
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.mesh import AXES
from hyper_parallel.core.topology import FAST, SLOW
from tests.pool import REPOSITORY


@st.composite
def meshes(draw):
    names = [name for name in AXES if draw(st.booleans())][:4]
    shape = [draw(st.integers(1, 3)) for _ in names]
    size = 1
    for each in shape:
        size *= each
    ranks = draw(st.permutations(range(size))) if draw(st.booleans()) else None
    return DeviceMesh(shape, names, ranks)


def test_ranks_lie_in_row_major_order():
    mesh = DeviceMesh((2, 3), ("replicate", "shard"))
    assert mesh.size == 6
    assert mesh.coordinates(4) == {"replicate": 1, "shard": 1}
    assert mesh.rank_at(replicate=1, shard=2) == 5
    assert mesh.groups(("shard",)) == ((0, 1, 2), (3, 4, 5))
    assert mesh.groups(("replicate",)) == ((0, 3), (1, 4), (2, 5))
    assert mesh.groups(("replicate", "shard")) == ((0, 1, 2, 3, 4, 5),)
    assert str(mesh) == "replicate=2xshard=3"


def test_ranks_that_are_not_counted_from_zero_are_shown():
    turned = DeviceMesh((2,), ("tensor",), ranks=(1, 0))
    assert str(turned) == "tensor=2 over the ranks 1, 0"
    assert repr(turned) == "DeviceMesh((2,), ('tensor',), ranks=(1, 0))"
    assert repr(DeviceMesh((2,), ("tensor",))) == "DeviceMesh((2,), ('tensor',))"


@given(meshes())
def test_a_mesh_is_read_back_from_its_text_and_from_a_pickle(mesh):
    assert eval(repr(mesh)) == mesh and hash(eval(repr(mesh))) == hash(mesh)
    assert pickle.loads(pickle.dumps(mesh)) == mesh


def test_a_pickled_mesh_is_found_among_the_keys_of_another_process():
    """The hash of text differs from process to process, so none may travel."""
    mesh = DeviceMesh((2,), ("tensor",))
    hash(mesh)
    code = (
        "import pickle, sys; from hyper_parallel import DeviceMesh; "
        f"mesh = pickle.loads({pickle.dumps(mesh)!r}); print(mesh in {{DeviceMesh((2,), ('tensor',))}})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize(
    ("shape", "names", "ranks", "says"),
    [
        ((True,), ("shard",), None, "the sizes of a mesh are whole numbers, found"),
        ((2.0,), ("shard",), None, "the sizes of a mesh are whole numbers, found"),
        ((1,), "shard", None, "the names of a mesh are a list, one for each axis, found 'shard'"),
        ((1,), None, None, "the names of a mesh are a list, one for each axis, found None"),
        ((1,), ("shard",), ("0",), "the ranks of a mesh are whole numbers, found"),
    ],
)
def test_what_makes_no_mesh_is_refused(shape, names, ranks, says):
    with pytest.raises(LayoutError, match=says):
        DeviceMesh(shape, names, ranks)


def test_an_absent_axis_is_an_axis_of_size_one():
    mesh = DeviceMesh((2,), ("shard",))
    assert mesh.axis_size("tensor") == 1
    assert mesh.coordinate(1, "tensor") == 0
    assert mesh.groups(("tensor",)) == ((0,), (1,))
    assert mesh.groups(("replicate", "shard")) == ((0, 1),)


def test_a_submesh_keeps_its_ranks():
    part = DeviceMesh((2, 2, 2), ("replicate", "shard", "tensor")).submesh(("replicate", "tensor"), rank=6)
    assert part.names == ("replicate", "tensor") and part.shape == (2, 2)
    assert part.ranks == (2, 3, 6, 7)
    assert part.coordinates(6) == {"replicate": 1, "tensor": 0}


def test_sizes_by_name_come_in_the_order_of_the_axes():
    mesh = DeviceMesh.from_sizes({"shard": 4, "replicate": 2})
    assert mesh.names == ("replicate", "shard") and mesh.shape == (2, 4)


@given(meshes(), st.sets(st.sampled_from(AXES)))
def test_groups_partition_the_mesh_and_agree_with_group_of(mesh, axes):
    groups = mesh.groups(tuple(axes))
    assert sorted(rank for group in groups for rank in group) == sorted(mesh.ranks)
    for group in groups:
        for rank in group:
            assert mesh.group_of(rank, tuple(axes)) == group
            assert mesh.rank_at(**mesh.coordinates(rank)) == rank


@pytest.mark.parametrize(
    ("shape", "names", "ranks", "message"),
    [
        ((2,), ("data",), None, "unknown mesh axis 'data'"),
        ((2, 2), ("shard", "replicate"), None, "in the order"),
        ((2, 2), ("shard", "shard"), None, "distinct"),
        ((0,), ("shard",), None, "mesh axis 'shard' has size 0"),
        ((2,), ("shard",), (0, 1, 2), "holds 2 ranks, found 3"),
        ((2,), ("shard",), (1, 1), "distinct"),
        ((2, 2), ("shard",), None, "one name an axis"),
    ],
)
def test_a_wrong_mesh_is_refused_with_what_was_found(shape, names, ranks, message):
    with pytest.raises(LayoutError, match=message):
        DeviceMesh(shape, names, ranks)


def test_questions_about_unknown_axes_and_ranks_are_refused():
    mesh = DeviceMesh((2,), ("shard",))
    for question in (
        lambda: mesh.axis_size("row"),
        lambda: mesh.groups(("row",)),
        lambda: mesh.coordinates(2),
        lambda: mesh.rank_at(shard=2),
        lambda: mesh.rank_at(tensor=1),
    ):
        with pytest.raises(LayoutError):
            question()


def test_a_group_inside_a_supernode_is_fast_and_one_across_is_slow():
    topology = Topology.regular(8, ranks_per_machine=2, machines_per_supernode=2)
    assert topology.machines == (0, 0, 1, 1, 2, 2, 3, 3)
    assert topology.tier((0, 3)) == FAST and topology.tier((3, 4)) == SLOW and topology.tier((5,)) == FAST
    mesh = DeviceMesh((2, 4), ("replicate", "shard"))
    assert topology.axis_tier(mesh, ("shard",)) == FAST
    assert topology.axis_tier(mesh, ("replicate",)) == SLOW


def test_tiers_follow_the_machines_whatever_the_rank_order():
    topology = Topology(machines=(0, 1, 0, 1), supernodes=(0, 1, 0, 1))
    mesh = DeviceMesh((2, 2), ("replicate", "shard"))
    assert topology.axis_tier(mesh, ("shard",)) == SLOW and topology.axis_tier(mesh, ("replicate",)) == FAST


def test_the_launcher_says_how_many_ranks_share_a_machine():
    assert Topology.from_environment({"LOCAL_WORLD_SIZE": "2"}, 4).machines == (0, 0, 1, 1)
    assert Topology.from_environment({}, 4).machines == (0, 0, 0, 0)
    assert Topology.from_local_ranks([0, 1, 0, 1, 2]).machines == (0, 0, 1, 1, 1)
    with pytest.raises(LayoutError, match="rank 2 is number 2 on its machine and the rank before it is number 0"):
        Topology.from_local_ranks([0, 0, 2])
    with pytest.raises(ConfigError, match="set MS_ROLE does not say"):
        Topology.from_environment({"MS_ROLE": "MS_WORKER", "RANK_ID": "1"}, 4)
    with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE is 'two'"):
        Topology.from_environment({"LOCAL_WORLD_SIZE": "two"}, 4)


def test_a_machine_in_two_supernodes_is_refused():
    with pytest.raises(LayoutError, match="machine 0 lies in supernode 0 and, by rank 1, in 1"):
        Topology((0, 0), (0, 1))
    with pytest.raises(LayoutError, match="not in the topology"):
        Topology.single_machine(2).tier((2,))
