"""Blocks: which lists are taken for them, where the sequence is cut, and what goes round their edges."""

from __future__ import annotations

import pytest

from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.plan.derive import derive
from hyper_parallel.core.plan.model import ModelDescription
from hyper_parallel.core.plan.names import block_around, block_of
from hyper_parallel.core.plan.plan import ShardingPlan
from tests.core.plan.by_hand import by_hand, stored
from tests.core.plan.linting import mended

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


# regions


@pytest.mark.parametrize("kind", ["opaque", "transparent"])
@pytest.mark.parametrize("module", ["model", "model.layers"])
def test_a_region_around_the_blocks_has_all_tokens_at_its_ends(module, kind):
    plain = derive(stored("llama"), DeviceMesh.from_sizes(TWO))
    plan = derive(stored("llama"), DeviceMesh.from_sizes(TWO), {"regions": {module: {"kind": kind}}})
    (region,) = [each for each in plan.boundaries if each.module == module]
    ends = [end for each in (*region.inputs, *region.outputs) for end in (each.before, each.after, each.gradient)]
    assert {str(each["tensor"]) for each in ends} == {"replicate"}
    assert tuple(each for each in plan.boundaries if each is not region) == plain.boundaries


def test_what_is_in_a_region_around_the_blocks_is_still_checked():
    regions = {"model": {"kind": "transparent"}, "model.layers.1": {"kind": "transparent"}}
    asked = {
        "regions": regions,
        "boundaries": {"model.layers.0.mlp": {"outputs": {"hidden": {"after": {"tensor": "replicate"}}}}},
    }
    (found,) = mended("llama", TWO, asked)
    assert str(found) == (
        "[chain] model.layers.0.mlp: hands on hidden states as (tensor: replicate), and no neighbour takes them so; "
        "they lie as (tensor: shard(1)); write below `boundaries:`\n"
        "    model.layers.0.mlp: {outputs: {hidden: {after: auto}}}"
    )


def test_a_region_around_the_blocks_does_not_cut_what_their_edges_take_whole():
    asked = {"regions": {"model.layers": {"kind": "opaque", "inputs": {"hidden": {"after": {"tensor": "shard(1)"}}}}}}
    (found,) = mended("llama", TWO, asked)
    assert str(found) == (
        "[chain] model.layers: has (tensor: shard(1)) inside, and model.layers.0 takes hidden states as (tensor: "
        "replicate); write below `regions:`\n    model.layers: {inputs: {hidden: {after: auto}}}"
    )


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("end", ["before", "after", "gradient", "gradient_before"])
@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_a_region_inside_of_a_boundary_takes_and_gives_what_that_does(side, end, sequence_parallel):
    entry = {"kind": "transparent", side: {"hidden": {end: "auto"}}}
    asked = {"sequence_parallel": sequence_parallel, "regions": {"model.layers.*.self_attn.q_proj": entry}}
    plan = derive(stored("llama"), DeviceMesh.from_sizes(TWO), asked)
    region, outer = (
        next(each for each in plan.boundaries if each.module == f"model.layers.1.{module}")
        for module in ("self_attn.q_proj", "self_attn")
    )
    (mine,), (around,) = getattr(region, side), getattr(outer, side)
    lies, gradient = (around.after, around.gradient) if side == "inputs" else (around.before, around.source_gradient)
    assert (mine.before, mine.after, mine.gradient, mine.source_gradient) == (lies, lies, gradient, gradient)


def test_a_region_inside_of_a_boundary_that_gives_back_other_gradients_is_mended():
    entry = {"kind": "transparent", "inputs": {"hidden": {"gradient_before": {"tensor": "replicate"}}}}
    (found,) = mended("gpt_oss", TWO, {"regions": {"model.layers.1.self_attn.v_proj": entry}})
    assert str(found) == (
        "[chain] model.layers.1.self_attn.v_proj: gives gradients back as (tensor: replicate), and "
        "model.layers.1.self_attn, around it, wants (tensor: partial); write below `regions:`\n"
        "    model.layers.1.self_attn.v_proj: {inputs: {hidden: {gradient_before: auto}}}"
    )


def test_a_region_inside_of_an_opaque_one_takes_what_that_declares():
    regions = [
        {
            "match": "model.layers.*.self_attn",
            "kind": "opaque",
            "inputs": {"hidden": {"gradient": {"tensor": "replicate"}}},
        },
        {"match": "model.layers.*.self_attn.q_proj", "kind": "opaque", "inputs": {"hidden": {"before": "auto"}}},
    ]
    plan = derive(stored("llama"), DeviceMesh.from_sizes(TWO), {"regions": regions})
    (region,) = [each for each in plan.boundaries if each.module == "model.layers.0.self_attn.q_proj"]
    assert str(region.inputs[0].source_gradient["tensor"]) == "replicate"
