"""Bodies of `test_muon.py` on several ranks: models that PyTorch's own FSDP2 and tensor parallelism hold."""

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hyper_parallel as hp
from hyper_parallel.backends.torch.optimizer import own_layout
from tests.equivalence.muon_bodies import STEPS, drawn

SIZES = {"up": (22, 13), "gate": (22, 13), "down": (13, 22)}  # uneven on two ranks and on four


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, (out, inner) in SIZES.items():
            setattr(self, name, torch.nn.Linear(inner, out, bias=name == "down"))

    def forward(self, x):
        return self.down(self.up(x) * self.gate(x).sigmoid())


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(20, 13)
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))
        self.norm = torch.nn.LayerNorm(13)  # its device mesh is another than that of biases inside of blocks

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        hidden = self.norm(hidden)
        return hidden @ hidden.transpose(-1, -2)


def make(how):
    """The model, with the same values on all ranks, held by PyTorch's own."""
    model = Model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(drawn(0, name, tuple(parameter.shape))))
    if how == "alone":
        return model
    shape, names = {
        "shards": ((4,), ("dp",)),
        "replicas": ((2, 2), ("dp_replicate", "dp_shard")),
        "over tensor": ((2, 2), ("dp", "tp")),
    }[how]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    along = mesh["dp"] if how == "over tensor" else mesh
    for layer in model.layers:
        if how == "over tensor":
            plan = {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=along)
    return fully_shard(model, mesh=along)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy().copy()


def give_gradients(model, step):
    for name, parameter in model.named_parameters():
        gradient = torch.from_numpy(drawn(step, name, tuple(parameter.shape)))
        if isinstance(parameter, DTensor):
            gradient = distributed(gradient, parameter)
        parameter.grad = gradient


def distributed(gradient, parameter):
    """The part that a parameter's rank has, in the parameter's own layout."""
    layout, local = own_layout(parameter), parameter.to_local()
    part = torch.from_numpy(layout.shard(gradient.numpy(), torch.distributed.get_rank())).reshape(local.shape)
    made = torch.zeros_like(parameter)
    made.to_local().copy_(part)
    return made


def train(backend, how, options, first=1, steps=STEPS, start=None, state=None):
    """All parameters, whole, after some steps, and the whole state."""
    model = make(how)
    if start is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                value = torch.from_numpy(start[name])
                if isinstance(parameter, DTensor):
                    parameter.copy_(distributed(value, parameter))
                else:
                    parameter.copy_(value)
    optimizer = hp.Muon(model, **options)
    if state is not None:
        optimizer.load_full_state(state)
    for step in range(first, first + steps):
        give_gradients(model, step)
        optimizer.step()
    return {name: whole(each) for name, each in model.named_parameters()}, optimizer.full_state()


def as_users_write(backend, how):
    """Losses of a loop with real gradients, and whether saved state gives the same next loss."""
    torch.manual_seed(0)
    model, losses = make(how), []
    optimizer = hp.Muon(model, lr=0.02, adamw_lr=0.01)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 20, (4, 6)))

    def step():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), torch.arange(6).repeat(4))
        loss.backward()
        if how != "over tensor":  # PyTorch's own clipping takes parameters of one device mesh
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss)

    losses = [step() for _ in range(3)]
    held = {name: whole(each) for name, each in model.named_parameters()}
    state = optimizer.state_dict()
    saved = {number: {k: copied(v) for k, v in each.items()} for number, each in state["state"].items()}
    losses.append(step())
    again = {name: whole(each) for name, each in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.from_numpy(held[name])
            parameter.copy_(distributed(value, parameter) if isinstance(parameter, DTensor) else value)
    optimizer.load_state_dict(state | {"state": saved})
    losses.append(step())
    same = all(np.array_equal(again[name], whole(each)) for name, each in model.named_parameters())
    return losses, same


def copied(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


def pending_gradients(backend):
    """Where the gradient of a replicated parameter lies, and the parameter after a step, here and on one device."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    start, inputs, wanted = (
        torch.from_numpy(drawn(seed, "pending", shape)) for seed, shape in enumerate([(6, 8), (16, 8), (16, 6)])
    )
    alone = torch.nn.Parameter(start.clone())
    spread = torch.nn.Parameter(distribute_tensor(start, mesh, [Replicate()]))
    (torch.nn.functional.linear(inputs, alone) * wanted).sum().backward()
    rows = [distribute_tensor(each, mesh, [Shard(0)]) for each in (inputs, wanted)]
    (torch.nn.functional.linear(rows[0], spread) * rows[1]).sum().backward()
    for parameter in (alone, spread):
        hp.Muon([("weight", parameter)], lr=0.1, ns_dtype="float32").step()
    return str(spread.grad.placements), spread.full_tensor().detach().numpy(), alone.detach().numpy()
