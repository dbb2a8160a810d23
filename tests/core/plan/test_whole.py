"""What stays whole beside what is cut: refused where it may work on heads or cut features, and mended by one paste."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.plan.derive import derive
from hyper_parallel.core.plan.model import ModelDescription
from hyper_parallel.core.plan.violations import report
from tests.core.plan.by_hand import by_hand
from tests.core.plan.linting import mended, wrong

TWO = {"tensor": 2}
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 96}
"""No two sizes alike: 24 features of queries, 12 of keys, 32 of hidden states, and 40 inner ones."""

Parameters = dict[str, tuple[tuple[int, ...], str]]
ATTENTION: Parameters = {
    "self_attn.q_proj.weight": ((24, 32), "Linear"),
    "self_attn.k_proj.weight": ((12, 32), "Linear"),
    "self_attn.v_proj.weight": ((12, 32), "Linear"),
    "self_attn.o_proj.weight": ((32, 24), "Linear"),
}
MLP: Parameters = {
    "mlp.gate_proj.weight": ((40, 32), "Linear"),
    "mlp.up_proj.weight": ((40, 32), "Linear"),
    "mlp.down_proj.weight": ((32, 40), "Linear"),
}
HALVES: Parameters = {"fc1.weight": ((40, 32), "Linear"), "fc2.weight": ((32, 40), "Linear")}
MOE: Parameters = {
    "mlp.gate.weight": ((8, 32), "MixtralTopKRouter"),
    "mlp.experts.gate_up_proj": ((8, 80, 32), "MixtralExperts"),
    "mlp.experts.down_proj": ((8, 32, 40), "MixtralExperts"),
}


def decoder(extra: Parameters, parts: Parameters = ATTENTION | MLP, **config: int) -> ModelDescription:
    """Two layers of `parts` and, in each, `extra`; names that begin with a dot stand outside of the layers."""
    names: Parameters = {"embed_tokens.weight": ((96, 32), "Embedding"), "lm_head.weight": ((96, 32), "Linear")}
    for layer in range(2):
        names |= {f"layers.{layer}.{name}": each for name, each in (parts | extra).items() if name[0] != "."}
        names[f"layers.{layer}.norm.weight"] = ((32,), "RMSNorm")
    names |= {name[1:]: each for name, each in extra.items() if name[0] == "."}
    modules = {"layers": "ModuleList"}
    for layer in range(2):
        modules |= {f"layers.{layer}": "Block", f"layers.{layer}.self_attn": "Attention", f"layers.{layer}.mlp": "MLP"}
    return by_hand(names, modules, SIZES | config)


def kept(*names: str) -> dict:
    return {"parameters": {f"**.{name.lstrip('.')}": {"role": "none"} for name in names}}


REPLICATE = "{placements: {tensor: replicate}}"
IN_ATTENTION, IN_MLP = f"layers.*.self_attn.**: {REPLICATE}", f"layers.*.mlp.**: {REPLICATE}"
HEADS = "layers.0.self_attn.q_proj.weight has 4 heads"

REFUSED: dict[str, tuple[Parameters, str, str]] = {
    "slopes": ({"self_attn.slopes": ((4,), "Attention")}, f"has 4 in dim 0, and {HEADS}", IN_ATTENTION),
    "a bias by distance": (
        {"self_attn.bias_of.weight": ((7, 4), "Embedding")},
        f"has 4 in dim 1, and {HEADS}",
        IN_ATTENTION,
    ),
    "temperatures": (
        {"self_attn.temperature": ((1, 4, 1, 1), "Attention")},
        f"has 4 in dim 1, and {HEADS}",
        IN_ATTENTION,
    ),
    "a gate for each head": (
        {"self_attn.head_gate.weight": ((4, 32), "Linear")},
        f"has 4 in dim 0, and {HEADS}",
        IN_ATTENTION,
    ),
    "scales of keys": (
        {"self_attn.scale": ((2, 6), "Attention")},
        "has 2 in dim 0, and layers.0.self_attn.k_proj.weight has 2 key/value heads",
        IN_ATTENTION,
    ),
    "a norm of all heads": (
        {"self_attn.inner_norm.weight": ((24,), "RMSNorm")},
        "has 24 in dim 0, and layers.0.self_attn.q_proj.weight has 24 features",
        IN_ATTENTION,
    ),
    "a bias of queries, keys and values": (
        {"self_attn.qkv_bias": ((48,), "Attention")},
        "has 48 in dim 0, and layers.0.self_attn.q_proj.weight has 48 features with keys and values",
        IN_ATTENTION,
    ),
    "a norm of inner features": (
        {"mlp.ffn_norm.weight": ((40,), "RMSNorm")},
        "has 40 in dim 0, and layers.0.mlp.gate_proj.weight has 40 features",
        IN_MLP,
    ),
    "scales of gate and up": (
        {"mlp.scale": ((80,), "MLP")},
        "has 80 in dim 0, and layers.0.mlp.gate_proj.weight has 80 features of gate and up",
        IN_MLP,
    ),
    "a number inside of a linear": (
        {"self_attn.o_proj.limit": ((1,), "Linear")},
        "works on what layers.0.self_attn.o_proj.weight does, which tensor cuts",
        IN_ATTENTION,
    ),
    "a scale of hidden states, before a sum or behind it": (
        {"mlp.scale": ((32,), "MLP")},
        "has the hidden size 32 in dim 0, and nothing tells whether it works before or behind the sum that the ranks "
        "make with layers.0.mlp.down_proj.weight, which tensor cuts",
        IN_MLP,
    ),
    "a bias by distance beside attention": (
        {"distance.weight": ((7, 4), "Embedding")},
        f"has 4 in dim 1, and {HEADS}",
        IN_ATTENTION,
    ),
    "gates for heads beside attention": (
        {"head_gate.weight": ((4, 32), "Linear")},
        f"has 4 in dim 0, and {HEADS}",
        IN_ATTENTION,
    ),
    "a bias by distance for all layers": (
        {".distance.weight": ((7, 4), "Embedding")},
        f"has 4 in dim 1, and {HEADS}",
        IN_ATTENTION,
    ),
}


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("case", REFUSED)
def test_what_may_work_on_cut_features_is_not_kept_whole(case, sequence_parallel):
    extra, message, line = REFUSED[case]
    (name,) = extra
    asked = {"sequence_parallel": sequence_parallel, **kept(name)}
    (found,) = (each for each in mended(decoder(extra), TWO, asked) if each.rule != "sequence")
    cuts = "" if message.endswith("cuts") else ", which tensor cuts"
    assert (found.rule, found.line) == ("consistent", line)
    assert found.message == f"stays whole with role: none, and {message}{cuts}"


@pytest.mark.parametrize("case", REFUSED)
def test_the_unknown_is_told_with_all_that_keeps_it_whole_rightly(case):
    extra, message, line = REFUSED[case]
    (found,) = mended(decoder(extra), TWO, {"sequence_parallel": False})
    (name,) = extra
    place = name[1:] if name[0] == "." else f"layers.*.{name}"
    assert (found.rule, found.line) == ("unknown", f"{line}\n{place}: {{role: none}}")
    assert f"; it {message}" in found.message


def test_a_whole_message():
    (found,) = mended(decoder(REFUSED["slopes"][0]), TWO)
    assert str(found) == (
        "[unknown] layers.0.self_attn.slopes and 1 more like it: no rule knows 'self_attn.slopes', [4] of a Attention "
        "in a Block; 'self_attn' is cut around it, so it may be kept whole only if it mixes no heads or inner "
        "features; it has 4 in dim 0, and layers.0.self_attn.q_proj.weight has 4 heads, which tensor cuts; write below "
        "`parameters:`\n"
        f"    layers.*.self_attn.**: {REPLICATE}\n"
        "    layers.*.self_attn.slopes: {role: none}"
    )


def test_what_is_whole_with_all_around_it_has_a_complete_gradient():
    extra = REFUSED["slopes"][0]
    around = {"**.self_attn.**": {"placements": {"tensor": "replicate"}}}
    asked = {"parameters": kept("self_attn.slopes")["parameters"] | around}
    plan = derive(decoder(extra), DeviceMesh.from_sizes(TWO), asked)
    for name in ("slopes", "q_proj.weight", "o_proj.weight"):
        parameter = plan[f"layers.1.self_attn.{name}"]
        assert not parameter.placements and not parameter.pending
    assert plan["layers.1.mlp.up_proj.weight"].local_shape == (20, 32)


def test_a_size_that_is_the_hidden_one_too_tells_nothing():
    extra: Parameters = {"self_attn.sub_norm.weight": ((32,), "RMSNorm")}
    wide = {
        name: (tuple(32 if size == 24 else size for size in shape), kind) for name, (shape, kind) in ATTENTION.items()
    }
    wide |= {f"self_attn.{each}_proj.weight": ((16, 32), "Linear") for each in "kv"}
    (found,) = mended(decoder(extra, wide | MLP, head_dim=8), TWO, kept("self_attn.sub_norm.weight"))
    assert found.message == (
        "stays whole with role: none, and has 32 in dim 0, and layers.0.self_attn.q_proj.weight has 32 features, which "
        "tensor cuts; 32 is the hidden size too, and nothing tells which it is"
    )


ALLOWED: dict[str, tuple[Parameters, tuple[str, ...]]] = {
    "a number": ({"self_attn.temperature": ((1,), "Attention")}, ("tensor",)),
    "as many numbers as nothing else has": ({"mlp.act.alpha": ((7,), "Activation")}, ("tensor",)),
    "scales of a layer": ({"layer_scale": ((32,), "Block")}, ("tensor",)),
    "a mixer with as many heads": (
        {
            "mixer.in_proj.weight": ((40, 32), "Linear"),
            "mixer.A_log": ((4,), "Mixer"),
            "mixer.out.weight": ((32, 40), "Linear"),
        },
        (),
    ),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_what_can_be_no_part_of_a_cut_stays_whole(case):
    extra, pending = ALLOWED[case]
    model = decoder(extra)
    assert {line for each in mended(model, TWO) for line in each.line.split("\n")} == {
        f"layers.*.{name}: {{role: none}}" for name in extra
    }
    plan = derive(model, DeviceMesh.from_sizes(TWO), kept(*extra))
    for name in extra:
        assert (plan[f"layers.0.{name}"].placements, plan[f"layers.0.{name}"].pending) == ({}, pending)
    assert plan["layers.0.self_attn.q_proj.weight"].local_shape == (12, 32)


def test_the_unknown_in_attention_is_whole_with_all_of_it_unless_a_user_knows_better():
    name = "self_attn.sub_norm.weight"
    model = decoder({name: ((6,), "RMSNorm")})
    (found,) = mended(model, TWO)
    assert found.line == f"{IN_ATTENTION}\nlayers.*.{name}: {{role: none}}"
    assert found.message.endswith(
        "; it stands in the attention layers.0.self_attn, which tensor cuts, and nothing tells whether all heads "
        "share it"
    )
    plan = derive(model, DeviceMesh.from_sizes(TWO), kept(name))
    assert plan[f"layers.0.{name}"].pending == ("tensor",)
    assert plan["layers.0.self_attn.q_proj.weight"].local_shape == (12, 32)


@pytest.mark.parametrize(
    "extra, message",
    [
        (
            {f"self_attn.norms.{head}.weight": ((6,), "LayerNorm") for head in range(4)},
            f"stands in a list of 4, and {HEADS}",
        ),
        (
            {"self_attn.pairs": ((8,), "Attention")},
            "has 8 in dim 0, and layers.0.self_attn.q_proj.weight has 8 halves of heads",
        ),
    ],
)
def test_numbers_of_heads_in_other_forms(extra, message):
    found = [each for each in mended(decoder(extra), TWO, kept(*extra)) if each.rule != "sequence"]
    assert {each.rule for each in found} == {"consistent"}
    assert {each.message for each in found} == {f"stays whole with role: none, and {message}, which tensor cuts"}
    assert {each.line for each in found} == {IN_ATTENTION}


def test_attention_without_keys_is_whole_with_all_that_may_hand_it_some():
    keyless = {f"layers.1.self_attn.{part}_proj.{leaf}" for part in "kv" for leaf in ("weight", "bias")}
    model = decoder({})
    model = replace(model, parameters=tuple(each for each in model.parameters if each.name not in keyless))
    found = [each for each in mended(model, TWO) if each.rule != "sequence"]
    assert {each.rule for each in found} == {"unknown"}
    told = {each.where: each for each in found}["layers.1.self_attn.q_proj.weight"]
    assert told.line == f"{IN_ATTENTION}\nlayers.1.self_attn.q_proj.weight: {{role: none}}"
    assert told.message.endswith(
        "; it stands in layers.1.self_attn, which makes no keys, and layers.0.self_attn may hand it its own, whose "
        "heads tensor cuts"
    )


def test_a_size_of_two_modules_is_whole_in_both():
    narrow = {name: (tuple(24 if size == 40 else size for size in shape), kind) for name, (shape, kind) in MLP.items()}
    asked = {"sequence_parallel": False, **kept("mixed.weight")}
    (found,) = mended(decoder({"mixed.weight": ((24, 7), "Mixed")}, ATTENTION | narrow), TWO, asked)
    assert (found.rule, found.line) == ("consistent", f"{IN_ATTENTION}\n{IN_MLP}")


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_halves_beside_attention_that_is_whole_stay_halves(sequence_parallel):
    asked = {"sequence_parallel": sequence_parallel, "parameters": {"layers.*.self_attn.**": {"role": "none"}}}
    plan = derive(decoder({}, ATTENTION | HALVES), DeviceMesh.from_sizes(TWO), asked)
    kinds = {each.module: each.kind for each in plan.boundaries}
    assert (kinds["layers.0.self_attn"], kinds["layers.0.fc1"], kinds["layers.0.fc2"]) == ("whole", "up", "down")
    assert kinds.get("layers.0") == ("entry" if sequence_parallel else None)
    assert plan["layers.0.fc1.weight"].local_shape == (20, 32)


def test_features_between_halves_that_no_module_holds():
    extra: Parameters = {"ffn_norm.weight": ((40,), "LayerNorm")}
    found = mended(decoder(extra, ATTENTION | HALVES), TWO, kept("ffn_norm.weight"))
    assert [(each.rule, each.line) for each in found] == [
        ("consistent", f"layers.*.fc1.**: {REPLICATE}\nlayers.*.fc2.**: {REPLICATE}")
    ]


ADAPTERS: dict[str, Parameters] = {
    "a bias of a factor": {
        "lora_A.default.weight": ((5, 32), "Linear"),
        "lora_B.default.weight": ((24, 5), "Linear"),
        "lora_B.default.bias": ((24,), "Linear"),
    },
    "square factors": {
        "lora_A.default.weight": ((32, 32), "Linear"),
        "lora_B.default.weight": ((24, 32), "Linear"),
    },
    "scales of outputs": {"ia3_l.default": ((24, 1), "ParameterDict")},
    "a number": {"ia3_l.default": ((1,), "ParameterDict")},
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_what_is_unknown_of_an_adapter_is_whole_only_with_its_linear(case):
    parts = {name.replace("q_proj.", "q_proj.base_layer."): each for name, each in ATTENTION.items()}
    model = decoder({f"self_attn.q_proj.{name}": each for name, each in ADAPTERS[case].items()}, parts | MLP)
    found = mended(model, TWO)
    assert {each.rule for each in found} == {"unknown"}
    for each in found:
        assert each.message.endswith(
            "; it works on what layers.0.self_attn.q_proj.base_layer.weight does, which tensor cuts"
        )
        assert each.line.split("\n")[0] == IN_ATTENTION
    asked = {"parameters": {f"**{each.where.removeprefix('layers.0')}": {"role": "none"} for each in found}}
    assert {each.rule for each in mended(model, TWO, asked)} == {"consistent"}


# experts


@pytest.mark.parametrize(
    "name, owner", [("mlp.experts.scale", "MixtralExperts"), ("mlp.gate.temperature", "MixtralTopKRouter")]
)
def test_the_number_of_experts_counts_where_experts_are_dealt_out(name, owner):
    model = decoder({name: ((8,), owner)}, ATTENTION | MOE)
    assert wrong(model, TWO, kept(name)) == []
    (found,) = mended(model, {"expert": 2}, kept(name))
    assert (found.rule, found.line) == ("consistent", "layers.*.mlp.**: {placements: {expert: replicate}}")
    assert found.message == (
        "stays whole with role: none, and has 8 in dim 0, and layers.0.mlp.experts.gate_up_proj has 8 experts, which "
        "expert cuts"
    )


def test_a_size_of_both_axes_is_whole_on_both():
    (found,) = mended(
        decoder({"mlp.experts.scale": ((8, 40), "MixtralExperts")}, ATTENTION | MOE), {"expert": 2, "tensor": 2}
    )
    assert found.line.split("\n")[0] == "layers.*.mlp.**: {placements: {expert: replicate, tensor: replicate}}"


@pytest.mark.parametrize("name", ["mlp.scale", "mlp.odd.weight"])
def test_a_block_of_experts_keeps_its_boundary_around_what_is_whole_in_it(name):
    model = decoder({name: ((7,), "Odd")}, ATTENTION | MOE)
    (found,) = mended(model, {"expert": 2, "tensor": 2})
    assert found.line == f"layers.*.{name}: {{role: none}}"
    plan = derive(model, DeviceMesh.from_sizes({"expert": 2, "tensor": 2}), kept(name))
    assert plan[f"layers.0.{name}"].pending == ("expert", "tensor")
    assert [each.kind for each in plan.boundaries if each.module.startswith("layers.0.mlp")] == [
        "moe",
        "router",
        "experts",
    ]


SHARED: Parameters = {f"mlp.shared_expert.{name[4:]}": each for name, each in MLP.items()}


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("shared", [{}, SHARED | {"mlp.shared_expert_gate.weight": ((1, 32), "Linear")}])
@pytest.mark.parametrize("sizes", [TWO, {"expert": 2, "tensor": 2}, {"context": 2, "tensor": 2}])
def test_experts_of_an_unknown_class_leave_no_role_to_what_is_around_them(sizes, shared, sequence_parallel):
    unknown = {name: (shape, kind.replace("Mixtral", "Own")) for name, (shape, kind) in MOE.items()}
    model = decoder({}, ATTENTION | unknown | shared)
    asked = {"sequence_parallel": sequence_parallel}
    found = mended(model, sizes, asked)
    assert [(each.rule, each.line) for each in found] == [("unknown", "layers.*.mlp.**: {role: none}")] * 2
    assert found[0].message.endswith(
        "; it stands in layers.0.mlp beside layers.0.mlp.gate.weight, and no rule knows what passes between them"
    )
    plan = derive(model, DeviceMesh.from_sizes(sizes), {**asked, **kept("mlp.**")})
    (block,) = [each for each in plan.boundaries if each.module.startswith("layers.0.mlp")]
    assert (block.module, block.kind) == ("layers.0.mlp", "whole")


@pytest.mark.parametrize("taken", [("mlp.experts.*",), ("mlp.shared_expert.**",)])
def test_a_part_of_a_block_of_experts_is_not_kept_whole_alone(taken):
    found = mended(decoder(SHARED, ATTENTION | MOE), TWO, kept(*taken))
    assert {each.rule for each in found} <= {"consistent", "chain"}


def test_a_norm_over_all_heads_is_not_left_in_an_attention_that_no_rule_knows():
    parts = {name: (shape, "OwnLinear" if "proj" in name else kind) for name, (shape, kind) in ATTENTION.items()}
    square = {name: ((32, 32), kind) for name, (_, kind) in parts.items()}
    norms: Parameters = {f"self_attn.{each}_norm.weight": ((32,), "RMSNorm") for each in "qk"}
    found = mended(decoder(norms, square | MLP, head_dim=8, num_key_value_heads=4), TWO)
    assert {each.rule for each in found} == {"unknown"}
    assert {each.line for each in found} == {"layers.*.self_attn.**: {role: none}"}


# tied


def test_a_head_that_no_rule_knows_is_tied_to_a_table_that_is_cut():
    model = decoder({})
    model = ModelDescription(
        model.class_name,
        model.parameters,
        {**model.modules, "unembed": "Linear"},
        config=model.config,
        tied={"unembed.weight": "embed_tokens.weight"},
    )
    (found,) = mended(model, TWO)
    assert found.line == f"embed_tokens.**: {REPLICATE}\nunembed.weight: {{role: none}}"
    assert found.message.endswith("; it is the same tensor as embed_tokens.weight, which tensor cuts")


# together


def test_experts_in_many_layers_are_told_in_one_line():
    parts: Parameters = {"mlp.gate.weight": ((4, 32), "MixtralTopKRouter")}
    for expert in range(4):
        parts |= {f"mlp.experts.{expert}.{name[4:]}": each for name, each in MLP.items()}
    model = decoder({}, ATTENTION | parts)
    lists = {f"layers.{layer}.mlp.experts": "ModuleList" for layer in range(2)}
    model = ModelDescription(model.class_name, model.parameters, {**model.modules, **lists}, config=model.config)
    found = mended(model, {"expert": 2, "tensor": 2})
    assert {(each.rule, each.line) for each in found} == {("experts", IN_MLP)}
    assert len(found) == 2  # gates and ups; downs are cut along another dim
    assert report(found).count(IN_MLP) == 2
