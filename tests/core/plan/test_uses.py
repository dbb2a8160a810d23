"""What code does with what is cut, where no module tells: tables as heads, slices of weights, a second attention."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.plan.derive import derive
from hyper_parallel.core.plan.model import ModelDescription
from hyper_parallel.core.plan.role_rules import OTHER_ATTENTION
from tests.core.plan.by_hand import HEADS, by_hand
from tests.core.plan.linting import mended, wrong

TWO = {"tensor": 2}
LAID_WHOLE = {"sequence_parallel": False}
MESH = DeviceMesh.from_sizes(TWO)
SQUARE = {f"{each}_proj.weight": ((32, 32), "Linear") for each in "qkvo"}


def decoder(*attentions: str, head: str = "lm_head") -> ModelDescription:
    """Two blocks with attention of these names, all of the same class."""
    names = {"embed_tokens.weight": ((96, 32), "Embedding"), "norm.weight": ((32,), "LayerNorm")}
    for place in (f"layers.{layer}.{each}" for layer in range(2) for each in attentions):
        names |= {f"{place}.{name}": each for name, each in SQUARE.items()}
    names |= {f"{head}.weight": ((96, 32), "Linear")} if head else {}
    classes = {f"layers.{layer}.{each}": "Attention" for layer in range(2) for each in attentions}
    return by_hand(names, {"layers": "ModuleList"} | classes, HEADS | {"num_key_value_heads": 4})


# tables


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_table_without_a_head_stays_whole(sequence_parallel):
    (found,) = mended(decoder("attn", head=""), TWO, {"sequence_parallel": sequence_parallel})
    assert str(found) == (
        "[head] embed_tokens.weight: tensor cuts its 96 tokens, and no module of Model gives logits; code that "
        "multiplies hidden states by this table would give a part of them, and nobody would sum up their gradient "
        "('embed_tokens.weight' is an embedding: 96 tokens); write below `parameters:`\n"
        "    embed_tokens.weight: {placements: none}"
    )


def test_a_head_that_no_rule_knows_is_one():
    (found,) = mended(decoder("attn", head="unembed"), TWO)
    assert (found.rule, found.line) == ("unknown", "unembed.weight: {role: none}")


def test_a_head_of_fewer_rows_is_one_by_its_name():
    model = decoder("attn")
    fewer = (replace(each, shape=(90, 32)) if each.name == "lm_head.weight" else each for each in model.parameters)
    assert {each.rule for each in wrong(replace(model, parameters=tuple(fewer)), TWO, LAID_WHOLE)} == {"unknown"}


@pytest.mark.parametrize("name", ["LlamaModel", "LlamaForTokenClassification"])
def test_a_base_model_of_hugging_face_is_cut_with_a_note(name):
    model = decoder("attn", head="")
    model = replace(model, class_name=name, config={**model.config, "model_type": "llama"})
    plan = derive(model, MESH)
    assert "tensor" in plan["embed_tokens.weight"].placements
    assert plan.notes[-1] == (
        f"embed_tokens.weight is cut over the vocabulary, and {name} has no head: who uses the table as one, outside "
        "of its modules, keeps it whole with placements: none"
    )


@pytest.mark.parametrize("name, config", [("LlamaModel", {}), ("LlamaForCausalLM", {"model_type": "llama"})])
def test_no_other_name_promises_that(name, config):
    model = decoder("attn", head="")
    (found,) = wrong(replace(model, class_name=name, config={**model.config, **config}), TWO)
    assert found.rule == "head"


# slices of weights


def bloom(**said: object) -> ModelDescription:
    """Two of Bloom's blocks, and what the configuration says beside sizes."""
    names = {"word_embeddings.weight": ((96, 32), "Embedding"), "lm_head.weight": ((96, 32), "Linear")}
    parts = {
        "self_attention.query_key_value": (96, 32),
        "self_attention.dense": (32, 32),
        "mlp.dense_h_to_4h": (128, 32),
        "mlp.dense_4h_to_h": (32, 128),
    }
    classes = {"h": "ModuleList"}
    for layer in range(2):
        names |= {f"h.{layer}.{part}.weight": (shape, "Linear") for part, shape in parts.items()}
        classes |= {f"h.{layer}.self_attention": "BloomAttention", f"h.{layer}.mlp": "BloomMLP"}
    return by_hand(names, classes, {"hidden_size": 32, "n_head": 4, "vocab_size": 96, "model_type": "bloom", **said})


def test_weights_that_are_sliced_by_the_configuration_are_whole():
    found = mended(bloom(pretraining_tp=2, slow_but_exact=True), TWO)
    assert [(each.rule, each.line) for each in found] == [
        ("configuration", "h.*.self_attention.**: {placements: {tensor: replicate}}"),
        ("configuration", "sequence_parallel: false"),
        ("configuration", "h.*.mlp.**: {placements: {tensor: replicate}}"),
        ("configuration", "sequence_parallel: false"),
    ]
    assert found[0].message == (
        "the configuration has pretraining_tp=2 and slow_but_exact=true, with which BloomAttention slices the weight "
        "of its last linear, which tensor cuts"
    )
    assert found[1].message == (
        "the configuration has pretraining_tp=2 and slow_but_exact=true, with which BloomAttention slices the weight "
        "of its last linear, and so no module is called behind which tokens could be dealt out"
    )


@pytest.mark.parametrize("said", [{"pretraining_tp": 1, "slow_but_exact": True}, {"pretraining_tp": 2}])
def test_weights_that_are_not_sliced_are_cut(said):
    assert wrong(bloom(**said), TWO) == []


# two attentions in a block


def test_the_second_attention_of_a_block_is_not_taken_for_one_of_the_same_tokens():
    found = mended(decoder("attn", "attention"), TWO, {"sequence_parallel": False})
    assert {each.rule for each in found} == {"unknown"} and len(found) == 4
    assert str(found[0]) == (
        "[unknown] layers.0.attention.q_proj.weight and 1 more like it: 'layers.0' holds two attentions, attn and "
        "attention, and nothing tells that attention reads the same tokens as attn; a role by hand for one of its "
        "parameters does; write below `parameters:`\n"
        "    layers.*.attention.q_proj.weight: {role: none}"
    )


def test_a_role_by_hand_tells_that_it_does():
    asked = {"parameters": {"layers.*.attention.q_proj.weight": {"role": "query"}}}
    plan = derive(decoder("attn", "attention"), MESH, asked)
    assert plan["layers.1.attention.o_proj.weight"].local_shape == (32, 16)


@pytest.mark.parametrize("name", sorted(OTHER_ATTENTION))
def test_attention_by_a_name_of_cross_attention_is_none(name):
    found = mended(decoder("attn", name), TWO, {"sequence_parallel": False})
    assert {each.rule for each in found} == {"unknown"}
    assert found[0].message.startswith("no rule knows 'q_proj.weight'")
