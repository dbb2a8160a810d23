"""Bodies of `test_fully_sharded.py`: what PyTorch users do with a sharded model."""

import copy
import pickle
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp
from hyper_parallel.core.fsdp.counts import total
from hyper_parallel.core.fsdp.unit import units_of
from tests.equivalence.fsdp_bodies import shard, worst
from tests.equivalence.toy import ToyConfig, batch, build
from tests.torch.fsdp2_bodies import EVEN, recompute


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


def recomputed_in_half_precision(backend, reentrant):
    """Gradients of blocks that are computed again in backward are the same bits as of those that are not."""
    config = ToyConfig(dtype="float32")
    found = []
    for again in (False, True):
        model, _ = build(backend, config)
        policy = hp.MixedPrecisionPolicy("bfloat16", "float32")
        shard(model, hp.DeviceMesh((2,), ("shard",)), mp_policy=policy)
        if again:
            for block in model.layers:  # inside of the unit's hooks, which cast what the block is given
                inside = block.forward
                block.forward = lambda x, inside=inside: checkpoint(inside, x, use_reentrant=reentrant)
        y = model(batch(backend, config, backend.collectives.rank()))
        (y.float() ** 2).mean().backward()
        found.append([p.grad for p in model.parameters()])
    return all(torch.equal(one, other) for one, other in zip(*found))


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


class Scaled(torch.nn.Module):
    """A linear map by a derived weight, whose node runs after the gradient of a leaf input is complete."""

    def __init__(self, output=lambda y: y):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.float64, generator=torch.manual_seed(0)))
        self.scale = torch.nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))
        self.output = output

    def forward(self, x):
        return self.output(torch.nn.functional.linear(x, self.weight * self.scale))


class Weights(NamedTuple):
    first: torch.Tensor


class Fields(torch.nn.Linear):
    """Keeps its weight where nothing can be put in its place."""

    def __init__(self):
        super().__init__(4, 4)
        self.kept = Weights(self.weight)


class Box:
    """An output that the library can't look into."""

    def __init__(self, y):
        self.y = y


@dataclass(slots=True)
class Slots:
    y: torch.Tensor


def written_view(y):
    """A view of what the unit computed, written to by whoever receives it."""
    return y.view(-1)


OUTPUTS = {"tensor": lambda y: y, "object": Box, "slots": Slots, "list": lambda y: [(y,)], "view": written_view}


def leaf_input(backend, kind):
    """Gradients of a unit that is fed a leaf which asks for a gradient itself; returns the worst error."""
    whole = Scaled()
    model = torch.nn.Sequential(hp.fully_shard(Scaled(OUTPUTS[kind]), mesh=hp.DeviceMesh((2,), ("shard",))))
    hp.fully_shard(model, mesh=hp.DeviceMesh((2,), ("shard",)))
    errors = []
    for _ in range(2):
        x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
        y = model(x)
        y = y.y if isinstance(y, (Box, Slots)) else y[0][0] if isinstance(y, list) else y
        if kind == "view":
            y.mul_(1.0)
        (y * y).sum().backward()
        x_whole = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
        whole(x_whole).square().sum().backward()
        errors.append(worst(x.grad.numpy(), x_whole.grad.numpy()))
        for p, w in zip(model.parameters(), whole.parameters()):
            errors.append(worst(p.grad.numpy(), hp.layout_of(p).shard(w.grad.numpy(), backend.collectives.rank())))
        model.zero_grad()
        whole.zero_grad()
    return max(errors)


def broken_backwards(backend, rounds):
    """Backwards that raise in the middle, on every rank, each followed by a good step; returns the worst error."""
    config = ToyConfig()
    rank = backend.collectives.rank()
    model, loss = build(backend, config)
    whole, whole_loss = build(backend, config)
    shard(model, hp.DeviceMesh((backend.collectives.world_size(),), ("shard",)))
    whole_loss(batch(backend, config, 0)).backward()
    errors = []
    for _ in range(rounds):
        handle = model.layers[0].register_forward_hook(lambda _, args, y: y.register_hook(fail) and None)
        try:
            loss(batch(backend, config, 0)).backward()
        except ZeroDivisionError:
            handle.remove()
        model.zero_grad()
        loss(batch(backend, config, 0)).backward()
        errors += [
            worst(p.grad.numpy(), hp.layout_of(p).shard(w.grad.numpy(), rank))
            for p, w in zip(model.parameters(), whole.parameters())
        ]
        model.zero_grad()
    return max(errors)


def fail(gradient):
    raise ZeroDivisionError


def hooks_of_the_user(backend):
    """What a forward pre-hook sees of a weight, and what a post-accumulate hook sees of its gradient."""
    model, loss = build(backend, ToyConfig())
    seen = []
    model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(tuple(module.up.shape)))
    shard(model, hp.DeviceMesh((2,), ("shard",)))
    model.layers[0].up.register_post_accumulate_grad_hook(lambda p: seen.append(tuple(p.grad.shape)))
    loss(batch(backend, ToyConfig(), 0)).backward()
    return seen


def misuse(backend):
    """Messages for what a sharded model can't do."""
    mesh = hp.DeviceMesh((2,), ("shard",))

    def restored_between(model, loss, x):
        value = loss(x)
        hp.restore(model)
        value.backward()

    def assigned(model, loss, x):
        model.load_state_dict({name: p.detach().clone() for name, p in model.state_dict().items()}, assign=True)
        loss(x)

    cases = {
        "copy": lambda model, loss, x: copy.deepcopy(model),
        "pickle": lambda model, loss, x: pickle.dumps(model),
        "create_graph": lambda model, loss, x: loss(x).backward(create_graph=True),
        "restore": restored_between,
        "assign": assigned,
        "again": lambda model, loss, x: hp.plan(model, mesh),
        "fields": lambda model, loss, x: hp.fully_shard(Fields(), mesh=mesh),
    }
    messages = {}
    for name, case in cases.items():
        model, loss = build(backend, ToyConfig())
        shard(model, mesh)
        try:
            case(model, loss, batch(backend, ToyConfig(), 0))
        except hp.HyperParallelError as error:
            messages[name] = str(error)
    return messages


def half_precision_beside_fsdp2(backend, policy, sizes, steps, until_last=None):
    """Train with ours and with PyTorch's own; returns whether losses, gradients and shards are the same bits.

    With `until_last`, the name of a method of both, a step has three batches, and the method is told of the last.
    """
    config = ToyConfig(dtype="float32")
    rank = backend.collectives.rank()
    (ours, our_loss), (theirs, their_loss) = build(backend, config), build(backend, config)
    for model in (ours, theirs):
        del model.temperature  # FSDP2 refuses scalars
        model.temperature = 2.0
    policy = MixedPrecisionPolicy(**{name: getattr(torch, value) for name, value in policy.items()})
    inside = replace(policy, output_dtype=None)  # blocks hand on what the next one computes in
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for model, wrap, over in ((ours, hp.fully_shard, hp.DeviceMesh.from_sizes(sizes)), (theirs, fsdp2, mesh)):
        for block in model.layers:
            wrap(block, mesh=over, mp_policy=inside)
        wrap(model, mesh=over, mp_policy=policy)
    same = []
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (ours, theirs)]
    for step in range(steps):
        for micro in range(3 if until_last else 1):
            if until_last:
                for model in (ours, theirs):
                    getattr(model, until_last)(micro == 2)
            x = batch(backend, config, 10 * step + rank + 2 * micro)
            losses = our_loss(x), their_loss(x)
            for loss in losses:
                loss.backward()
            same.append(torch.equal(*losses))
        for mine, other in zip(ours.parameters(), theirs.parameters()):
            same.append(torch.equal(mine.grad, other.grad.to_local()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for mine, other in zip(ours.parameters(), theirs.parameters()):
            same.append(torch.equal(mine, other.to_local()))
    return same


class _Packed(TorchDispatchMode):
    """Counts the bytes that FSDP2's packing operators write."""

    def __init__(self):
        super().__init__()
        self.written = {"copy_in": 0, "copy_out": 0, "chunk_cat": 0}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.namespace == "fsdp":
            name = function._schema.name.removeprefix("fsdp::")
            if name == "all_gather_copy_in":
                self.written["copy_in"] += result[0].nbytes
            elif name == "split_with_sizes_copy":
                self.written["copy_out"] += sum(each.nbytes for each in kwargs["out"])
            elif name == "chunk_cat":
                self.written["chunk_cat"] += kwargs["out"].nbytes
        return result


def copies_beside_fsdp2(backend):
    """Bytes that a step copies around its collectives: ours, FSDP2's as measured, and FSDP2's as they should be."""
    config = ToyConfig(inputs=5, width=4, hidden=7)
    rank, ranks = backend.collectives.rank(), backend.collectives.world_size()
    (ours, our_loss), (theirs, their_loss) = build(backend, config), build(backend, config)
    for model in (ours, theirs):
        del model.temperature  # FSDP2 refuses scalars
        model.temperature = 2.0
    shard(ours, hp.DeviceMesh((ranks,), ("shard",)))
    for block in theirs.layers:
        fsdp2(block)
    fsdp2(theirs)
    x = batch(backend, config, rank)
    our_loss(x).backward()
    with _Packed() as packed:
        their_loss(x).backward()
    expected = dict.fromkeys(packed.written, 0)
    for name, parameter in theirs.named_parameters():
        row = parameter[0].numel() * parameter.element_size()
        padded = -(-parameter.shape[0] // ranks) * ranks * row  # every piece as long as the longest
        gathers = 2 if name.startswith("layers") else 1
        expected["copy_in"] += gathers * padded // ranks
        expected["copy_out"] += gathers * padded
        expected["chunk_cat"] += padded
    return total(each for unit in units_of(backend, ours) for each in unit.parameters).copied, packed.written, expected


def gathered_under_recompute(backend, kind):
    """Bytes that gathers of a step bring, without checkpoints and with them, and fetches for nothing."""
    found, config = [], replace(EVEN, dtype="float64")
    for checkpoints in ("", kind):
        model, loss = build(backend, config)
        shard(model, hp.DeviceMesh((2,), ("shard",)))
        if checkpoints:
            recompute(model, checkpoints)
        units = list(units_of(backend, model))
        for step in range(2):
            counts = total(each for unit in units for each in unit.parameters).gathered
            loss(batch(backend, config, step)).backward()
        found.append(total(each for unit in units for each in unit.parameters).gathered - counts)
    return found, units[0].gathers.unused
