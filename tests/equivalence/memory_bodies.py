"""Bodies of `test_memory.py`: what the process really holds."""

import ctypes
import gc
from pathlib import Path

import hyper_parallel as hp
from hyper_parallel.core.fsdp.unit import unit_of
from tests.equivalence.toy import ToyConfig, batch, build


def resident_bytes():
    """What this process holds now, by /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024


def growth_through_a_forward(backend, reshard_after_forward):
    """Growth of the process while a step is between forward and backward, and the bytes of all blocks whole; dims are
    odd on purpose."""
    threshold = -3  # M_MMAP_THRESHOLD: a large block goes back to the system when it is freed
    ctypes.CDLL(None).mallopt(threshold, 1 << 16)
    config = ToyConfig(inputs=4, width=1023, hidden=2047, blocks=8, calls=tuple(range(8)), dtype="float32")
    model, loss = build(backend, config)
    mesh = hp.DeviceMesh((backend.collectives.world_size(),), ("shard",))
    for block in model.layers:
        hp.fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    hp.fully_shard(model, mesh=mesh)
    whole = sum(each.spec.numel * 4 for block in model.layers for each in unit_of(block).parameters)
    parameters = [p for _, p in hp.trainable_parameters(model)]
    gc.collect()
    before = resident_bytes()
    between = []

    def watched(x):
        value = loss(x)
        between.append(resident_bytes() - before)
        return value

    hp.value_and_grad(watched, parameters)(batch(backend, config, 0))
    return {"whole": whole, "after forward": between[0]}
