"""Sequences of several lengths under sequence parallelism, some of which leave a rank as many tokens as others do: what
is computed again in backward, and what users call one by one, belongs to the right one."""

from __future__ import annotations

import copy
import random
from typing import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel.core.errors import ContractError
from hyper_parallel.core.execution.apply import apply_plan
from tests.torch.production import assert_gradients_are_the_models, planned, tokens
from tests.torch.test_hugging_face import FAMILIES, OTHERS, build
from tests.torch.validated import on_all_ranks

pytestmark = pytest.mark.usefixtures("in_double_precision")

KINDS = {
    **{name: FAMILIES[name] for name in ("llama", "qwen3_moe")},
    "opt": ("opt", OTHERS["opt"][1] | {"dropout": 0.0}),
}


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def evaluate(model: nn.Module, ids: torch.Tensor) -> float:
    with torch.no_grad():
        found = loss_of(model.eval(), ids).item()
    model.train()
    return found


def checkpointed(model: nn.Module, reentrant: bool) -> None:
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})


def assert_is_reproduced(
    family: str, run: Callable[[nn.Module], list[float]], ranks: int = 2, validate: bool = False, **sizes: int
) -> None:
    """Ranks that run a function of a model get its numbers and its gradients."""
    model = build(*KINDS[family])
    plan = planned(model, {**sizes, "tensor": ranks})
    expected = run(model)

    def body(backend, own):
        own.zero_grad()
        assert run(own) == pytest.approx(expected, rel=1e-10)  # float64, sums of a few hundred terms
        assert_gradients_are_the_models(model, own, plan, backend.collectives.rank())

    on_all_ranks(model, plan, body, validate)


@pytest.mark.parametrize("validate", [False, True], ids=["production", "validation"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_forwards_of_several_lengths_before_one_backward(reentrant, validate):
    batches = [tokens(2, length) for length in (5, 6, 7)]

    def run(model):
        checkpointed(model, reentrant)
        losses = []
        for ids in batches:
            losses.append(loss_of(model, ids))
            evaluate(model, ids[:1, 1:])
        sum(losses).backward()
        return [loss.item() for loss in losses]

    assert_is_reproduced("qwen3_moe", run, validate=validate)


@pytest.mark.parametrize("seed", range(4))
def test_forwards_backwards_and_evaluations_in_any_order(seed):
    def run(model):
        order = random.Random(seed)
        batches = torch.Generator().manual_seed(seed)
        checkpointed(model, reentrant=bool(seed % 2))
        waiting, numbers = [], []
        for event in order.choices(("forward", "backward", "evaluation"), (3, 2, 1), k=12) + ["backward"] * 12:
            ids = torch.randint(3, 96, (order.randint(1, 2), order.randint(2, 13)), generator=batches)
            if event == "forward":
                waiting.append(loss_of(model, ids))
                numbers.append(waiting[-1].item())
            elif event == "evaluation":
                numbers.append(evaluate(model, ids))
            elif waiting:
                waiting.pop(order.randrange(len(waiting))).backward()
        return numbers

    assert_is_reproduced("llama", run, ranks=4 if seed < 2 else 2)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_checkpoints_around_the_model_and_around_its_blocks(reentrant):
    batches = [tokens(2, length) for length in (6, 5, 4)]

    def run(model):
        checkpointed(model, reentrant)
        asks = torch.ones((), requires_grad=True)  # a reentrant checkpoint wants one
        outer, inner = batches[0], batches[1:]
        losses = [checkpoint(lambda ids, _: loss_of(model, ids), outer, asks, use_reentrant=reentrant)]
        losses += [loss_of(model, ids) for ids in inner]
        sum(losses).backward()
        return [loss.item() for loss in losses]

    assert_is_reproduced("llama", run)


def test_the_same_with_units_that_are_gathered():
    batches = [tokens(1, length) for length in (5, 6)]

    def run(model):
        checkpointed(model, reentrant=True)
        losses = [loss_of(model, ids) for ids in batches]
        sum(losses).backward()
        return [loss.item() for loss in losses]

    assert_is_reproduced("llama", run, shard=2)


def blocks_in_turns(model: nn.Module, batches: list[torch.Tensor], recompute: bool) -> list[torch.Tensor]:
    """Each block for every batch before the next block; the sum of what comes out for each."""
    inner = model.model
    streams = [inner.embed_tokens(ids) for ids in batches]
    places = [inner.rotary_emb(hidden, torch.arange(hidden.shape[1])[None]) for hidden in streams]
    for block in inner.layers:

        def call(hidden, place, block=block):
            return block(hidden, position_embeddings=place)

        for index, place in enumerate(places):
            hidden = streams[index]
            streams[index] = checkpoint(call, hidden, place, use_reentrant=False) if recompute else call(hidden, place)
    return [(hidden * hidden).sum() for hidden in streams]


@pytest.mark.parametrize("recompute", [False, True], ids=["", "computed again"])
def test_blocks_that_are_called_one_by_one_for_batches_in_turns(recompute):
    batches = [tokens(2, length) for length in (5, 6, 3)]

    def run(model):
        sums = blocks_in_turns(model, batches, recompute)
        sum(sums).backward()
        return [each.item() for each in sums]

    assert_is_reproduced("llama", run)


def test_two_models_count_for_themselves():
    pair = nn.ModuleList(build(*KINDS["llama"]) for _ in range(2))
    plan = planned(pair[0], {"tensor": 2})
    batches = [tokens(2, 5), tokens(2, 6)]

    def run(models):
        for model in models:
            checkpointed(model, reentrant=False)
        losses = [loss_of(model, ids) for ids in batches for model in models]
        sum(losses).backward()
        return [loss.item() for loss in losses]

    expected = run(pair)

    def body(backend, first):
        second = copy.deepcopy(pair[1])
        second.zero_grad()
        apply_plan(backend, second, plan)
        first.zero_grad()
        assert run([first, second]) == pytest.approx(expected, rel=1e-10)
        for own, model in zip((first, second), pair):
            assert_gradients_are_the_models(model, own, plan, backend.collectives.rank())

    on_all_ranks(pair[0], plan, body, validate=False)


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_tokens_of_all_samples_in_a_row(reentrant):
    """OPT's feed-forward layers take `[samples * tokens, features]`."""
    batches = [tokens(2, 5), tokens(2, 6), tokens(1, 9)]

    def run(model):
        checkpointed(model, reentrant)
        losses = [loss_of(model, ids) for ids in batches]
        sum(losses).backward()
        return [loss.item() for loss in losses]

    assert_is_reproduced("opt", run)


def test_rows_that_may_be_of_either_shape_are_refused_by_every_rank():
    model = build(*KINDS["opt"])
    plan = planned(model, {"tensor": 2})
    refused = []

    def body(backend, own):
        checkpointed(own, reentrant=False)
        losses = [loss_of(own, tokens(*shape)) for shape in ((2, 6), (3, 4))]
        try:
            sum(losses).backward()
        except ContractError as error:
            refused.append(str(error))

    on_all_ranks(model, plan, body, validate=False)
    assert len(refused) == 2
    assert all("nothing tells how many samples of [2, 6] or [3, 4]" in each for each in refused)


def test_parts_that_are_of_no_sequence_are_refused_by_every_rank():
    model = build(*KINDS["llama"])
    plan = planned(model, {"tensor": 2})
    refused = []

    def body(backend, own):
        part = torch.ones(1, 3 + 2 * backend.collectives.rank(), 32)
        try:
            own.model.layers[1].self_attn(part, position_embeddings=None, attention_mask=None)
        except ContractError as error:
            refused.append(str(error))

    on_all_ranks(model, plan, body, validate=False)
    assert len(refused) == 2
    assert all("the tensor ranks hold [3, 5] tokens, and 8 tokens are cut into [4, 4]" in each for each in refused)


@pytest.mark.parametrize("validate", [False, True], ids=["production", "validation"])
@pytest.mark.parametrize("length, ranks", [(9, 4), (1, 2)])
def test_ranks_without_a_token(length, ranks, validate):
    ids = tokens(2, length)

    def run(model):
        model(input_ids=ids, use_cache=False).logits.square().sum().backward()  # on a rank: of its part of the logits
        return []

    assert_is_reproduced("qwen3_moe", run, ranks, validate)
