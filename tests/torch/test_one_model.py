"""Ranks that compute one model together: they start alike, are given the same, count the same heads, or all stop."""

from __future__ import annotations

import copy
from typing import Any, Callable

import pytest
import torch
from torch.nn import functional

import hyper_parallel as hp
from hyper_parallel import backends
from hyper_parallel.core.errors import ContractError
from hyper_parallel.core.execution.apply import apply_plan, execution_of
from hyper_parallel.core.execution.inprocess import InProcessWorld
from hyper_parallel.core.execution.loss import planned_cross_entropy
from tests.torch.test_hugging_face import FAMILIES, build
from tests.torch.test_models_by_hand import HEADS, SIZE, Attention, Block, Model
from tests.torch.validated import on_all_ranks, planned

pytestmark = pytest.mark.usefixtures("in_double_precision")
IDS = torch.arange(1, 17).reshape(2, 8)
LOWEST = torch.finfo(torch.float64).min
LEGAL = "legal: the same values on all ranks of a tensor group, which compute one model together: "


def llama() -> tuple[torch.nn.Module, hp.ShardingPlan]:
    model = build(*FAMILIES["llama"])
    return model, planned(model, sequence_parallel=True)


def said_by_all(model, plan, body: Callable[[Any, Any], object]) -> str:
    """What every rank is told, in the same words."""

    def on_rank(backend, own):
        with pytest.raises(ContractError) as caught:
            body(backend, own)
        return str(caught.value)

    [told] = set(on_all_ranks(model, plan, on_rank))
    return told


# What is given to the model.


def another(ids: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(16).reshape(2, 8) == 11, 90, ids)


def causal(value: float) -> torch.Tensor:
    return torch.full((2, 1, 8, 8), value, dtype=torch.float64).triu(1)


ONES = torch.ones(2, 8, dtype=torch.int64)
GIVEN = {
    "tokens": ({"input_ids": another(IDS)}, "input_ids int64 [2, 8]", "at [1, 3] rank 0 has 12 and rank 1 has 90"),
    "fewer tokens": ({"input_ids": IDS[:, 1:]}, "input_ids", "it is int64 [2, 8] on rank 0 and int64 [2, 7] on rank 1"),
    "labels": ({"labels": another(IDS)}, "labels int64 [2, 8]", "at [1, 3] rank 0 has 12 and rank 1 has 90"),
    "positions": ({"position_ids": IDS}, "position_ids", "it is NoneType on rank 0 and int64 [2, 8] on rank 1"),
    "a mask": (
        {"attention_mask": ONES.tril()},
        "attention_mask int64 [2, 8]",
        "at [0, 1] rank 0 has 1 and rank 1 has 0",
    ),
    "a mask of numbers": (
        {"attention_mask": causal(LOWEST)},
        "attention_mask",
        "it is int64 [2, 8] on rank 0 and float64 [2, 1, 8, 8] on rank 1",
    ),
    "a number": ({"num_items_in_batch": 15}, "num_items_in_batch", "it is 14 on rank 0 and 15 on rank 1"),
    "a nest": ({"more": [(IDS, 2)]}, "more[0][1]", "it is 1 on rank 0 and 2 on rank 1"),
    "one thing more": ({"extra": 1}, "extra", "rank 1 was given it and rank 0 was not"),
}
"""What rank 1 is given, what it is called, how it differs."""

USUAL = {
    "input_ids": IDS,
    "labels": IDS,
    "position_ids": None,
    "attention_mask": ONES,
    "num_items_in_batch": 14,
    "more": [(IDS, 1)],
    "use_cache": False,
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_only_one_rank_is_given_stops_all_of_them(name):
    given, what, how = GIVEN[name]
    model, plan = llama()

    def body(backend, own):
        own(**USUAL | (given if backend.collectives.rank() else {}))

    told = said_by_all(model, plan, body)
    start = f"LlamaForCausalLM: {what}: it has to be the same on every rank of tensor, but {how}\n  {LEGAL}"
    assert told == f"{start}a data loader reads the same samples on these ranks"


@pytest.mark.parametrize(
    ("other", "differ"), [(causal(LOWEST), False), (causal(LOWEST) - 1e-3, True), (causal(-1), True)]
)
def test_numbers_that_hide_something_drown_no_others(other, differ):
    model, plan = llama()

    def body(backend, own):
        mask = causal(LOWEST) if backend.collectives.rank() == 0 else other
        own(input_ids=IDS, attention_mask=mask, use_cache=False)

    if differ:
        assert said_by_all(model, plan, body).startswith("LlamaForCausalLM: attention_mask float64 [2, 1, 8, 8]: ")
    else:
        on_all_ranks(model, plan, body)


@pytest.mark.parametrize(("off", "differ"), [(1e-12, False), (1e-2, True)])
def test_numbers_may_differ_in_their_last_digits(off, differ):
    model, plan = llama()
    hidden = torch.randn(2, 8, 32)

    def body(backend, own):
        own(inputs_embeds=hidden * (1 + off * backend.collectives.rank()), use_cache=False)

    if differ:
        assert "inputs_embeds float64 [2, 8, 32]: " in said_by_all(model, plan, body)
    else:
        on_all_ranks(model, plan, body)


def test_ranks_with_samples_of_their_own_are_given_others_and_all_hear_of_what_one_group_has_wrong():
    model = build(*FAMILIES["llama"])
    plan = hp.plan(model, hp.DeviceMesh.from_sizes({"shard": 2, "tensor": 2}))

    def step(wrong: bool):
        def body(backend, own):
            rank = backend.collectives.rank()
            ids = another(IDS) if wrong and rank == 3 else IDS + rank // 2
            own(input_ids=ids, labels=ids, use_cache=False).loss.backward()

        return body

    on_all_ranks(model, plan, step(wrong=False))
    told = said_by_all(model, plan, step(wrong=True))
    assert "at [0, 0] rank 2 has 2 and rank 3 has 1" in told
    assert told.endswith(
        "a data loader picks samples by a rank's place along shard (mesh.coordinates(rank)) and reads the same samples "
        "on these ranks"
    )


def test_ranks_with_samples_of_their_own_may_be_given_fewer_things():
    model = build(*FAMILIES["llama"])
    plan = hp.plan(model, hp.DeviceMesh.from_sizes({"shard": 2, "tensor": 2}))

    def step(off: float):
        def body(backend, own):
            rank = backend.collectives.rank()
            mask = {"attention_mask": causal(-9 - off * (rank == 3))} if rank > 1 else {}
            own(input_ids=IDS, labels=IDS, use_cache=False, **mask).loss.backward()

        return body

    on_all_ranks(model, plan, step(off=0))
    told = said_by_all(model, plan, step(off=1))
    assert (
        "attention_mask float64 [2, 1, 8, 8]: it has to be the same on every rank of tensor, but ranks 2 and 3" in told
    )


def test_tokens_that_come_to_a_table_on_another_way_are_compared_there():
    model, plan = llama()

    def body(backend, own):
        changed = another(IDS) if backend.collectives.rank() else IDS
        own.model.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | {"input_ids": changed}), with_kwargs=True
        )
        own(input_ids=IDS, use_cache=False)

    told = said_by_all(model, plan, body)
    assert told.startswith("model.embed_tokens: input int64 [2, 8]: ") and "at [1, 3] rank 0 has 12" in told


def test_targets_are_compared_before_anybody_looks_at_its_own():
    model, plan = llama()
    for wrong in (another(IDS), IDS[:, 1:], IDS - 900):

        def body(backend, own, wrong=wrong):
            logits = own(input_ids=IDS, use_cache=False).logits
            planned_cross_entropy(backend, plan, logits, wrong if backend.collectives.rank() else IDS)

        assert said_by_all(model, plan, body).startswith("cross_entropy: targets")


def test_a_loss_that_is_another_on_each_rank_starts_no_backward():
    model, plan = llama()

    def body(backend, own):
        loss = own(input_ids=IDS, labels=IDS, use_cache=False).loss
        (loss / (1 + backend.collectives.rank())).backward()

    told = said_by_all(model, plan, body)
    assert told.startswith(
        "outside of the model's modules: the tensor that backward starts from: it has to be the same"
    )


def test_ranks_that_choose_other_experts_stop_at_the_experts():
    model = build(*FAMILIES["qwen3_moe"])
    plan = planned(model, sequence_parallel=True)

    def body(backend, own):
        def flip(module, args, output):
            scores, weights, chosen = output
            return scores, weights, 3 - chosen if backend.collectives.rank() else chosen

        own.model.layers[0].mlp.gate.register_forward_hook(flip)
        own(input_ids=IDS, use_cache=False)

    told = said_by_all(model, plan, body)
    assert told.startswith("model.layers.0.mlp.experts: top_k_index int64 [16, 2]: it has to be the same")
    assert "legal: the same choice of experts on these ranks" in told


# What ranks start with.


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"replicate": 2}, {"shard": 2}], ids=str)
@pytest.mark.parametrize("name", ["model.norm.weight", "model.rotary_emb.inv_freq"])
def test_ranks_that_start_with_other_values_all_stop_and_change_nothing(sizes, name):
    model = build(*FAMILIES["llama"])
    plan = hp.plan(model, hp.DeviceMesh.from_sizes(sizes))
    models = [model, copy.deepcopy(model)]
    with torch.no_grad():
        dict([*models[1].named_parameters(), *models[1].named_buffers()])[name][1] += 1e-9

    def body(backend):
        own = models[backend.collectives.rank()]
        with pytest.raises(ContractError) as caught:
            apply_plan(backend, own, plan, validate=True)
        assert execution_of(own) is None
        apply_plan(backend, own, plan)  # production looks at no value
        return str(caught.value)

    told = set(InProcessWorld(backends.load("torch"), 2, timeout_s=20).run(body))
    assert len(told) == 1 and f"Others than rank 0 hold: {name} (rank 1)\n" in told.pop()


def test_of_models_made_with_other_seeds_a_few_names_are_told():
    made = []
    for seed in (0, 0, 1, 2):
        torch.manual_seed(seed)
        made.append(Model(Block()))
    plan = hp.plan(made[0], hp.DeviceMesh.from_sizes({"replicate": 2, "tensor": 2}))

    def body(backend):
        with pytest.raises(ContractError, match=r"hold: .*weight \(ranks 2, 3\), .*, and \d+ more\n  legal: .* seed "):
            apply_plan(backend, made[backend.collectives.rank()], plan, validate=True)

    InProcessWorld(backends.load("torch"), 4, timeout_s=20).run(body)


def test_what_is_no_number_is_equal_to_itself():
    model, plan = llama()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    on_all_ranks(model, plan, lambda backend, own: None)


# How many heads there are.


class Counting(Attention):
    """Attention that makes heads of its features by `view`."""

    view: Callable[[torch.Tensor, int, int], torch.Tensor]

    def forward(self, hidden, memory=None, keys=None):
        samples, length, _ = hidden.shape
        projected = (each(hidden) for each in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (type(self).view(each, samples, length).transpose(1, 2) for each in projected)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(samples, length, -1)), None


VIEWS = {
    "by the size of a head": (lambda each, *_: each.unflatten(-1, (-1, SIZE)), ""),
    "pairs of heads": (lambda each, b, t: each.view(b, t, -1, 2, SIZE).flatten(2, 3), ""),
    "halves of heads": (lambda each, b, t: each.view(b, t, -1, 2, SIZE // 2).flatten(3), ""),
    "by the number of all heads": (lambda each, b, t: each.view(b, t, HEADS, -1), "splits it into parts of 4"),
    "by half a head": (lambda each, b, t: each.view(b, t, -1, SIZE // 2), "splits it into parts of 4"),
    "by two heads": (lambda each, *_: each.unflatten(-1, (-1, 2 * SIZE)), "joins them to parts of 16"),
}


@pytest.mark.parametrize("name", VIEWS)
def test_heads_are_counted_as_the_plan_deals_them_out(name):
    view, wrong = VIEWS[name]
    model = Model(Block(type("Counting", (Counting,), {"view": staticmethod(view)})()))
    plan = planned(model, sequence_parallel=False)
    expected = model(IDS).logits

    def body(backend, own):
        return backend.interception.plain(own(IDS).logits)

    if wrong:
        told = said_by_all(model, plan, body)
        assert "is shard(2) in units of 8, and the shape" in told and wrong in told
        assert "plan: parameter layers.0.self_attn.q_proj.weight: placements: {tensor: shard(0)}, pending: []" in told
    else:
        found = torch.cat(on_all_ranks(model, plan, body), -1)
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)  # float64's rounding of numbers around one
