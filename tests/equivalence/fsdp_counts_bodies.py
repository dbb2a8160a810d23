"""Bodies of `test_fsdp_counts.py`: what a step copies around its collectives, and where gradients lie."""

from dataclasses import replace

import numpy as np

import hyper_parallel as hp
from hyper_parallel.core.fsdp import build as units
from hyper_parallel.core.fsdp.counts import total
from hyper_parallel.core.fsdp.unit import units_of
from hyper_parallel.core.plan.costs import traffic
from tests.equivalence.fsdp_bodies import shard
from tests.equivalence.toy import batch, build


def counted_step(backend, config, placement=None):
    """The counts of one step by parameter name."""
    model, loss = build(backend, config)
    mesh = hp.DeviceMesh((backend.collectives.world_size(),), ("shard",))
    shard(model, mesh, shard_placement_fn=placement)
    parameters = hp.trainable_parameters(model)
    hp.value_and_grad(loss, [p for _, p in parameters])(batch(backend, config, backend.collectives.rank()))
    names = {id(parameter): name for name, parameter in parameters}
    return {names[id(each.parameter)]: each.counts for unit in units_of(backend, model) for each in unit.parameters}


def copied(backend, config, dims=None):
    """Bytes copied (gathers, reductions) and scaled by parameter, where any were; matrices are cut along `dims`."""

    def placement(parameter):
        return hp.Shard(dims) if dims is not None and len(parameter.shape) > dims else None

    counts = counted_step(backend, config, placement if dims is not None else None)
    found = {name: (each.gather_copied, each.reduce_copied) for name, each in counts.items() if each.copied}
    assert not any(each.scaled or each.cast or each.moved for each in counts.values())
    return found


def whole_bytes(backend, config):
    """Bytes of each parameter, whole."""
    model, _ = build(backend, config)
    return {use.name: use.parameter.nbytes for use in backend.modules.parameter_uses(model)}


def travelled(backend, config, sizes):
    """What a step of a planned model after its first one has brought this rank by kind of collective, and what the plan
    says of the rank with the most."""
    model, loss = build(backend, config)
    plan = hp.plan(model, hp.DeviceMesh.from_sizes(sizes))
    hp.parallelize(model, plan)
    step = hp.value_and_grad(loss, [p for _, p in hp.trainable_parameters(model)])
    found = []
    for _ in range(2):
        step(batch(backend, config, backend.collectives.rank()))
        counts = total(each for unit in units_of(backend, model) for each in unit.parameters)
        found.append((counts.gathered, counts.scattered, counts.summed))
    first, both = found
    said = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0)
    for flow in traffic(plan):
        said[flow.kind] += flow.bytes
    return tuple(after - before for before, after in zip(first, both)), tuple(said.values())


def fused_buffers(backend, config, sizes):
    """For each buffer of a step's reductions: address and length in bytes, and what lies behind the last member; and
    for each gradient whether it lies in one of them."""
    model, loss = build(backend, config)
    shard(model, hp.DeviceMesh.from_sizes(sizes))
    found = []
    runtime = next(units_of(backend, model)).schedule.runtime
    settle = runtime.settle

    def watched(reduction):
        (fused,) = reduction.fused
        used = sum(output.numel() for output in reduction.outputs)
        padding = backend.tensors.to_numpy(fused.buffer)[used:].tolist()
        found.append((backend.tensors.address(fused.buffer), fused.buffer.nbytes, padding))
        settle(reduction)

    runtime.settle = watched
    parameters = [p for _, p in hp.trainable_parameters(model)]
    _, gradients = hp.value_and_grad(loss, parameters)(batch(backend, config, 0))
    places = [(address, address + size) for address, size, _ in found]
    inside = [
        any(start <= backend.tensors.address(each) < stop for start, stop in places)
        for each in gradients
        if each is not None and each.numel()
    ]
    return found, inside


def waited(backend, config):
    """How often a step waits for what, and for how long in all."""
    model, loss = build(backend, config)
    shard(model, hp.DeviceMesh((2,), ("shard",)))
    parameters = [p for _, p in hp.trainable_parameters(model)]
    hp.value_and_grad(loss, parameters)(batch(backend, config, 0))
    waits = next(units_of(backend, model)).schedule.runtime.waits
    return dict(waits.times), min(waits.seconds.values())


class EqualPiecesOnly:
    """A framework's collectives as those of an accelerator's library that lacks all that is composed on CPUs."""

    def __init__(self, collectives):
        self._collectives = collectives

    def __getattr__(self, name):
        return getattr(self._collectives, name)

    def gathers_uneven(self):
        return False

    def scatters_uneven(self):
        return False

    def folds_scale(self, casts):
        return casts

    def all_gather(self, *tensors, pieces=None, **options):
        assert pieces is None
        return self._collectives.all_gather(*tensors, **options)

    def reduce_scatter(self, *tensors, pieces=None, **options):
        assert pieces is None
        return self._collectives.reduce_scatter(*tensors, **options)


def on_equal_pieces(backend, config):
    """Does a step on such a library give the same bits, and what does it copy? Bytes by parameter as in `copied`, and
    those scaled in a pass of their own."""
    plain = replace(backend, collectives=EqualPiecesOnly(backend.collectives))
    x = batch(backend, config, backend.collectives.rank())
    steps = []
    for each in (backend, plain):
        model, loss = build(backend, config)
        mesh = hp.DeviceMesh((backend.collectives.world_size(),), ("shard",))
        for module in (*model.layers, model):
            units.fully_shard(each, [module], mesh)
        parameters = hp.trainable_parameters(model)
        value, gradients = hp.value_and_grad(loss, [p for _, p in parameters])(x)
        steps.append([backend.tensors.to_numpy(each) for each in (value, *gradients)])
    names = {id(parameter): name for name, parameter in parameters}
    counts = {names[id(each.parameter)]: each.counts for unit in units_of(backend, model) for each in unit.parameters}
    same = all(np.array_equal(one, other) for one, other in zip(*steps))
    found = {name: (each.gather_copied, each.reduce_copied) for name, each in counts.items() if each.copied}
    return same, found, sum(each.scaled for each in counts.values())
