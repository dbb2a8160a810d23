"""Sequences of several lengths under sequence parallelism, some of which leave a rank as many tokens as others do: what
is computed again in backward belongs to the right one."""

import pytest

from tests.mindspore import sequence_bodies

LENGTHS = (5, 6, 7)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
@pytest.mark.parametrize("how", ["cell", "function"])
def test_forwards_of_several_lengths_before_one_backward(pool, how, reentrant):
    body = sequence_bodies.several_lengths
    for errors in pool("mindspore", 2).run(body, {"tensor": 2}, LENGTHS, how, reentrant, "production"):
        assert max(errors.values()) < 5e-6, errors  # float32, sums of a few hundred terms


def test_with_units_that_are_gathered_as_well(pool):
    body, sizes = sequence_bodies.several_lengths, {"shard": 2, "tensor": 2}
    for errors in pool("mindspore", 4).run(body, sizes, LENGTHS, "cell", True, "production"):
        assert max(errors.values()) < 5e-6, errors


def test_and_followed(pool):
    body = sequence_bodies.several_lengths
    for errors in pool("mindspore", 2).run(body, {"tensor": 2}, LENGTHS, "function", False, "validate"):
        assert max(errors.values()) < 5e-6, errors


@pytest.mark.parametrize("length, ranks, parts", [(9, 4, "[3, 3, 3, 0]"), (1, 2, "[1, 0]")])
def test_ranks_without_a_token_evaluate_and_are_refused_a_gradient(pool, length, ranks, parts):
    for message, error in pool("mindspore", ranks).run(sequence_bodies.without_a_token, ranks, length):
        assert f"of {length} tokens the {ranks} tensor ranks get {parts}" in message
        assert f"pad sequences to a multiple of {ranks} tokens" in message
        assert error < 5e-6  # float32, sums of a few hundred terms
