"""Bodies of `test_fsdp_counts.py`: what a step copies around its collectives, and where gradients lie."""

import hyper_parallel as hp
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
    """What a step of a planned model has brought this rank by kind of collective, and what the plan says of the rank
    with the most."""
    model, loss = build(backend, config)
    plan = hp.plan(model, hp.DeviceMesh.from_sizes(sizes))
    hp.parallelize(model, plan)
    parameters = hp.trainable_parameters(model)
    hp.value_and_grad(loss, [p for _, p in parameters])(batch(backend, config, backend.collectives.rank()))
    counts = total(each for unit in units_of(backend, model) for each in unit.parameters)
    said = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0)
    for flow in traffic(plan):
        said[flow.kind] += flow.bytes
    return (counts.gathered, counts.scattered, counts.summed), tuple(said.values())


def fused_buffers(backend, config, sizes):
    """For each buffer of a step's reductions: address and length in bytes, and what lies behind the last member; and
    for each gradient whether it lies in one of them."""
    model, loss = build(backend, config)
    shard(model, hp.DeviceMesh.from_sizes(sizes))
    found = []
    runtime = next(units_of(backend, model)).schedule._runtime
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
