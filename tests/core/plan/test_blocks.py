"""Blocks: which lists are taken for them, where the sequence is cut, and what goes round their edges."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.plan.derive import derive
from hyper_parallel.core.plan.model import ModelDescription
from hyper_parallel.core.plan.names import block_around, block_of
from hyper_parallel.core.plan.plan import ShardingPlan
from tests.core.plan.by_hand import by_hand, stored
from tests.core.plan.linting import mended, wrong

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


# one module twice


def stacked(*modules: int) -> ModelDescription:
    """A Llama whose list of blocks holds these modules, by their numbers: one that stands there again is the same."""
    plain = stored("llama")
    outside = [each for each in plain.parameters if ".layers." not in each.name]
    block = [each for each in plain.parameters if ".layers.0." in each.name]
    parameters, tied, kinds = outside[:1], {}, {"model.layers": "ModuleList"}
    for place, module in enumerate(modules):
        at, first = (f".layers.{each}." for each in (place, modules.index(module)))
        kinds |= {
            name.replace(".layers.0", at[:-1]): kind for name, kind in plain.modules.items() if ".layers.0" in name
        }
        if at == first:
            parameters += [replace(each, name=each.name.replace(".layers.0.", at)) for each in block]
        else:
            tied |= {each.name.replace(".layers.0.", at): each.name.replace(".layers.0.", first) for each in block}
    others = {name: kind for name, kind in plain.modules.items() if ".layers." not in name}
    return replace(plain, parameters=(*parameters, *outside[1:]), modules=others | kinds, tied=tied)


@pytest.mark.parametrize(
    "modules, places, edge", [((0, 0), (1, 0), "first"), ((0, 1, 1), (2, 1), "last"), ((0, 0, 1), (1, 0), "first")]
)
def test_a_block_that_is_at_an_edge_in_one_of_its_places_only(modules, places, edge):
    (found,) = mended(stacked(*modules), TWO)
    assert str(found) == (
        f"[sequence] model.layers.{places[0]}: is one module with model.layers.{places[1]}, as both hold the same "
        f"parameters, and one of them only is the {edge} block; write at the top level\n    sequence_parallel: false"
    )


@pytest.mark.parametrize("modules", [(0, 1, 1, 2), (0,), (0, 1)])
def test_a_block_that_is_at_no_edge_may_stand_twice(modules):
    assert wrong(stacked(*modules), TWO) == []


ONCE = {
    "a kind": {"regions": {"model.layers.{}.mlp": {"kind": "opaque"}}},
    "a region": {
        "regions": {"model.layers.{}.self_attn.q_proj": {"kind": "opaque", "inputs": {"state": {"before": "auto"}}}}
    },
}
LINES = {
    "a kind": ("mlp: {kind: auto}", "regions"),
    "a region": ("self_attn.q_proj: {type: none}", "boundaries"),
}


@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("case", LINES)
def test_what_an_entry_says_of_one_place_only(case, place):
    asked = {
        section: {module.format(place): entry for module, entry in entries.items()}
        for section, entries in ONCE[case].items()
    }
    (found,) = mended(stacked(0, 1, 1, 2), TWO, asked)
    line, section = LINES[case]
    module = line.partition(":")[0]
    assert (found.rule, found.section, found.line) == ("contract", section, f"model.layers.{place}.{line}")
    assert found.message == (
        f"is one module with model.layers.{3 - place}.{module}, as their blocks hold the same parameters, and does "
        "otherwise"
    )
    both = {
        section: {module.format("*"): entry for module, entry in entries.items()}
        for section, entries in ONCE[case].items()
    }
    assert wrong(stacked(0, 1, 1, 2), TWO, both) == []


def test_contracts_of_one_place_only():
    ends = {
        "inputs": {"hidden": {"before": {"tensor": "replicate"}}},
        "outputs": {"hidden": {"after": {"tensor": "replicate"}}},
    }
    asked = {
        "boundaries": {
            "model.layers.1.input_layernorm": {"outputs": ends["outputs"]},
            "model.layers.1.self_attn": {"inputs": ends["inputs"]},
        }
    }
    found = mended(stacked(0, 1, 1, 2), TWO, asked)
    every = "{hidden: {before: auto, after: auto, gradient: auto, gradient_before: auto}}"
    assert [each.line for each in found] == [
        f"model.layers.1.input_layernorm: {{outputs: {every}}}",
        f"model.layers.1.self_attn: {{inputs: {every}}}",
    ]
    asked["boundaries"] = {name.replace("1", "*", 1): entry for name, entry in asked["boundaries"].items()}
    assert wrong(stacked(0, 1, 1, 2), TWO, asked) == []
