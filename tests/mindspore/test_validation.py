"""Following MindSpore's tensors: every way through MindSpore that its interception misses, and gradients."""

from tests.mindspore import validation_bodies

EXPECTED = {
    "x[0]": "shard(0)",
    "x.T": "shard(0)",
    "sum": "shard(0)",
    "matmul": "partial",
}
"""States of results that are not cut along the last of two dims."""


def test_what_comes_of_a_followed_tensor_is_followed_on_every_way(pool):
    [states] = pool("mindspore", 1).run(validation_bodies.operators)
    assert states == {name: EXPECTED.get(name, "shard(1)") for name in states}
    assert len(states) == 18


def test_values_are_read_of_what_is_whole_and_of_nothing_else(pool):
    [(read, told)] = pool("mindspore", 1).run(validation_bodies.values)
    assert read == [3.0, 3, True, 3.0, 3.0, 3.0]
    assert told == [True] * 5


def test_followed_tensors_are_written_copied_and_printed(pool):
    [found] = pool("mindspore", 1).run(validation_bodies.objects)
    assert found.pop("written") == [5.0] * 4
    assert found.pop("copy") == "shard(0)"
    assert all(found.values())


def test_gradients_are_those_of_plain_tensors(pool):
    [(same, seen)] = pool("mindspore", 1).run(validation_bodies.gradients)
    assert same
    assert seen == [(3, 4)]


def test_functions_with_a_backward_of_their_own_are_refused_by_name(pool):
    [(function, cell)] = pool("mindspore", 1).run(validation_bodies.own_backwards)
    vouching = "legal: regions: [{match: model.mlp, kind: opaque}] among the overrides, which is trusted"
    assert function.startswith("model.mlp.up: add: it uses what Doubled returns, a function with a backward of its own")
    assert function.endswith(vouching)
    assert "it uses what a cell's bprop returns, a function with a backward of its own" in cell
    assert cell.endswith(
        f"{vouching}; or where it is a recomputation's, recompute(use_reentrant=False), which is followed"
    )


def test_a_plan_holds_without_devices(pool):
    [told] = pool("mindspore", 1).run(validation_bodies.on_zeros)
    assert told == [((0, 3), 11, True, ()), ((0, 3), 13, True, ())]
