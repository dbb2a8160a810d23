"""Models that no library has, planned with what lint suggests, and run by all ranks: they make the whole model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional

import hyper_parallel as hp
from hyper_parallel import ContractError, PlanError
from hyper_parallel.core.execution.heads import OwnSlopes
from tests.torch.all_ranks import gradients_of_all_ranks, logits_layout
from tests.torch.test_hugging_face import build, close

pytestmark = pytest.mark.usefixtures("in_double_precision")

HIDDEN, WORDS, HEADS, SIZE, INNER = 32, 96, 4, 8, 48


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def by_heads(features: torch.Tensor) -> torch.Tensor:
    return features.unflatten(-1, (-1, SIZE)).transpose(1, 2)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool = True) -> torch.Tensor:
    each = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(each, 1), value.repeat_interleave(each, 1)
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
    return mixed.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self, with_keys: bool = True) -> None:
        super().__init__()
        self.q_proj = linear(HIDDEN, HIDDEN)
        if with_keys:
            self.k_proj, self.v_proj = linear(HIDDEN, HIDDEN), linear(HIDDEN, HIDDEN)
        self.o_proj = linear(HIDDEN, HIDDEN)

    def forward(self, hidden, memory=None, keys=None):
        read = hidden if memory is None else memory
        key, value = keys or (by_heads(self.k_proj(read)), by_heads(self.v_proj(read)))
        return self.o_proj(attend(by_heads(self.q_proj(hidden)), key, value, memory is None)), (key, value)


class Phi3Attention(nn.Module):
    """A fused projection that is taken apart by the whole model's number of heads, and what stands behind it."""

    def __init__(self, norm: int = 0, key_norm: int = 0, keys: int = 2, sinks: bool = False) -> None:
        super().__init__()
        self.rows = (HEADS * SIZE, keys * SIZE, keys * SIZE)
        self.qkv_proj, self.o_proj = linear(HIDDEN, sum(self.rows)), linear(HIDDEN, HIDDEN)
        if norm:
            self.q_norm, self.k_norm = nn.LayerNorm(norm), nn.LayerNorm(key_norm)
        self.is_norm_of_heads = norm == SIZE
        if sinks:
            self.sinks = nn.Parameter(torch.zeros(HEADS))

    def forward(self, hidden):
        query, key, value = self.qkv_proj(hidden).split(self.rows, -1)
        if hasattr(self, "q_norm") and not self.is_norm_of_heads:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = by_heads(query), by_heads(key), by_heads(value)
        if hasattr(self, "q_norm") and self.is_norm_of_heads:
            query, key = self.q_norm(query), self.k_norm(key)
        if hasattr(self, "sinks"):
            query = query * self.sinks.sigmoid()[:, None, None]  # one number for each of all heads
        return self.o_proj(attend(query, key, value)), None


class MLP(nn.Module):
    def __init__(self, inner: int = INNER) -> None:
        super().__init__()
        self.up_proj, self.down_proj = linear(HIDDEN, inner), linear(inner, HIDDEN)

    def forward(self, hidden):
        return self.down_proj(functional.silu(self.up_proj(hidden)))


class Block(nn.Module):
    def __init__(self, attention: nn.Module | None = None, inner: int = INNER, **others: nn.Module) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.self_attn, self.mlp = attention or Attention(), MLP(inner)
        for name, module in others.items():
            setattr(self, name, module)
        self.others = list(others)

    def forward(self, hidden, memory=None, **keys):
        mixed, keys = self.self_attn(self.attn_norm(hidden), **keys)
        hidden = hidden + mixed
        for name in self.others:
            hidden = hidden + getattr(self, name)(self.attn_norm(hidden), memory=memory)[0]
        return hidden + self.mlp(self.mlp_norm(hidden)), keys


class Model(nn.Module):
    """Blocks between a table and a head, which is the table itself where there is no other."""

    def __init__(self, *blocks: nn.Module, has_head: bool = True, memory: bool = False, keys: int = HEADS) -> None:
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(WORDS, HIDDEN), nn.LayerNorm(HIDDEN)
        self.layers = nn.ModuleList(blocks)
        if has_head:
            self.lm_head = linear(HIDDEN, WORDS)
        self.reads_memory, self.hands_keys = memory, False
        self.config: dict[str, Any] = {
            "hidden_size": HIDDEN,
            "num_attention_heads": HEADS,
            "num_key_value_heads": keys,
            "head_dim": SIZE,
            "vocab_size": WORDS,
        }

    def forward(self, input_ids):
        hidden = self.embed_tokens(input_ids)
        memory = hidden[:, :3].detach() if self.reads_memory else None
        handed: dict[str, Any] = {}
        for block in self.layers:
            hidden, keys = block(hidden, memory=memory, **handed)
            handed = {"keys": keys} if self.hands_keys else {}
        hidden = self.norm(hidden)
        logits = self.lm_head(hidden) if hasattr(self, "lm_head") else hidden @ self.embed_tokens.weight.T
        return SimpleNamespace(logits=logits)


def with_shared_keys() -> Model:
    model = Model(Block(), Block(Attention(with_keys=False)))
    model.hands_keys = True
    return model


def lines(error: PlanError) -> dict:
    """What the error says is to be written, as an override file."""
    told = str(error)
    if "as an override file:\n" in told:
        return yaml.safe_load(told.partition("as an override file:\n")[2])
    section, line = told.rpartition("; write below ")[2].split("\n")
    return {section.strip("`:"): yaml.safe_load(line)}


def planned(model: nn.Module, ranks: int, sequence_parallel: bool, pastes: bool) -> hp.ShardingPlan:
    mesh, asked = hp.DeviceMesh.from_sizes({"tensor": ranks}), {"sequence_parallel": sequence_parallel}
    if pastes:
        with pytest.raises(PlanError) as told:
            hp.plan(model, mesh, asked)
        asked |= lines(told.value)
    return hp.plan(model, mesh, asked)


def hold_against_one_device(model: nn.Module, ranks: int, sequence_parallel: bool, pastes: bool) -> None:
    model = model.double()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    plan = planned(model, ranks, sequence_parallel, pastes)
    ids, weights = torch.randint(1, WORDS, (2, 8)), torch.randn(2, 8, WORDS)
    logits = model(input_ids=ids).logits
    (logits * weights).sum().backward()
    layout = logits_layout(plan, tuple(logits.shape))
    for rank, (found, gradients) in enumerate(gradients_of_all_ranks(model, plan, {"input_ids": ids}, weights)):
        assert close(found, logits.detach(), layout, rank), f"rank {rank}: logits"
        for name, parameter in model.named_parameters():
            assert close(gradients[name], parameter.grad, plan.layout(name), rank), f"rank {rank}: gradient of {name}"


def two(**fused: Any) -> list[Block]:
    return [Block(Phi3Attention(**fused)) for _ in range(2)]


KNOWN = {
    "a gathered projection": lambda: Model(*two(), keys=2),
    "norms of heads behind a gathered projection": lambda: Model(*two(norm=SIZE, key_norm=SIZE), keys=2),
    "norms of all heads behind it": lambda: Model(*two(norm=HIDDEN, key_norm=2 * SIZE), keys=2),
    "a number for each head behind it": lambda: Model(*two(sinks=True), keys=2),
    "as many keys as queries": lambda: Model(*two(keys=HEADS, norm=SIZE, key_norm=SIZE)),
}

MENDED = {
    "a table that is the head": lambda: Model(Block(), Block(), has_head=False),
    "inner features for fewer ranks": lambda: Model(Block(inner=6), Block(inner=6)),
    "keys of another layer": with_shared_keys,
    "attention to a memory": lambda: Model(*(Block(src_attn=Attention()) for _ in range(2)), memory=True),
    "attention to a memory, by a strange name": lambda: Model(
        *(Block(look=Attention()) for _ in range(2)), memory=True
    ),
}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", KNOWN)
def test_what_is_planned_is_the_model(case, ranks, sequence_parallel):
    hold_against_one_device(KNOWN[case](), ranks, sequence_parallel, pastes=False)


@pytest.mark.parametrize("case", MENDED)
def test_what_is_mended_is_the_model(case):
    hold_against_one_device(MENDED[case](), ranks=4, sequence_parallel=False, pastes=True)


def test_layers_of_norms_for_each_head_are_whole_with_their_attention():
    model = build("stablelm", {"qk_layernorm": True})
    plan = planned(model, 2, True, pastes=True)
    assert plan["model.layers.0.self_attn.q_proj.weight"].placements == {}
    assert plan["model.layers.0.mlp.up_proj.weight"].local_shape == (24, 32)


# slopes


def own(shape: tuple[int, ...], key: str = "alibi") -> torch.Tensor:
    """What the second of two ranks keeps of numbers for four heads."""
    value = torch.arange(torch.Size(shape).numel()).reshape(shape)
    _, kwargs = OwnSlopes("layers.0.attn", 4, 1, 2)((), {key: value})
    return kwargs[key]


def test_slopes_are_those_of_own_heads_wherever_the_heads_are():
    numbers = torch.arange(4 * 4 * 3)
    assert torch.equal(own((4, 4, 1, 3)), numbers.reshape(4, 4, 1, 3)[:, 2:])  # four samples
    assert torch.equal(own((4, 1, 3)), numbers[:12].reshape(4, 1, 3)[2:])
    assert torch.equal(own((8, 1, 3)), numbers[:24].reshape(2, 4, 1, 3)[:, 2:].reshape(4, 1, 3))
    assert torch.equal(own((4, 1, 1, 3)), numbers[:12].reshape(4, 1, 1, 3))  # the same for all heads


def test_masks_of_samples_are_not_taken_for_those_of_heads():
    assert own((4, 3, 3), "attention_mask").shape == (4, 3, 3)
    assert own((2, 4, 3, 3), "attention_mask").shape == (2, 2, 3, 3)


def test_slopes_of_another_shape_are_refused():
    with pytest.raises(ContractError) as told:
        own((3, 5))
    assert str(told.value) == (
        "layers.0.attn takes alibi of shape [3, 5], and works on a part of its 4 heads; which part of alibi these need "
        "is known for [samples, 4, queries, keys], [4, queries, keys] and [samples * 4, queries, keys]; for another "
        "shape keep the module whole: layers.0.attn.**: {placements: {tensor: replicate}}"
    )
