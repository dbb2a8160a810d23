"""Contracts and parameters of a plan as states."""

import pytest

from hyper_parallel.core.errors import ContractError
from hyper_parallel.core.placement import Partial, Replicate, Shard, StridedShard
from hyper_parallel.core.plan.contracts import Contract
from hyper_parallel.core.plan.plan import ParameterPlan
from hyper_parallel.core.rules.state import COPIED, PARTIAL, WHOLE, State, cut
from hyper_parallel.core.validation.checked import Rows
from hyper_parallel.core.validation.contracts import check_ends, contract_states, differs
from hyper_parallel.core.validation.parameters import parameter_states

AXES = ("context", "tensor")


@pytest.mark.parametrize(
    ("placement", "gradient", "state"),
    [
        (Replicate(), Replicate(), WHOLE),
        (Replicate(), Partial(), COPIED),
        (Partial(), Replicate(), PARTIAL),
        (Shard(1), Shard(1), cut(1)),
        (Shard(2), Shard(2), cut(2)),
    ],
)
def test_one_side_of_a_contract_is_a_state_for_each_axis(placement, gradient, state):
    assert contract_states({"tensor": placement}, {"tensor": gradient}, AXES, 3, 2) == (WHOLE, state)


def test_flattened_tokens_are_cut_within_each_sample_and_features_in_their_last_dim():
    assert contract_states({"tensor": Shard(1)}, {}, AXES, 2, 4) == (WHOLE, cut(0, blocks=4))
    assert contract_states({"tensor": Shard(2)}, {}, AXES, 2, 4) == (WHOLE, cut(1))


def test_the_samples_in_flattened_tokens_are_those_of_the_latest_activation_with_as_many_rows():
    rows = Rows()
    assert rows.samples((12, 8)) == 1
    assert rows.samples((3, 4, 8)) == 3
    assert rows.samples((12, 16)) == 3
    rows.samples((2, 6, 8))
    assert rows.samples((12, 8)) == 2


@pytest.mark.parametrize(
    ("found", "expected", "wrong"),
    [
        (WHOLE, WHOLE, False),
        (WHOLE, COPIED, True),
        (COPIED, WHOLE, True),
        (PARTIAL, WHOLE, True),
        (WHOLE, PARTIAL, True),
        (State(zero=True), PARTIAL, False),
        (cut(1), cut(1), False),
        (cut(1), cut(0), True),
        (cut(0, blocks=2), cut(0), True),
        (WHOLE, cut(0), True),
        (State(same=(0,)), cut(0), False),
        (State(same=(0,)), cut(1), True),
    ],
)
def test_what_can_be_taken_for_what(found, expected, wrong):
    assert differs(found, expected, takes_part=True) is wrong


def test_how_a_gradient_lies_is_asked_of_what_has_one_only():
    assert not differs(COPIED, WHOLE, takes_part=False)
    assert differs(PARTIAL, WHOLE, takes_part=False)


@pytest.mark.parametrize(
    ("after", "gradient", "legal"),
    [
        (Shard(1), Replicate(), "shard(1)"),
        (Partial(), Partial(), "replicate"),
        (Replicate(), Shard(1), "replicate or partial"),
    ],
)
def test_a_gradient_that_a_tensor_cannot_have_is_refused_with_those_that_it_can(after, gradient, legal):
    contract = Contract("hidden", 3, 8, {"tensor": Replicate()}, {"tensor": after}, {"tensor": gradient})
    with pytest.raises(ContractError) as caught:
        check_ends("model.mlp", "input", contract)
    assert str(caught.value) == (
        f"model.mlp: the input 'hidden': after the transition it is {after} over tensor, and its gradient is said to "
        f"be {gradient}\n"
        f"  legal: a gradient that is {legal} over tensor\n"
        f"  plan: boundary model.mlp, input hidden, after: {{tensor: {after}}}, its gradient: {{tensor: {gradient}}}"
    )


def parameter(placements, pending=()):
    return ParameterPlan("model.w", (4, 4), "float32", True, placements, "", pending=pending)


def test_a_parameter_lies_as_the_plan_says():
    assert parameter_states(parameter({}), AXES, False) == (WHOLE, WHOLE)
    assert parameter_states(parameter({}, ("shard", "tensor")), AXES, False) == (WHOLE, COPIED)
    assert parameter_states(parameter({"tensor": StridedShard(0, 2)}), AXES, False) == (WHOLE, cut(0, blocks=2))
    assert parameter_states(parameter({}, ("tensor",)), AXES, True) == (WHOLE, PARTIAL)


def test_a_part_whose_gradient_is_said_to_be_a_sum_over_parts_is_refused():
    with pytest.raises(ContractError) as caught:
        parameter_states(parameter({"tensor": Shard(0)}, ("tensor",)), AXES, False)
    assert str(caught.value) == (
        "model.w: its gradient is said to be a partial sum over tensor, which cuts it: each rank computes all of the "
        "gradient of its part, and the sum would mix the parts of several ranks\n"
        "  legal: pending without tensor\n"
        "  plan: parameter model.w: placements: {tensor: shard(0)}, pending: [tensor]"
    )
