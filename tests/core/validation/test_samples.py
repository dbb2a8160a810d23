"""What validation refuses along axes whose ranks have samples of their own: the whole messages."""

from dataclasses import replace

import pytest

import hyper_parallel as hp
from hyper_parallel import ContractError, Replicate, Shard, StridedShard
from hyper_parallel.core.validation.samples import check_samples
from tests.core.plan.by_hand import stored

UP = "model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.layers.0.mlp.experts.down_proj"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def plan():
    return hp.plan(stored("mixtral"), hp.DeviceMesh.from_sizes({"shard": 2, "expert": 2}))


def with_parameter(plan, name, **changes):
    return replace(plan, parameters=tuple(replace(p, **changes) if p.name == name else p for p in plan.parameters))


def refusal(plan):
    with pytest.raises(ContractError) as error:
        check_samples(plan)
    return str(error.value)


def test_a_correct_plan_is_let_through(plan):
    check_samples(plan)


WRONG = {
    "whole beside a dealt one": (
        UP,
        {"placements": {"shard": Shard(0)}},
        f"{UP}: it is replicate over expert, and {DOWN} beside it is dealt out\n"
        "  legal: both shard(0), or both replicate over expert\n"
        f"  plan: parameter {UP}: placements: {{shard: shard(0)}}, pending: [shard]",
    ),
    "cut inside of experts": (
        UP,
        {"placements": {"expert": Shard(1)}},
        f"{UP}: it is shard(1) over expert, along which only experts are dealt out, one after the other\n"
        "  legal: shard(0) over expert for a tensor of packed experts, replicate for others\n"
        f"  plan: parameter {UP}: placements: {{expert: shard(1)}}, pending: [shard]",
    ),
    "dealt out in another order": (
        UP,
        {"placements": {"expert": StridedShard(0, 2)}},
        f"{UP}: it is strided_shard(0, 2) over expert, along which only experts are dealt out, one after the other\n"
        "  legal: shard(0) over expert for a tensor of packed experts, replicate for others\n"
        f"  plan: parameter {UP}: placements: {{expert: strided_shard(0, 2)}}, pending: [shard]",
    ),
    "no experts": (
        NORM,
        {"placements": {"expert": Shard(0)}},
        f"{NORM}: it is shard(0) over expert, along which only experts are dealt out, one after the other\n"
        "  legal: shard(0) over expert for a tensor of packed experts, replicate for others\n"
        f"  plan: parameter {NORM}: placements: {{expert: shard(0)}}, pending: [shard, expert]",
    ),
    "a sum too many": (
        UP,
        {"pending": ("shard", "expert")},
        f"{UP}: it is dealt out over expert, so each rank has the whole gradient of its experts, and their sum would "
        "mix those of several\n"
        "  legal: pending without expert\n"
        f"  plan: parameter {UP}: placements: {{shard: strided_shard(0, 2), expert: shard(0)}}, "
        "pending: [shard, expert]",
    ),
    "a sum too few": (
        NORM,
        {"pending": ("shard",)},
        f"{NORM}: it is replicate over expert, whose ranks have samples of their own, and nothing sums up its "
        "gradient there\n"
        "  legal: pending with expert\n"
        f"  plan: parameter {NORM}: placements: {{shard: shard(0)}}, pending: [shard]",
    ),
}


@pytest.mark.parametrize(("name", "changes", "told"), WRONG.values(), ids=WRONG)
def test_what_is_said_of_a_parameter_over_expert_is_held(plan, name, changes, told):
    assert refusal(with_parameter(plan, name, **changes)) == told


def test_a_frozen_parameter_needs_no_sum(plan):
    check_samples(with_parameter(plan, NORM, pending=("shard",), trainable=False))


def test_nothing_crosses_between_samples(plan):
    attention = next(each for each in plan.boundaries if each.module == "model.layers.0.self_attn")
    contract = attention.inputs[0]
    changed = replace(attention, inputs=(replace(contract, after={"shard": Shard(0), "expert": Replicate()}),))
    boundaries = tuple(changed if each is attention else each for each in plan.boundaries)
    assert refusal(replace(plan, boundaries=boundaries)) == (
        "model.layers.0.self_attn: the input 'hidden': over expert, whose ranks have samples of their own, it is "
        "shard(0) before the transition and replicate after it, and its gradient is shard(0) and shard(0)\n"
        "  legal: the same before and after over expert: shard(0)\n"
        "  plan: boundary model.layers.0.self_attn, input hidden: before: {shard: shard(0), expert: shard(0)}, after: "
        "{shard: shard(0), expert: replicate}"
    )
