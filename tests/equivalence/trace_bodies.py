"""Bodies of `test_trace.py`: what a sharded model says of itself, and of a step."""

import json

import hyper_parallel as hp
from hyper_parallel.core.fsdp.unit import units_of
from hyper_parallel.core.topology_sources import find_topology
from tests.equivalence.fsdp_bodies import shard
from tests.equivalence.toy import ToyConfig, batch, build

CONFIG = ToyConfig(dtype="float32")


def sharded(backend, sizes):
    """The toy model over a mesh of two supernodes of equal size, and a step that has not run."""
    model, loss = build(backend, CONFIG)
    shard(model, hp.DeviceMesh.from_sizes(sizes))
    step = hp.value_and_grad(loss, [each for _, each in hp.trainable_parameters(model)])
    return model, lambda: step(batch(backend, CONFIG, backend.collectives.rank()))


def described(backend, sizes):
    """What `describe` says before a step, and after."""
    world = backend.collectives.world_size()
    find_topology(backend, {rank: str(rank // (world // 2)) for rank in range(world)}, {})
    try:
        model, step = sharded(backend, sizes)
        before = hp.describe(model)
        step()
        return before, hp.describe(model)
    finally:
        find_topology(backend, hp.Topology.single_machine(world), {})


def traced(backend, sizes, path):
    """The saved trace of a second step, and how many spans a third adds to it, for which it has ended."""
    model, step = sharded(backend, sizes)
    step()
    with hp.trace_step(model) as trace:
        step()
    noted = len(trace.spans)
    step()
    file = f"{path}/{backend.name}{backend.collectives.rank()}.json"
    trace.save(file)
    with open(file) as saved:
        return json.load(saved), len(trace.spans) - noted


def profiled(backend, sizes):
    """The names in PyTorch's profile of a step; and whether events were shown to it before, in and after that step."""
    from torch.profiler import ProfilerActivity, profile

    model, step = sharded(backend, sizes)
    schedule = next(units_of(backend, model)).schedule
    plain = type(schedule.runtime)
    step()
    shown = [type(schedule.runtime) is not plain]
    with profile(activities=[ProfilerActivity.CPU]) as record:
        step()
    shown.append(type(schedule.runtime) is not plain)
    step()
    shown.append(type(schedule.runtime) is not plain)
    return {event.name for event in record.events()}, shown
