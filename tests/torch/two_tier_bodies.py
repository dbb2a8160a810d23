"""Bodies of `test_two_tier.py`, run on the ranks of the test bed."""

import time

import torch
import torch.distributed as dist

from hyper_parallel import DeviceMesh

MESH = DeviceMesh((2, 2), ("replicate", "shard"))
FLOATS = 1 << 18


def sums_and_times(place):
    """For the pair inside a supernode and the one across: the sum over it of `rank`, the seconds that each of three
    all-reduces of 1 MiB took, and the bytes that all of them sent on each tier."""
    found = {}
    for axis in ("shard", "replicate"):
        groups = {ranks: dist.new_group(list(ranks)) for ranks in MESH.groups((axis,))}
        group = groups[MESH.group_of(place.rank, (axis,))]
        tensor = torch.full((FLOATS,), float(place.rank))
        before, times = place.sent_bytes(), []
        for _ in range(3):
            tensor.fill_(place.rank)
            dist.barrier(group)
            start = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            times.append(time.perf_counter() - start)
        dist.barrier(group)  # what the other has received has been sent
        sent = {tier: count - before[tier] for tier, count in place.sent_bytes().items()}
        assert (tensor == tensor[0]).all()
        found[axis] = float(tensor[0]), times, sent
        dist.barrier()
    return found


def failing(place):
    """Rank 1 fails while the others wait for it."""
    if place.rank == 1:
        raise ValueError("rank 1 has had enough")
    dist.barrier()
