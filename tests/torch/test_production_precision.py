"""Production mode in PyTorch at the precision that training uses: what is rounded, and no more."""

from __future__ import annotations

import pytest
import torch

from tests.torch.all_ranks import on_all_ranks
from tests.torch.production import loss_of, own_weights, planned, tokens
from tests.torch.test_hugging_face import FAMILIES, build


@pytest.mark.parametrize("kind", ["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_gradients_are_those_of_one_device_to_rounding(family, kind):
    """bfloat16 has 8 bits, 0.4%: sums over ranks are rounded where one product is rounded once, so errors of a few
    such steps add up; float32 has 24 bits."""
    model = build(*FAMILIES[family]).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
    bound = 1e-5 if kind == "float32" else 0.08
    plan = planned(model, {"tensor": 2})
    ids, weights = tokens(2, 8), torch.randn(2, 8, 96)

    def logits_of(each):
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            return each(input_ids=ids).logits

    expected = logits_of(model)
    loss_of(expected.float(), weights).backward()
    gradients = {name: each.grad.float() for name, each in model.named_parameters()}

    def body(backend, own):
        rank = backend.collectives.rank()
        logits = logits_of(own)
        assert logits.dtype == expected.dtype
        loss_of(logits.float(), own_weights(plan, rank, weights)).backward()
        for name, parameter in own.named_parameters():
            part = torch.from_numpy(plan.layout(name).shard(gradients[name].numpy(), rank))
            scale = gradients[name].abs().max().item()
            torch.testing.assert_close(parameter.grad.float(), part, rtol=0, atol=bound * scale, msg=name)

    on_all_ranks(model, plan, body)
