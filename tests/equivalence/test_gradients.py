"""The check of gradients on real ranks, on both backends: every rank gets the same report."""

import pytest

from tests.equivalence import gradients_bodies as bodies
from tests.equivalence.test_decoder import random_case

MESHES = [({"tensor": 2}, 2), ({"shard": 2, "tensor": 2}, 4)]
NORM = "model.layers.1.input_layernorm.weight"


def same_on_all(reports):
    """The report that all ranks have."""
    assert all(each == reports[0] for each in reports)
    return reports[0]


@pytest.mark.parametrize(("sizes", "ranks"), MESHES, ids=str)
def test_a_right_plan_gives_the_numbers_of_one_device(pool, backend_name, sizes, ranks):
    case = random_case(batch=4, vocab_size=37, tie_word_embeddings=True)
    report = same_on_all(pool(backend_name, ranks).run(bodies.check, *case, sizes))
    assert report.ok, str(report)
    assert all(each.production and each.validation for each in report.parameters)
    assert report.dtype == "float64"


def test_a_forgotten_sum_is_caught_with_the_parameter_on_every_rank(pool, backend_name):
    case = random_case(batch=2)
    report = same_on_all(pool(backend_name, 2).run(bodies.check, *case, {"tensor": 2}, NORM))
    assert not report.ok
    assert [each.name for each in report.parameters if not each.worst <= report.bound] == [NORM]
    assert NORM.removesuffix(".weight") in report.refused


def test_other_ranks_than_the_plan_has_are_refused(pool, backend_name):
    told = set(pool(backend_name, 2).run(bodies.refusal, *random_case(batch=4), {"tensor": 4}))
    assert told == {
        "check_gradients: 2 ranks have joined and the mesh tensor=4 has 4; start as many, or one process alone, in "
        "which all of them run"
    }


def test_a_process_alone_runs_all_ranks_where_the_framework_does(pool, backend_name):
    case = random_case(batch=4)
    if backend_name == "torch":
        [report] = pool(backend_name, 1).run(bodies.check, *case, {"shard": 2, "tensor": 2})
        assert report.ok, str(report)
    else:
        [told] = pool(backend_name, 1).run(bodies.refusal, *case, {"shard": 2, "tensor": 2})
        assert told.startswith(
            "check_gradients: mindspore does not run several ranks in one process; start 4 processes"
        )
