"""Placements that describe a plan well enough and are none that a model runs with: refused before anything changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml
from torch import nn

import hyper_parallel as hp
from hyper_parallel import PlanError, Shard, StridedShard
from tests.torch.all_ranks import on_all_ranks
from tests.torch.production import hold_against
from tests.torch.test_hugging_face import FAMILIES, build

KEYS = "model.layers.0.self_attn.k_proj.weight"
TABLE = "model.embed_tokens.weight"


def refusal(sizes, name, placements):
    model = build(*FAMILIES["llama"])
    plan = hp.plan(model, hp.DeviceMesh.from_sizes(sizes))
    parameters = tuple(replace(p, placements=placements) if p.name == name else p for p in plan.parameters)
    with pytest.raises(PlanError) as error:
        on_all_ranks(model, replace(plan, parameters=parameters), lambda backend, own: None)
    return str(error.value)


@pytest.mark.parametrize(
    ("placements", "found", "right"),
    [
        ({"shard": Shard(0), "tensor": Shard(0)}, "shard(0)", "strided_shard(0, 2)"),
        ({"shard": StridedShard(1, 2), "tensor": Shard(0)}, "strided_shard(1, 2)", "shard(1)"),
    ],
)
def test_a_unit_cuts_what_other_axes_have_left(placements, found, right):
    """Else the parts would be put together in another order than they were cut in."""
    told = refusal({"shard": 2, "tensor": 2}, KEYS, placements)
    assert told.endswith(
        f"does not fit the model: {KEYS} is {found} over shard; a unit cuts the part that other axes leave on a rank, "
        f"which is {right}"
    )


def test_a_table_is_looked_up_in_one_run_of_rows():
    assert refusal({"tensor": 2}, TABLE, {"tensor": StridedShard(0, 2)}).endswith(
        f"does not fit the model: {TABLE} is strided_shard(0, 2) over tensor, several runs of rows on each rank; a "
        "rank looks tokens up in one run, as shard(0) gives it"
    )


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(32, 24, bias=False), nn.Linear(24, 32, bias=False)

    def forward(self, rows):
        return self.down_proj(self.up_proj(rows).relu())


class Experts(nn.Module):
    """Each token goes to one of four experts, which are modules."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, hidden):
        weights, chosen = self.gate(hidden).softmax(-1).max(-1, keepdim=True)
        made = (expert(hidden) * (chosen == number) for number, expert in enumerate(self.experts))
        return sum(made) * weights


def test_experts_that_are_modules_are_told_once_with_the_line_that_mends_them(in_double_precision):
    model = build(*FAMILIES["llama"])
    for layer in model.model.layers:
        layer.mlp = Experts()
    mesh = hp.DeviceMesh.from_sizes({"expert": 2})
    with pytest.raises(PlanError) as error:
        on_all_ranks(model, hp.plan(model, mesh), lambda backend, own: None)
    told, _, line = str(error.value).partition("have every rank hold all of them: ")
    assert told.count("modules of their own") == 1
    mended = hp.plan(model, mesh, {"parameters": yaml.safe_load(line)})
    hold_against(model, mended, samples=4, length=5)
