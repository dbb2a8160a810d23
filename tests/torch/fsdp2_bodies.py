"""Bodies of `test_fsdp2.py`: twenty steps with our `fully_shard` and with PyTorch's own, told the same things."""

from functools import partial

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp
from tests.equivalence.toy import ToyConfig, batch, build

STEPS = 20


def toy(backend, config):
    """The toy model without its scalar, which FSDP2 refuses."""
    model, loss = build(backend, config)
    del model.temperature
    model.temperature = torch.tensor(2.0, dtype=getattr(torch, config.dtype))
    return model, loss


def recompute(model, kind):
    """Checkpoints in the blocks, or around them, of either kind."""
    reentrant = "reentrant" in kind
    for block in model.layers:
        forward = block.forward if "inside" in kind else block.__call__

        def again(x, forward=forward):
            return checkpoint(forward, x, use_reentrant=reentrant)

        if "inside" in kind:
            block.forward = again
        else:
            model.around = [*getattr(model, "around", []), again]
    if "around" in kind:
        model.forward = lambda x: around(model, x)


def around(model, x):
    """The toy's forward with its blocks inside checkpoints."""
    x = x @ model.embed
    for index in model.calls:
        x = model.around[index](x)
    return model.head(x * model.extra) * model.temperature


def prefetch(model):
    """Two ahead in forward and in backward, by lists."""
    blocks = list(model.layers)
    model.set_modules_to_forward_prefetch(blocks[:2])
    for place, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 3])
        block.set_modules_to_backward_prefetch(blocks[max(place - 2, 0) : place][::-1])


def before_micro_batch(model, kind, last):
    """What a training loop says before each micro-batch."""
    if kind == "none":
        model.set_requires_gradient_sync(last)
    elif kind == "scatter":
        model.set_requires_all_reduce(last)
    elif kind == "deferred":
        model.set_is_last_backward(last)
    elif kind == "stay":
        model.set_is_last_backward(last)
        model.set_reshard_after_backward(last)
        model.set_requires_gradient_sync(last)


def train(backend, model, loss, config, accumulation, make_optimizer):
    """The losses of the steps, of two micro-batches each where gradients accumulate."""
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    micro_batches, losses = (2 if accumulation else 1), []
    for step in range(STEPS):
        for micro in range(micro_batches):
            if accumulation:
                before_micro_batch(model, accumulation, micro == micro_batches - 1)
            value = loss(batch(backend, config, 100 * step + 10 * micro + backend.collectives.rank()))
            value.backward()
            losses.append(value.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def side_by_side(
    backend,
    sizes,
    config,
    accumulation="",
    checkpoints="",
    lists=False,
    reshard=None,
    factor=None,
    optimizer=torch.optim.AdamW,
    rate=0.01,
    **options,
):
    """Both models after twenty steps, ours sharded with `options`; returns the largest differences of a loss and of a
    shard's element, relative."""
    ours, our_loss = toy(backend, config)
    theirs, their_loss = toy(backend, config)
    our_mesh = hp.DeviceMesh.from_sizes(sizes)
    their_mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for model, shard, mesh in ((ours, partial(hp.fully_shard, **options), our_mesh), (theirs, fsdp2, their_mesh)):
        for block in model.layers:
            shard(block, mesh=mesh, reshard_after_forward=True if reshard is None else reshard)
        shard(model, mesh=mesh)
        if checkpoints:
            recompute(model, checkpoints)
        if lists:
            prefetch(model)
        if factor:
            model.set_gradient_divide_factor(factor)
            if shard is fsdp2:
                model.set_force_sum_reduction_for_comms(True)  # gloo does not multiply before a sum
    make_optimizer = partial(optimizer, lr=rate)
    our_losses = train(backend, ours, our_loss, config, accumulation, make_optimizer)
    their_losses = train(backend, theirs, their_loss, config, accumulation, make_optimizer)
    shards = {name: p.to_local().detach() for name, p in theirs.named_parameters()}
    found = {name: p.detach() for name, p in ours.named_parameters()}
    assert set(found) == set(shards)
    assert not torch.equal(our_losses[0], our_losses[-1]), "something was learned"
    return largest(our_losses, their_losses), max(largest(found[name], shards[name]) for name in shards)


def largest(found, wanted):
    """The largest difference, relative to the largest element."""
    assert found.shape == wanted.shape
    if not found.numel():
        return 0.0
    return float((found - wanted).abs().max() / wanted.abs().max())


EVEN = ToyConfig(inputs=4, width=4, hidden=8, blocks=3, calls=(0, 1, 2), dtype="float32")
"""Dims that two and four ranks divide."""
UNEVEN = ToyConfig(blocks=2, calls=(0, 1), dtype="float32")
"""Dims of 5, 3 and 7."""
