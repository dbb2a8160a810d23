"""Blocks: which lists are taken for them, where the sequence is cut, and what goes round their edges."""

from __future__ import annotations

import pytest

from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.plan.derive import derive
from hyper_parallel.core.plan.model import ModelDescription
from hyper_parallel.core.plan.names import block_around, block_of
from hyper_parallel.core.plan.plan import ShardingPlan
from tests.core.plan.by_hand import by_hand

TWO = {"tensor": 2}


def edges(plan: ShardingPlan) -> dict[str, str]:
    return {each.module: each.kind for each in plan.boundaries if each.kind in ("entry", "exit")}


@pytest.mark.parametrize(
    "module, block",
    [
        ("layers.0", "layers.0"),
        ("model.layers.3.mlp.experts.1.up", "model.layers.3"),
        ("stages.0.blocks.1.norm", "stages.0"),
        ("mlp.experts.0", ""),
        ("mlp.experts.module.0.inner.1", ""),
        ("layers", ""),
        ("", ""),
    ],
)
def test_a_block_is_an_element_of_the_outermost_list_but_no_expert(module, block):
    assert block_of(module) == block


def test_a_parameter_in_a_list_is_no_block():
    assert (block_around("scales.0"), block_around("layers.0.scales.1")) == ("", "layers.0")


# experts in a list


def one_block(prefix: str = "") -> ModelDescription:
    """A model of one block with experts in a list, which stands in no list itself or, with a prefix, in one."""
    names = {"embed_tokens.weight": ((96, 32), "Embedding"), "norm.weight": ((32,), "RMSNorm")}
    for part, rows in (("q", 32), ("k", 16), ("v", 16)):
        names[f"{prefix}self_attn.{part}_proj.weight"] = ((rows, 32), "Linear")
    names[f"{prefix}self_attn.o_proj.weight"] = ((32, 32), "Linear")
    names[f"{prefix}mlp.gate.weight"] = ((4, 32), "Linear")
    for expert in range(4):
        for part, shape in (("gate", (16, 32)), ("up", (16, 32)), ("down", (32, 16))):
            names[f"{prefix}mlp.experts.{expert}.{part}_proj.weight"] = (shape, "Linear")
    names["lm_head.weight"] = ((96, 32), "Linear")
    modules = {f"{prefix}mlp": "MixtralSparseMoeBlock", f"{prefix}mlp.experts": "ModuleList"}
    modules |= {f"{prefix}self_attn": "Attention"}
    modules |= {f"{prefix}mlp.experts.{expert}": "MixtralMLP" for expert in range(4)}
    return by_hand(names, modules | ({"layers": "ModuleList", "layers.0": "Block"} if prefix else {}))


@pytest.mark.parametrize("sizes", [{"shard": 2, "tensor": 2}, {"expert": 2}])
def test_a_list_of_experts_is_no_list_of_blocks(sizes):
    plan = derive(one_block(), DeviceMesh.from_sizes(sizes))
    assert edges(plan) == {} and [unit.name for unit in plan.units] == [""]
    hidden = [end for each in plan.boundaries for end in (*each.inputs, *each.outputs) if end.name == "hidden"]
    assert {str(end.before.get("tensor", "replicate")) for end in hidden} <= {"replicate", "partial"}


def test_experts_of_a_block_in_a_list_are_no_blocks_either():
    plan = derive(one_block("layers.0."), DeviceMesh.from_sizes(TWO))
    assert edges(plan) == {"layers.0": "entry"} and [unit.name for unit in plan.units] == ["layers.0", ""]
    (edge,) = [each for each in plan.boundaries if each.module == "layers.0"]
    assert [each.name for each in (*edge.inputs, *edge.outputs)] == ["hidden", "hidden"]
