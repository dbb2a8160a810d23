"""Bodies of `test_early_all_reduce.py`: a model whose all-reduces begin behind their reduce-scatters, beside one
whose do not."""

import numpy as np

import hyper_parallel as hp
from hyper_parallel.core.fsdp.unit import unit_of, units_of
from tests.equivalence.fsdp_bodies import descend, shard
from tests.equivalence.toy import ToyConfig, batch, build

CONFIG = ToyConfig(blocks=3, calls=(0, 1, 2), dtype="float32")
MESH = {"replicate": 2, "shard": 2}


def trained(backend, steps, early, kind="", through_plan=False):
    """Every loss and the parameters after some steps, of two micro-batches each where gradients accumulate. `early` are
    the names of the blocks that are, and "" for the outermost unit."""
    model, loss = build(backend, CONFIG)
    mesh = hp.DeviceMesh.from_sizes(MESH)
    if through_plan:
        hp.parallelize(model, hp.plan(model, mesh), early_all_reduce=bool(early))
    else:
        for index, block in enumerate(model.layers):
            hp.fully_shard(block, mesh=mesh, early_all_reduce=f"layers.{index}" in early)
        hp.fully_shard(model, mesh=mesh, early_all_reduce="" in early)
    parameters = hp.trainable_parameters(model)
    rank, losses = backend.collectives.rank(), []
    for number in range(steps):
        for last in (False, True) if kind else (True,):
            say(hp.fully_sharded(model), kind, last)
            x = batch(backend, CONFIG, 100 * number + 10 * last + rank)
            value, gradients = hp.value_and_grad(loss, [p for _, p in parameters])(x)
            losses.append(float(backend.tensors.to_numpy(value)))
        descend(backend, parameters, gradients, rate=0.01)
    assert {unit.name for unit in units_of(backend, model) if unit.early_all_reduce} == set(early)
    return losses, hp.full_parameters(model)


def say(handle, kind, last):
    """What a loop says of a micro-batch."""
    if kind == "none":
        handle.set_requires_gradient_sync(last)
    elif kind == "scatter":
        handle.set_requires_all_reduce(last)
    elif kind == "deferred":
        handle.set_is_last_backward(last)


def side_by_side(backend, steps, early, kind="", through_plan=False):
    """Are they the same, in every bit? And has anything been learned?"""
    losses, parameters = trained(backend, steps, early, kind, through_plan)
    usual_losses, usual = trained(backend, steps, (), kind, through_plan)
    same = all(np.array_equal(parameters[name], usual[name]) for name in usual)
    return losses == usual_losses and same, losses[0] != losses[-1]


def hooked(backend):
    """What a unit's hook for all-reduces is shown of an early step, and of the same step without."""
    shown = []
    for early in (True, False):
        model, loss = build(backend, CONFIG)
        shard(model, hp.DeviceMesh.from_sizes(MESH), early_all_reduce=early)
        for unit in units_of(backend, model):
            unit.all_reduce_hook = lambda buffer: shown.append(backend.tensors.to_numpy(buffer).copy())
        parameters = [p for _, p in hp.trainable_parameters(model)]
        hp.value_and_grad(loss, parameters)(batch(backend, CONFIG, backend.collectives.rank()))
    return shown


def broken_off(backend):
    """After a backward that has raised in its midst on every rank: is the next step as it would have been? And how many
    reductions were on their way?"""
    model, loss = build(backend, CONFIG)
    shard(model, hp.DeviceMesh.from_sizes(MESH), early_all_reduce=True)
    parameters, x = [p for _, p in hp.trainable_parameters(model)], batch(backend, CONFIG, backend.collectives.rank())
    wanted = [backend.tensors.to_numpy(each).copy() for each in hp.value_and_grad(loss, parameters)(x)[1]]

    def boom():
        raise ValueError("in the middle")

    hook = backend.modules.after_forward(model.layers[0], lambda output: backend.autograd.on_gradient(output, boom))
    try:
        hp.value_and_grad(loss, parameters)(x)
    except ValueError:
        pass
    hook.remove()
    schedule = unit_of(model).schedule
    under_way = len(schedule._parked) + (schedule._previous is not None)
    found = hp.value_and_grad(loss, parameters)(x)[1]
    return all(np.array_equal(backend.tensors.to_numpy(a), b) for a, b in zip(found, wanted)), under_way


def behind_others(backend):
    """Sums that begin behind others while the program's own go on among the same ranks: what all of them give."""
    comm, tensors, world = backend.collectives, backend.tensors, backend.collectives.world()
    apart = comm.groups([world.ranks], apart=True)
    assert apart.ranks == world.ranks and comm.groups([world.ranks]) is world
    assert comm.groups([world.ranks], apart=True) is apart
    size, found, waiting = 1000, [], []
    for number in range(5):
        pieces = tensors.from_numpy(np.full(size * world.size, 1.0 + world.index + number, "float32"))
        part = tensors.zeros((size,), "float32")
        first = comm.reduce_scatter(part, pieces, world, async_op=True)
        before, begun = comm.behind([first], lambda part=part: [comm.all_reduce(part, apart, async_op=True)])
        own = tensors.from_numpy(np.full(7, 1.0 + world.index, "float32"))
        comm.all_reduce(own, world)
        found.append(tensors.to_numpy(own).copy())
        waiting.append((before, begun, part))
    for before, begun, part in waiting:
        before.wait()
        begun.wait()
        found.append(tensors.to_numpy(part).copy())
    return found
