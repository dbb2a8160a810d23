"""A step of distributed Muon on four ranks of this machine, against peers (`muon_peers.py`).

    ours              `hyper_parallel.Muon` on FSDP2's parameters, all ranks one supernode
    ours, apart       the same, each copy a supernode of its own (only where there are copies)
    naive             gather every matrix on every rank, orthogonalize it there, with our kernels
    torch.optim.Muon  on FSDP2's DTensors
    muon-fsdp2        of PyPI; no copies
    DistMuon          TorchTitan's

The same model of 48 matrices (8 blocks of width 512, 16.8 million elements) and the same full-rank gradients. First
each way takes three steps of a smaller model, and is held against one device in float64. Then the ways take turns in
rounds; only the optimizer's step is timed. "busy" is the CPU time of all ranks, "wall" until the slowest rank is done;
ratios are medians of those within rounds. Beside them stands what a step was seen to do: "work", the products of all
ranks over those of orthogonalizing each matrix once; "uneven", the products of the busiest rank over the mean; "sent",
what TCP says that all ranks sent, and that over the least that it takes to have each matrix whole on one rank of each
copy; "state", the momentum of the rank that has most.

    python benchmarks/muon.py --json FILE
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from muon_peers import DECAY, MOMENTUM, RATE, WAYS, Way, gradients_of, whole_model
from torch import Tensor, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import hyper_parallel
from hyper_parallel import Launch
from hyper_parallel.backends import load

RANKS = 4
MESHES = {"shard 4": (1, 4), "replicate 2, shard 2": (2, 2)}
BOUNDS = {"float32": 1e-5, "bfloat16": 3e-2}
"""How far three steps may lead from those of one device: the norm of the difference over that of the way taken."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def one_device(width: int, blocks: int, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Where the model starts, and where it is after `steps` in float64."""
    model = whole_model(width, blocks)
    start = {name: each.detach().double() for name, each in model.named_parameters()}
    values, momenta = dict(start), {name: torch.zeros_like(each) for name, each in start.items()}
    for number in range(steps):
        for name, gradient in gradients_of(model, number).items():
            momenta[name] = momenta[name].lerp(gradient.double(), 1 - MOMENTUM)
            update = orthogonal(gradient.double().lerp(momenta[name], MOMENTUM))
            scale = 0.2 * max(update.shape) ** 0.5
            values[name] = values[name] * (1 - RATE * DECAY) - RATE * scale * update
    return start, values


def orthogonal(matrix: Tensor) -> Tensor:
    """Five steps of the quintic."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T).T
    a, b, c = COEFFICIENTS
    matrix = matrix / matrix.norm()
    for _ in range(5):
        gram = matrix @ matrix.T
        matrix = a * matrix + (b * gram + c * gram @ gram) @ matrix
    return matrix


def error_of(way: Way, start: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Take three steps; the largest error of a matrix, over the way that it has come."""
    for number in range(3):
        way.give(way.local(gradients_of(way.model, number)))
        way.step()
    found = way.whole()
    return max(
        float((found[name] - value).norm() / (value - start[name]).norm()) for name, value in expected.items()
    )  # fmt: skip


class Products(TorchDispatchMode):
    """Counts the multiplications and additions of matrix products. What is called on DTensors counts where these call
    it on their local parts."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(not issubclass(Tensor, each) and each.__name__ == "DTensor" for each in types):
            return NotImplemented
        name = function._overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            one, other = args[-2:]
            self.flops += 2 * one.numel() * other.shape[-1]
        return function(*args, **(kwargs or {}))


def flops_of(way: Way) -> int:
    """The products that orthogonalizing each matrix once takes."""
    sides = [sorted(each.shape) for each in way.named.values()]
    return sum(5 * (4 * small * small * large + 2 * small**3) for small, large in sides)


def least_bytes(way: Way, copies: int, shards: int, dtype: str) -> int:
    """What must be sent at least where each matrix goes to one rank of each copy and back, in the dtype of the
    orthogonalization, and copies tell each other nothing."""
    numel = sum(each.numel() for each in way.named.values())
    return 2 * copies * numel * (shards - 1) // shards * getattr(torch, dtype).itemsize


def sent_bytes() -> int:
    """What this process has sent on its TCP connections so far, as the kernel counts it (`tcpi_bytes_sent`)."""
    return sum(struct.unpack_from("Q", info, 200)[0] for info in tcp_infos())


def tcp_infos() -> Iterator[bytes]:
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                    yield each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue  # closed since it was listed, or not connected


def seen(way: Way, gradients: dict[str, Tensor]) -> dict[str, int]:
    """What this rank does in a step."""
    way.give(gradients)
    torch.distributed.barrier()
    before = sent_bytes()
    way.step()
    sent = sent_bytes() - before
    torch.distributed.barrier()
    way.give(gradients)
    with torch.compiler.set_stance("force_eager"), Products() as products:
        way.step()
    return {"flops": products.flops, "sent": sent, "state": sum(each.nbytes for each in way.momenta())}


def measure(ways: dict[str, Way], rounds: int, steps: int) -> dict[str, list[dict[str, float]]]:
    """Milliseconds a step on this rank, by way and round. The order changes from round to round."""
    times: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    names = list(ways)
    parts = next(iter(ways.values()))
    gradients = [parts.local(gradients_of(parts.model, number)) for number in range(2)]
    for turn in range(rounds + 1):  # the first round warms up
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            wall = busy = 0.0
            for number in range(steps):
                ways[name].give(gradients[number % len(gradients)])
                torch.distributed.barrier()
                start = perf_counter(), process_time()
                ways[name].step()
                wall, busy = wall + perf_counter() - start[0], busy + process_time() - start[1]
            if turn:
                times[name].append({"wall": wall / steps * 1e3, "busy": busy / steps * 1e3})
    return times


def rank_main(rank: int, port: int, options: argparse.Namespace, results: Any) -> None:
    """One rank: checks and measures; rank 0 puts what all ranks found into `results`."""
    torch.set_num_threads(1)
    hyper_parallel.initialize("torch", Launch(rank, RANKS, rank, "127.0.0.1", port, "local"))
    collectives = load("torch").collectives
    found: dict[str, Any] = {}
    for mesh_name in options.meshes:
        shape = MESHES[mesh_name]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        mesh = mesh if shape[0] > 1 else mesh["shard"]
        for dtype in options.dtypes:
            found[f"{mesh_name}, {dtype}"] = compare(mesh, shape, dtype, options)
    of_all = collectives.gather_objects(found)
    if rank == 0:
        results.put(of_all)
    collectives.barrier()
    collectives.shutdown()


def compare(mesh: Any, shape: tuple[int, int], dtype: str, options: argparse.Namespace) -> dict[str, dict]:
    """What this rank finds of all ways on a mesh, by way."""
    ways, errors = {}, {}
    start, expected = one_device(128, 2, 3)
    for name in options.ways:
        way = WAYS[name]
        if way.missing() or not way.runs_on(shape):
            continue
        errors[name] = error_of(way(whole_model(128, 2), mesh, dtype), start, expected)
        if name.startswith("ours") and not errors[name] <= BOUNDS[dtype]:
            raise SystemExit(f"{name} is {errors[name]:.1e} away from one device")
        ways[name] = way(whole_model(options.width, options.blocks), mesh, dtype)
    times = measure(ways, options.rounds, options.steps)
    found = {}
    for name, way in ways.items():
        done = seen(way, way.local(gradients_of(way.model, 9)))
        once, least = flops_of(way), least_bytes(way, *shape, dtype)
        found[name] = {"error": errors[name], "times": times[name], "once": once, "least": least, **done}
    return found


def summary(of_all: list[dict[str, dict]]) -> dict[str, dict[str, dict]]:
    """For each mesh and dtype one row for each way, from what all ranks found."""
    tables = {}
    for case, ways in of_all[0].items():
        rows = {}
        for name, one in ways.items():
            ranks = [found[case][name] for found in of_all]
            rounds = list(zip(*(each["times"] for each in ranks)))
            flops = [each["flops"] for each in ranks]
            rows[name] = {
                "wall": [max(each["wall"] for each in turn) for turn in rounds],
                "busy": [sum(each["busy"] for each in turn) for turn in rounds],
                "work": sum(flops) / one["once"],
                "uneven": max(flops) * len(flops) / sum(flops),
                "sent": sum(each["sent"] for each in ranks),
                "least": one["least"],
                "state": max(each["state"] for each in ranks),
                "error": one["error"],
            }
        tables[case] = rows
    return tables


def ratio(row: dict, peer: dict, clock: str) -> float:
    """The median over rounds of the time of one way over that of another."""
    return median(own / other for own, other in zip(row[clock], peer[clock]))


def print_tables(tables: dict[str, dict[str, dict]]) -> None:
    """One row for each way."""
    clocks = "".join(f"{clock + ' ms':>8} {'ours/it':>8} " for clock in ("busy", "wall"))
    for case, rows in tables.items():
        ours = next(iter(rows.values()))
        print(f"\n{case}\n{'way':<17} {clocks}{'work':>5} {'uneven':>7} {'sent MB':>8} {'/least':>7} {'state MB':>9} "
              f"{'error':>8}")  # fmt: skip
        for name, row in rows.items():
            times = "".join(f"{median(row[each]):>8.0f} {ratio(ours, row, each):>8.3f} " for each in ("busy", "wall"))
            print(f"{name:<17} {times}{row['work']:>5.2f} {row['uneven']:>7.3f} {row['sent'] / 1e6:>8.1f} "
                  f"{row['sent'] / row['least']:>7.3f} {row['state'] / 1e6:>9.1f} {row['error']:>8.1e}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, action="append", dest="ways", help="again for more (default: all)")
    parser.add_argument("--mesh", choices=MESHES, action="append", dest="meshes", help="again for more (default: all)")
    parser.add_argument("--dtype", choices=BOUNDS, action="append", dest="dtypes", help="of Newton-Schulz")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7, help="ratios are medians of so many (default 7)")
    parser.add_argument("--steps", type=int, default=2, help="steps in a round (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    options = parser.parse_args()
    for name, default in (("ways", WAYS), ("meshes", MESHES), ("dtypes", BOUNDS)):
        setattr(options, name, getattr(options, name) or list(default))
    for name in options.ways:
        if WAYS[name].missing():
            print(f"left out: {name}; {WAYS[name].missing()}")

    os.environ["OMP_NUM_THREADS"] = "1"  # read by the ranks when they import torch
    load_before = os.getloadavg()[0]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(rank_main, (port, options, results), nprocs=RANKS)
    tables = summary(results.get())
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {load_before:.1f} at the start, {RANKS} ranks, "
          f"{options.blocks} blocks of {options.width}")  # fmt: skip
    print_tables(tables)
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        options.json.write_text(
            json.dumps({"torch": torch.__version__, "settings": settings, "tables": tables}, indent=1)
        )


if __name__ == "__main__":
    main()
