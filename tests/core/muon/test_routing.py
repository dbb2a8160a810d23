"""Who updates which parameter, and why."""

from __future__ import annotations

import pytest

from hyper_parallel import ConfigError
from hyper_parallel.core.muon.adapters import views_of
from hyper_parallel.core.muon.routing import describe_routes, routes_of
from tests.core.plan.by_hand import HEADS, MODELS, by_hand, layerless, stored

TO_ADAMW = {
    "llama": {"model.embed_tokens.weight", "lm_head.weight"},
    "gpt2": {"transformer.wte.weight", "transformer.wpe.weight"},
    "gpt_oss": {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.*.mlp.experts.gate_up_proj_bias",
        "model.layers.*.mlp.experts.down_proj_bias",
    },
    "mamba": {
        "backbone.embeddings.weight",
        "backbone.layers.*.mixer.A_log",
        "backbone.layers.*.mixer.conv1d.weight",
    },
    "deepseek_v3": {"model.embed_tokens.weight", "lm_head.weight"},
    "qwen3_moe": {"model.embed_tokens.weight", "lm_head.weight"},
}
"""Parameters of two dims or more that are none of the matrices inside."""


@pytest.mark.parametrize("name", sorted(TO_ADAMW))
def test_matrices_inside_go_to_muon_and_all_else_to_adamw(name):
    model = stored(name)
    routes = routes_of(model)
    assert list(routes) == [each.name for each in model.parameters]
    wide = {each.name for each in model.parameters if len(each.shape) > 1}
    assert all(routes[each] == ("adamw", "a vector", False) for each in routes if each not in wide)
    assert {layerless(each) for each in wide if routes[each].algorithm == "adamw"} == TO_ADAMW[name]


@pytest.mark.parametrize("name", sorted(each.stem for each in MODELS.glob("*.json")))
def test_every_parameter_has_a_route_with_a_reason(name):
    for parameter, route in routes_of(stored(name)).items():
        assert route.algorithm in ("muon", "adamw") and route.why, parameter


def test_routers_go_to_muon_as_in_moonlight():
    assert routes_of(stored("deepseek_v3"))["model.layers.1.mlp.gate.weight"].algorithm == "muon"


def test_a_reason_tells_the_role_and_the_matrices():
    routes = routes_of(stored("phi3"))
    assert routes["model.layers.0.self_attn.qkv_proj.weight"].why == (
        "qkv: hidden states to queries, keys and values; as query, key, value"
    )


def test_what_is_tied_is_one_parameter_and_no_matrix():
    """Here the first name alone looks like a matrix inside: the tie tells."""
    model = by_hand({"body.table": ((96, 32), "Body")})
    tied = by_hand({"body.table": ((40, 32), "Body")}, {"lm_head": "Linear"})
    tied = type(tied)(**{**tied.__dict__, "tied": {"lm_head.weight": "body.table"}})
    assert routes_of(model)["body.table"].why == "one dim is over the 96 tokens of the vocabulary"
    assert routes_of(tied) == {"body.table": ("adamw", "tied to lm_head.weight, makes outputs", True)}
    assert routes_of(stored("llama_tied"))["model.embed_tokens.weight"].algorithm == "adamw"


@pytest.mark.parametrize(
    ("name", "shape", "owner", "algorithm", "words"),
    [
        ("blocks.0.mix.weight", (32, 32), "Linear", "muon", "Linear inside of the model"),
        ("blocks.0.bank", (4, 32, 32), "Stranger", "muon", "inside of the model"),
        ("blocks.0.qkv.weight", (96, 32), "Linear", "muon", "taken as one matrix"),
        ("blocks.0.conv.weight", (16, 8, 3, 3), "Conv2d", "muon", "Conv2d inside of the model"),
        ("blocks.0.conv.weight", (16, 1, 3), "Conv1d", "adamw", "depthwise"),
        ("blocks.0.table.weight", (7, 32), "Embedding", "adamw", "an embedding"),
        ("blocks.0.norm.weight", (4, 8), "HeadRMSNorm", "adamw", "a norm"),
        ("blocks.0.A_log", (32, 8), "Mixer", "adamw", "element by element"),
        ("blocks.0.relative_pos_embed", (2, 8, 8), "Attention", "adamw", "looked up"),
        ("blocks.0.gate.weight", (1, 32), "Linear", "adamw", "a vector in the shape of a matrix"),
        ("blocks.0.none.weight", (0, 32), "Linear", "adamw", "empty"),
        ("patch_embed.proj.weight", (32, 3, 4, 4), "Conv2d", "adamw", "makes hidden states of inputs"),
        ("classifier.dense.weight", (10, 32), "Linear", "adamw", "makes outputs"),
        ("blocks.0.mix.lora_A.default.weight", (4, 32), "Linear", "adamw", "low-rank adapter"),
        ("scale", (), "Model", "adamw", "a number"),
    ],
)
def test_where_the_planner_knows_no_role_classes_and_names_decide(name, shape, owner, algorithm, words):
    route = routes_of(by_hand({name: (shape, owner)}, config=HEADS))[name]
    assert route.algorithm == algorithm and words in route.why, route


def test_routes_by_hand_win_the_later_one_over_the_earlier():
    routes = routes_of(
        stored("llama_tied"), {"model.layers.*.mlp.*.weight": "adamw", "**.up_proj.weight": "muon", "lm_head.*": "muon"}
    )
    assert routes["model.layers.0.mlp.gate_proj.weight"][:2] == (
        "adamw",
        "given by routes 'model.layers.*.mlp.*.weight'",
    )
    assert routes["model.layers.0.mlp.up_proj.weight"][:2] == ("muon", "given by routes '**.up_proj.weight'")
    assert routes["model.embed_tokens.weight"].algorithm == "muon"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model.norm.weight": "muon"}, ["gives Muon what is no matrix: model.norm.weight [32]"]),
        ({"model.layers.**": "muon"}, ["input_layernorm.weight [32]", "and 1 more", "or write adamw"]),
        ({"**.q_proj.weights": "muon"}, ["fits no parameter"]),
        ({"**.q_proj.weight": "sgd"}, ["'**.q_proj.weight' goes to 'sgd'; write muon or adamw"]),
        ({"": "muon"}, ["a pattern is text"]),
    ],
)
def test_what_can_not_be_is_refused_by_name(given, words):
    with pytest.raises(ConfigError) as raised:
        routes_of(stored("llama"), given)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_routes_are_told_with_the_matrices_and_layers_that_are_alike_once():
    model = stored("mixtral")
    lines = describe_routes(routes_of(model), views_of(model)).splitlines()
    found = {line.split()[0]: line.split(None, 1)[1] for line in lines[1:]}
    assert found["model.layers.0-1.mlp.experts.gate_up_proj"] == (
        "muon     4 x (48x32, 48x32)  expert gate up: `gate_up` of the experts; as gate, up"
    )
    assert found["model.layers.0-1.input_layernorm.weight"].split() == ["adamw", "a", "vector"]
    assert len(lines) == 1 + len({layerless(each.name) for each in model.parameters})


def test_norms_and_biases_do_not_decay_whatever_their_shape():
    routes = routes_of(stored("gpt_oss"), {"**.gate_up_proj_bias": "adamw"})
    still = {layerless(name) for name, route in routes.items() if not route.decays}
    assert "model.layers.*.mlp.experts.down_proj_bias" in still and "model.norm.weight" in still
    assert "model.layers.*.mlp.experts.gate_up_proj_bias" in still
    assert not still & {"model.embed_tokens.weight", "lm_head.weight", "model.layers.*.self_attn.q_proj.weight"}
