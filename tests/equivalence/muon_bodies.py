"""What every rank does in test_muon.py: parameters that lie by hand or in a model, and gradients that are given."""

import importlib

import numpy as np

import hyper_parallel as hp
from hyper_parallel.core.errors import HyperParallelError
from hyper_parallel.core.layout import Layout
from tests.equivalence import decoder_bodies, production_bodies

STEPS = 20


def drawn(seed, name, shape):
    """The same numbers on every rank: full rank, of size one."""
    return np.random.default_rng([seed, *map(ord, name)]).standard_normal(shape).astype(np.float32)


def make_parameter(backend, array, name, dtype=None):
    framework = importlib.import_module(backend.name)
    tensor = backend.tensors.from_numpy(np.ascontiguousarray(array), dtype)
    if backend.name == "torch":
        return framework.nn.Parameter(tensor)
    return framework.Parameter(tensor, name=name)


class Spread:
    """Parameters that lie as `layouts` say, by name, with an optimizer: matrices for Muon, vectors for AdamW."""

    def __init__(self, backend, layouts, start=None, dtype=None, **options):
        self.backend, self.layouts, self.dtype = backend, layouts, dtype
        rank = backend.collectives.rank()
        self.parameters, groups = {}, {"muon": [], "adamw": []}
        for name, each in layouts.items():
            whole = drawn(0, name, each.shape) if start is None else start[name]
            self.parameters[name] = made = make_parameter(backend, each.shard(whole, rank), name, dtype)
            spread = hp.DTensor.from_local(made, each.mesh, each.placements, shape=each.shape, run_check=False)
            groups["muon" if len(each.shape) > 1 else "adamw"].append((name, spread))
        given = [{"params": pairs, "algorithm": algorithm} for algorithm, pairs in groups.items() if pairs]
        self.optimizer = hp.Muon(given, **options)

    def gradients(self, seed):
        rank = self.backend.collectives.rank()
        return {name: each.shard(drawn(seed, name, each.shape), rank) for name, each in self.layouts.items()}

    def step(self, gradients):
        """One step with local gradients, numpy or None, by name."""
        take_step(self.backend, self.optimizer, gradients, self.dtype)

    def values(self):
        return {name: self.backend.tensors.to_numpy(each) for name, each in self.parameters.items()}


def take_step(backend, optimizer, gradients, dtype=None):
    ordered = [pair for each in optimizer.param_groups for pair in zip(each["param_names"], each["params"])]
    made = [None if gradients[n] is None else backend.tensors.from_numpy(gradients[n], dtype) for n, _ in ordered]
    if backend.name == "mindspore":
        optimizer(made)
        return
    for (_, parameter), gradient in zip(ordered, made):
        parameter.grad = gradient
    optimizer.step()


def train(backend, layouts, count=STEPS, dtype=None, **options):
    """The local values of all parameters after some steps."""
    spread = Spread(backend, layouts, dtype=dtype, **options)
    for step in range(1, count + 1):
        spread.step(spread.gradients(step))
    return spread.values()


def go_on(backend, layouts, count, first=1, start=None, state=None, dtype=None, **options):
    """Some steps from given values and state: this rank's values, and the whole state."""
    spread = Spread(backend, layouts, start, dtype, **options)
    if state is not None:
        spread.optimizer.load_full_state(state)
        again = spread.optimizer.full_state()["parameters"]
        factor = 20 if options.get("momentum_form") == "heavy_ball" else 1
        for name, held in state["parameters"].items():
            momentum, found = held.get("momentum_buffer"), again[name].pop("momentum_buffer", None)
            assert_same({key: value for key, value in held.items() if key != "momentum_buffer"}, again[name])
            if momentum is not None:  # of the other form it is 1 / (1 - 0.95) times as large, and rounded once
                np.testing.assert_allclose(found, factor * momentum, rtol=2e-7 if factor > 1 else 0)
    for step in range(first, first + count):
        spread.step(spread.gradients(step))
    return spread.values(), spread.optimizer.full_state()


def assert_same(one, other):
    """Nested mappings of arrays and numbers, equal in every bit."""
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, dict):
            assert_same(value, other[key])
        else:
            np.testing.assert_array_equal(value, other[key], err_msg=key)


# What is refused

BROKEN = "few rows"


def refusals(backend, layouts, **options):
    """For each thing that is wrong on one rank: the error that this rank raises, and whether anything has changed. A
    good step follows each, so nothing is left on the wires."""
    spread, rank = Spread(backend, layouts, **options), backend.collectives.rank()
    spread.step(spread.gradients(1))
    told = {}

    def refused(case, spoil, mend=lambda: None):
        before, state = spread.values(), spread.optimizer.full_state()["parameters"]
        gradients = spread.gradients(2)
        spoil(gradients)
        try:
            spread.step(gradients)
            error = "no error"
        except HyperParallelError as found:
            error = f"{type(found).__name__}: {found}"
        mend()
        assert_same(before, spread.values())
        assert_same(state, spread.optimizer.full_state()["parameters"])
        spread.step(spread.gradients(2))
        told[case] = error

    def on(number, change):
        return lambda gradients: change(gradients) if rank == number else None

    def not_finite(gradients):
        gradients[BROKEN] = np.full_like(gradients[BROKEN], np.inf)

    def option(steps):
        spread.optimizer.param_groups[0]["steps"] = steps

    refused("not finite", on(1, not_finite))
    refused("missing", on(0, lambda gradients: gradients.update({BROKEN: None})))
    if backend.name == "mindspore":  # PyTorch itself refuses such a gradient
        refused("another shape", on(1, lambda gradients: gradients.update({BROKEN: np.ones((2, 2), np.float32)})))
    refused("an option", on(1, lambda _: option(6)), lambda: option(5))
    try:
        Spread(backend, layouts, steps=5 + (rank == 1), **options)
    except HyperParallelError as found:
        told["another plan"] = f"{type(found).__name__}: {found}"
    before = spread.values()
    nothing = spread.gradients(3) | {BROKEN: None}
    spread.step(nothing)
    after = spread.values()
    np.testing.assert_array_equal(before.pop(BROKEN), after.pop(BROKEN))
    assert not any(np.array_equal(before[name], after[name]) for name in before if before[name].size)
    return told


# Models

IGNORED = "model.layers.0.mlp.down_proj.weight"
"""What every rank has to itself in a model that is fully sharded otherwise."""


def make_model(backend, how, case, sizes):
    """A model whose parameters are spread by a plan, or fully sharded but for one, or not at all."""
    if how == "experts":
        model = production_bodies.experts(backend, idle=False)
    else:
        model = decoder_bodies.build(backend, *case[:2])
    mesh = hp.DeviceMesh.from_sizes(sizes)
    if how == "fully_shard":
        ignored = [parameter for name, parameter in hp.trainable_parameters(model) if name == IGNORED]
        for layer in model.model.layers:
            hp.fully_shard(layer, mesh=mesh, ignored_params=ignored)
        hp.fully_shard(model, mesh=mesh, ignored_params=ignored)
    elif how != "plain":
        hp.parallelize(model, hp.plan(model, mesh))
    return model


def train_model(backend, how, case, sizes, count=STEPS, **options):
    """The whole parameters before and after some steps, and which of them Muon has."""
    model = make_model(backend, how, case, sizes)
    before = hp.full_parameters(model)
    mesh = hp.DeviceMesh.from_sizes(sizes) if how == "plain" else None
    optimizer = hp.Muon(model, adamw_lr=0.0, mesh=mesh, **options)
    rank, layouts = backend.collectives.rank(), {}
    for name, parameter in hp.trainable_parameters(model):
        layouts[name] = hp.layout_of(parameter) or Layout(hp.DeviceMesh((1,), ("shard",), [rank]), {}, parameter.shape)
    for step in range(1, count + 1):
        take_step(
            backend,
            optimizer,
            {name: each.shard(drawn(step, name, each.shape), rank) for name, each in layouts.items()},
        )
    return before, hp.full_parameters(model), optimizer.param_groups[0]["param_names"]


def changed_layouts(backend, case, sizes):
    """The errors of steps after a model has been restored, and after it has been sharded."""
    told = []
    for first, then in ((True, False), (False, True)):
        model = make_model(backend, "fully_shard", case, sizes) if first else decoder_bodies.build(backend, *case[:2])
        optimizer = hp.Muon(model)
        old = {
            name: each for group in optimizer.param_groups for name, each in zip(group["param_names"], group["params"])
        }
        if then:
            hp.fully_shard(model, mesh=hp.DeviceMesh.from_sizes(sizes))
        else:
            hp.restore(model)
        before = hp.full_parameters(model)
        try:
            take_step(backend, optimizer, {name: np.zeros(tuple(each.shape), np.float32) for name, each in old.items()})
        except HyperParallelError as found:
            told.append(f"{type(found).__name__}: {found}")
        assert_same(before, hp.full_parameters(model))
    return told
