"""What users write around a parallel model, as docs/parallelize.md says: what works, and what does not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

import hyper_parallel as hp
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.models.config import DecoderConfig
from hyper_parallel.models.torch_decoder import Decoder, SwiGLU
from tests.torch import validated
from tests.torch.all_ranks import on_all_ranks
from tests.torch.production import LLAMA, assert_gradients_are_the_models, planned, tokens
from tests.torch.test_hugging_face import build

TWO_RANKS = hp.DeviceMesh.from_sizes({"tensor": 2})

pytestmark = pytest.mark.usefixtures("in_double_precision")


def with_a_whole_head(model, sequence_parallel):
    whole = {"lm_head.**": {"placements": {"tensor": "replicate"}}}
    return hp.plan(model, TWO_RANKS, {"sequence_parallel": sequence_parallel, "parameters": whole})


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_with_a_whole_head_every_rank_generates_what_one_device_does(sequence_parallel):
    model, prompt = build(*LLAMA).eval(), tokens(1, 4)

    def generated(each):
        return each.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None).tolist()

    plan = with_a_whole_head(model, sequence_parallel)
    assert on_all_ranks(model, plan, lambda _, own: generated(own)) == [generated(copy.deepcopy(model))] * 2


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_with_a_whole_head_a_loss_written_by_hand_is_that_of_one_device(sequence_parallel):
    model, ids = build(*LLAMA), tokens(2, 6)
    plan = with_a_whole_head(model, sequence_parallel)

    def step(each):
        logits = each(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        return loss.item()

    expected = step(model)

    def body(backend, own):
        assert step(own) == pytest.approx(expected, rel=1e-12)  # float64's rounding
        assert_gradients_are_the_models(model, own, plan, backend.collectives.rank())

    on_all_ranks(model, plan, body)


def test_tied_embeddings_are_kept_whole_together_with_the_head():
    model = build("llama", {"tie_word_embeddings": True})
    with pytest.raises(hp.PlanError, match="model.embed_tokens.weight: {placements: {tensor: replicate}}"):
        with_a_whole_head(model, sequence_parallel=True)


def test_a_loss_over_parameters_sees_the_part_of_the_rank():
    model = build(*LLAMA)
    plan = planned(model, {"tensor": 2})

    def squares(each):
        return sum(parameter.square().sum().item() for parameter in each.parameters())

    found = on_all_ranks(model, plan, lambda _, own: squares(own))
    assert max(found) < squares(model)


def test_gradients_that_are_asked_of_autograd_by_parameter_are_refused_by_it():
    model, ids = build(*LLAMA), tokens(2, 6)

    def body(_, own):
        loss = own(input_ids=ids, labels=ids, use_cache=False).loss
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            torch.autograd.grad(loss, list(own.parameters()))

    on_all_ranks(model, planned(model, {"shard": 2, "tensor": 2}), body)


@pytest.mark.parametrize(("sequence_parallel", "length"), [(False, 6), (True, 3)])
def test_hidden_states_between_blocks_have_the_tokens_of_the_rank(sequence_parallel, length):
    model, ids = build(*LLAMA), tokens(2, 6)

    def shapes(_, own):
        states = own(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        return [tuple(each.shape) for each in states]

    for found in on_all_ranks(model, planned(model, {"tensor": 2}, sequence_parallel), shapes):
        assert found == [(2, length, 32), (2, length, 32), (2, 6, 32)]


class Scaled(SwiGLU):
    """Divides by a width that is the part's on a rank."""

    def forward(self, hidden):
        inner = F.silu(self.gate_proj(hidden)) * self.up_proj(hidden)
        return self.down_proj(inner / inner.shape[-1])


def decoder_with_a_number_of_its_shape():
    config = DecoderConfig(96, 32, 48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8)
    model = Decoder(config)
    model.model.layers[0].mlp = Scaled(config)
    return model


def test_a_number_out_of_a_local_shape_is_seen_by_numbers_only():
    plan = hp.plan(decoder_with_a_number_of_its_shape(), TWO_RANKS)
    report = hp.check_gradients(decoder_with_a_number_of_its_shape, plan, {"input_ids": tokens(2, 6)})
    assert not report.refused and not report.failed and not report.ok
    assert "model.layers.0.mlp" in str(report)


@pytest.mark.parametrize("validate", [False, True])
def test_a_layer_of_a_parallel_model_is_not_copied_and_told_so(validate):
    model = build(*LLAMA)

    def body(_, own):
        for module in (own, own.model.layers[0], own.model.layers[0].mlp):
            with pytest.raises(ConfigError, match="a sharded model, or a module of it, can't be copied or pickled"):
                copy.deepcopy(module)

    validated.on_all_ranks(model, planned(model, {"tensor": 2}), body, validate)
