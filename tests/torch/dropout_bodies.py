"""What every rank does in test_dropout.py, where ranks are processes: only these have generators of their own."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp
from tests.torch.all_ranks import double_precision
from tests.torch.production import loss_of, own_samples, own_weights, planned, tokens
from tests.torch.test_hugging_face import FAMILIES, OTHERS, build

GPT2 = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
DROPPING = {
    "gpt2": GPT2,
    "opt": {"dropout": 0.3, "attention_dropout": 0.3},
    "bloom": {"hidden_dropout": 0.3, "attention_dropout": 0.3},
    "llama": {"attention_dropout": 0.3},
}
"""What makes models of Hugging Face's drop."""


def made(family):
    """A model that drops in training."""
    kind, sizes = (FAMILIES | OTHERS)[family]
    return build(kind, sizes | DROPPING[family]).train()


class Masks(TorchFunctionMode):
    """Notes every mask that a dropout draws, or gives those that it is given, in order. What a model has made
    `[samples * tokens, features]` is noted as `[samples, tokens, features]`."""

    def __init__(self, samples, given=()):
        super().__init__()
        self._samples = samples
        self.drawn = []
        self._given = list(given)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is not functional.dropout or not kwargs["training"] or not kwargs["p"]:
            return function(*args, **kwargs)
        (x,) = args
        if self._given:
            return x * torch.from_numpy(self._given.pop(0)).reshape(x.shape)
        with torch.no_grad():
            mask = function(torch.ones_like(x), p=kwargs["p"])
        flat = mask.dim() == 2
        self.drawn.append((mask.unflatten(0, (self._samples, -1)) if flat else mask).numpy())
        return x * mask


def put_together(masks, shape, tensor_ranks):
    """The whole mask of those of all ranks, which lie in order; whether tensor ranks have parts of it; whether they
    have drawn the same."""
    samples = []
    for start in range(0, len(masks), tensor_ranks):
        own = masks[start : start + tensor_ranks]
        alike = all(np.array_equal(each, own[0]) for each in own)
        dims = [dim for dim in range(1, len(shape)) if own[0].shape[dim] != shape[dim]]
        samples.append(np.concatenate(own, dims[0]) if dims else own[0])
    return np.concatenate(samples), bool(dims), alike


def one_step(backend, family, sizes, sequence_parallel):
    """How far loss and gradients are from those of one device that drops the same, relative to the largest of their
    tensor; what became of each mask."""
    rank = backend.collectives.rank()
    with double_precision():
        whole, model = made(family), made(family)
        torch.manual_seed(1)
        ids, weights = tokens(4, 7), torch.randn(4, 7, 96)
        with torch.no_grad(), Masks(4) as shapes:
            whole(input_ids=ids, use_cache=False)
        plan = planned(whole, sizes, sequence_parallel)
        hp.parallelize(model, plan)
        hp.manual_seed(5, model)
        own_ids = own_samples(plan, rank, ids)
        with Masks(len(own_ids)) as own:
            logits = model(input_ids=own_ids, use_cache=False).logits
        loss_of(logits, own_weights(plan, rank, weights)).backward()
        everyone = backend.collectives.gather_objects(own.drawn)
        put = [
            put_together(masks, each.shape, plan.mesh.axis_size("tensor"))
            for each, *masks in zip(shapes.drawn, *everyone)
        ]
        with Masks(4, [mask for mask, _, _ in put]):
            loss_of(whole(input_ids=ids, use_cache=False).logits, weights).backward()
        expected, errors = dict(whole.named_parameters()), {}
        for name, parameter in model.named_parameters():
            gradient = expected[name].grad
            part = torch.from_numpy(plan.layout(name).shard(gradient.numpy(), rank))
            errors[name] = (parameter.grad - part).abs().max().item() / max(gradient.abs().max().item(), 1e-3)
    samples = everyone[0][0], everyone[-1][0]
    return max(errors.values()), [(cut, alike) for _, cut, alike in put], np.array_equal(*samples)


def step(model, plan, rank, ids, seed=5):
    """Loss and gradients of a training step, and the framework's generator afterwards, all as bytes."""
    hp.manual_seed(seed, model)
    model.zero_grad()
    own = own_samples(plan, rank, ids)
    loss = hp.cross_entropy(model(input_ids=own, use_cache=False).logits, own, model)
    loss.backward()
    gradients = [each.grad.numpy().tobytes() for each in model.parameters()]
    return loss.item(), gradients, torch.get_rng_state().numpy().tobytes()


def both_modes(backend, family, sizes, sequence_parallel):
    """Whether a step is the same bits in both modes, and in production a second time; whether another seed changes it;
    whether the step after it, with the generators as they then are, drops something else."""
    rank, made_of, steps = backend.collectives.rank(), {}, {}
    torch.manual_seed(1)
    ids = tokens(4, 7)
    for mode in ("production", "validate"):
        made_of[mode] = model = made(family).float()
        plan = planned(model, sizes, sequence_parallel)
        hp.parallelize(model, plan, mode=mode)
        steps[mode] = step(model, plan, rank, ids)
    model = made_of["production"]
    again, other = step(model, plan, rank, ids), step(model, plan, rank, ids, seed=6)
    losses = []
    for _ in range(2):
        with torch.no_grad():
            losses.append(model(input_ids=own_samples(plan, rank, ids), use_cache=False).logits.sum().item())
    return steps["production"] == steps["validate"] == again, other[0] != again[0], losses[0] != losses[1]


def checkpointed(backend, family, sequence_parallel):
    """Whether gradients are the same bits without a checkpoint, with one of either kind around each block, and around
    each feed-forward inside of a block."""
    rank = backend.collectives.rank()
    torch.manual_seed(1)
    ids = tokens(2, 7)
    model = made(family).float()
    plan = planned(model, {"tensor": 2}, sequence_parallel)
    hp.parallelize(model, plan)
    plain, same = step(model, plan, rank, ids)[:2], {}
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        same[f"block, {reentrant}"] = step(model, plan, rank, ids)[:2] == plain
        model.gradient_checkpointing_disable()
    blocks = [each for each in model.modules() if hasattr(each, "mlp")]
    for reentrant in (False, True):
        for block in blocks:
            block.mlp = Checkpointed(block.mlp, reentrant)
        same[f"feed-forward, {reentrant}"] = step(model, plan, rank, ids)[:2] == plain
        for block in blocks:
            block.mlp = block.mlp.inner
    return same


class Checkpointed(nn.Module):
    """A module that is computed again in backward."""

    def __init__(self, inner, use_reentrant):
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, *args):
        return checkpoint(self.inner, *args, use_reentrant=self.use_reentrant)


def unequal(backend, family, sequence_parallel):
    """What validation says where ranks are seeded otherwise, in float64."""
    rank = backend.collectives.rank()
    with double_precision():
        torch.manual_seed(1)
        ids = tokens(2, 7)
        model = made(family)
        plan = planned(model, {"tensor": 2}, sequence_parallel)
        hp.parallelize(model, plan, mode="validate")
        torch.manual_seed(rank)
        try:
            model(input_ids=ids, use_cache=False)
        except hp.ContractError as error:
            return str(error)


def interrupted(backend):
    """Whether the generators are the user's again after an exception inside of attention: once the model begins anew,
    and after `restore`; where they stood before that."""
    model = made("gpt2").float()
    plan = planned(model, {"tensor": 2}, sequence_parallel=True)
    hp.parallelize(model, plan)
    found = []
    for back in (lambda: model.eval()(input_ids=ids, use_cache=False), lambda: hp.restore(model)):
        model.train()
        hp.manual_seed(5, model)
        ids = torch.zeros(2, 7, dtype=torch.int64)
        handle = model.transformer.h[1].attn.c_attn.register_forward_hook(stop)
        try:
            model(input_ids=ids, use_cache=False)
        except KeyError:
            inside = torch.initial_seed()
        handle.remove()
        back()
        found.append((inside != 5, torch.initial_seed() == 5))
    return found


def stop(module, args, output):
    """A hook that ends a forward."""
    raise KeyError("an error of the model's own")
