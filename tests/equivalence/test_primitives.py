"""The small operations that transitions are made of give the same on both backends, and what numpy says."""

from __future__ import annotations

import pytest

from tests.equivalence import differentiable_bodies as differentiable
from tests.equivalence import primitive_bodies as bodies
from tests.pool import Pool


@pytest.fixture
def alone(pool, backend_name):
    """One worker of a backend."""
    return pool(backend_name, 1)


@pytest.mark.parametrize(
    "body",
    [
        bodies.buffers_and_zeros,
        bodies.moves_like_numpy,
        bodies.moves_between_single_elements,
        bodies.moves_keep_every_bit,
        bodies.reduces_like_numpy,
        bodies.reduces_parts_of_buffers,
        bodies.nan_wins,
        bodies.shares_of_ties,
        bodies.products_of_rows,
        differentiable.gradients,
        differentiable.unused_results,
        differentiable.results_over_the_input,
        differentiable.identity_passes_the_gradient_on,
        differentiable.gradients_of_any_form,
        differentiable.nothing_to_record,
        differentiable.dtypes_may_change,
        differentiable.errors_come_through,
    ],
    ids=lambda body: body.__name__,
)
def test_one_rank(alone, body):
    alone.run(body)


def test_rows_are_summed_in_order_and_halves_rounded_once(alone):
    assert alone.run(bodies.sums_rows_in_order) == [[1.0, 0.0, 2050.0, 258.0]]


def test_moves_outside_the_tensors_are_refused(alone):
    (messages,) = alone.run(bodies.refused_moves)
    assert "ends at element 4 of a target with 4 and at element 3 of a source with 4" in messages["target too small"]
    assert "at element 4 of a source with 4" in messages["source too small"]
    for mistake in ("target before its start", "source before its start", "backwards"):
        assert "nothing may be negative" in messages[mistake]
    assert messages["another dtype"].startswith("can't move float64 into float32")
    assert "target of shape (4, 3) is not contiguous" in messages["strided"]


def test_rows_that_do_not_fit_are_refused(alone):
    (messages,) = alone.run(bodies.refused_rows)
    assert messages["uneven"] == "5 elements do not make 2 rows of one length"
    assert messages["no rows"] == "5 elements do not make 0 rows of one length"
    assert messages["unknown"] == """rows have no 'avg': write "sum", "max" or "min\""""
    assert messages["sum of bools"] == "bool has no sum: cast to an integer dtype"
    assert messages["short result"] == "a row of 1 float32 does not fit rows of 2 float32"
    assert messages["long row"] == "a row of 4 float32 does not fit rows of 2 float32"
    assert messages["row of another dtype"] == "a row of 2 float16 does not fit rows of 2 float32"


def test_a_second_derivative_through_an_operation_is_an_error(alone):
    (message,) = alone.run(differentiable.second_derivatives)
    assert message.startswith("the gradient of a transition can't be differentiated again")


def test_a_retained_graph_of_torch_runs_backward_again(pool):
    pool("torch", 1).run(differentiable.retained_graph)


def test_some_ranks_make_a_group_without_the_others(pool, backend_name):
    assert pool(backend_name, 4).run(bodies.groups_of_some) == [
        [1111, 11, 101, 1111],
        [1111, 11, 1010, 1111],
        [1111, 101, 1111],
        [1111, 1010, 1111],
    ]


def test_overlapping_groups_are_made_by_their_members_in_any_order(pool, backend_name):
    assert pool(backend_name, 4).run(bodies.overlapping_groups) == [
        [1001, 111],
        [110, 1110, 111],
        [110, 1110, 111],
        [1001, 1110],
    ]


def test_groups_within_a_process_group_of_the_program():
    own = Pool("torch", 3)  # its workers leave the job that the pool has made for them
    try:
        assert own.run(bodies.groups_in_a_job_of_the_program) == [
            [11, 1, 11, 1, 111],
            [11, 110, 11, 110, 111],
            [110, 110, 111],
        ]
    finally:
        own.close()


def test_groups_are_made_once(pool, backend_name):
    pool(backend_name, 4).run(bodies.groups_are_reused)
