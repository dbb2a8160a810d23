"""A bias behind a weight whose inputs are cut counts once, whatever its module does with the pending sum."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import hyper_parallel as hp
from hyper_parallel import ContractError, PlanError, backends
from hyper_parallel.core.execution.apply import find_adaptations
from hyper_parallel.core.execution.facts import Facts
from hyper_parallel.core.validation.one_rank import OneRankCollectives
from tests.torch.test_models_by_hand import HIDDEN, INNER, WORDS, Attention, Block, Model, hold_against_one_device

in_double_precision = pytest.mark.usefixtures("in_double_precision")

Change = Callable[["MLP", torch.Tensor], torch.Tensor]


class MLP(nn.Module):
    """Inner features that `change` goes on with."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(HIDDEN, INNER), nn.Linear(INNER, HIDDEN)
        self.change = change

    def forward(self, hidden):
        return self.change(self, functional.silu(self.up_proj(hidden)))


class Scaled(Attention):
    """Attention that scales what its last linear gives."""

    def __init__(self) -> None:
        super().__init__()
        self.o_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden, memory=None, keys=None):
        mixed, keys = super().forward(hidden, memory, keys)
        return mixed / 3, keys


def of_sum(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda mlp, inner: change(mlp.down_proj(inner))


def masked_alike(summand: torch.Tensor) -> torch.Tensor:
    """Dropout for which every rank draws the same."""
    drawn = torch.rand(summand.shape[-1], generator=torch.Generator().manual_seed(3))
    return summand * (drawn > 0.5)


CHANGES: dict[str, Change] = {
    "scaled": of_sum(lambda summand: summand * 2),
    "scaled in place": of_sum(lambda summand: summand.mul_(2)),
    "negated": of_sum(lambda summand: -summand),
    "doubled": of_sum(lambda summand: summand + summand),
    "flipped": of_sum(lambda summand: summand.flip(-1)),
    "scaled by feature": of_sum(lambda summand: summand * torch.linspace(0, 1, HIDDEN)),
    "masked": of_sum(lambda summand: summand.masked_fill(torch.arange(HIDDEN) > 5, 0.0)),
    "dropped alike": of_sum(masked_alike),
    "added twice": lambda mlp, inner: mlp.down_proj(inner) + mlp.down_proj.bias,
    "called as a function": lambda mlp, inner: functional.linear(inner, mlp.down_proj.weight, mlp.down_proj.bias),
}


def without_bias(mlp: MLP, inner: torch.Tensor) -> torch.Tensor:
    return functional.linear(inner, mlp.down_proj.weight)


def model_with(change: Change, attention: Callable[[], nn.Module] = Attention) -> Model:
    blocks = [Block(attention()) for _ in range(2)]
    for block in blocks:
        block.mlp = MLP(change)
    return Model(*blocks)


def planned(model: nn.Module, sequence_parallel: bool) -> hp.ShardingPlan:
    return hp.plan(model, hp.DeviceMesh.from_sizes({"tensor": 2}), {"sequence_parallel": sequence_parallel})


def check(model: nn.Module, plan: hp.ShardingPlan) -> None:
    """Production and validation against one device."""
    ids = torch.randint(1, WORDS, (2, 8))
    report = hp.check_gradients(lambda: copy.deepcopy(model), plan, {"input_ids": ids.numpy()})
    assert report.ok, str(report)


@in_double_precision
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_bias_is_part_of_the_pending_sum(change, sequence_parallel):
    hold_against_one_device(model_with(CHANGES[change]), 2, sequence_parallel, pastes=False)


@in_double_precision
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_bias_is_part_of_what_attention_scales(sequence_parallel):
    hold_against_one_device(model_with(CHANGES["scaled"], Scaled), 2, sequence_parallel, pastes=False)


@in_double_precision
@pytest.mark.parametrize(
    "change",
    [CHANGES["scaled in place"], CHANGES["flipped"], CHANGES["added twice"], without_bias],
    ids=["scaled in place", "flipped", "added twice", "not used"],
)
def test_validation_follows_the_bias_with_the_sum(change):
    model = model_with(change, Scaled).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    check(model, planned(model, sequence_parallel=False))


@in_double_precision
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_every_rank_records_a_bias_that_is_trained_alone(sequence_parallel):
    """Else one rank would wait in a collective of backward that the other does not come to."""
    model = model_with(CHANGES["scaled"]).double()
    model.requires_grad_(False)
    model.layers[0].mlp.down_proj.bias.requires_grad_(True)
    check(model, planned(model, sequence_parallel))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_one_rank_has_all_of_its_gradient(sequence_parallel):
    plan = planned(model_with(CHANGES["scaled"]), sequence_parallel)
    bias = plan["layers.1.mlp.down_proj.bias"]
    assert (bias.placements, bias.pending) == ({}, ("tensor",))
    assert bias.notes == ("added by the first tensor rank, to its part of the sum",)


def test_a_plan_that_sums_nothing_up_is_refused():
    """As plans were made when biases were added after the reduction."""
    model = model_with(CHANGES["scaled"])
    plan = planned(model, sequence_parallel=False)
    name = "layers.1.mlp.down_proj.bias"
    parameters = (replace(each, pending=()) if each.name == name else each for each in plan.parameters)
    plan = replace(plan, parameters=tuple(parameters))
    facts = Facts(replace(backends.load("torch"), collectives=OneRankCollectives(1, 2)), model, plan)
    with pytest.raises(PlanError) as refused:
        find_adaptations(facts)
    assert (
        f"{name}: the first tensor rank adds it, to its part of a sum, and has all of its gradient; found pending: [], "
        "which has to name tensor: make the plan anew"
    ) in str(refused.value)


def test_a_pending_sum_is_dropped_alike_where_zeros_are_written():
    model = model_with(of_sum(functional.dropout))
    plan = planned(model, sequence_parallel=False)
    assert "the plan holds" in str(hp.validate(lambda: copy.deepcopy(model).to("meta"), plan, (2, 8)))


def test_other_numbers_than_zero_are_not_written_into_a_pending_sum():
    model = model_with(of_sum(lambda summand: functional.alpha_dropout(summand, 0.5, training=True)))
    plan = planned(model, sequence_parallel=False)
    with pytest.raises(ContractError) as refused:
        hp.validate(lambda: copy.deepcopy(model).to("meta"), plan, (2, 8))
    assert str(refused.value).splitlines()[0] == (
        "layers.0.mlp: alpha_dropout over tensor: input is partial, and alpha_dropout of a sum can't be worked out "
        "from its parts"
    )
