"""One architecture written in PyTorch and in MindSpore has one description and one plan."""

from __future__ import annotations  # noqa: I001 (MindSpore's backend first: it sets launch_blocking)

import pytest

from hyper_parallel import DeviceMesh, plan
from hyper_parallel.backends.mindspore import BACKEND as MINDSPORE
from hyper_parallel.backends.torch import BACKEND as TORCH
from hyper_parallel.core.plan.model import describe
from hyper_parallel.models import mindspore_decoder, torch_decoder
from hyper_parallel.models.config import DecoderConfig

import mindspore
import torch


def torch_model():
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(12, 8)
            self.layers = nn.ModuleList([Block(), Block()])
            self.norm = nn.LayerNorm(8)
            self.head = nn.Linear(8, 12, bias=False)
            self.head.weight = self.embed.weight

    return Model()


def mindspore_model():
    nn = mindspore.nn

    class Block(nn.Cell):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm((8,))
            self.mlp = nn.SequentialCell(nn.Dense(8, 16), nn.GELU(), nn.Dense(16, 8))

    class Model(nn.Cell):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(12, 8)
            self.layers = nn.CellList([Block(), Block()])
            self.norm = nn.LayerNorm((8,))
            self.head = nn.Dense(8, 12, has_bias=False)
            self.head.weight = self.embed.embedding_table

    return Model()


SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2}
CONFIGS = {
    tied: DecoderConfig(**SIZES, num_heads=4, num_kv_heads=2, head_dim=8, tie_word_embeddings=tied)
    for tied in (False, True)
}
PAIRS = {
    "our decoder": lambda: (torch_decoder.Decoder(CONFIGS[False]), mindspore_decoder.Decoder(CONFIGS[False])),
    "our decoder, tied": lambda: (torch_decoder.Decoder(CONFIGS[True]), mindspore_decoder.Decoder(CONFIGS[True])),
    "the frameworks' own layers": lambda: (torch_model(), mindspore_model()),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_descriptions_are_equal(pair):
    ours, theirs = (describe(model, backend) for model, backend in zip(PAIRS[pair](), (TORCH, MINDSPORE)))
    assert ours.parameters == theirs.parameters
    assert list(ours.modules.items()) == list(theirs.modules.items())
    assert ours.tied == theirs.tied
    assert (ours.class_name, ours.config) == (theirs.class_name, theirs.config)


@pytest.mark.parametrize("pair", PAIRS)
def test_plans_are_equal_byte_for_byte(pair, tmp_path):
    mesh = DeviceMesh((2, 4), ("replicate", "shard"))
    for model, name in zip(PAIRS[pair](), ("torch", "mindspore")):
        plan(model, mesh).save(tmp_path / f"{name}.yaml")
    assert (tmp_path / "torch.yaml").read_bytes() == (tmp_path / "mindspore.yaml").read_bytes()
