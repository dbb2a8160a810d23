"""What every rank does in test_production.py."""

import importlib
import sys

import numpy as np

import hyper_parallel as hp
from hyper_parallel.core.execution.apply import execution_of
from tests.equivalence.decoder_bodies import build

DATA = ("replicate", "shard", "expert")


def own_ids(plan, rank, ids):
    """The samples of a rank."""
    layout = hp.Layout(plan.mesh, {axis: hp.Shard(0) for axis in DATA if axis in plan.mesh.names}, ids.shape)
    return layout.shard(ids, rank)


def loss_of(backend, model, ids):
    """The mean cross entropy of each next token."""
    tokens = backend.tensors.from_numpy(ids)

    def loss():
        return hp.cross_entropy(model(tokens)[:, :-1], tokens[:, 1:], model)

    return loss


def gradients_of(backend, model, ids):
    """The loss, and name -> gradient, as numpy."""
    parameters = hp.trainable_parameters(model)
    value, found = hp.value_and_grad(loss_of(backend, model, ids), [each for _, each in parameters])()
    named = {name: each for (name, _), each in zip(parameters, found, strict=True)}
    return (
        float(backend.tensors.to_numpy(value)),
        {name: backend.tensors.to_numpy(each) for name, each in named.items()},
        list(found),
    )


def parallel(backend, config, weights, sizes, sequence_parallel):
    """The decoder under a plan."""
    model = build(backend, config, weights)
    plan = hp.plan(model, hp.DeviceMesh.from_sizes(sizes), {"sequence_parallel": sequence_parallel})
    return hp.parallelize(model, plan), plan


def one_step(backend, config, weights, ids, sizes, sequence_parallel):
    """A step with the rank's part of the batch: loss, gradients, the placements they have, and the norm of all."""
    model, plan = parallel(backend, config, weights, sizes, sequence_parallel)
    rank = backend.collectives.rank()
    loss, gradients, tensors = gradients_of(backend, model, own_ids(plan, rank, ids))
    norm = hp.clip_grad_norm_(model, tensors, float("inf"))
    layouts = {name: hp.layout_of(parameter) for name, parameter in hp.trainable_parameters(model)}
    assert layouts == {name: plan.layout(name) for name in layouts}
    return loss, gradients, layouts, norm


def undone(backend, config, weights, ids, sizes):
    """Whether whole parameters are found while the model is parallel, and the model itself is found afterwards."""
    whole, (model, _) = build(backend, config, weights), parallel(backend, config, weights, sizes, True)
    gradients_of(backend, model, ids)
    full = hp.full_parameters(model)
    assert full.keys() == weights.keys() and all(np.array_equal(full[name], weights[name]) for name in weights)
    hp.restore(model)
    assert execution_of(model) is None
    assert all(hp.layout_of(parameter) is None for _, parameter in hp.trainable_parameters(model))
    (_, found, _), (_, expected, _) = gradients_of(backend, model, ids), gradients_of(backend, whole, ids)
    return all(np.array_equal(found[name], expected[name]) for name in expected)


def refusals(backend, config, weights):
    """The messages of mistakes; after each the model is what it was."""
    rank, messages = backend.collectives.rank(), {}

    def refused(name, model, plan):
        before = [tuple(each.parameter.shape) for each in backend.modules.parameter_uses(model)]
        try:
            hp.parallelize(model, plan)
        except hp.HyperParallelError as error:
            messages[name] = f"{type(error).__name__}: {error}"
        assert [tuple(each.parameter.shape) for each in backend.modules.parameter_uses(model)] == before
        assert execution_of(model) is None or name == "twice"

    model = build(backend, config, weights)
    plan = hp.plan(model, hp.DeviceMesh.from_sizes({"tensor": 2}))
    other = {name: value for name, value in config.items() if name != "vocab_size"} | {"vocab_size": 50}
    smaller = {name: value[:50] if value.shape[0] == config["vocab_size"] else value for name, value in weights.items()}
    refused("another model", build(backend, other, smaller), plan)
    refused("one rank", build(backend, other, smaller) if rank else model, plan)
    refused("mesh", model, hp.plan(model, hp.DeviceMesh.from_sizes({"tensor": 4})))
    refused("context", model, hp.plan(model, hp.DeviceMesh.from_sizes({"context": 2})))
    hp.parallelize(model, plan)
    refused("twice", model, plan)
    return messages


# Experts

EXPERTS = {
    "vocab_size": 24,
    "hidden_size": 16,
    "moe_intermediate_size": 12,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
}


def experts(backend, idle):
    """The model of experts with fixed values; with `idle` nobody chooses the last four of them."""
    model = importlib.import_module(f"tests.equivalence.moe_{backend.name}").Model(EXPERTS)
    values = {}
    for use in backend.modules.parameter_uses(model):
        value = np.random.default_rng(sum(use.name.encode())).normal(size=tuple(use.parameter.shape)) * 0.5
        if idle and use.name.endswith("gate.weight"):
            value = np.array([4.0, 3.0, -4.0, -3.0, 1.0, 0.5, -0.5, -1.0])[:, None] * value[:1]
        values[use.name] = value.astype("float32")
    backend.modules.load_parameters(model, values)
    return model


def step_of_experts(backend, ids, sizes, idle):
    """The largest error of the loss, and of each gradient, over the largest element of that of one device."""
    whole, model, rank = experts(backend, idle), experts(backend, idle), backend.collectives.rank()
    plan = hp.plan(model, hp.DeviceMesh.from_sizes(sizes))
    hp.parallelize(model, plan)
    expected_loss, expected, _ = gradients_of(backend, whole, ids)
    loss, found, _ = gradients_of(backend, model, own_ids(plan, rank, ids))
    errors = {"loss": abs(np.mean(backend.collectives.gather_objects(loss)) / expected_loss - 1)}
    for name, gradient in expected.items():
        part = plan.layout(name).shard(gradient, rank)
        assert found[name].shape == part.shape, name
        errors[name] = float(np.abs(found[name] - part).max(initial=0) / np.abs(gradient).max())
    return errors


# Nothing but the model's own code


def calls_in_blocks(backend, config, weights, ids, sizes):
    """Without a plan and with one: the functions, Python's and the framework's, that run inside of each attention and
    feed-forward layer of the decoder, by its name."""
    found = []
    for model in (build(backend, config, weights), parallel(backend, config, weights, sizes, True)[0]):
        blocks = {name: each for name, each in backend.modules.named_modules(model) if name.endswith(("attn", "mlp"))}
        found.append({name: calls_in(backend, model, each, ids) for name, each in blocks.items()})
    return found


def calls_in(backend, model, module, ids):
    """The functions that run inside of a module's own code, look-ups of its attributes left out: a parameter that a
    unit shows is found with a call less."""
    attribute = {"torch": "forward", "mindspore": "construct"}[backend.name]
    own_code, names = getattr(module, attribute), []

    def note(frame, event, argument):
        if event in ("call", "c_call"):
            names.append(frame.f_code.co_name if event == "call" else argument.__name__)

    def counted(*args, **kwargs):
        sys.setprofile(note)
        try:
            return own_code(*args, **kwargs)
        finally:
            sys.setprofile(None)

    vars(module)[attribute] = counted
    try:
        model(backend.tensors.from_numpy(ids))
    finally:
        del vars(module)[attribute]
    return [name for name in names if name != "__getattr__"]
