"""Lint: every rule has a bad plan that trips it and nothing else, and the line that it tells mends the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.core.errors import PlanError
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import RaggedShard, Shard, StridedShard
from hyper_parallel.core.plan.derive import derive
from hyper_parallel.core.plan.lint import Violation, lint, report
from hyper_parallel.core.plan.model import ModelDescription, ParameterDescription
from hyper_parallel.core.plan.placing import Placed
from tests.core.plan.by_hand import by_hand, stored
from tests.core.plan.linting import drafted, mended, pasted, wrong

TWO = {"tensor": 2}
WHOLE = "{placements: {tensor: replicate}}"


def told(violations: list[Violation]) -> list[tuple[str, str, str]]:
    return [(each.rule, each.where, each.line) for each in violations]


def placed_by_hand(draft, name: str, **changes):
    """The draft with another placement of one parameter, past all passes."""
    member = draft.members[name]
    placed = replace(member.placed, **changes)
    return replace(draft, members={**draft.members, name: replace(member, placed=placed)})


def test_stored_models_have_nothing_wrong():
    for name in ("llama", "gpt2", "olmo2", "phi3", "mixtral", "gpt_oss", "deepseek_v3", "falcon"):
        for sizes in (TWO, {"shard": 2, "expert": 2, "tensor": 2}, {"replicate": 2, "context": 2, "tensor": 4}):
            assert wrong(name, sizes) == []


# unknown


def test_an_unknown_parameter_is_told_with_what_was_tried():
    found = mended("mamba", TWO)
    assert {each.rule for each in found} == {"unknown"}
    told = {each.where: str(each) for each in found}
    assert told["backbone.layers.0.mixer.conv1d.weight"] == (
        "[unknown] backbone.layers.0.mixer.conv1d.weight and 1 more like it: no rule knows 'conv1d.weight', [64, 1, 4] "
        "of a Conv1d in a MambaMixer; write below `parameters:`\n"
        "    backbone.layers.*.mixer.conv1d.weight: {role: none}"
    )


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_an_unknown_mixer_stays_whole_only_if_an_override_says_so(sequence_parallel):
    model, mesh = stored("mamba"), DeviceMesh.from_sizes({"shard": 2, "context": 2, "tensor": 2})
    with pytest.raises(PlanError, match="no rule knows 'mixer.A_log'"):
        derive(model, mesh)
    asked = {"sequence_parallel": sequence_parallel, "parameters": {"backbone.**.mixer.**": {"role": "none"}}}
    plan = derive(model, mesh, asked)
    parameter = plan["backbone.layers.0.mixer.in_proj.weight"]
    assert (parameter.role, dict(parameter.placements)) == ("whole", {"shard": Shard(0)})
    # Every rank of tensor and context computes all of its samples, so only the data axes add up gradients.
    assert parameter.pending == ("shard",)
    (mixer,) = [each for each in plan.boundaries if each.module == "backbone.layers.0.mixer"]
    lies = {axis: str(each) for axis, each in mixer.inputs[0].before.items()}
    assert lies == {
        "shard": "shard(0)",
        "context": "shard(1)",
        "tensor": "shard(1)" if sequence_parallel else "replicate",
    }
    whole = {"shard": "shard(0)", "context": "replicate", "tensor": "replicate"}
    assert {axis: str(each) for axis, each in mixer.inputs[0].after.items()} == whole
    assert {axis: str(each) for axis, each in mixer.inputs[0].gradient.items()} == whole
    assert mixer.outputs[0].before == mixer.inputs[0].after and mixer.outputs[0].after == mixer.inputs[0].before


def test_a_whole_parameter_beside_cut_ones_has_a_pending_gradient():
    bare = {"model.layers.0.self_attn.strange": ((7,), "LlamaAttention")}
    plain = stored("llama")
    model = replace(plain, parameters=plain.parameters + by_hand(bare).parameters)
    (found,) = mended(model, TWO)
    assert found.line == f"model.layers.0.self_attn.**: {WHOLE}\nmodel.layers.0.self_attn.strange: {{role: none}}"
    plan = derive(model, DeviceMesh((2,), ("tensor",)), {"parameters": {"**.strange": {"role": "none"}}})
    assert plan["model.layers.0.self_attn.strange"].pending == ("tensor",)


# heads, divisibility, experts


@pytest.mark.parametrize("name", ["llama", "olmo2", "gpt_neox", "phi3", "deepseek_v3", "qwen3"])
def test_heads_that_cannot_be_dealt_out(name):
    found = mended(name, {"tensor": 3})
    assert {each.rule for each in found} == {"heads"}
    assert all("heads can't be dealt out to 3 tensor ranks (" in each.message + " (" for each in found)
    assert {each.line.rpartition(": {placements")[0].rpartition(".")[0].split(".")[-1] for each in found} <= {
        "self_attn",
        "attention",
    }


def test_heads_are_told_with_the_rule_that_led_there():
    found = mended("llama", {"tensor": 3})
    assert str(found[0]) == (
        "[heads] model.layers.0.self_attn.q_proj.weight and 1 more like it: 4 heads can't be dealt out to 3 tensor "
        f"ranks ({found[0].because}); write below `parameters:`\n    model.layers.*.self_attn.**: {WHOLE}"
    )
    assert "is a query: out 32 = 4 heads of 8" in found[0].because


def test_heads_of_keys_are_called_so():
    assert {each.message for each in mended("llama", {"tensor": 3})} == {
        "4 heads can't be dealt out to 3 tensor ranks",
        "2 key/value heads can't be dealt out to 3 tensor ranks",
    }


def test_attention_kept_whole_gives_complete_gradients():
    asked = {"parameters": {"model.layers.*.self_attn.**": {"placements": {"tensor": "replicate"}}}}
    plan = derive(stored("llama"), DeviceMesh.from_sizes({"shard": 2, "tensor": 3}), asked)
    for name in ("q_proj", "k_proj", "o_proj"):
        assert plan[f"model.layers.0.self_attn.{name}.weight"].pending == ("shard",)
    (attention,) = [each for each in plan.boundaries if each.module == "model.layers.0.self_attn"]
    assert str(attention.outputs[0].before["tensor"]) == "replicate"


def test_experts_that_cannot_be_dealt_out():
    found = mended("mixtral", {"expert": 3, "tensor": 2})
    assert {each.rule for each in found} == {"divisibility"}
    assert found[0].message == "4 experts can't be dealt out to 3 expert ranks"
    assert found[0].line == "model.layers.*.mlp.**: {placements: {expert: replicate}}"


def test_interleaved_features_that_cannot_be_cut():
    sizes = {"hidden_size": 32, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 8, "vocab_size": 96}
    model = replace(stored("gpt_oss"), config=sizes)
    kept = [each for each in model.parameters if ".self_attn." not in each.name]
    found = mended(replace(model, parameters=tuple(kept)), {"tensor": 5})
    assert {each.rule for each in found} == {"divisibility"}
    assert found[0].message == "96 features, 2 kinds one by one, can't be cut for 5 tensor ranks"
    assert found[0].line == f"model.layers.*.mlp.**: {WHOLE}"


def experts_one_by_one():
    parameters = {"model.layers.0.mlp.gate.weight": ((2, 32), "Linear")}
    for expert in range(2):
        place = f"model.layers.0.mlp.experts.{expert}"
        parameters |= {f"{place}.{each}_proj.weight": ((48, 32), "Linear") for each in ("gate", "up")}
        parameters[f"{place}.down_proj.weight"] = ((32, 48), "Linear")
    modules = {
        "model.layers.0.mlp": "MixtralSparseMoeBlock",
        "model.layers.0.mlp.experts": "ModuleList",
        **{f"model.layers.0.mlp.experts.{expert}": "MixtralMLP" for expert in range(2)},
    }
    return by_hand(parameters, modules)


def test_experts_of_modules_of_their_own_over_tensor_and_expert():
    found = mended(experts_one_by_one(), {"expert": 2, "tensor": 2})
    assert {each.rule for each in found} == {"experts"}
    assert "both are offered only for experts that are packed into one tensor" in found[0].message
    assert WHOLE in found[0].line
    plan = derive(experts_one_by_one(), DeviceMesh.from_sizes({"expert": 2, "tensor": 2}), pasted(None, found))
    assert plan["model.layers.0.mlp.experts.1.up_proj.weight"].placements == {"expert": RaggedShard((0,), (0, 1))}


# coverage and one boundary


@pytest.mark.parametrize("module", ["model.layers.0.mlp", "model.layers.1.input_layernorm", "lm_head"])
def test_a_boundary_taken_away_leaves_its_parameters_uncovered(module):
    found = mended("llama", TWO, {"boundaries": {module: {"type": "none"}}})
    assert {(each.rule, each.line, each.section) for each in found} == {
        ("coverage", f"{module}: {{type: auto}}", "boundaries")
    }
    assert found[0].message == f"acts in no boundary: {module} is none"


def test_a_parameter_in_two_boundaries():
    draft = drafted("llama", TWO)
    twice = replace(draft.groups[0], module="model.other")
    (found,) = lint(replace(draft, groups=(*draft.groups, twice), kinds={**draft.kinds, twice.module: "embedding"}))
    assert (found.rule, found.where, found.line) == ("one boundary", "model.embed_tokens.weight", "")
    assert found.message == "stands in 2 boundaries, model.embed_tokens and model.other; it must stand in one"


# chain


def contract(module: str, side: str, end: str, placement: str, name: str = "hidden") -> dict:
    return {"boundaries": {module: {side: {name: {end: {"tensor": placement}}}}}}


CHAINS = {
    "what is handed on without a taker": ("llama", contract("model.layers.0.mlp", "outputs", "after", "replicate")),
    "what is taken without a giver": ("llama", contract("model.layers.0.self_attn", "inputs", "before", "replicate")),
    "a pending sum handed on": ("llama", contract("model.layers.0.mlp", "outputs", "after", "partial")),
    "experts in a block": ("mixtral", contract("model.layers.0.mlp.experts", "outputs", "after", "replicate")),
    "gradients in a block": ("mixtral", contract("model.layers.0.mlp.gate", "inputs", "gradient_before", "replicate")),
    "heads inside attention": (
        "olmo2",
        contract("model.layers.0.self_attn.q_norm", "inputs", "before", "replicate", "heads"),
    ),
    "features inside attention": (
        "phi3",
        contract("model.layers.0.self_attn.qkv_proj", "outputs", "after", "shard(2)", "features"),
    ),
}


@pytest.mark.parametrize("case", CHAINS)
def test_a_broken_chain(case):
    model, asked = CHAINS[case]
    found = mended(model, TWO, asked)
    assert {(each.rule, each.section) for each in found} == {("chain", "boundaries")}


def test_a_broken_chain_names_both_ends_and_the_layouts():
    (found,) = mended("llama", TWO, CHAINS["what is handed on without a taker"][1])
    assert str(found) == (
        "[chain] model.layers.0.mlp: hands on hidden states as (tensor: replicate), and no neighbour takes them so; "
        "they lie as (tensor: shard(1)); write below `boundaries:`\n"
        "    model.layers.0.mlp: {outputs: {hidden: {after: auto}}}"
    )
    (found,) = mended("mixtral", TWO, CHAINS["experts in a block"][1])
    assert found.message == (
        "hands hidden states on as (tensor: replicate), and model.layers.0.mlp, around it, wants (tensor: partial)"
    )


def test_another_layout_between_neighbours_that_agree():
    asked = contract("model.layers.*.self_attn", "inputs", "before", "replicate")
    asked["boundaries"] |= contract("model.layers.*.input_layernorm", "outputs", "after", "replicate")["boundaries"]
    assert wrong("llama", TWO, asked) == []


def test_a_shared_expert_kept_whole_beside_cut_ones():
    asked = {"parameters": {"model.layers.1.mlp.shared_experts.**": {"placements": {"tensor": "replicate"}}}}
    found = mended("deepseek_v3", TWO, asked)
    assert {(each.rule, each.where, each.line) for each in found} == {
        ("chain", "model.layers.1.mlp.shared_experts", f"model.layers.1.mlp.**: {WHOLE}")
    }


# layouts


def test_a_contract_that_no_tensor_can_have():
    (found,) = mended("llama", TWO, contract("lm_head", "outputs", "after", "shard(7)", "logits"))
    assert (found.rule, found.where) == ("layout", "lm_head")
    assert found.message.startswith("output logits: axis 'tensor': shard(7) names dim 7")


def test_a_placement_that_no_parameter_can_have():
    draft = placed_by_hand(drafted("llama", TWO), "model.norm.weight", placements={"tensor": Shard(3)})
    (found,) = lint(draft)
    assert (found.rule, found.line) == ("layout", "model.norm.weight: {placements: auto}")
    assert "shard(3) names dim 3" in found.message


def test_data_parallel_placements_set_by_hand():
    draft = drafted("llama", {"replicate": 2, "shard": 2})
    (found,) = lint(placed_by_hand(draft, "lm_head.weight", placements={"shard": Shard(1)}))
    assert (found.rule, found.where) == ("data parallel", "lm_head.weight")
    assert found.message == "shard: shard(1) is set by hand; fully sharded data parallelism makes it shard(0)"
    (found,) = lint(placed_by_hand(draft, "lm_head.weight", placements={"replicate": Shard(1), "shard": Shard(0)}))
    assert (found.rule, found.message.partition(";")[0]) == ("data parallel", "replicate: shard(1) is set by hand")


def test_an_axis_that_the_mesh_lacks():
    draft = placed_by_hand(drafted("llama", TWO), "model.norm.weight", placements={"expert": Shard(0)})
    (found,) = lint(draft)
    assert (found.rule, found.message) == ("axis", "is placed over 'expert', which the mesh tensor=2 does not have")


def test_a_pipeline_is_not_planned():
    (found,) = wrong("llama", {"pipeline": 2, "tensor": 2})
    assert (found.rule, found.where) == ("axis", "")
    assert str(found) == (
        "[axis] the model itself: the mesh pipeline=2xtensor=2 has a pipeline, which is not planned; leave that axis "
        "out"
    )


# tied


@pytest.mark.parametrize("one, other", [("model.embed_tokens", "lm_head"), ("lm_head", "model.embed_tokens")])
def test_tied_parameters_that_are_placed_differently(one, other):
    asked = {"parameters": {f"{one}.weight": {"placements": {"tensor": "replicate"}}}}
    (found,) = mended("llama_tied", TWO, asked)
    assert (found.rule, found.where, found.line) == ("tied", "lm_head.weight", f"{other}.weight: {WHOLE}")
    here, there = ("replicate", "tensor: shard(0)") if one != "lm_head" else ("tensor: shard(0)", "replicate")
    assert found.message == (
        f"is the same tensor as model.embed_tokens.weight, which is placed as {here}, and it as {there}"
    )


def test_tied_parameters_whose_gradients_differ():
    draft = placed_by_hand(drafted("llama_tied", TWO), "lm_head.weight", pending=("tensor",))
    (found,) = lint(draft)
    assert (found.rule, found.message) == (
        "tied",
        "is the same tensor as model.embed_tokens.weight, whose gradient is pending over no axis, and its own over "
        "tensor",
    )


# consistent

WEIGHT = "model.layers.*.{}.weight"


@pytest.mark.parametrize(
    "model, name",
    [
        ("llama", "mlp.gate_proj"),
        ("llama", "mlp.down_proj"),
        ("llama", "self_attn.q_proj"),
        ("llama", "self_attn.k_proj"),
        ("llama", "self_attn.o_proj"),
        ("deepseek_v3", "self_attn.kv_b_proj"),
        ("phi3", "mlp.gate_up_proj"),
    ],
)
def test_one_kept_whole_while_its_partners_are_cut(model, name):
    pattern = WEIGHT.format(name)
    found = mended(model, TWO, {"parameters": {pattern: {"placements": {"tensor": "replicate"}}}})
    lines = [(each.rule, line) for each in found for line in each.line.split("\n")]
    assert {rule for rule, _ in lines} == {"consistent"}
    assert "which works on the same, is cut" in found[0].message
    assert all(line.endswith(": {placements: {tensor: auto}}") for _, line in lines)


def test_packed_experts_kept_whole_over_one_axis_only():
    asked = {"parameters": {"model.layers.*.mlp.experts.down_proj": {"placements": {"expert": "replicate"}}}}
    (found,) = mended("mixtral", {"expert": 2}, asked)
    assert (found.rule, found.line) == (
        "consistent",
        "model.layers.*.mlp.experts.down_proj: {placements: {expert: auto}}",
    )


@pytest.mark.parametrize(
    "axis, placement, usual", [("tensor", "shard(1)", "is cut as shard(0)"), ("context", "shard(0)", "is kept whole")]
)
def test_a_cut_that_the_role_does_not_have(axis, placement, usual):
    asked = {"parameters": {"model.layers.0.mlp.up_proj.weight": {"placements": {axis: placement}}}}
    (found,) = mended("llama", {"context": 2, "tensor": 2}, asked)
    assert found.rule == "consistent"
    assert found.message == f"{axis}: {placement}, but the role up {usual} over {axis}"
    assert found.line == f"model.layers.0.mlp.up_proj.weight: {{placements: {{{axis}: auto}}}}"


@pytest.mark.parametrize("placement", ["shard(0)", "shard(1)", "shard(2)", "strided_shard(0, 2)"])
@pytest.mark.parametrize("axis", ["tensor", "expert", "context"])
@pytest.mark.parametrize("name", ["input_layernorm.weight", "mlp.**"])
def test_a_cut_of_what_has_the_role_none_is_told_once(name, axis, placement):
    asked = {"parameters": {f"model.layers.1.{name}": {"role": "none", "placements": {axis: placement}}}}
    found = mended("llama", {axis: 2}, asked)
    assert {each.rule for each in found} == {"consistent"}
    assert {each.message for each in found} == {f"{axis}: {placement}, but the role none is kept whole over {axis}"}
    assert {each.line.partition(": ")[2] for each in found} == {f"{{placements: {{{axis}: auto}}}}"}
    assert len(found) == len({each.where for each in found})


def test_a_cut_that_can_not_be_is_told_once():
    asked = {"parameters": {"model.layers.*.input_layernorm.weight": {"placements": {"tensor": "shard(2)"}}}}
    (found,) = mended("llama", TWO, asked)
    assert str(found) == (
        "[consistent] model.layers.0.input_layernorm.weight and 1 more like it: tensor: shard(2), but the role norm is "
        "kept whole over tensor ('input_layernorm.weight' is a norm: 32 features: hidden_size); write below "
        "`parameters:`\n    model.layers.*.input_layernorm.weight: {placements: {tensor: auto}}"
    )


def test_fused_blocks_cut_as_one():
    asked = {"parameters": {"model.layers.*.mlp.gate_up_proj.weight": {"placements": {"tensor": "shard(0)"}}}}
    (found,) = mended("phi3", TWO, asked)
    assert found.message == "tensor: shard(0), but the role gate_up is cut as strided_shard(0, 2) over tensor"


def test_a_role_taken_from_one_of_several():
    asked = {"parameters": {"model.layers.*.mlp.gate_proj.weight": {"role": "none"}}}
    (found,) = mended("llama", TWO, asked)
    assert (found.rule, found.line) == ("consistent", "model.layers.*.mlp.gate_proj.weight: {role: auto}")
    assert found.message == (
        "stays whole with role: none, while model.layers.0.mlp.up_proj.weight, which works on the same, is cut over "
        "tensor"
    )


def test_a_role_taken_from_one_that_is_placed_whole_too():
    name = "model.layers.*.mlp.gate_proj.weight"
    (found,) = mended("llama", TWO, {"parameters": {name: {"role": "none", "placements": {"tensor": "replicate"}}}})
    assert found.line == f"{name}: {{role: auto, placements: {{tensor: auto}}}}"


def test_a_head_without_a_role():
    (found,) = mended("llama", TWO, {"parameters": {"lm_head.weight": {"role": "none"}}})
    assert (found.rule, found.line) == ("consistent", "lm_head.weight: {role: auto, placements: none}")


# together


def test_all_violations_come_at_once_with_one_file_that_mends_them():
    asked = {"boundaries": {"model.norm": {"type": "none"}}}
    found = wrong("llama", {"tensor": 3}, asked)
    assert {each.rule for each in found} == {"heads", "coverage"}
    with pytest.raises(PlanError) as error:
        derive(stored("llama"), DeviceMesh((3,), ("tensor",)), asked)
    message = str(error.value)
    assert message.startswith("LlamaForCausalLM can't be planned on tensor=3:\n[heads] model.layers.0.self_attn.q_proj")
    assert message.endswith(
        "all lines together, as an override file:\n"
        "  parameters:\n"
        f"    model.layers.*.self_attn.**: {WHOLE}\n"
        "  boundaries:\n"
        "    model.norm: {type: auto}"
    )


def test_a_boundary_taken_away_does_not_hide_what_its_entry_says_of_contracts():
    ends = {
        "inputs": {"hidden": {"after": {"tensor": "shard(2)"}}},
        "outputs": {"hidden": {"after": {"tensor": "partial"}}},
    }
    found = mended("llama", TWO, {"boundaries": {"model.norm": {"type": "none", **ends}}})
    assert [str(each) for each in found] == [
        "[coverage] model.norm.weight: acts in no boundary: model.norm is none ('norm.weight' is a norm: 32 features: "
        "hidden_size); write below `boundaries:`\n    model.norm: {type: auto}",
        "[contract] model.norm: input hidden: after is given as (tensor: shard(2)); both ends of a norm have the same "
        "whole tokens and no pending sum, such as (tensor: replicate); write below `boundaries:`\n"
        "    model.norm: {inputs: {hidden: {after: auto}}}",
        "[chain] model.norm: hands on hidden states as (tensor: partial), and no neighbour adds up a pending sum; they "
        "lie as (tensor: replicate); write below `boundaries:`\n    model.norm: {outputs: {hidden: {after: auto}}}",
    ]


def test_what_agrees_with_a_boundary_taken_away_is_not_told():
    asked = contract("model.layers.1.self_attn", "inputs", "before", "replicate")
    norm = contract("model.layers.1.input_layernorm", "outputs", "after", "replicate")["boundaries"]
    asked["boundaries"] |= {module: {"type": "none", **ends} for module, ends in norm.items()}
    (found,) = mended("llama", TWO, asked)
    assert (found.rule, found.line) == ("coverage", "model.layers.1.input_layernorm: {type: auto}")


@pytest.mark.parametrize(
    "role, then",
    [("key", "the role up is cut as shard(0) over tensor"), ("none", "the role none is kept whole over tensor")],
)
def test_an_unknown_role_does_not_hide_a_cut_that_it_does_not_have(role, then):
    name = "model.layers.0.mlp.up_proj.weight"
    found = mended("llama", TWO, {"parameters": {name: {"role": role, "placements": {"tensor": "shard(1)"}}}})
    assert f"tensor: shard(1), but {then}" in [each.message for each in found if each.where == name]


def test_an_unknown_role_does_not_hide_that_it_is_whole_beside_cut_ones():
    name = "model.layers.0.mlp.up_proj.weight"
    asked = {"role": "key", "placements": {"tensor": "replicate"}}
    found = mended("llama", TWO, {"parameters": {name: asked}})
    assert "is whole over tensor, while model.layers.0.mlp.gate_proj.weight, which works on the same, is cut" in [
        each.message for each in found if each.where == name
    ]
    whole = {"model.layers.0.mlp.**": {"placements": {"tensor": "replicate"}}, name: asked}
    assert {each.rule for each in mended("llama", TWO, {"parameters": whole})} == {"unknown"}


def test_an_unknown_parameter_does_not_hide_a_cut_of_it():
    asked = {"parameters": {"backbone.layers.*.mixer.A_log": {"placements": {"tensor": "shard(0)"}}}}
    found = [each for each in mended("mamba", TWO, asked) if each.where == "backbone.layers.0.mixer.A_log"]
    assert [each.rule for each in found] == ["unknown", "consistent"]
    assert found[1].message == "tensor: shard(0), but the role none is kept whole over tensor"


def test_heads_that_cannot_be_dealt_out_are_mended_whatever_cut_was_asked_for():
    for name in ("q_proj", "o_proj"):
        asked = {
            "parameters": {f"model.layers.0.self_attn.{name}.weight": {"placements": {"tensor": "strided_shard(0, 2)"}}}
        }
        assert {each.rule for each in mended("llama", {"tensor": 3}, asked)} == {"heads"}


def test_a_line_holds_only_for_those_that_need_it():
    asked = {"parameters": {"model.layers.1.mixer.**": {"role": "none"}}}
    model = by_hand({f"model.layers.{layer}.mixer.weight": ((7, 7), "Conv1d") for layer in range(3)})
    (found,) = mended(model, TWO, asked)
    assert found.line == "model.layers.0.mixer.weight: {role: none}\nmodel.layers.2.mixer.weight: {role: none}"
    assert found.more == 1
    assert report([found]).count("{role: none}") == 4


def test_thousands_of_alike_violations_are_one():
    parameters = {f"layers.{layer}.mixer.weight": ((7, 7), "Conv1d") for layer in range(2000)}
    (found,) = wrong(by_hand(parameters), TWO)
    assert found.more == 1999
    assert str(found).startswith("[unknown] layers.0.mixer.weight and 1999 more like it: no rule knows 'mixer.weight'")
    assert found.line == "layers.*.mixer.weight: {role: none}"


def test_a_uneven_strided_draft_is_legal():
    draft = drafted("phi3", {"tensor": 5, "shard": 2}, {"parameters": {"**.self_attn.**": {"placements": "none"}}})
    placed: Placed = draft.members["model.layers.0.mlp.gate_up_proj.weight"].placed
    assert placed.placements["tensor"] == StridedShard(0, 2)
    assert lint(draft) == []


def test_roles_that_make_no_boundary_are_told_with_everything_else():
    """A module that is attention and feed-forward at once does not hide an unknown convolution beside it."""
    parts = {f"{each}.weight": (32, 32) for each in ("q_proj", "k_proj", "v_proj", "o_proj")}
    parts |= {"up_proj.weight": (48, 32), "down_proj.weight": (32, 48)}
    names = {"model.embed_tokens.weight": ((96, 32), "Embedding"), "model.layers.0.conv.weight": ((32, 1, 4), "Conv1d")}
    names |= {f"model.layers.0.self_attn.{name}": (shape, "Linear") for name, shape in parts.items()}
    modules = {"": "Model"}
    for name in names:
        path = name.split(".")[:-1]
        for depth in range(1, len(path) + 1):
            modules.setdefault(".".join(path[:depth]), names[name][1] if depth == len(path) else "Block")
    modules |= {"model.layers": "ModuleList", "model.layers.0.self_attn": "ParallelAttentionMLP"}
    made = tuple(ParameterDescription(name, shape, "float32", owner) for name, (shape, owner) in names.items())
    model = ModelDescription("Model", made, modules, config={"num_attention_heads": 4})
    with pytest.raises(PlanError) as told:
        derive(model, DeviceMesh((2,), ("tensor",)))
    message = str(told.value)
    assert "model.layers.0.conv.weight" in message and "no rule knows" in message
    assert "make no boundary together" in message and "role: none" in message
