"""Validation of Hugging Face's models: right plans hold and give the model's numbers, broken ones stop at the break."""

from __future__ import annotations

import random

import pytest
import torch

from hyper_parallel.core.errors import ContractError, HyperParallelError, PlanError
from tests.torch.test_hugging_face import FAMILIES, OTHERS, build
from tests.torch.validated import differs_from, mutations, planned, step

pytestmark = pytest.mark.usefixtures("in_double_precision")


def tokens() -> torch.Tensor:
    return torch.randint(1, 64, (2, 8))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_the_plan_of_every_family_holds_and_gives_the_models_gradients(family, sequence_parallel):
    model, ids = build(*(FAMILIES | OTHERS)[family]), tokens()
    plan = planned(model, sequence_parallel)
    assert differs_from(model, plan, ids, step(model, plan, ids)) == ""


@pytest.mark.parametrize("family", ["llama", "falcon with one key", "qwen3_moe", "deepseek_v3", "phi3"])
def test_on_four_ranks_with_a_sequence_that_does_not_divide(family):
    model, ids = build(*FAMILIES[family]), torch.randint(1, 64, (2, 7))
    plan = planned(model, sequence_parallel=True, ranks=4)
    assert differs_from(model, plan, ids, step(model, plan, ids)) == ""


BROKEN = [
    ("llama", False, 30),
    ("llama", True, 30),
    ("qwen3", True, 20),
    ("mixtral", True, 20),
    ("qwen3_moe", False, 20),
    ("phi3", False, 20),
    ("gpt2", True, 20),
]
"""Family, sequence parallelism, and how many of all ways to change its plan in one place are tried."""


@pytest.mark.parametrize(("family", "sequence_parallel", "tried"), BROKEN)
def test_a_plan_that_changes_loss_or_a_gradient_stops_with_the_right_module_named(family, sequence_parallel, tried):
    model, ids = build(*FAMILIES[family]), tokens()
    plan = planned(model, sequence_parallel)
    for mutation in random.Random(0).sample(list(mutations(plan)), tried):
        told = what_validation_says(model, mutation.plan, ids)
        if told:
            assert names(told, mutation.where), f"{mutation.what}: {told}"
        else:
            assert is_right(model, mutation.plan, ids), f"{mutation.what} was not noticed"


def what_validation_says(model, plan, ids) -> str:
    try:
        step(model, plan, ids)
    except (ContractError, PlanError) as error:
        return str(error)
    return ""


def names(told: str, where: str) -> bool:
    """The message has the module or the parameter that was changed in it, or stops in the module of the parameter."""
    module = told.partition(":")[0]
    return where in told or where.startswith(f"{module}.")


def is_right(model, plan, ids) -> bool:
    try:
        return differs_from(model, plan, ids, step(model, plan, ids, validate=False)) == ""
    except HyperParallelError:
        return False
