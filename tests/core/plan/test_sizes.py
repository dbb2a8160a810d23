"""Whose heads a configuration counts, and which dim of a linear is over outputs: told for certain or not at all."""

from __future__ import annotations

import pytest

from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.plan.derive import derive
from hyper_parallel.core.plan.model import ModelDescription
from hyper_parallel.core.plan.roles import assign_roles
from tests.core.plan.by_hand import HEADS, by_hand
from tests.core.plan.linting import pasted, wrong

TWO = {"tensor": 2}


def decoder(place: str = "", owner: str = "Linear", vocabulary: bool = True) -> dict:
    """A block with attention of square projections, in a list below `place`, and the vocabulary beside the list."""
    table, head = ((96, 32), "Embedding"), ((96, 32), "Linear")
    names = {f"{place}embed_tokens.weight": table, f"{place}lm_head.weight": head} if vocabulary else {}
    names |= {f"{place}layers.0.self_attn.{each}_proj.weight": ((32, 32), owner) for each in "qkvo"}
    return names | {f"{place}layers.0.norm.weight": ((32,), "RMSNorm")}


def described(parameters: dict, **config: object) -> ModelDescription:
    lists = {name[: name.index("layers.") + 6]: "ModuleList" for name in parameters if "layers." in name}
    attention = {f"{each}.0.self_attn": "Attention" for each in lists}
    plain = {key: value for key, value in HEADS.items() if key not in ("num_key_value_heads", "head_dim")}
    return by_hand(parameters, lists | attention, plain | config)


def heads(model: ModelDescription, place: str) -> int | None:
    return assign_roles(model).assignments[f"{place}layers.0.self_attn.q_proj.weight"].heads


@pytest.mark.parametrize(
    "part",
    [
        {"audio_config": {"encoder_attention_heads": 2}},
        {"audio_config": {"attention_heads": 2}},
        {"parts": {"vision": {"num_heads": 2}}},
        {"parts": [{"depth": 3}, {"n_head": 2}]},
    ],
)
def test_a_part_with_heads_of_its_own_leaves_the_heads_of_the_configuration_to_the_decoder(part):
    model = described(decoder("model.") | decoder("tower.", vocabulary=False), **part)
    assert heads(model, "model.") == 4
    assert heads(model, "tower.") is None


@pytest.mark.parametrize("part", [{"audio_config": {"attention_heads": 0}}, {"audio_config": {"num_heads": None}}, {}])
def test_one_list_of_blocks_has_the_heads_of_the_configuration_wherever_its_vocabulary_stands(part):
    outside = {"embed_tokens.weight": ((96, 32), "Embedding")}
    assert heads(described(outside | decoder("model.decoder.", vocabulary=False), **part), "model.decoder.") == 4


def test_a_part_with_heads_makes_a_decoder_prove_that_it_stands_beside_the_vocabulary():
    outside = {"embed_tokens.weight": ((96, 32), "Embedding")}
    model = described(outside | decoder("model.decoder.", vocabulary=False), audio_config={"attention_heads": 2})
    assert heads(model, "model.decoder.") is None


def test_a_second_list_of_blocks_has_not_the_heads_of_the_first():
    model = described(decoder("model.") | decoder("draft.", vocabulary=False))
    assert heads(model, "model.") == 4
    assert heads(model, "draft.") is None


def test_two_decoders_beside_vocabularies_of_their_own_have_no_heads_that_are_known():
    model = described(decoder("draft.") | decoder("target."))
    assert heads(model, "draft.") is None and heads(model, "target.") is None
    asked = {"sequence_parallel": False}  # of several lists nobody knows between which the sequence could be cut
    found = wrong(model, TWO, asked)
    assert {each.rule for each in found} == {"heads"}
    assert wrong(model, TWO, pasted(asked, found)) == []


@pytest.mark.parametrize("owner", ["TransposedLinear", "LinearT", "LinearTransposed", "Conv1DLinear", "MultiLinear"])
def test_a_square_weight_of_a_linear_that_is_not_known_is_refused(owner):
    model = described(decoder("model.", owner))
    (told,) = assign_roles(model).unknown["model.layers.0.self_attn.q_proj.weight"][:1]
    assert told == (
        f"'@attention.q_proj.weight' is a query, but {owner} is no kind of linear that is known, and the shape "
        "[32, 32] does not tell which dim is over outputs, since both may be; it is cut only where its class goes by a "
        "known name, such as Linear"
    )
    found = wrong(model, TWO)
    assert {each.rule for each in found} == {"unknown"}
    asked = pasted(None, found)
    assert wrong(model, TWO, asked) == []
    plan = derive(model, DeviceMesh.from_sizes(TWO), asked)
    assert not plan["model.layers.0.self_attn.q_proj.weight"].placements


@pytest.mark.parametrize("owner", ["TransposedLinear", "LinearT"])
def test_a_weight_that_is_not_square_tells_its_order(owner):
    names = {"layers.0.mlp.up_proj.weight": ((32, 48), owner), "layers.0.mlp.down_proj.weight": ((48, 32), owner)}
    plan = derive(described(decoder() | names), DeviceMesh.from_sizes(TWO))
    assert plan["layers.0.mlp.up_proj.weight"].local_shape == (32, 24)
    assert plan["layers.0.mlp.down_proj.weight"].local_shape == (24, 32)


@pytest.mark.parametrize("owner", ["Linear", "FalconLinear", "Linear8bitLt", "NonDynamicallyQuantizableLinear"])
def test_linears_that_are_known_keep_outputs_first(owner):
    plan = derive(described(decoder("", owner)), DeviceMesh.from_sizes(TWO))
    assert plan["layers.0.self_attn.q_proj.weight"].local_shape == (16, 32)
    assert plan["layers.0.self_attn.o_proj.weight"].local_shape == (32, 16)


def test_a_stranger_that_fits_in_neither_order_is_told_what_was_expected():
    names = {"layers.0.mlp.up_proj.weight": ((40, 48), "Own"), "layers.0.mlp.down_proj.weight": ((48, 32), "Own")}
    told = assign_roles(described(decoder() | names)).unknown["layers.0.mlp.up_proj.weight"]
    assert told[0].endswith("the shape [40, 48] fits in no order: expected in 32 = hidden_size")
