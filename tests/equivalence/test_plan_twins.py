"""One decoder written in PyTorch and in MindSpore has one plan on every mesh axis, byte for byte."""

from __future__ import annotations  # noqa: I001 (MindSpore's backend first: it sets launch_blocking)

from types import SimpleNamespace

import pytest

from hyper_parallel import ConfigError, DeviceMesh, backends, parallelize, plan
from hyper_parallel.backends.mindspore import BACKEND as MINDSPORE  # noqa: F401
from hyper_parallel.core.plan.model import describe
from hyper_parallel.models import mindspore_decoder, torch_decoder
from hyper_parallel.models.config import DecoderConfig

import mindspore
import torch

HIDDEN, HEADS, KEYS, INNER, EXPERTS, WORDS, LAYERS = 32, 4, 2, 48, 4, 96, 2


CONFIG = SimpleNamespace(
    model_type="twin",
    hidden_size=HIDDEN,
    num_attention_heads=HEADS,
    num_key_value_heads=KEYS,
    head_dim=HIDDEN // HEADS,
    vocab_size=WORDS,
    num_experts=EXPERTS,
)
"""What both models say of themselves."""


def torch_twin(tied: bool):
    nn = torch.nn

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj = nn.Linear(HIDDEN, HIDDEN)
            self.k_proj = nn.Linear(HIDDEN, KEYS * HIDDEN // HEADS)
            self.v_proj = nn.Linear(HIDDEN, KEYS * HIDDEN // HEADS)
            self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
            self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
            self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    class SparseMoeBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
            self.experts = nn.ModuleList([MLP() for _ in range(EXPERTS)])

    class Layer(nn.Module):
        def __init__(self, sparse):
            super().__init__()
            self.input_layernorm = nn.LayerNorm(HIDDEN)
            self.self_attn = Attention()
            self.post_attention_layernorm = nn.LayerNorm(HIDDEN)
            self.mlp = SparseMoeBlock() if sparse else MLP()

    class Twin(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = CONFIG
            self.embed_tokens = nn.Embedding(WORDS, HIDDEN)
            self.layers = nn.ModuleList([Layer(sparse=layer % 2) for layer in range(LAYERS)])
            self.norm = nn.LayerNorm(HIDDEN)
            self.lm_head = nn.Linear(HIDDEN, WORDS, bias=False)
            if tied:
                self.lm_head.weight = self.embed_tokens.weight

    return Twin()


def mindspore_twin(tied: bool):
    nn = mindspore.nn

    class Attention(nn.Cell):
        def __init__(self):
            super().__init__()
            self.q_proj = nn.Dense(HIDDEN, HIDDEN)
            self.k_proj = nn.Dense(HIDDEN, KEYS * HIDDEN // HEADS)
            self.v_proj = nn.Dense(HIDDEN, KEYS * HIDDEN // HEADS)
            self.o_proj = nn.Dense(HIDDEN, HIDDEN, has_bias=False)

    class MLP(nn.Cell):
        def __init__(self):
            super().__init__()
            self.gate_proj = nn.Dense(HIDDEN, INNER, has_bias=False)
            self.up_proj = nn.Dense(HIDDEN, INNER, has_bias=False)
            self.down_proj = nn.Dense(INNER, HIDDEN, has_bias=False)

    class SparseMoeBlock(nn.Cell):
        def __init__(self):
            super().__init__()
            self.gate = nn.Dense(HIDDEN, EXPERTS, has_bias=False)
            self.experts = nn.CellList([MLP() for _ in range(EXPERTS)])

    class Layer(nn.Cell):
        def __init__(self, sparse):
            super().__init__()
            self.input_layernorm = nn.LayerNorm((HIDDEN,))
            self.self_attn = Attention()
            self.post_attention_layernorm = nn.LayerNorm((HIDDEN,))
            self.mlp = SparseMoeBlock() if sparse else MLP()

    class Twin(nn.Cell):
        def __init__(self):
            super().__init__()
            self.config = CONFIG
            self.embed_tokens = nn.Embedding(WORDS, HIDDEN)
            self.layers = nn.CellList([Layer(sparse=layer % 2) for layer in range(LAYERS)])
            self.norm = nn.LayerNorm((HIDDEN,))
            self.lm_head = nn.Dense(HIDDEN, WORDS, has_bias=False)
            if tied:
                self.lm_head.weight = self.embed_tokens.embedding_table

    return Twin()


def our_decoders(tied: bool):
    config = DecoderConfig(
        vocab_size=WORDS,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KEYS,
        head_dim=HIDDEN // HEADS,
        tie_word_embeddings=tied,
    )
    return torch_decoder.Decoder(config), mindspore_decoder.Decoder(config)


def twins(tied: bool):
    return torch_twin(tied), mindspore_twin(tied)


MESHES = [
    {"shard": 2, "tensor": 2},
    {"replicate": 2, "shard": 3, "tensor": 4},
    {"shard": 2, "context": 2, "tensor": 2},
    {"context": 4},
]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("models", [our_decoders, twins])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_plans_are_equal_byte_for_byte(models, tied, sequence_parallel, tmp_path):
    for sizes in MESHES + ([{"shard": 2, "expert": 2}, {"expert": 4}] if models is twins else []):
        plans = []
        for model, name in zip(models(tied), ("torch", "mindspore")):
            made = plan(model, DeviceMesh.from_sizes(sizes), {"sequence_parallel": sequence_parallel})
            made.save(tmp_path / name)
            plans.append(made)
        assert plans[0].to_dict() == plans[1].to_dict()
        assert (tmp_path / "torch").read_bytes() == (tmp_path / "mindspore").read_bytes()
        assert plans[0].table() == plans[1].table()
        assert plans[0].boundaries and all(each.role for each in plans[0].parameters)
        text = (tmp_path / "torch").read_text()
        assert not [word for word in ("CellList", "Dense", "Cell", "embedding_table", "gamma") if word in text]


@pytest.mark.parametrize("place", [0, 1], ids=["torch", "mindspore"])
def test_a_plan_that_can_not_run_yet_is_made_and_then_refused_before_anything_is_changed(place):
    model = twins(False)[place]
    made = plan(model, DeviceMesh.from_sizes({"shard": 2, "context": 2, "tensor": 2}))
    before = describe(model, backends.of_model(model))
    with pytest.raises(ConfigError, match="running the axes context is not offered"):
        parallelize(model, made)
    assert describe(model, backends.of_model(model)) == before
