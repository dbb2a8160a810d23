"""Production mode on Hugging Face's models in PyTorch: all ranks in one process, held against the model itself."""

from __future__ import annotations

import copy

import pytest
import torch

from hyper_parallel import backends
from hyper_parallel.core.execution.apply import apply_plan
from hyper_parallel.core.execution.inprocess import InProcessWorld
from hyper_parallel.core.fsdp import build as units
from hyper_parallel.core.fsdp.clip import clip_grad_norm_
from tests.torch import production_bodies
from tests.torch.all_ranks import logits_layout, on_all_ranks
from tests.torch.production import (
    LLAMA,
    assert_gradients_are_the_models,
    assert_same,
    hold_against,
    loss_of,
    own_samples,
    own_weights,
    planned,
    tokens,
)
from tests.torch.test_hugging_face import EXPERTS, FAMILIES, HEAD, OTHERS, build

LENGTHS = {"even": (4, 8), "odd": (4, 7), "fewer tokens than ranks": (4, 1)}


pytestmark = pytest.mark.usefixtures("in_double_precision")


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    "sizes", [{"shard": 2, "tensor": 2}, {"replicate": 2, "tensor": 2}, {"shard": 3, "tensor": 2}], ids=str
)
@pytest.mark.parametrize(
    "family", ["llama with biases", "llama with tied embeddings", "qwen3_moe", "phi3", "gpt2", "gpt_oss"]
)
def test_data_parallel_ranks_on_top_take_the_mean(family, sizes, sequence_parallel):
    model = build(*FAMILIES[family])
    hold_against(model, planned(model, sizes, sequence_parallel), samples=6, length=8)


@pytest.mark.parametrize("length", [8, 1], ids=["many tokens", "ranks that get none"])
@pytest.mark.parametrize("sizes", [{"expert": 4}, {"expert": 2, "tensor": 2}, {"shard": 2, "expert": 2}], ids=str)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_tokens_travel_to_their_experts(family, sizes, length):
    model = build(*FAMILIES[family])
    hold_against(model, planned(model, sizes), samples=4, length=length)


@pytest.mark.parametrize("sizes", [{"expert": 4}, {"expert": 2, "tensor": 2}, {"shard": 2, "expert": 2}], ids=str)
def test_all_tokens_travel_to_all_experts(sizes):
    model = build(*OTHERS["llama4_text"])
    hold_against(model, planned(model, sizes), samples=4, length=7)


def test_ranks_with_more_tokens_and_with_fewer_share_experts_that_take_all():
    model = build(*OTHERS["llama4_text"])
    batches = [tokens(samples, 5) for samples in (3, 1)]

    def body(backend, own):
        found = own(input_ids=batches[backend.collectives.rank()], use_cache=False).logits
        found.sum().backward()
        return found.detach()

    for ids, found in zip(batches, on_all_ranks(model, planned(model, {"expert": 2}), body)):
        torch.testing.assert_close(found, model(input_ids=ids, use_cache=False).logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("trained", ["", "experts"])
def test_a_rank_whose_experts_nobody_chooses_still_takes_part(trained):
    model = build("mixtral", EXPERTS | {"num_local_experts": 8, "num_experts": 8})
    factors = torch.tensor([4.0, 3.0, -4.0, -3.0, 1.0, 0.5, -0.5, -1.0])  # the highest two scores: 0 and 1, or 2 and 3
    for layer in model.model.layers:
        with torch.no_grad():
            layer.mlp.gate.weight.copy_(factors[:, None] * layer.mlp.gate.weight[:1])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    hold_against(model, planned(model, {"expert": 4}), samples=4, length=5)
    for layer in model.model.layers:
        assert not layer.mlp.experts.down_proj.grad[4:].any() and layer.mlp.experts.down_proj.grad[:4].any()


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("family", ["llama", "opt", "mixtral"])
def test_any_length_of_sequence(family, length):
    model = build(*(FAMILIES | OTHERS)[family])
    hold_against(model, planned(model, {"tensor": 4}), *length)


@pytest.mark.parametrize(
    "sizes",
    [{"num_hidden_layers": 1}, {"vocab_size": 97}, {"num_attention_heads": 8}, {"intermediate_size": 46}],
    ids=str,
)
def test_odd_sizes(sizes):
    model = build("llama", HEAD | sizes)
    ids, weights = tokens(2, 8), torch.randn(2, 8, model.config.vocab_size)
    plan = planned(model, {"tensor": 4})
    loss_of(model(input_ids=ids).logits, weights).backward()

    def body(backend, own):
        rank = backend.collectives.rank()
        loss_of(own(input_ids=ids).logits, own_weights(plan, rank, weights)).backward()
        assert_gradients_are_the_models(model, own, plan, rank)

    on_all_ranks(model, plan, body)


def test_the_padding_token_gets_no_gradient():
    model = build(*LLAMA)
    model.model.embed_tokens.padding_idx = 50
    model.zero_grad()
    ids = torch.full((2, 8), 50)
    ids[:, ::2] = 51
    plan = planned(model, {"tensor": 2})
    model(input_ids=ids).logits.sum().backward()
    assert model.model.embed_tokens.weight.grad[50].abs().max() == 0

    def body(backend, own):
        own(input_ids=ids).logits.sum().backward()
        assert_gradients_are_the_models(model, own, plan, backend.collectives.rank())

    on_all_ranks(model, plan, body)


@pytest.mark.parametrize(
    "family, loss_type",
    [
        ("llama with tied embeddings", "ForCausalLM"),
        ("llama", "ForConditionalGeneration"),
        ("gpt2", None),
        ("openai-gpt", None),
    ],
)
def test_a_model_that_computes_its_own_loss_gets_that_of_the_whole_vocabulary(family, loss_type):
    model = build(*(FAMILIES | OTHERS)[family])
    model.loss_type = loss_type
    ids, labels = tokens(2, 8), tokens(2, 8)
    labels[0, :3] = -100
    for more in ({}, {"num_items_in_batch": 7}):
        model.zero_grad()
        expected = model(input_ids=ids, labels=labels, **more).loss
        expected.backward()
        plan = planned(model, {"shard": 2, "tensor": 2})

        def body(backend, own):
            loss = own(input_ids=ids, labels=labels, **more).loss
            loss.backward()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
            assert_gradients_are_the_models(model, own, plan, backend.collectives.rank())

        on_all_ranks(model, plan, body)


def test_layouts_and_whole_values_are_found_and_an_optimizer_keeps_the_ranks_together():
    model = build(*FAMILIES["qwen3"])
    plan = planned(model, {"shard": 2, "tensor": 2})
    batches = [(tokens(4, 6), torch.randn(4, 6, 96)) for _ in range(3)]
    whole = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    for ids, weights in batches:
        optimizer.zero_grad()
        loss_of(whole(input_ids=ids).logits, weights).backward()
        optimizer.step()

    def body(backend, own):
        rank = backend.collectives.rank()
        for name, parameter in own.named_parameters():
            assert units.layout_of(parameter) == plan.layout(name)
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.01)
        for ids, weights in batches:
            optimizer.zero_grad()
            logits = own(input_ids=own_samples(plan, rank, ids)).logits
            loss_of(logits, own_weights(plan, rank, weights)).backward()
            optimizer.step()
        return units.full_parameters(backend, own)

    for found in on_all_ranks(model, plan, body):
        for name, parameter in whole.named_parameters():
            # Adam divides by the root of a square, which makes 1e-13 of a small gradient 1e-9 of its step.
            torch.testing.assert_close(torch.from_numpy(found[name]), parameter.detach(), rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        (LLAMA, {"shard": 2, "tensor": 2}),
        (FAMILIES["qwen3_moe"], {"shard": 2, "expert": 2}),
        (FAMILIES["qwen3_moe"], {"expert": 2, "tensor": 2}),
    ],
    ids=["tensor", "experts", "experts and tensor"],
)
def test_the_norm_counts_every_element_once(family, sizes):
    model = build(*family)
    plan = planned(model, sizes)
    ids, weights = tokens(4, 8), torch.randn(4, 8, 96)
    loss_of(model(input_ids=ids).logits, weights).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()

    def body(backend, own):
        rank = backend.collectives.rank()
        loss_of(own(input_ids=own_samples(plan, rank, ids)).logits, own_weights(plan, rank, weights)).backward()
        parameters = list(own.parameters())
        norm = clip_grad_norm_(backend, own, parameters, [each.grad for each in parameters], 1.0)
        assert norm == pytest.approx(expected, rel=1e-6)  # summed over ranks in float32
        for name, parameter in own.named_parameters():
            clipped = dict(model.named_parameters())[name].grad
            expected_part = torch.from_numpy(plan.layout(name).shard(clipped.numpy(), rank))
            torch.testing.assert_close(parameter.grad, expected_part, rtol=1e-5, atol=1e-7)

    on_all_ranks(model, plan, body)


# Ways of use


def test_gradients_accumulate_and_evaluation_leaves_no_trace():
    model = build(*LLAMA).train()
    plan = planned(model, {"shard": 2, "tensor": 2})
    batches = [(tokens(4, 8), torch.randn(4, 8, 96)) for _ in range(2)]
    for ids, weights in batches:
        loss_of(model(input_ids=ids).logits, weights).backward()

    def body(backend, own):
        rank = backend.collectives.rank()
        for ids, weights in batches:
            loss_of(own(input_ids=own_samples(plan, rank, ids)).logits, own_weights(plan, rank, weights)).backward()
            own.eval()
            with torch.no_grad():
                found = own(input_ids=ids[:, :5]).logits
                assert_same(found, model(input_ids=ids[:, :5]).logits, logits_layout(plan, (4, 5, 96)), rank, "logits")
            own.train()
        assert_gradients_are_the_models(model, own, plan, rank)

    on_all_ranks(model, plan, body)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("sizes", [{"shard": 2, "tensor": 2}, {"shard": 2, "expert": 2}], ids=str)
def test_activation_checkpointing(sizes, reentrant):
    model = build(*FAMILIES["qwen3_moe"]).train()
    plan = planned(model, sizes)
    ids, weights = tokens(4, 7), torch.randn(4, 7, 96)
    loss_of(model(input_ids=ids, use_cache=False).logits, weights).backward()

    def body(backend, own):
        rank = backend.collectives.rank()
        own.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            own.enable_input_require_grads()
        logits = own(input_ids=own_samples(plan, rank, ids), use_cache=False).logits
        loss_of(logits, own_weights(plan, rank, weights)).backward()
        assert_gradients_are_the_models(model, own, plan, rank)

    on_all_ranks(model, plan, body)


def test_steps_with_a_cache_go_on_where_the_last_one_stopped():
    model = build(*FAMILIES["qwen3"])
    plan = planned(model, {"tensor": 2}, sequence_parallel=False)
    ids = tokens(2, 9)
    expected = model(input_ids=ids).logits

    def body(backend, own):
        with torch.no_grad():
            first = own(input_ids=ids[:, :6], use_cache=True)
            rest = own(input_ids=ids[:, 6:], past_key_values=first.past_key_values, use_cache=True)
        found = torch.cat([first.logits, rest.logits], 1)
        assert_same(found, expected, logits_layout(plan, expected.shape), backend.collectives.rank(), "logits")

    on_all_ranks(model, plan, body)


def test_two_models_in_one_process():
    first, second = build(*LLAMA), build(*FAMILIES["gpt2"])
    plans = planned(first, {"tensor": 2}), planned(second, {"shard": 2})
    ids, weights = tokens(2, 6), torch.randn(2, 6, 96)
    for model in (first, second):
        loss_of(model(input_ids=ids).logits, weights).backward()
    models = [[copy.deepcopy(model) for model in (first, second)] for _ in range(2)]

    def body(backend):
        rank = backend.collectives.rank()
        both = models[rank]
        for model, plan in zip(both, plans):
            model.zero_grad()
            apply_plan(backend, model, plan)
        one, other = both
        logits = one(input_ids=ids).logits
        loss_of(other(input_ids=ids).logits, weights).backward()
        part = logits_layout(plans[0], weights.shape).shard(weights.numpy(), rank)
        loss_of(logits, torch.from_numpy(part)).backward()
        for own, model, plan in zip(both, (first, second), plans):
            assert_gradients_are_the_models(model, own, plan, rank)

    InProcessWorld(backends.load("torch"), 2).run(body)


@pytest.mark.parametrize("sizes", [{"shard": 2, "tensor": 2}, {"expert": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("trained", ["lm_head", "norm", "q_proj", "layers.1", "mlp.gate.", "down_proj"])
def test_what_is_frozen_gets_no_gradient_and_what_is_not_its_own(trained, sizes):
    model = build(*FAMILIES["qwen3_moe"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    hold_against(model, planned(model, sizes), samples=4, length=7)


REAL = {
    "llama with biases": {"shard": 2, "tensor": 2},
    "qwen3_moe": {"shard": 2, "tensor": 2},
    "mixtral": {"expert": 2, "tensor": 2},
}


@pytest.mark.parametrize("family", REAL)
def test_real_ranks_do_the_same(pool, family):
    for errors in pool("torch", 4).run(production_bodies.one_step, family, REAL[family]):
        assert max(errors.values()) < 1e-10, errors
