"""The rules held against numbers on MindSpore, for the operators that have a kernel on a CPU."""

from __future__ import annotations

import pytest

ROOMS = (
    "pointwise",
    "contraction",
    "reduction",
    "normalisation",
    "shape",
    "slicing",
    "gathering",
    "attention and factory",
)
NUMBERS_AS_TENSORS = "MindSpore hands some numbers over as tensors, of which nobody knows that they are zero"
NOT_YET: dict[str, tuple[str, set[str]]] = {
    "copy_": (
        "a target that is overwritten keeps its state, for others may hold the same memory",
        {
            "replicate, partial",
            "partial, replicate",
            "shard(0), strided_shard(0, 2)",
            "strided_shard(0, 2), shard(0)",
            "shard(1), strided_shard(1, 2)",
            "strided_shard(1, 2), shard(1)",
        },
    ),
    "layer_norm": (
        "nobody has needed it of a pending sum",
        {"replicate, its gradient partial, partial, partial"},
    ),
    "pad": (NUMBERS_AS_TENSORS, {"partial"}),
}
"""What is refused although it would be right: why, and for which states of the arguments."""


@pytest.mark.parametrize("room", ROOMS)
def test_what_ranks_hold_makes_the_whole_as_the_rules_say(pool, room):
    (found,) = pool("mindspore", 1).run("tests.mindspore.rule_bodies:findings", room, timeout=150)
    assert not [each for each in found if each[2] == "wrong"]
    too_strict = [each for each in found if each[2] == "too strict"]
    assert not [each for each in too_strict if each[1] not in NOT_YET.get(each[0], ("", set()))[1]]
    allowed = {name for name, _, _, told in found if told.startswith("[")}
    assert allowed == {name for name, *_ in found}, "every program is allowed somehow"


def test_operators_go_by_canonical_names(pool):
    pool("mindspore", 1).run("tests.mindspore.rule_bodies:canonical_names")
