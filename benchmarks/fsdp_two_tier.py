"""A step of fully sharded training on two emulated supernodes of two ranks, against PyTorch's FSDP2.

    ours          `hyper_parallel.fully_shard`
    ours early    the same with `early_all_reduce=True`
    fsdp2         PyTorch's `fully_shard` as it is on a CPU: nothing overlaps
    fsdp2 streams the same with the streams that it has on accelerators (two_tier/fsdp2_streams.py)
    fsdp2 direct  that with a direct exchange, as ours, in the place of gloo's reduce-scatter, which sends more

The same transformer, ranks, mesh (replicate between supernodes, shard inside) and gloo. Ranks are processes in network
namespaces; the kernel limits what each sends inside its supernode and beyond it. A block computes by sleeping, since
four ranks share the cores of this machine: it stands for a device that computes elsewhere. Embedding, head and loss are
computed. That all compute the same is checked first, with a smaller model that really computes.

A step is forward, loss and backward until all gradients are there, without an optimizer. They take turns in
rounds; medians count, and ratios are medians of the ratios within rounds. "blocked" is what is left of the time of the
step's thread when what it computes, sleeps and waits for a core is taken away: exposed communication. "sent" is counted
by the kernel, headers and acknowledgements included, and stands beside what `plan.traffic` predicts.

    python benchmarks/fsdp_two_tier.py --json FILE       # as root
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from two_tier import Links, Network, Place, run
from two_tier.fsdp2_streams import Streams
from two_tier.transformer import Clock, Size, Transformer

import hyper_parallel
from hyper_parallel import DeviceMesh, Launch
from hyper_parallel.backends import load
from hyper_parallel.core.fsdp import counts
from hyper_parallel.core.fsdp.unit import units_of

MESH = DeviceMesh((2, 2), ("replicate", "shard"))
FAST_MBIT, SLOW_MBIT = 2000, (2000, 800, 200)
EXACT = 1e-6
"""How far a gradient may be from FSDP2's, over the largest of its parameter: float32, summed in another order."""
TARGETS = {"fsdp2": {200: 0.60}, "fsdp2 streams": {2000: 0.95, 200: 0.90}}


class Way(ABC):
    """One way to train the transformer."""

    def __init__(self, size: Size):
        torch.manual_seed(0)
        self.model = Transformer(size)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """One step; returns the loss. The gradients are on the parameters."""
        loss = self.model(tokens, targets)
        loss.backward()
        self.finish()
        return loss

    def finish(self) -> None:  # noqa: B027 (not all have something to do)
        """Wait for the gradients."""

    def parameters(self) -> dict[str, Tensor]:
        """This rank's shards by name."""
        return dict(self.model.named_parameters())

    @abstractmethod
    def copied_bytes(self, tokens: Tensor, targets: Tensor) -> int:
        """What a step copies around its collectives."""


class Ours(Way):
    """`hyper_parallel.fully_shard`."""

    early = False

    def __init__(self, size: Size):
        super().__init__(size)
        for each in (*self.model.blocks, [self.model.norm, self.model.head], self.model):
            hyper_parallel.fully_shard(each, mesh=MESH, early_all_reduce=self.early)
        self._parameters = [each for unit in units_of(load("torch"), self.model) for each in unit.parameters]

    def copied_bytes(self, tokens: Tensor, targets: Tensor) -> int:
        return self.counted(tokens, targets).copied

    def counted(self, tokens: Tensor, targets: Tensor) -> counts.Counts:
        """The counters of a step, over all parameters."""
        before = asdict(counts.total(self._parameters))
        self.step(tokens, targets)
        after = asdict(counts.total(self._parameters))
        return counts.Counts(**{name: after[name] - before[name] for name in after})

    def peak_bytes(self, tokens: Tensor, targets: Tensor) -> int:
        """The most bytes of full parameters that were held at a time in a step, asked where modules begin and end."""
        held: list[int] = []

        def look(*_: Any) -> None:
            held.append(sum(each.held_bytes() for each in self._parameters))

        hooks = [each.register_forward_hook(look) for each in self.model.modules()]
        hooks += [each.register_full_backward_pre_hook(look) for each in self.model.blocks]
        self.step(tokens, targets)
        for hook in hooks:
            hook.remove()
        return max(held)

    def save_trace(self, tokens: Tensor, targets: Tensor, path: Path) -> None:
        """When the schedule did what in a step."""
        with hyper_parallel.trace_step(self.model) as trace:
            self.step(tokens, targets)
        trace.save(path)

    def bound_bytes(self) -> int:
        """What they may be: the outermost unit, which stays, and the two largest others, one of them fetched ahead."""
        root, *others = (
            sum(each.spec.numel * 4 for each in unit.parameters) for unit in units_of(load("torch"), self.model)
        )
        return root + sum(sorted(others)[-2:])


class OursEarly(Ours):
    """With all-reduces that begin when their reduce-scatters are done."""

    early = True


class FSDP2(Way):
    """PyTorch's."""

    def __init__(self, size: Size):
        super().__init__(size)
        self.mesh = init_device_mesh("cpu", MESH.shape, mesh_dim_names=MESH.names)
        for block in self.model.blocks:
            fsdp2_fully_shard(block, mesh=self.mesh)
        fsdp2_fully_shard([self.model.norm, self.model.head], mesh=self.mesh)
        fsdp2_fully_shard(self.model, mesh=self.mesh)

    def parameters(self) -> dict[str, Tensor]:
        return {name: each.to_local() for name, each in self.model.named_parameters()}

    def copied_bytes(self, tokens: Tensor, targets: Tensor) -> int:
        with Copies() as copies:
            self.step(tokens, targets)
        return copies.bytes


class FSDP2Streams(FSDP2):
    """PyTorch's, with streams."""

    direct = False

    def __init__(self, size: Size):
        super().__init__(size)
        units = [self.model, *self.model.blocks, self.model.norm]
        sums = self.mesh["replicate"].get_group()
        self._streams = Streams(self.model, units, MESH.groups(("shard",)), sums, self.direct)

    def finish(self) -> None:
        self._streams.wait()


class FSDP2Direct(FSDP2Streams):
    """PyTorch's, with streams and a reduce-scatter that sends no more than it has to."""

    direct = True


class Copies(TorchDispatchMode):
    """Counts the bytes that FSDP2's three packing operators write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        packet = str(function._overloadpacket)
        if packet == "fsdp.all_gather_copy_in":
            self.bytes += sum(each.nbytes for each in args[0])
        elif packet == "fsdp.split_with_sizes_copy":
            self.bytes += args[0].nbytes
        elif packet == "fsdp.chunk_cat":
            self.bytes += kwargs["out"].nbytes
        return function(*args, **kwargs)


WAYS: dict[str, type[Way]] = {
    "ours": Ours,
    "ours early": OursEarly,
    "fsdp2": FSDP2,
    "fsdp2 streams": FSDP2Streams,
    "fsdp2 direct": FSDP2Direct,
}
OURS = ("ours", "ours early")


def check(place: Place) -> float:
    """The largest difference of a loss or a gradient from FSDP2's, over the largest of its parameter; raises when it is
    not of rounding."""
    size, worst = Size(64, 2, 256, 16, None), 0.0
    ways = {name: way(size) for name, way in WAYS.items()}
    for number in range(2):
        batch = batch_of(place.rank, size, number)
        losses = {name: float(way.step(*batch).detach()) for name, way in ways.items()}
        expected = {name: grad_of(each) for name, each in ways["fsdp2"].model.named_parameters()}
        for name, way in ways.items():
            errors = {"loss": abs(losses[name] - losses["fsdp2"]) / losses["fsdp2"]}
            for parameter, each in way.model.named_parameters():
                difference = (grad_of(each) - expected[parameter]).abs().max()
                errors[parameter] = float(difference / expected[parameter].abs().max())
            if not max(errors.values()) <= EXACT:
                raise SystemExit(f"{name} differs from fsdp2: {max(errors, key=errors.get)} by {max(errors.values())}")
            worst = max(worst, *errors.values())
            torch.optim.SGD(way.model.parameters(), lr=0.1).step()
            way.model.zero_grad()
    return worst


def grad_of(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def batch_of(rank: int, size: Size, number: int = 0) -> tuple[Tensor, Tensor]:
    """One sample of the rank's own, and its next tokens."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    tokens = torch.randint(0, size.vocabulary, (1, size.tokens + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def rank_main(
    place: Place, size: Size, slow_links: Iterable[int], rounds: int, steps: int, traces: Path | None
) -> dict[str, Any]:
    """What a rank finds; the first one changes the links."""
    launch = Launch(place.rank, place.network.size, place.rank, launcher="local")
    hyper_parallel.initialize("torch", launch, place.supernodes)
    result: dict[str, Any] = {"error": check(place), "links": {}}
    ways, batch = {name: way(size) for name, way in WAYS.items()}, batch_of(place.rank, size)
    for way in ways.values():
        way.step(*batch)
    result["copied"] = {name: way.copied_bytes(*batch) for name, way in ways.items()}
    ours = ways["ours"]
    result["peak"], result["bound"] = ours.peak_bytes(*batch), ours.bound_bytes()
    counted = ours.counted(*batch)
    result["received"] = {"fast": counted.gathered + counted.scattered, "slow": counted.summed}
    for slow in slow_links:
        dist.barrier()
        if place.rank == 0:
            place.network.set_links(Links(FAST_MBIT, slow))
        dist.barrier()
        result["links"][slow] = measure(place, ways, batch, rounds, steps)
        for name in OURS if traces is not None else ():
            ways[name].save_trace(*batch, traces / f"{name.replace(' ', '_')}_slow{slow}_rank{place.rank}.json")
    return result


def measure(place: Place, ways: dict[str, Way], batch: tuple, rounds: int, steps: int) -> dict[str, list[dict]]:
    """Milliseconds and bytes a step on this rank, by way and round. The order changes from round to round."""
    found: dict[str, list[dict]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(rounds + 1):  # the first round warms up
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            way = ways[name]
            way.model.zero_grad()
            sent = place.sent_bytes()
            dist.barrier()
            before = now()
            for _ in range(steps):
                way.step(*batch)
                way.model.zero_grad()
            spent = {key: (value - before[key]) / steps * 1e3 for key, value in now().items()}
            dist.barrier()
            if turn:
                blocked = spent["wall"] - spent["slept"] - spent["busy"] - spent["queued"]
                bytes_sent = {tier: (count - sent[tier]) / steps for tier, count in place.sent_bytes().items()}
                found[name].append({**spent, "blocked": blocked, "sent": bytes_sent})
    return found


def now() -> dict[str, float]:
    """Clocks of the step's thread, in seconds: of the wall, what it computed, slept, and waited for a core."""
    queued = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1]
    return {
        "wall": time.perf_counter(),
        "busy": time.thread_time(),
        "slept": Clock.slept,
        "queued": int(queued) / 1e9,
    }


def predicted(size: Size) -> dict[str, int]:
    """What the plan says that a rank receives on each tier in a step. In a plan backward begins with the last two
    blocks; here with the last one and the unit of norm and head, so that one block more is gathered twice."""
    with torch.device("meta"):
        model = Transformer(size)
        plan = hyper_parallel.plan(model, MESH)
    flows: Counter = Counter()
    topology = hyper_parallel.Topology((0, 0, 1, 1), (0, 0, 1, 1))
    for flow in plan.traffic(topology):
        flows[flow.tier] += flow.bytes
    flows["fast"] += sum(each.nbytes for each in model.blocks[-2].parameters()) // MESH.axis_size("shard")
    return dict(flows)


def summary(results: list[dict], slow: int) -> dict[str, dict]:
    """For each way the medians over rounds: of the slowest step and wait; what rank 0 sent."""
    rows = {}
    for name in WAYS:
        rounds = list(zip(*(result["links"][slow][name] for result in results)))
        rows[name] = {
            "steps": [max(each["wall"] for each in ranks) for ranks in rounds],
            "blocked": median(max(each["blocked"] for each in ranks) for ranks in rounds),
            "queued": median(max(each["queued"] for each in ranks) for ranks in rounds),
            "sent": {tier: median(ranks[0]["sent"][tier] for ranks in rounds) for tier in ("fast", "slow")},
        }
        rows[name]["step"] = median(rows[name]["steps"])
    for row in rows.values():
        row["over it"] = {
            name: median(own / other for own, other in zip(rows[name]["steps"], row["steps"])) for name in OURS
        }
    return rows


def print_tables(results: list[dict], links: dict[int, dict], prediction: dict[str, int]) -> None:
    """One row for each way and each speed of the slow links."""
    print(f"{'slow link':>9} {'way':<14} {'step ms':>8} {'ours/it':>8} {'early/it':>8} {'target':>7} "
          f"{'blocked':>8} {'queued':>7} "
          f"{'sent fast':>10} {'slow MB':>8}")  # fmt: skip
    for slow, rows in links.items():
        for name, row in rows.items():
            target = TARGETS.get(name, {}).get(slow)
            ours, early = (row["over it"][each] for each in OURS)
            print(f"{slow:>9} {name:<14} {row['step']:>8.0f} {ours:>8.3f} {early:>8.3f} {target or '':>7} "
                  f"{row['blocked']:>8.0f} {row['queued']:>7.0f} {row['sent']['fast'] / 1e6:>10.1f} "
                  f"{row['sent']['slow'] / 1e6:>8.1f}")  # fmt: skip
    first = results[0]
    told = ", ".join(f"{tier} {count / 1e6:.1f} MB" for tier, count in prediction.items())
    counted = ", ".join(f"{tier} {count / 1e6:.1f} MB" for tier, count in first["received"].items())
    print(f"predicted by the plan: {told}; counted by our units: {counted}")
    print("copied around collectives: " + ", ".join(f"{name} {n / 1e6:.1f} MB" for name, n in first["copied"].items()))
    print(f"our full parameters: at most {first['peak'] / 1e6:.1f} MB, bound {first['bound'] / 1e6:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=256, help="of each rank")
    parser.add_argument("--gigaflops", type=float, default=30.0, help="of the device that a block sleeps for")
    parser.add_argument("--compute", action="store_true", help="compute instead of sleeping; at common priority")
    parser.add_argument("--slow", type=int, action="append", help=f"Mbit/s between supernodes (default {SLOW_MBIT})")
    parser.add_argument("--rounds", type=int, default=5, help="the median of so many counts")
    parser.add_argument("--steps", type=int, default=1, help="in a round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    parser.add_argument(
        "--traces", type=Path, metavar="FOLDER", help="write when our schedule did what, by link and rank"
    )
    options = parser.parse_args()
    if options.traces:
        options.traces.mkdir(parents=True, exist_ok=True)
    gigaflops = None if options.compute else options.gigaflops
    size = Size(options.width, options.layers, options.vocabulary, options.tokens, gigaflops)
    slow_links = options.slow or list(SLOW_MBIT)

    load("torch")  # before the ranks are forked
    load_before = os.getloadavg()[0]
    with Network(Links(FAST_MBIT, slow_links[0])) as network:
        results = run(
            network, rank_main, size, slow_links, options.rounds, options.steps, options.traces,
            timeout_s=900.0, real_time=not options.compute,
        )  # fmt: skip
    links = {slow: summary(results, slow) for slow in slow_links}
    prediction = predicted(size)
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, load {load_before:.1f} at the start, {asdict(size)}, "
        f"fast link {FAST_MBIT} Mbit/s, largest difference from fsdp2 {max(each['error'] for each in results):.1e}"
    )
    print_tables(results, links, prediction)
    if options.json:
        content = {"torch": torch.__version__, "load": load_before, "size": asdict(size), "links": links}
        content |= {key: results[0][key] for key in ("copied", "peak", "bound", "received")}
        options.json.write_text(json.dumps({**content, "predicted": prediction}, indent=1))


if __name__ == "__main__":
    main()
