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


def told_and_seen(backend, frozen, **options):
    """The events of a step by `describe`, and those of a third step by its trace, both in their order."""
    model, loss = build(backend, CONFIG)
    for use in backend.modules.parameter_uses(model):
        if use.name.startswith(tuple(frozen)):
            use.parameter.requires_grad = False
    shard(model, hp.DeviceMesh((backend.collectives.world_size(),), ("shard",)), **options)
    step = hp.value_and_grad(loss, [each for _, each in hp.trainable_parameters(model)])
    for _ in range(2):
        step(batch(backend, CONFIG, 0))
    with hp.trace_step(model) as trace:
        step(batch(backend, CONFIG, 0))
    _, _, told = hp.describe(model).partition("in this order:\n")
    told = [event for line in told.strip().splitlines() for event in line.split(": ", 1)[1].split(", ")]
    seen = [span.name for span in sorted(trace.spans, key=lambda span: span.start) if span.row == "step"]
    return told, [name.replace("issue ", "start ").replace("wait ", "wait for ") for name in seen]


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
