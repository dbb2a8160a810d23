"""Bodies of `test_fsdp_values.py`: models that are sharded before they have values, and whole values for shards."""

import numpy as np

import hyper_parallel as hp
from hyper_parallel.core.fsdp.unit import units_of
from tests.equivalence.fsdp_bodies import shard
from tests.equivalence.toy import ToyConfig, batch, build

SIZES = (5, 3, 4)


def linears(backend):
    """Two linear layers in the framework's own modules."""
    if backend.name == "torch":
        from torch import nn

        return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(SIZES, SIZES[1:])))
    from mindspore import nn

    return nn.SequentialCell(*(nn.Dense(a, b) for a, b in zip(SIZES, SIZES[1:])))


def values_of(backend, model):
    """Numbers for every parameter, by name."""
    draw = np.random.default_rng(0).normal
    uses = backend.modules.parameter_uses(model)
    return {use.name: draw(size=tuple(use.parameter.shape)).astype("float32") for use in uses}


def step(backend, model):
    """The loss of one step and this rank's gradients."""
    x = backend.tensors.from_numpy(np.random.default_rng(1).normal(size=(2, SIZES[0])).astype("float32"))
    parameters = [p for _, p in hp.trainable_parameters(model)]

    def loss(x):
        y = model(x)
        return (y * y).mean()

    value, gradients = hp.value_and_grad(loss, parameters)(x)
    return backend.tensors.to_numpy(value), [backend.tensors.to_numpy(each) for each in gradients]


def sharded(backend, model, **options):
    for module in (model[0], model):
        hp.fully_shard(module, mesh=hp.DeviceMesh((2,), ("shard",)), **options)
    return model


def without_values(backend, to_empty=False, **options):
    """Shard a model that has no values, give it some, and train: is all as if it had had them before?"""
    usual = linears(backend)
    values = values_of(backend, usual)
    backend.modules.load_parameters(usual, values)
    sharded(backend, usual, **options)
    with backend.modules.without_values():
        model = linears(backend)
    sharded(backend, model, **options)
    for _, parameter in hp.trainable_parameters(model):
        assert not backend.tensors.has_values(parameter)
        assert tuple(parameter.shape) == hp.layout_of(parameter).local_shape(backend.collectives.rank())
    parameters = []
    if to_empty:
        model.to_empty(device="cpu")
        parameters = [p for _, p in hp.trainable_parameters(model)]
    hp.load_full_parameters(model, values)
    if to_empty:  # an optimizer that was made by now goes on
        assert all(one is other for one, (_, other) in zip(parameters, hp.trainable_parameters(model)))
    for name, found in hp.full_parameters(model).items():
        np.testing.assert_array_equal(found, values[name])
    for found, expected in zip(step(backend, model), step(backend, usual)):
        np.testing.assert_equal(found, expected)
    copied = sum(each.counts.gather_copied for unit in units_of(backend, model) for each in unit.parameters)
    hp.restore(model)
    for use in backend.modules.parameter_uses(model):
        np.testing.assert_array_equal(backend.tensors.to_numpy(use.parameter), values[use.name])
    return copied


def initialised_by_hand(backend):
    """`to_empty` makes shards, which the usual functions fill; the first forward takes them."""
    import torch

    with torch.device("meta"):
        model = linears(backend)
    sharded(backend, model).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    step(backend, model)
    return {name: sorted(set(value.ravel().tolist())) for name, value in hp.full_parameters(model).items()}


def tied(backend):
    """`to_empty` makes a parameter for each place where a tied one stands; they are tied again."""
    import torch

    from tests.equivalence.toy_torch import Toy

    config = ToyConfig(inputs=4, width=4, hidden=8, tied=True)
    with torch.device("meta"):
        model = Toy(config)
    usual, loss = build(backend, config)
    shard(model, hp.DeviceMesh((2,), ("shard",))).to_empty(device="cpu")
    before = model.embed is model.head.weight
    hp.load_full_parameters(model, hp.full_parameters(usual))
    x = batch(backend, config, 0)
    y = model(x)
    (y * y).mean().backward()
    loss(x).backward()
    rank = backend.collectives.rank()
    for found, expected in zip(model.parameters(), usual.parameters()):
        part = hp.layout_of(found).shard(expected.grad.numpy(), rank)
        np.testing.assert_allclose(found.grad.numpy(), part, rtol=1e-11, atol=1e-11)  # float64, two ranks alike
    return before, model.embed is model.head.weight


def refusals(backend):
    """What is told of missing and of wrong values."""
    with backend.modules.without_values():
        model = linears(backend)
    values = values_of(backend, model)
    sharded(backend, model)
    first = next(iter(values))
    calls = {
        "forward": lambda: step(backend, model),
        "full": lambda: hp.full_parameters(model),
        "missing": lambda: hp.load_full_parameters(model, {name: values[name] for name in list(values)[1:]}),
        "shape": lambda: hp.load_full_parameters(model, values | {first: values[first][1:]}),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except hp.ConfigError as error:
            found[name] = str(error)
    hp.load_full_parameters(model, values)
    step(backend, model)
    return found


def loaded_while_it_trains(backend):
    """New values for a model in use, in place: parameters stay the same objects."""
    model = linears(backend)
    values = values_of(backend, model)
    sharded(backend, model)
    step(backend, model)
    before = [p for _, p in hp.trainable_parameters(model)]
    hp.load_full_parameters(model, values)
    same = all(one is other for one, (_, other) in zip(before, hp.trainable_parameters(model)))
    return same, all(np.array_equal(found, values[name]) for name, found in hp.full_parameters(model).items())


def changed_after_a_forward(backend):
    """Shards change in place when a forward has been recorded that no backward follows. Does the unit that backward
    would have begun with see the new values: called by itself, gathered by hand, and in the next forward where it had
    been gathered by hand before?"""
    model, whole = linears(backend), linears(backend)
    values = values_of(backend, whole)
    backend.modules.load_parameters(model, values)
    sharded(backend, model)
    for _ in range(2):
        step(backend, model)
    x = backend.tensors.from_numpy(np.ones((2, SIZES[0]), "float32"))
    parameters, first = hp.trainable_parameters(model), model[0]

    def broken_off(x):
        model(x)
        raise ZeroDivisionError

    def forward_then_change():
        try:
            hp.value_and_grad(broken_off, [p for _, p in parameters])(x)
        except ZeroDivisionError:
            pass
        values.update({name: value + 1 for name, value in values.items()})
        backend.modules.load_parameters(whole, values)
        for name, parameter in parameters:
            part = hp.layout_of(parameter).shard(values[name], backend.collectives.rank())
            if part.size:
                with backend.autograd.no_grad():
                    backend.tensors.copy_(parameter, backend.tensors.from_numpy(part))

    def same(one, other):
        with backend.autograd.no_grad():
            return np.array_equal(backend.tensors.to_numpy(one(x)), backend.tensors.to_numpy(other(x)))

    forward_then_change()
    seen = {"called": same(first, whole[0])}
    forward_then_change()
    first.unshard()
    seen["gathered"] = np.array_equal(backend.tensors.to_numpy(first.weight), values["0.weight"])
    forward_then_change()
    seen["next forward"] = same(model, whole)
    return seen
