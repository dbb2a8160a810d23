"""What every rank does in test_production.py, where ranks are processes."""

import torch

import hyper_parallel as hp
from tests.torch.all_ranks import double_precision
from tests.torch.production import loss_of, own_samples, own_weights, planned, tokens
from tests.torch.test_hugging_face import FAMILIES, build


def one_step(backend, family, sizes):
    """The largest error of the loss, and of each gradient, over the largest element of the whole one."""
    rank = backend.collectives.rank()
    with double_precision():
        whole, model = build(*FAMILIES[family]), build(*FAMILIES[family])
        torch.manual_seed(1)
        ids, weights = tokens(4, 7), torch.randn(4, 7, 96)
        expected = loss_of(whole(input_ids=ids, use_cache=False).logits, weights)
        expected.backward()
        plan = planned(whole, sizes)
        hp.parallelize(model, plan)
        loss = loss_of(
            model(input_ids=own_samples(plan, rank, ids), use_cache=False).logits, own_weights(plan, rank, weights)
        )
        loss.backward()
        # Each rank has the loss of its samples and of its part of the vocabulary.
        total = sum(backend.collectives.gather_objects(loss.item())) / (
            plan.mesh.axis_size("shard") * plan.mesh.axis_size("expert")
        )
        errors = {"loss": abs(total / expected.item() - 1)}
        found = dict(model.named_parameters())
        for name, parameter in whole.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            part = torch.from_numpy(plan.layout(name).shard(gradient.numpy(), rank))
            difference = (found[name].grad - part).abs()
            errors[name] = difference.max().item() / max(gradient.abs().max().item(), 1e-3) if part.numel() else 0.0
    return errors
