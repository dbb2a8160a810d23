"""Contracts by hand: what contradicts the cuts of parameters is refused, and what is free changes their gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Shard
from hyper_parallel.core.plan.derive import derive
from tests.core.plan.by_hand import by_hand, stored
from tests.core.plan.linting import mended, wrong

TWO, FOUR = {"tensor": 2}, {"tensor": 4}
LAYER = "model.layers.*."


def contract(module: str, side: str, end: str, placement: str, name: str = "hidden", axis: str = "tensor") -> dict:
    return {"boundaries": {module: {side: {name: {end: {axis: placement}}}}}}


def both_ends(module: str, placement: str, axis: str = "tensor") -> dict:
    """Another layout inside of a module, the same where hidden states come in and where they go out."""
    inputs, outputs = {"hidden": {"after": {axis: placement}}}, {"hidden": {"before": {axis: placement}}}
    return {"boundaries": {module: {"inputs": inputs, "outputs": outputs}}}


def few_heads():
    """Phi-3 with one key/value head: at four ranks its fused projection is computed in parts and gathered."""
    model = stored("phi3")
    shapes = {each.name: (48, 32) if "qkv_proj" in each.name else each.shape for each in model.parameters}
    made = tuple(replace(each, shape=shapes[each.name]) for each in model.parameters)
    return replace(model, parameters=made, config={**model.config, "num_key_value_heads": 1})


def residual_inside():
    """An attention of Bloom, which adds a residual to what its last linear gives."""
    place = "transformer.h.0.self_attention"
    parameters = {
        f"{place}.query_key_value.weight": ((96, 32), "Linear"),
        f"{place}.dense.weight": ((32, 32), "Linear"),
    }
    config = {"hidden_size": 32, "n_head": 4, "num_attention_heads": 4, "vocab_size": 96, "model_type": "bloom"}
    return by_hand(parameters, {place: "BloomAttention", "transformer.h.0": "BloomBlock"}, config)


# the inside of a boundary

AS_PLACED = "as the parameters of this {} are placed, it is ({})"
CONTRADICTIONS = {
    "a sum over heads that is dropped": (
        "llama",
        contract(LAYER + "self_attn", "outputs", "before", "replicate"),
        f"output hidden: before is given as (tensor: replicate); {AS_PLACED.format('attention', 'tensor: partial')}",
        LAYER + "self_attn: {outputs: {hidden: {before: auto}}}",
    ),
    "features that are not whole": (
        "llama",
        contract(LAYER + "mlp", "inputs", "after", "shard(2)"),
        f"input hidden: after is given as (tensor: shard(2)); {AS_PLACED.format('mlp', 'tensor: replicate')}",
        LAYER + "mlp: {inputs: {hidden: {after: auto}}}",
    ),
    "a gradient that is not added up": (
        "llama",
        contract(LAYER + "self_attn", "inputs", "gradient", "replicate"),
        f"input hidden: gradient is given as (tensor: replicate); {AS_PLACED.format('attention', 'tensor: partial')}",
        LAYER + "self_attn: {inputs: {hidden: {gradient: auto}}}",
    ),
    "a gradient of what is made": (
        "llama",
        contract(LAYER + "mlp", "outputs", "gradient_before", "partial"),
        f"output hidden: gradient_before is given as (tensor: partial); {AS_PLACED.format('mlp', 'tensor: replicate')}",
        LAYER + "mlp: {outputs: {hidden: {gradient_before: auto}}}",
    ),
    "logits of a part of the vocabulary": (
        "llama",
        contract("lm_head", "outputs", "before", "replicate", "logits"),
        f"output logits: before is given as (tensor: replicate); {AS_PLACED.format('head', 'tensor: shard(2)')}",
        "lm_head: {outputs: {logits: {before: auto}}}",
    ),
    "tokens": (
        "llama",
        contract("model.embed_tokens", "inputs", "after", "shard(1)", "tokens"),
        f"input tokens: after is given as (tensor: shard(1)); {AS_PLACED.format('embedding', 'tensor: replicate')}",
        "model.embed_tokens: {inputs: {tokens: {after: auto}}}",
    ),
    "a block around experts": (
        "mixtral",
        contract(LAYER + "mlp", "inputs", "after", "shard(1)"),
        f"input hidden: after is given as (tensor: shard(1)); {AS_PLACED.format('moe', 'tensor: replicate')}",
        LAYER + "mlp: {inputs: {hidden: {after: auto}}}",
    ),
    "a norm over all heads": (
        "olmo2",
        contract(LAYER + "self_attn.q_norm", "inputs", "after", "shard(2)", "heads"),
        f"input heads: after is given as (tensor: shard(2)); {AS_PLACED.format('wide_norm', 'tensor: replicate')}",
        LAYER + "self_attn.q_norm: {inputs: {heads: {after: auto}}}",
    ),
    "a norm over parts of features": (
        "llama",
        contract(LAYER + "input_layernorm", "inputs", "after", "shard(2)"),
        "input hidden: after is given as (tensor: shard(2)); both ends of a norm have the same whole tokens and no "
        "pending sum, such as (tensor: shard(1))",
        LAYER + "input_layernorm: {inputs: {hidden: {after: auto}}}",
    ),
    "a norm that hands on other tokens than it takes": (
        "llama",
        contract(LAYER + "input_layernorm", "outputs", "before", "replicate"),
        "output hidden: before is given as (tensor: replicate); both ends of a norm have the same whole tokens and no "
        "pending sum, such as (tensor: shard(1))",
        LAYER + "input_layernorm: {outputs: {hidden: {before: auto}}}",
    ),
    "a gradient between modules": (
        "llama",
        contract(LAYER + "self_attn", "inputs", "gradient_before", "replicate"),
        "input hidden: gradient_before is given as (tensor: replicate); the gradient of (tensor: shard(1)) is "
        "(tensor: shard(1))",
        LAYER + "self_attn: {inputs: {hidden: {gradient_before: auto}}}",
    ),
    "a gradient of what is cut": (
        "llama",
        contract("lm_head", "outputs", "gradient", "replicate", "logits"),
        "output logits: gradient is given as (tensor: replicate); the gradient of (tensor: shard(2)) is "
        "(tensor: shard(2))",
        "lm_head: {outputs: {logits: {gradient: auto}}}",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_contract_that_contradicts_the_cut(case):
    model, asked, message, line = CONTRADICTIONS[case]
    (found,) = mended(model, TWO, asked)
    assert (found.rule, found.section, found.message, found.line) == ("contract", "boundaries", message, line)


def test_a_contradiction_is_told_with_the_line_that_mends_it():
    (found,) = mended("llama", TWO, CONTRADICTIONS["a sum over heads that is dropped"][1])
    assert str(found) == (
        "[contract] model.layers.0.self_attn and 1 more like it: output hidden: before is given as (tensor: "
        "replicate); as the parameters of this attention are placed, it is (tensor: partial); write below "
        "`boundaries:`\n"
        "    model.layers.*.self_attn: {outputs: {hidden: {before: auto}}}"
    )


@pytest.mark.parametrize(
    "axis, module, placement", [("context", "self_attn", "replicate"), ("expert", "mlp", "replicate")]
)
def test_no_axis_may_bring_other_tokens_to_what_is_cut(axis, module, placement):
    asked = contract(LAYER + module, "inputs", "after", placement, axis=axis)
    (found,) = mended("llama", {"expert": 2, "context": 2, "tensor": 2}, asked)
    assert (found.rule, found.line) == ("contract", LAYER + module + ": {inputs: {hidden: {after: auto}}}")


def test_all_wrong_ends_are_told_at_once():
    ends = {"after": {"tensor": "shard(1)"}, "gradient": {"tensor": "shard(1)"}}
    found = mended("llama", TWO, {"boundaries": {"model.layers.0.mlp": {"inputs": {"hidden": ends}}}})
    assert [each.line.partition("hidden: ")[2] for each in found] == ["{after: auto}}}", "{gradient: auto}}}"]


def test_a_layout_that_cannot_be_is_told_once():
    (found,) = mended("llama", TWO, contract(LAYER + "mlp", "outputs", "before", "shard(7)"))
    assert (found.rule, found.line) == (
        "layout",
        LAYER + "mlp: {outputs: {hidden: {before: auto, after: auto, gradient: auto, gradient_before: auto}}}",
    )


def test_the_template_written_out_changes_nothing():
    ends = {"inputs": {"hidden": {"after": {"tensor": "replicate"}}}}
    ends["outputs"] = {"hidden": {"before": {"tensor": "partial"}}}
    plan = derive(stored("llama"), DeviceMesh((2,), ("tensor",)), {"boundaries": {LAYER + "self_attn": ends}})
    assert plan.boundaries == derive(stored("llama"), DeviceMesh((2,), ("tensor",))).boundaries


# what works on each token for itself


@pytest.mark.parametrize(
    "sequence_parallel, placement, pending", [(True, "replicate", ()), (False, "shard(1)", ("tensor",))]
)
def test_a_norm_may_work_on_other_tokens_and_then_its_gradient_is_another(sequence_parallel, placement, pending):
    asked = {"sequence_parallel": sequence_parallel, **both_ends(LAYER + "input_layernorm", placement)}
    plan = derive(stored("llama"), DeviceMesh((2,), ("tensor",)), asked)
    assert plan["model.layers.0.input_layernorm.weight"].pending == pending
    usual = ("tensor",) if sequence_parallel else ()
    assert plan["model.layers.0.post_attention_layernorm.weight"].pending == usual


def test_a_norm_may_work_on_all_of_a_context():
    mesh = DeviceMesh.from_sizes({"shard": 2, "context": 2, "tensor": 2})
    plan = derive(stored("llama"), mesh, both_ends(LAYER + "input_layernorm", "replicate", "context"))
    assert plan["model.layers.0.input_layernorm.weight"].pending == ("shard", "tensor")
    assert plan["model.layers.0.post_attention_layernorm.weight"].pending == ("shard", "context", "tensor")


def test_what_stays_whole_may_work_on_each_token_for_itself():
    roles = {"parameters": {"backbone.**.mixer.**": {"role": "none"}}}
    mesh = DeviceMesh((2,), ("tensor",))
    name = "backbone.layers.0.mixer.in_proj.weight"
    assert derive(stored("mamba"), mesh, roles)[name].pending == ()
    by_token = roles | both_ends("backbone.layers.*.mixer", "shard(1)")
    assert derive(stored("mamba"), mesh, by_token)[name].pending == ("tensor",)


def test_a_whole_weight_beside_a_bias_of_a_norm_sees_the_same_tokens():
    parameters = {f"layers.0.norm.{each}": ((32,), "LayerNorm") for each in ("weight", "bias")}
    asked = {"parameters": {"layers.0.norm.weight": {"role": "none"}}}
    plan = derive(by_hand(parameters, {"layers.0": "Block"}), DeviceMesh((2,), ("tensor",)), asked)
    assert plan["layers.0.norm.weight"].pending == plan["layers.0.norm.bias"].pending == ("tensor",)


# regions


def region(kind: str) -> dict:
    return {"regions": {LAYER + "self_attn": {"kind": kind, "inputs": {"hidden": {"after": {"tensor": "shard(1)"}}}}}}


def test_an_opaque_region_is_trusted_with_its_contracts():
    plan = derive(stored("llama"), DeviceMesh((2,), ("tensor",)), region("opaque"))
    (attention,) = [each for each in plan.boundaries if each.module == "model.layers.0.self_attn"]
    assert attention.inputs[0].after == {"tensor": Shard(1)}


def test_an_opaque_region_that_takes_a_part_of_the_tokens_has_a_part_of_every_gradient():
    whole = {"parameters": {LAYER + "self_attn.**": {"placements": {"tensor": "replicate"}}}}
    ends = {
        "inputs": {"hidden": {"after": {"tensor": "shard(1)"}}},
        "outputs": {"hidden": {"before": {"tensor": "shard(1)"}}},
    }
    asked = whole | {"regions": {LAYER + "self_attn": {"kind": "opaque", **ends}}}
    sees_all, sees_part = (derive(stored("qwen3"), DeviceMesh((2,), ("tensor",)), each) for each in (whole, asked))
    members = [each.name for each in sees_all.parameters if each.boundary == "model.layers.0.self_attn"]
    assert {sees_all[name].pending for name in members} == {()}
    assert {sees_part[name].pending for name in members} == {("tensor",)}

    norm = {"model.layers.0.self_attn.k_norm.weight": {"pending": "none"}}
    by_hand = derive(stored("qwen3"), DeviceMesh((2,), ("tensor",)), asked | {"parameters": whole["parameters"] | norm})
    assert {name for name in members if not by_hand[name].pending} == set(norm)


def test_a_gradient_is_not_pending_where_its_parameter_is_cut():
    asked = region("opaque") | {"parameters": {LAYER + "self_attn.q_proj.weight": {"pending": ["tensor"]}}}
    (found,) = mended("llama", TWO, asked)
    assert (found.rule, found.message) == (
        "override",
        "is cut over tensor, where each rank has the gradient of its own part",
    )


def test_a_transparent_region_is_checked_inside():
    (found,) = mended("llama", TWO, region("transparent"))
    assert (found.rule, found.section) == ("contract", "regions")
    assert found.line == LAYER + "self_attn: {inputs: {hidden: {after: auto}}}"


def test_the_line_stands_behind_the_entry_that_is_wrong():
    asked = {
        "regions": {LAYER + "mlp": {"kind": "transparent"}},
        **contract(LAYER + "mlp", "inputs", "after", "shard(1)"),
    }
    (found,) = mended("llama", TWO, asked)
    assert found.section == "boundaries"


def test_a_gradient_of_a_region_that_cannot_be():
    asked = region("opaque")
    asked["regions"][LAYER + "self_attn"]["inputs"]["hidden"]["gradient"] = {"tensor": "replicate"}
    (found,) = mended("llama", TWO, asked)
    assert (found.rule, found.message) == (
        "contract",
        "input hidden: gradient is given as (tensor: replicate); the gradient of (tensor: shard(1)) is "
        "(tensor: shard(1))",
    )


# boundaries inside of others


@pytest.mark.parametrize(
    "model, sizes, module, outer, needed",
    [
        (few_heads(), FOUR, "qkv_proj", "self_attn", "features from (tensor: shard(2)) to (tensor: replicate)"),
        (few_heads(), FOUR, "o_proj", "self_attn", "features from (tensor: replicate) to (tensor: shard(2))"),
        ("olmo2", TWO, "q_norm", "self_attn", "heads from (tensor: shard(2)) to (tensor: replicate)"),
        ("mixtral", {"expert": 2}, "experts", "mlp", "tokens travel to their experts over expert"),
    ],
)
def test_a_boundary_that_is_needed_inside_of_another_is_not_taken_away(model, sizes, module, outer, needed):
    outer = f"model.layers.0.{outer}"
    (found,) = mended(model, sizes, {"boundaries": {f"{outer}.{module}": {"type": "none"}}})
    assert str(found) == (
        f"[contract] {outer}.{module}: is none, and so nothing is done there inside of {outer}; needed is: {needed}; "
        f"write below `boundaries:`\n    {outer}.{module}: {{type: auto}}"
    )


def test_the_sum_before_a_residual_is_not_taken_away():
    (found,) = mended(residual_inside(), TWO, {"boundaries": {"**.dense": {"type": "none"}}})
    assert (found.rule, found.line) == ("contract", "transformer.h.0.self_attention.dense: {type: auto}")
    assert found.message.endswith("needed is: hidden from (tensor: partial) to (tensor: shard(1))")


@pytest.mark.parametrize(
    "block, needed",
    [
        ("model.layers.0", "hidden from (tensor: replicate) to (tensor: shard(1))"),
        ("model.layers.1", "hidden from (tensor: shard(1)) to (tensor: replicate)"),
    ],
)
def test_the_edges_of_the_blocks_are_not_taken_away(block, needed):
    (found,) = mended("llama", TWO, {"boundaries": {block: {"type": "none"}}})
    assert (found.rule, found.line) == ("contract", block + ": {type: auto}")
    assert found.message == f"is none, and so nothing is done there; needed is: {needed}"


def test_a_boundary_that_does_nothing_may_be_taken_away():
    assert wrong("mixtral", {"expert": 2}, {"boundaries": {LAYER + "mlp.gate": {"type": "none"}}}) == []


def test_an_opaque_region_may_do_without_the_boundaries_inside():
    asked = {"boundaries": {"**.q_norm": {"type": "none"}}, "regions": {LAYER + "self_attn": {"kind": "opaque"}}}
    assert wrong("olmo2", TWO, asked) == []


@pytest.mark.parametrize(
    "asked",
    [
        contract("**.dense", "inputs", "before", "replicate", "features"),
        {
            "boundaries": {
                "**.qkv_proj": {"outputs": {"features": {"after": {"tensor": "shard(2)"}}}},
                "**.o_proj": {"inputs": {"features": {"before": {"tensor": "shard(2)"}}}},
            }
        },
    ],
)
def test_what_parts_of_a_module_give_each_other_lies_as_the_module_works_on_it(asked):
    model, sizes = (residual_inside(), TWO) if "**.dense" in asked["boundaries"] else (few_heads(), FOUR)
    assert {each.rule for each in mended(model, sizes, asked)} == {"chain"}


@pytest.mark.parametrize(
    "module, side, name", [("lm_head", "outputs", "logits"), ("model.embed_tokens", "inputs", "tokens")]
)
def test_nothing_outside_of_the_model_adds_up_a_pending_sum(module, side, name):
    end = "after" if side == "outputs" else "before"
    (found,) = mended("llama", TWO, contract(module, side, end, "partial", name))
    assert (found.rule, found.message) == (
        "chain",
        f"has {name} as (tensor: partial), and nothing adds up a pending sum",
    )


def test_a_pending_sum_has_no_taker_even_where_one_is_declared():
    asked = contract("model.norm", "outputs", "after", "partial", axis="context")
    asked["boundaries"] |= contract("lm_head", "inputs", "before", "partial", axis="context")["boundaries"]
    found = mended("llama", {"context": 2}, asked)
    assert {(each.rule, each.where) for each in found} == {("chain", "model.norm"), ("chain", "lm_head")}


# parameters kept whole beside cut ones


@pytest.mark.parametrize("sizes, axis", [(TWO, "tensor"), ({"expert": 2}, "expert")])
def test_a_router_kept_whole_beside_cut_experts(sizes, axis):
    (found,) = mended("mixtral", sizes, {"parameters": {LAYER + "mlp.gate.weight": {"role": "none"}}})
    assert (found.rule, found.line) == ("consistent", LAYER + "mlp.gate.weight: {role: auto}")
    assert found.message == (
        "stays whole with role: none, while model.layers.0.mlp.experts.gate_up_proj, which works on the same, is cut "
        f"over {axis}"
    )


def test_a_router_and_experts_kept_whole_beside_a_cut_shared_expert():
    whole = {LAYER + "mlp.gate.*": {"role": "none"}, LAYER + "mlp.experts.*": {"role": "none"}}
    found = mended("deepseek_v3", TWO, {"parameters": whole})
    assert {(each.rule, each.line) for each in found} == {("consistent", "model.layers.1.mlp.**: {role: none}")}


def test_a_norm_over_all_heads_kept_whole_inside_of_cut_attention():
    (found,) = mended("olmo2", TWO, {"parameters": {LAYER + "self_attn.q_norm.weight": {"role": "none"}}})
    assert (found.rule, found.line) == ("consistent", LAYER + "self_attn.q_norm.weight: {role: auto}")
    assert found.message == (
        "stays whole with role: none, while model.layers.0.self_attn.q_proj.weight, which works on the same, is cut "
        "over tensor"
    )


# roles and placements by hand on what is tied


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize(
    "entry",
    [
        *({"role": role} for role in ("up", "query", "norm", "router", "projection", "none")),
        {"placements": {"tensor": "shard(1)"}},
    ],
)
def test_one_paste_mends_what_is_tied(entry, name, sequence_parallel):
    mended("llama_tied", TWO, {"sequence_parallel": sequence_parallel, "parameters": {name: entry}})


def test_a_role_by_hand_that_breaks_a_module_is_taken_back():
    found = mended("llama", TWO, {"parameters": {"model.layers.0.self_attn.q_proj.weight": {"role": "key"}}})
    assert {(each.rule, each.line) for each in found} == {
        ("unknown", "model.layers.0.self_attn.q_proj.weight: {role: auto}")
    }


def test_a_role_taken_from_one_is_given_back_where_the_others_keep_theirs():
    found = mended("gpt2", TWO, {"parameters": {"transformer.h.0.attn.c_attn.weight": {"role": "none"}}})
    assert {each.line for each in found} == {"transformer.h.0.attn.c_attn.weight: {role: auto}"}
    assert [(each.rule, each.where.rpartition(".")[2]) for each in found] == [
        ("unknown", "bias"),
        ("consistent", "weight"),
    ]
