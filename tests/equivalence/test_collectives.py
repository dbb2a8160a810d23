"""The collectives of both backends do what numpy says, at 1, 2, 3 and 4 ranks."""

from __future__ import annotations

import pytest

from tests.equivalence import collective_bodies as bodies


@pytest.fixture(params=[1, 2, 3, 4])
def ranks(pool, backend_name, request):
    """The worker pool of a backend with so many ranks."""
    return pool(backend_name, request.param)


@pytest.mark.parametrize(
    "body",
    [
        bodies.groups_are_known,
        bodies.all_gather,
        bodies.all_gather_from_own_part_of_the_output,
        bodies.reduce_scatter,
        bodies.reduce_scatter_into_own_part_of_the_input,
        bodies.all_reduce,
        bodies.broadcast,
        bodies.equal_all_to_all,
        bodies.uneven_all_to_all,
        bodies.messages_in_order,
        bodies.blocking_messages,
        bodies.messages_beside_collectives,
        bodies.many_in_flight,
        bodies.uneven_pieces,
        bodies.scaled_sums,
        bodies.sums_in_rank_order,
        bodies.sums_agree_on_all_ranks,
        bodies.objects,
        bodies.barrier,
    ],
    ids=lambda body: body.__name__,
)
def test_agrees_with_numpy(ranks, body):
    ranks.run(body)


def test_half_precision_is_summed_in_float32(pool, backend_name):
    # 256 + 1 + 1 + 1 = 259 lies between 258 and 260, which bfloat16 has, and the tie goes to the even one; adding the
    # ones to 256 one by one in bfloat16 changes nothing. The same holds for 2051 in float16.
    for bfloat16, float16 in pool(backend_name, 4).run(bodies.half_precision_sums):
        assert bfloat16 == {"all_reduce": 260.0, "reduce_scatter": 260.0}
        assert float16 == {"all_reduce": 2052.0, "reduce_scatter": 2052.0}


@pytest.mark.parametrize(
    "mistake, says",
    {
        "gather of the wrong size": "output has 9 elements and input 2: with 4 ranks output must have 4 x 2 = 8",
        "gather into another dtype": "output is float16 and input is float32: cast one of them",
        "scatter of the wrong size": "input has 9 elements and output 2: with 4 ranks input must have 4 x 2 = 8",
        "sum of bools": "bool has no sum: cast to an integer dtype",
        "scattered sum of bools": "bool has no sum: cast to an integer dtype",
        "unknown source": "source 4 is not in the group",
        "too few splits": "input_splits [1, 1, 1] must be 4 counts",
        "splits beyond the end": "input_splits [2, 2, 2, 2] must be 4 counts of at least 0 that sum up to the 4",
        "negative split": "output_splits [-1, -1, -1, -1] must be 4 counts of at least 0",
        "indivisible exchange": "output has 5 elements, not divisible by 4 ranks: give output_splits",
        "message to itself": "destination is this rank itself",
        "message from itself": "source is this rank itself",
        "strided tensor": "tensor is not contiguous",
        "rank named twice": "ranks [0] are named twice",
        "rank out of the world": "ranks [4] do not exist: the world has ranks 0 to 3",
        "group without ranks": "a group without ranks",
        "ranks out of order": "group [1, 0] is out of order: write [0, 1]",
    }.items(),
)
def test_wrong_arguments_are_refused_by_every_rank(refused, mistake, says):
    for rank, messages in enumerate(refused):
        assert says in messages[mistake]
        assert f"on ranks [0, 1, 2, 3], at rank {rank}: " in messages[mistake]


@pytest.fixture(scope="module", params=["torch", "mindspore"])
def refused(pool, request):
    """The messages by rank; the body also proves that the ranks are still in step afterwards."""
    return pool(request.param, 4).run(bodies.refusals)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_wrong_arguments_are_refused_in_any_world(pool, backend_name, count):
    for messages in pool(backend_name, count).run(bodies.refusals):
        assert len(messages) == (17 if count > 1 else 15)
