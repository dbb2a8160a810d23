"""Bodies of `test_fully_sharded.py`: what PyTorch users do with a sharded model."""

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp
from tests.equivalence.fsdp_bodies import shard, worst
from tests.equivalence.toy import ToyConfig, batch, build


def beside_fsdp2(backend, sizes):
    """Five AdamW steps with ours and with PyTorch's own; returns the largest relative difference of any parameter."""
    config = ToyConfig()
    rank = backend.collectives.rank()
    ours, our_loss = build(backend, config)
    theirs, their_loss = build(backend, config)
    del theirs.temperature  # FSDP2 refuses scalars
    del ours.temperature
    ours.temperature = theirs.temperature = torch.tensor(2.0, dtype=torch.float64)
    shard(ours, hp.DeviceMesh.from_sizes(sizes))
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for block in theirs.layers:
        fsdp2(block, mesh=mesh)
    fsdp2(theirs, mesh=mesh)
    our_optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01)
    their_optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    for step in range(5):
        for loss, optimizer in ((our_loss, our_optimizer), (their_loss, their_optimizer)):
            loss(batch(backend, config, 10 * step + rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = hp.full_parameters(ours)
    return max(worst(found[name], p.full_tensor().detach().numpy()) for name, p in theirs.named_parameters())


def accumulated(backend):
    """Two backwards without zero_grad add up on `.grad`, as without sharding."""
    config = ToyConfig()
    rank = backend.collectives.rank()
    model, loss = build(backend, config)
    whole, whole_loss = build(backend, config)
    shard(model, hp.DeviceMesh((2,), ("shard",)))
    for step in range(2):
        loss(batch(backend, config, step)).backward()
        whole_loss(batch(backend, config, step)).backward()
    return max(
        worst(p.grad.numpy(), hp.layout_of(p).shard(w.grad.numpy(), rank))
        for p, w in zip(model.parameters(), whole.parameters())
    )


def recomputed(backend, reentrant, block_is_unit):
    """Blocks under PyTorch's checkpoint; returns the worst gradient error."""
    config = ToyConfig(calls=(0, 1, 1))
    rank = backend.collectives.rank()
    model, _ = build(backend, config)
    whole, whole_loss = build(backend, config)
    shard(model, hp.DeviceMesh((2,), ("shard",)), wrap_blocks=block_is_unit)
    forward = type(model.layers[0]).forward
    for block in model.layers:  # the checkpoint goes around the module's call in one case, inside it in the other
        if not block_is_unit:
            block.forward = lambda x, block=block: checkpoint(forward, block, x, use_reentrant=reentrant)

    if block_is_unit:
        layers = list(model.layers)

        class Checkpointed(torch.nn.Module):
            def __init__(self, block):
                super().__init__()
                self.block = block

            def forward(self, x):
                return checkpoint(self.block, x, use_reentrant=reentrant)

        model.layers = torch.nn.ModuleList(Checkpointed(block) for block in layers)
    y = model(batch(backend, config, 0))
    (y * y).mean().backward()
    whole_loss(batch(backend, config, 0)).backward()
    found = {name.replace("block.", ""): p for name, p in model.named_parameters()}
    return max(
        worst(found[name].grad.numpy(), hp.layout_of(found[name]).shard(w.grad.numpy(), rank))
        for name, w in whole.named_parameters()
    )


def kept_graph(backend):
    """backward(retain_graph=True) twice gives twice the gradient."""
    config = ToyConfig()
    model, loss = build(backend, config)
    shard(model, hp.DeviceMesh((2,), ("shard",)))
    value = loss(batch(backend, config, 0))
    value.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    value.backward()
    loss(batch(backend, config, 0)).backward()  # and a new graph afterwards counts as well
    return all(torch.allclose(p.grad, 3 * g, rtol=1e-15) for p, g in zip(model.parameters(), once))


def optimizer_made_before(backend):
    """The parameter objects stay, so an optimizer built before sharding trains the shards."""
    config = ToyConfig()
    model, loss = build(backend, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = hp.full_parameters(model)
    shard(model, hp.DeviceMesh((2,), ("shard",)))
    loss(batch(backend, config, 0)).backward()
    optimizer.step()
    after = hp.full_parameters(model)
    return all(not np.array_equal(before[name], after[name]) for name in before)


def without_values(backend):
    """A model on the meta device is refused by name."""
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4))
    try:
        hp.fully_shard(model, mesh=hp.DeviceMesh((2,), ("shard",)))
    except hp.ConfigError as error:
        return str(error)
