"""What a replayed transition costs beside its collectives, against `redistribute` of PyTorch's DTensor.

Tensors of a few elements on ranks of this machine: the wire costs both sides alike, what differs is Python. "busy" is
the time that the calling thread computed, without waiting for other ranks; "wall" includes the waiting. Both are in
microseconds a call, the mean over the ranks of the best of several rounds, in which the contestants take turns:

    run      the transition on plain tensors, without autograd:  redistribution(...).run(local)
    plain    the transition on plain tensors, recorded if asked: redistribution(...)(local)
    DTensor  hyper_parallel.DTensor.redistribute
    torch    torch.distributed.tensor.DTensor.redistribute

    python benchmarks/transitions.py --json transitions.json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from contextlib import nullcontext
from math import prod
from pathlib import Path
from time import perf_counter_ns, thread_time_ns
from typing import Any, Callable

import torch
import torch.distributed.tensor as theirs
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh

from hyper_parallel import DeviceMesh, DTensor, Layout, backends
from hyper_parallel.core.backend import Launch
from hyper_parallel.core.placement import Partial, Placement, Shard, parse_placement
from hyper_parallel.core.replay import redistribution

SHAPE = (4, 4)
TRANSITIONS = [
    ((2,), "shard(0)", "replicate"),
    ((2,), "shard(1)", "replicate"),
    ((2,), "shard(0)", "shard(1)"),
    ((2,), "partial", "replicate"),
    ((2,), "partial", "shard(0)"),
    ((2,), "replicate", "shard(0)"),
    ((2, 2), "shard(0); shard(1)", "replicate; replicate"),
    ((2, 2), "shard(0); shard(0)", "replicate; replicate"),
    ((2, 2), "shard(0); replicate", "replicate; shard(0)"),
    ((2, 2), "partial; partial", "replicate; shard(0)"),
]
"""Shape of the mesh, source and target: one placement for each axis."""

NAMES = ("replicate", "shard")
MODES = ("no_grad", "grad")
CONTESTANTS = ("run", "plain", "DTensor", "torch")

Call = Callable[[], Any]


def placements_of(text: str) -> list[Placement]:
    """The placements that a text like "shard(0); replicate" names."""
    return [parse_placement(each) for each in text.split("; ")]


def theirs_of(placement: Placement) -> theirs.Placement:
    """PyTorch's placement of the same name."""
    if isinstance(placement, Shard):
        return theirs.Shard(placement.dim)
    return theirs.Partial() if isinstance(placement, Partial) else theirs.Replicate()


def contestants(mesh_shape: tuple[int, ...], source: str, target: str, grad: bool) -> dict[str, Call]:
    """What is measured, on this rank."""
    backend = backends.load("torch")
    mesh = DeviceMesh(mesh_shape, NAMES[-len(mesh_shape) :])
    before, after = (Layout(mesh, placements_of(side), SHAPE) for side in (source, target))
    transition = redistribution(backend, before, after)
    rank = backend.collectives.rank()
    local = backend.tensors.zeros(before.local_shape(rank), "float32").fill_(rank).requires_grad_(grad)
    ours = DTensor.from_local(local, mesh, before.placements, shape=SHAPE, run_check=False)
    their_mesh = init_device_mesh(local.device.type, mesh_shape, mesh_dim_names=mesh.names)
    their_source, their_target = ([theirs_of(each) for each in layout.placements] for layout in (before, after))
    them = theirs.DTensor.from_local(local, their_mesh, their_source, run_check=False)
    calls: dict[str, Call] = {
        "plain": lambda: transition(local),
        "DTensor": lambda: ours.redistribute(placements=after.placements),
        "torch": lambda: them.redistribute(placements=their_target),
    }
    expected = calls["torch"]().to_local()
    for found in (transition(local), calls["DTensor"]().to_local()):
        if not torch.equal(found, expected):
            raise SystemExit(f"{source} -> {target}: found {found}, PyTorch has {expected}")
    return calls if grad else {"run": lambda: transition.run(local), **calls}


def measure(calls: dict[str, Call], rounds: int, repeats: int, barrier: Call) -> dict[str, dict[str, float]]:
    """Microseconds a call by contestant and clock, the least of all rounds."""
    best = {name: {"busy": float("inf"), "wall": float("inf")} for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            barrier()
            busy, wall = thread_time_ns(), perf_counter_ns()
            for _ in range(repeats):
                call()
            spent = {"busy": thread_time_ns() - busy, "wall": perf_counter_ns() - wall}
            for clock, nanoseconds in spent.items():
                best[name][clock] = min(best[name][clock], nanoseconds / repeats / 1e3)
    return best


def rank_main(rank: int, ranks: int, port: int, rounds: int, repeats: int, results: Any) -> None:
    """One rank: measures every transition that needs so many; rank 0 puts the rows into `results`."""
    torch.set_num_threads(1)
    backend = backends.load("torch")
    backend.collectives.initialize(Launch(rank, ranks, rank, "127.0.0.1", port, "local"))
    rows = []
    for mesh_shape, source, target in TRANSITIONS:
        for mode in MODES if prod(mesh_shape) == ranks else ():
            with torch.no_grad() if mode == "no_grad" else nullcontext():
                calls = contestants(mesh_shape, source, target, grad=mode == "grad")
                of_all = backend.collectives.gather_objects(
                    measure(calls, rounds, repeats, backend.collectives.barrier)
                )
            mean = {
                name: {clock: sum(each[name][clock] for each in of_all) / ranks for clock in ("busy", "wall")}
                for name in calls
            }
            rows.append({"ranks": ranks, "from": source, "to": target, "mode": mode, "microseconds": mean})
    if rank == 0:
        results.put(rows)
    backend.collectives.barrier()
    backend.collectives.shutdown()


def run(ranks: int, rounds: int, repeats: int) -> list[dict]:
    """The rows of all transitions over so many ranks, measured by processes of their own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(rank_main, (ranks, port, rounds, repeats, results), nprocs=ranks)
    return results.get()


def print_table(rows: list[dict], clock: str) -> None:
    print(f"\n{clock}, microseconds a call")
    head = " ".join(f"{name:>8}" for name in CONTESTANTS)
    print(f"{'transition':<44} {'mode':<8} {head} {'plain/torch':>12} {'DTensor/torch':>14}")
    for row in rows:
        times = {name: each[clock] for name, each in row["microseconds"].items()}
        cells = " ".join(f"{times[name]:>8.0f}" if name in times else f"{'':>8}" for name in CONTESTANTS)
        ratios = [times[name] / times["torch"] for name in ("plain", "DTensor")]
        print(f"{row['from'] + ' -> ' + row['to']:<44} {row['mode']:<8} {cells} {ratios[0]:>12.2f} {ratios[1]:>14.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="the best of so many rounds counts (default 15)")
    parser.add_argument("--repeats", type=int, default=50, help="calls in a round (default 50)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    options = parser.parse_args()

    os.environ["OMP_NUM_THREADS"] = "1"  # read by the ranks when they import torch
    load = os.getloadavg()[0]
    worlds = sorted({prod(mesh_shape) for mesh_shape, _, _ in TRANSITIONS})
    rows = [row for ranks in worlds for row in run(ranks, options.rounds, options.repeats)]
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {load:.1f} at the start, tensors of shape {SHAPE}")
    for clock in ("busy", "wall"):
        print_table(rows, clock)
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "shape": SHAPE, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
