"""What every rank does in test_validation.py."""

from dataclasses import replace

import numpy as np

import hyper_parallel as hp
from hyper_parallel.core.execution.apply import execution_of
from tests.equivalence.decoder_bodies import build
from tests.equivalence.production_bodies import gradients_of, own_ids


def planned(backend, config, weights, sizes, sequence_parallel):
    model = build(backend, config, weights)
    return model, hp.plan(model, hp.DeviceMesh.from_sizes(sizes), {"sequence_parallel": sequence_parallel})


def both_modes(backend, config, weights, ids, sizes, sequence_parallel):
    """Whether loss and gradients of a step are the same bits in both modes; what validation has looked at."""
    steps = []
    for mode in ("production", "validate"):
        model, plan = planned(backend, config, weights, sizes, sequence_parallel)
        hp.parallelize(model, plan, mode=mode)
        ids_here = own_ids(plan, backend.collectives.rank(), ids)
        steps.append(gradients_of(backend, model, ids_here)[:2])
        watch = execution_of(model).following.watch if mode == "validate" else None
        hp.restore(model)
    (loss, expected), (found_loss, found) = steps
    same = loss == found_loss and all(np.array_equal(found[name], expected[name]) for name in expected)
    return same, watch.operators, sorted(watch.boundaries)


def broken(backend, config, weights, ids, sequence_parallel):
    """What validation says of plans that are broken in one place each, by how they are broken."""
    told = {}
    for name, breaks in BREAKS.items():
        model, plan = planned(backend, config, weights, {"tensor": 2}, sequence_parallel)
        try:
            hp.parallelize(model, breaks(plan), mode="validate")
            gradients_of(backend, model, ids)
            told[name] = "holds"
        except hp.ContractError as error:
            told[name] = str(error)
    return told


def different(backend, config, weights, ids, sizes, name):
    """What validation says on a rank where ranks differ in one thing, by its name. The last rank is the odd one out, or
    for targets, which only a tensor group compares, the last of each group."""
    rank = backend.collectives.rank()
    is_odd = rank % 2 == 1 if "targets" in name else rank == backend.collectives.world_size() - 1
    targets = ids
    if is_odd and name == "a parameter":
        weights = weights | {NORM: weights[NORM] + np.float32(1e-3)}
    elif is_odd and "targets" in name:
        targets = changed(ids, name)
    elif is_odd and name != "heads":
        ids = targets = changed(ids, name)
    model, plan = planned(backend, config, weights, sizes, sequence_parallel=True)
    if name == "heads":
        for layer in model.model.layers:
            layer.self_attn.head_dim //= 2
    tokens, targets = map(backend.tensors.from_numpy, (ids, targets))

    def loss():
        return hp.cross_entropy(model(tokens)[:, :-1], targets[:, 1:], model)

    try:
        hp.parallelize(model, plan, mode="validate")
        hp.value_and_grad(loss, [each for _, each in hp.trainable_parameters(model)])()
    except hp.ContractError as error:
        return str(error)
    return "nothing"


def changed(ids, name):
    """Another token, another length, or another dtype."""
    if "length" in name:
        return ids[:, :-1]
    if "dtype" in name:
        return ids.astype(np.int32)
    ids = ids.copy()
    ids[1, 2] = (ids[1, 2] + 1) % 96
    return ids


NORM = "model.layers.1.input_layernorm.weight"


def with_parameter(plan, name, **changes):
    """The plan with one parameter's record changed."""
    parameters = (replace(each, **changes) if each.name == name else each for each in plan.parameters)
    return replace(plan, parameters=tuple(parameters))


def with_contract(plan, module, side, **changes):
    """The plan with the first contract of one side of a boundary changed; ends are given over `tensor`."""

    def changed(contract):
        ends = {end: {**(getattr(contract, end) or {}), "tensor": each} for end, each in changes.items()}
        return replace(contract, **ends)

    def other(boundary):
        if boundary.module != module:
            return boundary
        first, *rest = getattr(boundary, side)
        return replace(boundary, **{side: (changed(first), *rest)})

    return replace(plan, boundaries=tuple(map(other, plan.boundaries)))


def without_boundary(plan, module):
    """The plan without one boundary."""
    return replace(plan, boundaries=tuple(each for each in plan.boundaries if each.module != module))


ATTENTION, QUERY = "model.layers.0.self_attn", "model.layers.0.self_attn.q_proj.weight"

BREAKS = {
    "nothing": lambda plan: plan,
    "a weight cut along its inputs": lambda plan: with_parameter(plan, QUERY, placements={"tensor": hp.Shard(1)}),
    "a pending gradient that is whole": lambda plan: with_parameter(plan, "model.norm.weight", pending=("tensor",)),
    "a boundary that is missing": lambda plan: without_boundary(plan, ATTENTION),
    "a table without its boundary": lambda plan: without_boundary(plan, "model.embed_tokens"),
    "a gradient that nobody sums up": lambda plan: with_contract(plan, ATTENTION, "inputs", gradient=hp.Replicate()),
    "a sum that is taken for whole": lambda plan: with_contract(plan, ATTENTION, "outputs", before=hp.Replicate()),
}
"""Ways to break a plan of the decoder, the first of which breaks nothing."""
