"""What a step of production runs, counted: the model's own functions, and the transitions that its plan tells."""

import pytest

from tests.equivalence import step_count_bodies as bodies
from tests.equivalence.test_decoder import random_case

# Several key heads on each rank: with one, a reshape of heads finds nothing to copy.
SEVERAL_HEADS = {"num_heads": 8, "num_kv_heads": 4}


def case():
    return *random_case(batch=2, length=8, **SEVERAL_HEADS), {"tensor": 2}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_step_runs_the_models_own_functions_and_the_plans_transitions(pool, backend_name, sequence_parallel):
    """Not a Python frame and not a function of the framework more: all else runs in transitions, in the loss, and where
    gradients are summed up, each as often as the plan says."""
    for (alone, _), (found, ours), expected in pool(backend_name, 2).run(
        bodies.counts_of_a_step, *case(), sequence_parallel
    ):
        assert sum(alone.values()) > 300 and found == alone
        assert {name: ours[name] for name in bodies.COLLECTIVES if name in ours} == expected["collectives"]
        assert ours["_Differentiable.forward"] == ours["_Differentiable.backward"] == expected["operations"]
        assert ours["on_arguments"] == ours["on_output"] == expected["hooked"]
        assert ours["UnitReduction.__init__"] == expected["reduced"]


# Other tensors over the same elements compute nothing: what takes a gradient that a parameter keeps, and reshapes.
VIEWS = ("aten::detach", "aten::view")


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_backward_runs_the_models_own_operators_on_plain_tensors(pool, sequence_parallel):
    """The loss of a cut vocabulary goes back in a function of ours, not by itself, and a table that knows some of the
    tokens takes the gradients of no others."""
    expected = {"aten::_log_softmax_backward_data": -1, "aten::nll_loss_backward": -1, "aten::mul.Tensor": 1}
    for alone, found, classes in pool("torch", 2).run(bodies.operators_of_a_step, *case(), sequence_parallel):
        assert classes == ["Parameter", "Tensor"]
        assert sum(alone.values()) > 500
        changed = {name: found[name] - alone[name] for name in alone | found if found[name] != alone[name]}
        assert {name: count for name, count in changed.items() if name not in VIEWS} == expected
