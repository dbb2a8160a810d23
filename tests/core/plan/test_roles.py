"""Roles: right for every stored model, unmoved by wrappers, and refused where anything contradicts."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from hyper_parallel.core.plan.grouping import group
from hyper_parallel.core.plan.model import ModelDescription, ParameterDescription
from hyper_parallel.core.plan.roles import ROLES, Assignment, assign_roles
from tests.core.plan.by_hand import HEADS, by_hand, layerless, renamed, stored, with_shape
from tests.core.plan.truth import TRUTH, UNKNOWN, Truth
from tests.work import work


def told(assignment: Assignment) -> Truth:
    """The part of an assignment that the truth tables hold."""
    return Truth(*(getattr(assignment, field) for field in Truth._fields))


def role_of(model: ModelDescription, name: str) -> Truth:
    result = assign_roles(model)
    assert name in result.assignments, result.unknown.get(name)
    return told(result.assignments[name])


def why_not(model: ModelDescription, name: str) -> str:
    result = assign_roles(model)
    assert name not in result.assignments
    return " ".join(result.unknown[name])


@pytest.mark.parametrize("name", sorted(TRUTH))
def test_every_parameter_is_what_the_forward_code_makes_of_it(name):
    result = assign_roles(stored(name))
    assert {layerless(each): told(found) for each, found in result.assignments.items()} == TRUTH[name]
    assert {layerless(each) for each in result.unknown} == UNKNOWN.get(name, set())
    assert all(found.role in ROLES for found in result.assignments.values())


def test_layers_of_one_kind_are_told_alike():
    result = assign_roles(stored("llama"))
    for name, found in result.assignments.items():
        other = result.assignments[name.replace("layers.0", "layers.1")]
        assert told(found) == told(other)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model.", "network.", "a.b.c."])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss", "deepseek_v3", "falcon"])
def test_a_prefix_changes_nothing(name, prefix):
    model = stored(name)
    result = assign_roles(renamed(model, lambda each: prefix + each, {}))
    plain = assign_roles(model)
    assert {each: told(found) for each, found in result.assignments.items()} == {
        prefix + each: told(found) for each, found in plain.assignments.items()
    }


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"])
@pytest.mark.parametrize("after", ["layers.0", "layers.0.self_attn", "layers.0.mlp", "layers.0.input_layernorm"])
def test_a_wrapper_in_the_middle_changes_nothing(wrapper, after):
    def rename(name: str) -> str:
        return (name + ".").replace(f"{after}.", f"{after}.{wrapper}.")[:-1]

    model = stored("qwen3_moe")
    result = assign_roles(renamed(model, rename, {f"model.{after}": "Wrapper"}))
    assert not result.unknown
    assert [told(found) for found in result.assignments.values()] == [
        told(found) for found in assign_roles(model).assignments.values()
    ]


@pytest.mark.parametrize("names", [{"weight": "gamma", "bias": "beta"}, {"weight": "embedding_table"}])
def test_the_leaves_of_mindspore_are_known(names):
    model = by_hand(
        {
            f"wte.{names['weight']}": ((96, 32), "Embedding"),
            f"h.0.ln_1.{names['weight']}": ((32,), "LayerNorm"),
            f"h.0.ln_1.{names.get('bias', 'bias')}": ((32,), "LayerNorm"),
        }
    )
    assert [each.role for each in assign_roles(model).assignments.values()] == ["embedding", "norm", "norm"]


def test_a_tied_head_has_its_role_under_its_own_name():
    model = stored("gemma2")
    assert "lm_head.weight" not in {each.name for each in model.parameters}
    assert role_of(model, "lm_head.weight") == Truth("head", 0, 1, vocab_dim=0)
    assert role_of(model, "model.embed_tokens.weight") == Truth("embedding", vocab_dim=0)


def test_without_a_configuration_the_norm_of_queries_tells_the_heads():
    model = replace(stored("qwen3"), config={})
    result = assign_roles(model)
    assert {layerless(each): told(found) for each, found in result.assignments.items()} == TRUTH["qwen3"]


def test_without_any_sign_of_heads_they_are_not_known():
    query = role_of(replace(stored("llama"), config={}), "model.layers.0.self_attn.q_proj.weight")
    assert query == Truth("query", 0, 1, heads=None)


# Attention in its forms.


def attention(projections: dict[str, tuple[tuple[int, ...], str]], owner: str, **config: object) -> ModelDescription:
    return by_hand(
        {f"h.0.attn.{name}": each for name, each in projections.items()}, {"h.0.attn": owner}, HEADS | config
    )


@pytest.mark.parametrize(
    ("owner", "rows", "config", "expected"),
    [
        ("FalconAttention", 64, {"new_decoder_architecture": True, "num_kv_heads": 2}, Truth("qkv", 0, 1, (), 2)),
        ("FalconAttention", 96, {"new_decoder_architecture": False, "multi_query": False}, Truth("qkv", 0, 1, (), 4)),
        ("BloomAttention", 96, {}, Truth("qkv", 0, 1, (), 4)),
        ("PersimmonAttention", 96, {}, Truth("qkv", 0, 1, (), 4)),
        ("MptAttention", 96, {}, Truth("qkv", 0, 1, (32, 32, 32), 4)),
        ("GPTBigCodeAttention", 48, {"multi_query": True}, Truth("qkv", 0, 1, (32, 8, 8), 4)),
        ("GPTBigCodeAttention", 96, {"multi_query": False}, Truth("qkv", 0, 1, (), 4)),
        ("Unheard", 64, {"model_type": "phi3"}, Truth("qkv", 0, 1, (32, 16, 16), 4)),
    ],
)
def test_fused_projections_follow_their_architecture(owner, rows, config, expected):
    model = attention(
        {"query_key_value.weight": ((rows, 32), "Linear"), "dense.weight": ((32, 32), "Linear")}, owner, **config
    )
    assert role_of(model, "h.0.attn.query_key_value.weight") == expected


def test_a_concatenated_projection_counts_the_heads_of_each_block():
    result = assign_roles(stored("phi3"))
    assert result.assignments["model.layers.0.self_attn.qkv_proj.weight"].packed_heads == (4, 2, 2)


def test_a_fused_projection_of_an_unknown_architecture_is_refused():
    model = attention(
        {"qkv_proj.weight": ((96, 32), "Linear"), "out_proj.weight": ((32, 32), "Linear")}, "LightningAttention"
    )
    assert "only the code of LightningAttention tells the order" in why_not(model, "h.0.attn.qkv_proj.weight")
    assert "the module can't be cut" in why_not(model, "h.0.attn.out_proj.weight")


def test_a_fused_projection_of_the_wrong_size_is_refused():
    model = with_shape(stored("phi3"), r".*0\.self_attn\.qkv_proj\.weight", (96, 32))
    assert why_not(model, "model.layers.0.self_attn.qkv_proj.weight").endswith(
        "dim 0 of model.layers.0.self_attn.qkv_proj.weight [96, 32] is 96, expected 64: "
        "4 query and 2 key/value heads of 8, concatenated"
    )


def test_falcon_without_its_configuration_is_refused():
    model = stored("falcon")
    config = {key: value for key, value in model.config.items() if key != "new_decoder_architecture"}
    assert "depends on the configuration's new_decoder_architecture" in why_not(
        replace(model, config=config), "transformer.h.0.self_attention.query_key_value.weight"
    )


def test_norms_of_queries_and_keys_are_told_by_their_shape():
    projections = {name: ((rows, 32), "Linear") for name, rows in (("q_proj.weight", 32), ("k_proj.weight", 16))}
    projections |= {"v_proj.weight": ((16, 32), "Linear"), "o_proj.weight": ((32, 32), "Linear")}
    for shapes, role in (
        (((8,), (8,)), "head_norm"),
        (((32,), (16,)), "wide_norm"),
        (((4, 8), (2, 8)), "per_head_norm"),
    ):
        norms = {"q_norm.weight": (shapes[0], "RMSNorm"), "k_norm.weight": (shapes[1], "RMSNorm")}
        model = attention(projections | norms, "Attention")
        assert {role_of(model, f"h.0.attn.{name}").role for name in norms} == {role}
    model = attention(projections | {"q_norm.weight": ((12,), "RMSNorm")}, "Attention")
    assert "expected [8] (one head), [32] (all heads) or [4, 8] (each head)" in why_not(model, "h.0.attn.q_norm.weight")


def test_a_norm_as_wide_as_all_heads_must_be_as_wide_as_its_projection():
    model = attention({"q_proj.weight": ((64, 32), "Linear"), "q_norm.weight": ((32,), "RMSNorm")}, "Attention")
    assert "expected [8] (one head), [64] (all heads)" in why_not(model, "h.0.attn.q_norm.weight")


def test_keys_that_the_configuration_counts_otherwise_are_refused():
    model = with_shape(stored("llama"), r".*0\.self_attn\.k_proj\.weight", (32, 32))
    assert "is 32, expected 16: 2 heads of 8" in why_not(model, "model.layers.0.self_attn.k_proj.weight")
    assert "the module can't be cut" in why_not(model, "model.layers.0.self_attn.q_proj.weight")
    assert "model.layers.1.self_attn.k_proj.weight" in assign_roles(model).assignments


def test_features_that_heads_do_not_divide_are_refused():
    config = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 32}
    model = replace(stored("llama"), config=config)
    assert "is 32, no multiple of 3 heads" in why_not(model, "model.layers.0.self_attn.q_proj.weight")


def test_attention_to_something_else_is_refused():
    model = by_hand(
        {"layers.0.encoder_attn.q_proj.weight": ((32, 32), "Linear")}, {"layers.0.encoder_attn": "Attention"}
    )
    assert "no rule knows 'q_proj.weight'" in why_not(model, "layers.0.encoder_attn.q_proj.weight")


def test_an_attention_is_known_by_its_class_too():
    model = stored("llama")
    result = assign_roles(renamed(model, lambda name: name.replace("self_attn", "mixer"), {}))
    assert not result.unknown


# Feed-forward layers, routers, experts.


def block(parameters: dict[str, tuple[tuple[int, ...], str]], **modules: str) -> ModelDescription:
    return by_hand(
        {f"layers.0.{name}": each for name, each in parameters.items()},
        {f"layers.0.{name.replace('__', '.')}": kind for name, kind in modules.items()},
    )


def test_gate_is_a_router_beside_experts_and_a_projection_elsewhere():
    linears = {f"mlp.{name}.weight": ((48, 32), "Linear") for name in ("gate", "up")}
    dense = block(linears | {"mlp.down.weight": ((32, 48), "Linear")}, mlp="FeedForward")
    assert role_of(dense, "layers.0.mlp.gate.weight") == Truth("gate", 0, 1)
    sparse = with_shape(stored("qwen3_moe"), r".*0\.mlp\.gate\.weight", (5, 32))
    assert "is 5, expected 4: experts in experts.gate_up_proj" in why_not(sparse, "model.layers.0.mlp.gate.weight")


def test_experts_in_a_list_are_counted_and_numbered():
    parameters = {"block_sparse_moe.gate.weight": ((2, 32), "Linear")}
    for index in range(2):
        for name, shape in (("w1", (48, 32)), ("w2", (32, 48)), ("w3", (48, 32))):
            parameters[f"block_sparse_moe.experts.{index}.{name}.weight"] = (shape, "Linear")
    result = assign_roles(block(parameters, block_sparse_moe="MixtralSparseMoeBlock"))
    assert not result.unknown
    found = {name.removeprefix("layers.0.block_sparse_moe."): each for name, each in result.assignments.items()}
    assert told(found["gate.weight"]) == Truth("router", 0, 1)
    assert told(found["experts.1.w1.weight"]) == Truth("expert_gate", 0, 1)
    assert told(found["experts.1.w3.weight"]) == Truth("expert_up", 0, 1)
    assert told(found["experts.1.w2.weight"]) == Truth("expert_down", 0, 1)
    assert [found[f"experts.{index}.w1.weight"].expert for index in range(2)] == [0, 1]


def test_packed_experts_of_llama4_are_transposed_and_end_to_end():
    model = block(
        {
            "feed_forward.experts.gate_up_proj": ((4, 32, 96), "Llama4TextExperts"),
            "feed_forward.experts.down_proj": ((4, 48, 32), "Llama4TextExperts"),
            "feed_forward.router.weight": ((4, 32), "Llama4Router"),
        }
    )
    assert role_of(model, "layers.0.feed_forward.experts.gate_up_proj") == Truth(
        "expert_gate_up", 2, 1, (48, 48), expert_dim=0
    )
    assert role_of(model, "layers.0.feed_forward.router.weight") == Truth("router", 0, 1)


def test_packed_experts_of_an_unknown_class_are_refused():
    model = block({"mlp.experts.gate_up_proj": ((4, 96, 32), "MyExperts")})
    assert "only the code of MyExperts tells which dim is which" in why_not(model, "layers.0.mlp.experts.gate_up_proj")


def test_packed_experts_in_the_other_order_are_refused():
    model = with_shape(stored("mixtral"), r".*0\.mlp\.experts\.gate_up_proj", (4, 32, 96))
    assert "dim 2 of model.layers.0.mlp.experts.gate_up_proj [4, 32, 96] is 96, expected 32" in why_not(
        model, "model.layers.0.mlp.experts.gate_up_proj"
    )


def test_inner_features_that_differ_are_refused():
    model = with_shape(stored("llama"), r".*0\.mlp\.up_proj\.weight", (40, 32))
    assert why_not(model, "model.layers.0.mlp.down_proj.weight") == (
        "'model.layers.0.mlp': inner features differ: gate_proj.weight (gate) has 48, up_proj.weight (up) has 40, "
        "down_proj.weight (down) has 48"
    )


def test_a_cut_that_nothing_closes_is_refused():
    model = block({"mlp.up_proj.weight": ((48, 32), "Linear"), "mlp.back.weight": ((32, 48), "Linear")})
    assert "expected one down that closes the cut, found 0" in why_not(model, "layers.0.mlp.up_proj.weight")


def test_a_bias_of_the_wrong_size_is_refused():
    model = with_shape(stored("llama_bias"), r".*0\.mlp\.up_proj\.bias", (40,))
    assert "has 40 elements, and model.layers.0.mlp.up_proj.weight [48, 32] has 48 outputs" in why_not(
        model, "model.layers.0.mlp.up_proj.bias"
    )


def test_a_stranger_of_a_linear_is_told_by_its_shape_or_refused():
    linears = {"mlp.up_proj.weight": ((32, 48), "Projection"), "mlp.down_proj.weight": ((48, 32), "Projection")}
    assert role_of(block(linears), "layers.0.mlp.up_proj.weight") == Truth("up", 1, 0)
    square = {name: ((32, 32), "Projection") for name in linears}
    assert "does not tell which dim is over outputs" in why_not(block(square), "layers.0.mlp.up_proj.weight")


def test_opt_has_its_feed_forward_in_the_block_and_may_project_its_embedding():
    config = HEADS | {"word_embed_proj_dim": 16}
    model = by_hand(
        {
            "model.decoder.embed_tokens.weight": ((96, 16), "Embedding"),
            "model.decoder.embed_positions.weight": ((66, 32), "OPTLearnedPositionalEmbedding"),
            "model.decoder.project_in.weight": ((32, 16), "Linear"),
            "model.decoder.project_out.weight": ((16, 32), "Linear"),
            "model.decoder.layers.0.fc1.weight": ((48, 32), "Linear"),
            "model.decoder.layers.0.fc1.bias": ((48,), "Linear"),
            "model.decoder.layers.0.fc2.weight": ((32, 48), "Linear"),
            "model.decoder.layers.0.final_layer_norm.weight": ((32,), "LayerNorm"),
            "lm_head.weight": ((96, 16), "Linear"),
        },
        config=config,
    )
    assert [each.role for each in assign_roles(model).assignments.values()] == [
        "embedding",
        "position_embedding",
        "projection",
        "projection",
        "up",
        "up",
        "down",
        "norm",
        "head",
    ]


def test_what_no_rule_knows_is_told_with_its_place_and_shape():
    assert why_not(stored("mamba"), "backbone.layers.0.mixer.conv1d.weight") == (
        "no rule knows 'conv1d.weight', [64, 1, 4] of a Conv1d in a MambaMixer"
    )


def test_what_lies_inside_a_module_that_is_cut_is_told_so():
    model = by_hand({"layers.0.self_attn.lambda_q1": ((8,), "DiffLlamaAttention")})
    assert "'self_attn' is cut around it" in why_not(model, "layers.0.self_attn.lambda_q1")


# Adapters.


def with_adapters(model: ModelDescription, linear: str, parts: dict[str, tuple[int, ...]]) -> ModelDescription:
    """An adapter around the linear at `linear`, whose weight moves into a base layer."""
    owner = model.modules[linear]

    def rename(name: str) -> str:
        return name.replace(f"{linear}.", f"{linear}.base_layer.")

    wrapped = renamed(model, rename, {linear: "AdapterLinear", f"{linear}.base_layer": owner})
    added = tuple(ParameterDescription(f"{linear}.{name}", shape, "float32", "Linear") for name, shape in parts.items())
    return replace(wrapped, parameters=wrapped.parameters + added)


FACTORS = ("lora_A.default.weight", "lora_B.default.weight")


@pytest.mark.parametrize(
    ("name", "linear", "shapes", "expected"),
    [
        ("llama", "self_attn.q_proj", ((2, 32), (32, 2)), (Truth("adapter", 0, 1), Truth("query", 0, 1, heads=4))),
        ("llama", "self_attn.k_proj", ((2, 32), (16, 2)), (Truth("adapter", 0, 1), Truth("key", 0, 1, heads=2))),
        (
            "llama",
            "self_attn.o_proj",
            ((2, 32), (32, 2)),
            (Truth("attention_output", 0, 1, heads=4), Truth("adapter", 0, 1)),
        ),
        ("llama", "mlp.down_proj", ((2, 48), (32, 2)), (Truth("down", 0, 1), Truth("adapter", 0, 1))),
        ("llama", "mlp.up_proj", ((32, 2), (2, 48)), (Truth("adapter", 1, 0), Truth("up", 1, 0))),
        (
            "phi3",
            "self_attn.qkv_proj",
            ((2, 32), (64, 2)),
            (Truth("adapter", 0, 1), Truth("qkv", 0, 1, (32, 16, 16), 4)),
        ),
        ("deepseek_v3", "self_attn.q_a_proj", ((2, 32), (16, 2)), (Truth("latent", 0, 1), Truth("latent", 0, 1))),
    ],
)
def test_the_factors_of_an_adapter_follow_their_linear(name, linear, shapes, expected):
    place = f"model.layers.0.{linear}"
    model = with_adapters(stored(name), place, dict(zip(FACTORS, shapes)))
    result = assign_roles(model)
    assert not result.unknown
    assert tuple(told(result.assignments[f"{place}.{factor}"]) for factor in FACTORS) == expected
    base = result.assignments[f"{place}.base_layer.weight"]
    assert told(base) == TRUTH[name][f"model.layers.*.{linear}.weight"]


def test_an_adapter_around_a_transposed_linear_keeps_its_own_order():
    model = with_adapters(stored("gpt2"), "transformer.h.0.attn.c_attn", dict(zip(FACTORS, ((2, 32), (96, 2)))))
    assert role_of(model, "transformer.h.0.attn.c_attn.lora_B.default.weight") == Truth("qkv", 0, 1, (32, 32, 32), 4)


def test_bare_factors_beside_the_weight_are_known():
    model = stored("llama")
    place = "model.layers.0.mlp.up_proj"
    added = (
        ParameterDescription(f"{place}.lora_A", (2, 32), "float32", "LoRALinear"),
        ParameterDescription(f"{place}.lora_B", (48, 2), "float32", "LoRALinear"),
    )
    model = replace(model, parameters=model.parameters + added)
    assert role_of(model, f"{place}.lora_B") == Truth("up", 0, 1)


@pytest.mark.parametrize(
    ("linear", "parts", "words"),
    [
        (
            "layers.0.mlp.up_proj",
            {"lora_A.default.weight": (32, 32), "lora_B.default.weight": (48, 32)},
            "tell them apart",
        ),
        ("layers.0.mlp.up_proj", {"lora_A.default.weight": (2, 30)}, "expected [rank, 32]"),
        ("layers.0.mlp.down_proj", {"lora_magnitude_vector.default.weight": (32,)}, "cut along its inputs"),
        ("embed_tokens", {"lora_embedding_A.default": (2, 96)}, "an adapter of an embedding"),
        ("layers.0.input_layernorm", {"lora_A.default.weight": (2, 32)}, "no linear with a known role"),
    ],
)
def test_adapters_that_can_not_be_planned_are_refused(linear, parts, words):
    model = with_adapters(stored("llama"), f"model.{linear}", parts)
    assert words in why_not(model, f"model.{linear}.{list(parts)[0]}")


def test_a_trained_copy_of_a_module_has_the_role_of_the_original():
    model = stored("llama")
    copies = [each for each in model.parameters if each.name in ("lm_head.weight", "model.layers.0.mlp.up_proj.weight")]

    def below(name: str, wrapper: str) -> str:
        return f"{name.removesuffix('.weight')}.{wrapper}.weight"

    parameters = [each for each in model.parameters if each not in copies]
    parameters += [replace(each, name=below(each.name, "original_module"), trainable=False) for each in copies]
    parameters += [replace(each, name=below(each.name, "modules_to_save.default")) for each in copies]
    result = assign_roles(replace(model, parameters=tuple(parameters)))
    assert not result.unknown
    for wrapper in ("original_module", "modules_to_save.default"):
        assert told(result.assignments[below("lm_head.weight", wrapper)]) == Truth("head", 0, 1, vocab_dim=0)
        assert told(result.assignments[below("model.layers.0.mlp.up_proj.weight", wrapper)]) == Truth("up", 0, 1)


# Whatever is described, every name is told or refused.

SEGMENTS = (
    "weight bias lora_A base_layer modules_to_save default gate experts 0 q_norm q_proj kv_b_proj up_proj gate_up_proj "
    "norm sinks module lm_head e_score_correction_bias router input_linear"
).split()
CLASSES = "Linear Conv1D RMSNorm Embedding Stranger GptOssExperts Llama4TextExperts".split()


def damaged(model: ModelDescription, chance: random.Random) -> ModelDescription:
    """The model with some shapes, names, classes and settings changed or gone."""
    parameters: dict[str, ParameterDescription] = {}
    for each in model.parameters:
        kind, segments = chance.random(), each.name.split(".")
        if kind < 0.05:
            continue
        if kind < 0.12:
            sizes = [chance.choice((0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 96)) for _ in range(chance.randint(0, 4))]
            each = replace(each, shape=tuple(sizes))
        elif kind < 0.20:
            segments[chance.randrange(len(segments))] = chance.choice(SEGMENTS)
        elif kind < 0.25:
            segments.insert(chance.randrange(len(segments) + 1), chance.choice(SEGMENTS))
        elif kind < 0.30:
            each = replace(each, module_class=chance.choice(CLASSES))
        name = ".".join(segments)
        parameters.setdefault(name, replace(each, name=name))
    values = (None, 0, -1, 1, 7, True, "x", [1], {"a": 1})
    config = {
        key: chance.choice(values) if chance.random() < 0.1 else value
        for key, value in model.config.items()
        if chance.random() > 0.1
    }
    tied = {name: first for name, first in model.tied.items() if first in parameters and name not in parameters}
    return replace(model, parameters=tuple(parameters.values()), config=config, tied=tied)


@pytest.mark.parametrize("name", sorted(TRUTH))
def test_every_name_of_a_damaged_model_is_told_or_refused(name):
    chance = random.Random(name)
    for _ in range(20):
        model = damaged(stored(name), chance)
        result = assign_roles(model)
        names = {each.name for each in model.parameters} | set(model.tied)
        assert set(result.assignments) | set(result.unknown) == names
        assert not set(result.assignments) & set(result.unknown)
        assert all(result.unknown.values())
        grouped = [name for each in group(model, result) for name in each.parameters]
        assert sorted(grouped) == sorted(result.assignments)


# Speed.


def deep_model(layers: int) -> ModelDescription:
    """Llama of so many layers."""
    one = stored("llama")
    first = [each for each in one.parameters if ".layers.0." in each.name]
    parameters = [each for each in one.parameters if ".layers." not in each.name]
    modules = dict(one.modules)
    for layer in range(layers):
        parameters += [replace(each, name=each.name.replace(".0.", f".{layer}.")) for each in first]
        modules |= {
            name.replace(".0", f".{layer}"): kind
            for name, kind in one.modules.items()
            if name.startswith("model.layers.0")
        }
    return replace(one, parameters=tuple(parameters), modules=modules)


def with_experts(layers: int, experts: int) -> ModelDescription:
    """Layers of nothing but so many experts."""
    parameters = {}
    for layer in range(layers):
        for index in range(experts):
            place = f"model.layers.{layer}.mlp.experts.{index}"
            parameters |= {f"{place}.{name}.weight": ((48, 32), "Linear") for name in ("gate_proj", "up_proj")}
            parameters[f"{place}.down_proj.weight"] = ((32, 48), "Linear")
    return by_hand(parameters)


def test_ten_times_the_layers_are_ten_times_the_work():
    few, many = deep_model(11), deep_model(110)
    assert len(many.parameters) == 993
    assert not assign_roles(many).unknown  # what is kept for later models is kept now
    assert work(assign_roles, many) < 10.5 * work(assign_roles, few)


def test_ten_times_the_experts_are_ten_times_the_work():
    assert not assign_roles(with_experts(layers=10, experts=30)).unknown
    few = work(assign_roles, with_experts(layers=1, experts=30))
    assert work(assign_roles, with_experts(layers=1, experts=300)) < 10.5 * few
    assert work(assign_roles, with_experts(layers=10, experts=30)) < 10.5 * few


def test_a_hundred_thousand_experts_take_about_ten_times_what_ten_thousand_take():
    """What C does is no line of Python. Each measured at ten to seventeen times; a search for each among all is near a
    hundred."""

    def seconds(experts: int) -> float:
        model = with_experts(layers=58, experts=experts)
        assert len(model.parameters) == 58 * experts * 3
        begun = time.process_time()
        assert not assign_roles(model).unknown
        return time.process_time() - begun

    assert seconds(600) < 50 * seconds(60)


def strange(block_class: str, module: str, class_name: str, parameters: dict[str, tuple[int, ...]], config=None):
    """A small decoder's block with one module more."""
    names = {"model.embed_tokens.weight": ((96, 32), "Embedding")}
    for each in ("q_proj", "k_proj", "v_proj", "o_proj"):
        names[f"model.layers.0.self_attn.{each}.weight"] = ((32, 32), "Linear")
    names |= {f"{module}.{each}": (shape, class_name) for each, shape in parameters.items()}
    modules = {"": "Model", "model": "Backbone", "model.layers": "ModuleList", "model.layers.0": block_class}
    modules["model.layers.0.self_attn"] = "Attention"
    for name, (_, owner) in names.items():
        path = name.split(".")[:-1]
        for depth in range(1, len(path) + 1):
            modules.setdefault(".".join(path[:depth]), owner if depth == len(path) else "Block")
    modules[module] = class_name
    made = tuple(ParameterDescription(name, shape, "float32", owner) for name, (shape, owner) in names.items())
    return ModelDescription(
        "Model", made, modules, config={"num_attention_heads": 4, "vocab_size": 96, **(config or {})}
    )


@pytest.mark.parametrize("class_name", ["BatchNorm1d", "InstanceNorm1d", "GroupNorm"])
def test_a_norm_over_tokens_is_no_norm_of_hidden_states(class_name):
    model = strange("Block", "model.layers.0.norm", class_name, {"weight": (32,), "bias": (32,)})
    assert set(assign_roles(model).unknown) == {"model.layers.0.norm.weight", "model.layers.0.norm.bias"}


@pytest.mark.parametrize("name", ["xattn", "attn"])
def test_attention_to_something_else_is_unknown_by_its_class(name):
    projections = {f"{each}.weight": (32, 32) for each in ("q_proj", "k_proj", "v_proj", "o_proj")}
    model = strange("Block", f"model.layers.0.{name}", "GatedCrossAttention", projections)
    assert set(assign_roles(model).unknown) == {f"model.layers.0.{name}.{each}" for each in projections}


def test_the_heads_of_the_text_are_not_those_of_a_vision_tower():
    projections = {f"{each}.weight": (32, 32) for each in ("q_proj", "k_proj", "v_proj", "o_proj")}
    config = {"vision_config": {"num_attention_heads": 2}}
    model = strange("Block", "vision.layers.0.self_attn", "CLIPAttention", projections, config)
    assigned = assign_roles(model).assignments
    assert assigned["model.layers.0.self_attn.q_proj.weight"].heads == 4
    told = assigned.get("vision.layers.0.self_attn.q_proj.weight")
    assert told is None or told.heads is None
