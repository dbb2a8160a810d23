"""What every rank does in test_production.py."""

import numpy as np

import hyper_parallel as hp
from hyper_parallel.core.execution.apply import execution_of
from tests.equivalence.decoder_bodies import build

DATA = ("replicate", "shard")


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
