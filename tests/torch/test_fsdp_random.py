"""Random models, sharded at random, told random things, on ranks in one process: against the whole model in float64."""

import random
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp
from hyper_parallel import backends
from hyper_parallel.core.execution.inprocess import InProcessWorld
from hyper_parallel.core.fsdp import build
from hyper_parallel.core.fsdp.unit import units_of

BOUND = 1e-10  # float64 sums in another order, through up to a dozen layers
WIDTH = 5


class Leaf(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        return torch.tanh(self.linear(x)) + x


class Node(torch.nn.Module):
    """Calls modules below in an order of its own, some of them inside checkpoints of either kind."""

    def __init__(self, draw, depth):
        super().__init__()
        below = [Node(draw, depth - 1) if depth and draw.random() < 0.5 else Leaf() for _ in range(draw.randint(1, 3))]
        self.below = torch.nn.ModuleList(below)
        self.own = torch.nn.Parameter(torch.rand(WIDTH, WIDTH, dtype=torch.float64) / WIDTH)
        self.calls = [(draw.randrange(len(below)), draw.choice([None, None, True, False])) for _ in range(3)]

    def forward(self, x):
        x = x @ self.own
        for place, reentrant in self.calls:
            module = self.below[place]
            again = reentrant is not None and x.requires_grad
            x = checkpoint(module, x, use_reentrant=reentrant) if again else module(x)
        return x @ self.own.t()


def make(seed):
    torch.manual_seed(seed)
    return Node(random.Random(seed), 2)


def loss(model, index, rank):
    generator = torch.Generator().manual_seed(1000 * index + rank)
    return model(torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)).square().mean()


class Whole:
    """The whole model's gradients of batches, the mean over ranks, for whichever rank asks."""

    def __init__(self, seed, ranks):
        self.model, self.ranks, self._lock = make(seed), ranks, threading.Lock()

    def worst(self, model, rank, indices):
        """The largest error of the gradients on a rank's model, which are forgotten then."""
        with self._lock:
            self.model.zero_grad()
            for index in indices:
                for each in range(self.ranks):
                    (loss(self.model, index, each) / self.ranks).backward()
            wanted = {
                n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in self.model.named_parameters()
            }
        errors = [0.0]
        for name, parameter in model.named_parameters():
            part = torch.from_numpy(build.layout_of(parameter).shard(wanted[name].numpy(), rank))
            found = torch.zeros_like(part) if parameter.grad is None else parameter.grad
            errors += (found - part).abs().flatten().tolist()
            parameter.grad = None
        return max(errors)


def shard(backend, model, ranks, draw):
    """Units on some modules, and on the model."""
    meshes = {2: [{"shard": 2}], 4: [{"shard": 4}, {"replicate": 2, "shard": 2}]}
    mesh = hp.DeviceMesh.from_sizes(draw.choice(meshes[ranks]))
    wishes = [True, None, False] + [2] * (mesh.axis_size("shard") == 4)
    for module in [*model.modules()][:0:-1]:
        if isinstance(module, (Leaf, Node)) and draw.random() < 0.6:
            build.fully_shard(backend, [module], mesh, draw.choice(wishes))
    build.fully_shard(backend, [model], mesh, draw.choice([None, True, False]))
    model.set_prefetch_depth(draw.randint(0, 3), draw.randint(0, 3))


def micro_batch(model, kind, last, draw):
    """What is said before one."""
    model.set_requires_gradient_sync(last or kind != "none")
    model.set_requires_all_reduce(last or kind not in ("none", "scatter"))
    model.set_is_last_backward(last or kind != "deferred")
    model.set_reshard_after_backward(last or draw.random() < 0.7)


@pytest.mark.parametrize("seed", range(6))
def test_every_gradient_is_that_of_the_whole_model(seed):
    ranks = 2 + 2 * (seed % 2)
    whole, models = Whole(seed, ranks), [make(seed) for _ in range(ranks)]

    def body(backend):
        draw, rank = random.Random(seed), backend.collectives.rank()
        model = models[rank]
        shard(backend, model, ranks, draw)
        for step in range(3):
            kind, count = draw.choice(["none", "scatter", "deferred", "all"]), draw.randint(1, 3)
            for micro in range(count):
                micro_batch(model, kind, micro == count - 1, draw)
                if draw.random() < 0.3:
                    with torch.no_grad():
                        loss(model, 0, rank)
                loss(model, 10 * step + micro, rank).backward()
            assert whole.worst(model, rank, range(10 * step, 10 * step + count)) < BOUND
            assert not any(each.held_bytes() for unit in units_of(backend, model) for each in unit.parameters)

    InProcessWorld(backends.load("torch"), ranks, timeout_s=60).run(body)


def go_astray(model, what, draw):
    """One rank's step, in which it does what the others don't; takes back what it has changed."""
    node = draw.choice([each for each in model.modules() if isinstance(each, Node)])
    calls = node.calls
    node.calls = {"skips": calls[1:], "repeats": calls + calls[:1], "turns round": calls[::-1]}.get(what, calls)
    try:
        if what == "evaluates":
            with torch.no_grad():
                loss(model, 0, 0)
        elif what == "does not go back":
            loss(model, 0, 0)
        loss(model, 0, 0).backward()
    finally:
        node.calls = calls


@pytest.mark.parametrize("seed", range(6))
def test_when_one_rank_goes_astray_all_are_told_and_the_next_step_is_right(seed):
    ranks = 2 + 2 * (seed % 2)
    whole, models = Whole(seed, ranks), [make(seed) for _ in range(ranks)]

    def body(backend):
        draw, rank = random.Random(seed), backend.collectives.rank()
        model, told = models[rank], []
        shard(backend, model, ranks, draw)
        for what in draw.sample(["skips", "repeats", "turns round", "evaluates", "does not go back", "", "", ""], 8):
            odd, choice = draw.randrange(ranks), random.Random(draw.random())
            try:
                go_astray(model, what if rank == odd else "", choice)
                told.append(None)
            except hp.ConfigError as error:
                told.append(str(error))
            assert what or told[-1] is None, "nobody went astray"
            model.zero_grad()
            loss(model, 1, rank).backward()
            assert whole.worst(model, rank, [1]) < BOUND
        return told

    results = InProcessWorld(backends.load("torch"), ranks, timeout_s=60).run(body)
    assert all(told == results[0] for told in results)
    assert any(results[0])
