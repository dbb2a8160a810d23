"""Bodies of `test_fsdp_reach.py`: what PyTorch code does with weights of another module, and backwards in a forward."""

import copy
import gc
import weakref

import torch

import hyper_parallel as hp
from hyper_parallel.core.fsdp.unit import units_of
from tests.equivalence.fsdp_bodies import worst
from tests.equivalence.reach_bodies import refused


class Forces(torch.nn.Module):
    """What a linear map makes of the gradient of an energy, which is taken in the forward."""

    def __init__(self):
        super().__init__()
        self.energy = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
        self.tail = torch.nn.Linear(5, 3)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            forces = torch.autograd.grad(self.energy(x).sum(), x)[0]
        return self.tail(forces)


def backward_in_a_forward(backend):
    """Returns the worst error of a step's gradients and of an evaluation, and the bytes that are gathered at the
    end."""
    model = Forces().double()
    backend.modules.load_parameters(
        model, {name: torch.linspace(-1, 1, p.numel()).view(p.shape).numpy() for name, p in model.named_parameters()}
    )
    whole = copy.deepcopy(model)
    mesh, rank, x = hp.DeviceMesh((2,), ("shard",)), backend.collectives.rank(), torch.eye(4, 5, dtype=torch.float64)
    for module in (model.energy, model):
        hp.fully_shard(module, mesh=mesh)
    errors = []
    for _ in range(4):
        for each in (model, whole):
            each.zero_grad()
            each(x).square().sum().backward()
        for mine, other in zip(model.tail.parameters(), whole.tail.parameters()):
            errors.append(worst(mine.grad.numpy(), hp.layout_of(mine).shard(other.grad.numpy(), rank)))
        with torch.no_grad():
            errors.append(worst(model(x).numpy(), whole(x).numpy()))
    return max(errors), sum(each.held_bytes() for unit in units_of(backend, model) for each in unit.parameters)


class Asking(torch.nn.Module):
    """Lets a function look at its input and at a weight that belongs to another unit."""

    def __init__(self, ask):
        super().__init__()
        self.first, self.last, self.ask = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).double(), ask

    def forward(self, x):
        self.ask(self.first(x), self.last.weight)
        return x


TOLD = {
    "type_as": lambda x, weight: x.type_as(weight).dtype == torch.float64,
    "to": lambda x, weight: x.to(weight).dtype == torch.float64,
    "new_zeros": lambda x, weight: type(weight.new_zeros(3)) is torch.Tensor and weight.new_zeros(3).shape == (3,),
    "grad_fn": lambda x, weight: weight.grad_fn is None and weight._version >= 0,
    "deepcopy": lambda x, weight: type(copy.deepcopy(weight)) is torch.nn.Parameter,
}
REFUSED = {
    "type_as": lambda x, weight: weight.type_as(x),
    "to": lambda x, weight: weight.to(x),
    "detach": lambda x, weight: x.new_tensor(weight),
    "zeros_like": lambda x, weight: torch.zeros_like(weight),
    "mul": lambda x, weight: x * weight,
}


def asked(backend):
    """By name: what is told of a weight, and the messages where it is computed with."""
    told, messages = {}, {}
    for cases, answers in ((TOLD, told), (REFUSED, messages)):
        for name, case in cases.items():
            model = Asking(lambda x, weight, case=case, name=name: answers.update({name: case(x, weight)}))
            for module in (model.first, model.last, model):
                hp.fully_shard(module, mesh=hp.DeviceMesh((2,), ("shard",)))
            message = refused(lambda: model(torch.ones(2, 4)))
            answers[name] = message if cases is REFUSED else answers.get(name, message)
    return told, messages


def let_go_of(backend):
    """Is a model gone that was restored after a forward without a backward?"""
    model = torch.nn.Linear(4, 4)
    hp.fully_shard(model, mesh=hp.DeviceMesh((2,), ("shard",)))
    model(torch.ones(2, 4))
    hp.restore(model)
    seen = weakref.ref(model)
    del model
    gc.collect()
    return seen() is None
