"""A step of fully sharded training on both backends, at equal work.

    alone      the whole decoder on one rank, while the others rest
    crowded    the same on four ranks at a time, which exchange nothing: they share the cores of this machine
    sharded    the same under `hyper_parallel.fully_shard`, HSDP 2x2 over loopback: gloo for PyTorch, mccl for MindSpore

One decoder (`hyper_parallel.models`) with the same weights and tokens, float32, `OMP_NUM_THREADS=1` (MindSpore's
kernels use threads of its own all the same). A step is forward, loss and backward by `hyper_parallel.value_and_grad`,
without an optimizer. First the losses and gradients of both backends are held against each other, and sharded ones
against the mean of whole ones; the bytes that units count must be equal. Then all take turns in rounds: medians count,
and ratios are medians of those within rounds. "added" is what sharding adds, sharded less crowded in the same round;
its ratio is that of its medians.

"wall" is the time until the slowest rank is done, "busy" the CPU time of all ranks. "start" and "wait" are what the
step's thread spends in starting collectives of a kind and in waiting for them, the mean over ranks: those of mccl are
over when they have been started. All milliseconds. "resting" is CPU time that ranks took while others had their turn.

    python benchmarks/fsdp_backends.py --json FILE
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import time
import traceback
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import fmean, median
from typing import Any, Callable, Iterator, Sequence

import numpy as np

import hyper_parallel as hp
from hyper_parallel.backends import load
from hyper_parallel.core.fsdp import counts
from hyper_parallel.core.fsdp.trace import ObservedRuntime
from hyper_parallel.core.fsdp.unit import units_of
from hyper_parallel.models.config import DecoderConfig
from hyper_parallel.models.weights import initial_weights
from hyper_parallel.train.job import die_with
from hyper_parallel.train.launch import free_port

BACKENDS = ("torch", "mindspore")
MESH = hp.DeviceMesh((2, 2), ("replicate", "shard"))
RANKS = MESH.size
SUPERNODES = {"0-1": "first", "2-3": "second"}
MODES = {"alone": 1, "crowded": RANKS, "sharded": RANKS}
"""The ranks that take part."""
CLOCKS = ("wall", "busy")
KINDS = ("gather", "scatter", "sum")
ISSUES = {"issue_gather": "gather", "issue_reduce_scatter": "scatter", "issue_all_reduce": "sum"}
CLOSE = 1e-5
"""How far numbers may be apart, over the largest of their tensor: float32, where products and sums of both frameworks
run in different orders. What `hyper_parallel.check_gradients` allows."""
LIMIT_S = 120.0

Gradients = dict[str, np.ndarray]


@dataclass(frozen=True)
class Size:
    """Of the decoder, and of what a rank computes in a step."""

    width: int
    layers: int
    vocabulary: int
    samples: int
    tokens: int

    def config(self) -> DecoderConfig:
        return DecoderConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=3 * self.width,
            num_layers=self.layers,
            num_heads=self.width // 32,
            num_kv_heads=self.width // 64,
            head_dim=32,
            max_position_embeddings=self.tokens,
        )


# What a rank does


class Rank:
    """One rank of one backend: the decoder whole and sharded, and a batch of its own."""

    def __init__(self, backend: str, launch: hp.Launch, size: Size):
        hp.initialize(backend, launch, SUPERNODES)
        self._backend, self._size = load(backend), size
        ids = np.random.default_rng(launch.rank).integers(0, size.vocabulary, (size.samples, size.tokens + 1))
        self._tokens, self._targets = (self._backend.tensors.from_numpy(each) for each in (ids[:, :-1], ids[:, 1:]))
        whole, sharded = self._decoder(), self._decoder()
        for each in (*sharded.model.layers, [sharded.model.norm, sharded.lm_head], sharded):
            hp.fully_shard(each, mesh=MESH)
        self._models = {"whole": whole, "sharded": sharded}
        self._steps = {name: self._step_of(model) for name, model in self._models.items()}
        self._sharded = [each for unit in units_of(self._backend, sharded) for each in unit.parameters]
        schedule = next(units_of(self._backend, sharded)).schedule
        self._waits, self._starts = schedule.runtime.waits, Counter()
        schedule.runtime = ObservedRuntime(schedule.runtime, self._noting_starts)

    def _decoder(self) -> Any:
        module = importlib.import_module(f"hyper_parallel.models.{self._backend.name}_decoder")
        decoder = module.Decoder(self._size.config())
        self._backend.modules.load_parameters(decoder, initial_weights(decoder.config, seed=0))
        return decoder

    def _step_of(self, model: Any) -> Callable[[], tuple[Any, list[Any]]]:
        def loss() -> Any:
            return self._backend.training.cross_entropy(model(self._tokens), self._targets)

        return hp.value_and_grad(loss, [parameter for _, parameter in hp.trainable_parameters(model)])

    @contextmanager
    def _noting_starts(self, event: str, _: Any) -> Iterator[None]:
        """Time the events that start collectives."""
        begun = time.perf_counter()
        yield
        if event in ISSUES:
            self._starts[ISSUES[event]] += time.perf_counter() - begun

    def numbers(self, name: str) -> tuple[float, Gradients]:
        """The loss and the gradients of a step, this rank's shards of the sharded decoder."""
        value, gradients = self._steps[name]()
        names = [each for each, _ in hp.trainable_parameters(self._models[name])]
        arrays = [self._backend.tensors.to_numpy(each) for each in gradients]
        return float(self._backend.tensors.to_numpy(value)), dict(zip(names, arrays))

    def layouts(self) -> dict[str, hp.Layout]:
        """How parameters lie."""
        return {name: hp.layout_of(each) for name, each in hp.trainable_parameters(self._models["sharded"])}

    def counted(self) -> dict[str, float]:
        """The bytes that a sharded step counts. Called after a first one, in which more is gathered."""
        before = asdict(counts.total(self._sharded))
        self._steps["sharded"]()
        return {name: count - before[name] for name, count in asdict(counts.total(self._sharded)).items()}

    def timed(self, mode: str, steps: int) -> dict[str, float]:
        """Milliseconds a step on this rank."""
        step = self._steps["sharded" if mode == "sharded" else "whole"]
        if MODES[mode] > 1:
            self._backend.collectives.barrier()
        before = self._clocks()
        for _ in range(steps):
            step()
        return {name: 1e3 * (now - before[name]) / steps for name, now in self._clocks().items()}

    def _clocks(self) -> dict[str, float]:
        """In seconds: the wall's, what the process computed, and the step's thread's in collectives by their kind."""
        found = {"wall": time.perf_counter(), "busy": time.process_time()}
        for kind in KINDS:
            found[f"start {kind}"], found[f"wait {kind}"] = self._starts[kind], self._waits.seconds[kind]
        return found


def serve(pipe: Connection, launcher: int, backend: str, launch: hp.Launch, size: Size) -> None:
    """Be a rank: call the methods that are asked for, until there is nobody to ask. Each answer tells how much CPU time
    the rank took since the one before, which is what it takes to rest."""
    die_with(launcher)
    try:
        rank = Rank(backend, launch, size)
        pipe.send((None, None, 0.0))
        rested = time.process_time()
        while True:
            method, arguments = pipe.recv()
            resting = time.process_time() - rested
            pipe.send((getattr(rank, method)(*arguments), None, resting))
            rested = time.process_time()
    except BaseException:
        pipe.send((None, traceback.format_exc(), 0.0))
    finally:
        os._exit(0)  # frameworks may wait for others as they are taken down


# What asks them


class Ranks:
    """The ranks of one backend. They end with the `with` block."""

    def __init__(self, backend: str, size: Size):
        self.backend, self.size = backend, size
        self.resting = 0.0
        """Seconds of CPU time that all have taken while nothing was asked of them."""
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Ranks:
        context, port = multiprocessing.get_context("spawn"), free_port()
        for rank in range(RANKS):
            launch = hp.Launch(rank, RANKS, rank, master_port=port, launcher="local", timeout_s=LIMIT_S)
            ours, theirs = context.Pipe()
            arguments = theirs, os.getpid(), self.backend, launch, self.size
            self._processes.append(context.Process(target=serve, args=arguments, daemon=True))
            self._processes[-1].start()
            self._pipes.append(ours)
            theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._processes:
            each.kill()
        for each in self._processes:
            each.join()

    def join(self) -> None:
        """Wait until all ranks have joined. Called once, before anything is asked."""
        self._answers(RANKS)

    def ask(self, method: str, *arguments: Any, ranks: int = RANKS) -> list[Any]:
        """What the method of `Rank` returns on each of the first `ranks`, which run it at the same time."""
        for pipe in self._pipes[:ranks]:
            pipe.send((method, arguments))
        return self._answers(ranks)

    def _answers(self, ranks: int) -> list[Any]:
        """Ends the program where a rank has failed, or says nothing for too long."""
        pending, found, end = (
            {pipe: rank for rank, pipe in enumerate(self._pipes[:ranks])},
            {},
            time.monotonic() + LIMIT_S,
        )
        while pending:
            ready = wait(pending, max(0.0, end - time.monotonic()))
            if not ready:
                raise SystemExit(f"{self.backend}: the ranks {sorted(pending.values())} took more than {LIMIT_S:g} s")
            for pipe in ready:
                rank = pending.pop(pipe)
                try:
                    found[rank], failure, resting = pipe.recv()
                except EOFError:
                    failure = "it ended without a word"
                if failure is not None:
                    raise SystemExit(f"{self.backend}, rank {rank}: {failure}")
                self.resting += resting
        return [found[rank] for rank in range(ranks)]


def check(crews: Sequence[Ranks]) -> dict[str, float]:
    """How far losses and gradients are apart at most, over the largest of their tensor; ends the program when that is
    not of rounding."""
    first, second = ({name: each.ask("numbers", name) for name in ("whole", "sharded")} for each in crews)
    layouts, errors = crews[0].ask("layouts")[0], {}
    for name in first:
        errors[f"{name}, {crews[1].backend} and {crews[0].backend}"] = max(map(farthest, first[name], second[name]))
    for crew, found in zip(crews, (first, second)):
        wholes = [gradients for _, gradients in found["whole"]]
        means = {name: np.mean([each[name] for each in wholes], axis=0) for name in layouts}
        errors[f"{crew.backend}, sharded and whole"] = max(
            farthest((whole, {name: layouts[name].shard(each, rank) for name, each in means.items()}), sharded)
            for rank, ((whole, _), sharded) in enumerate(zip(found["whole"], found["sharded"], strict=True))
        )
    for what, error in errors.items():
        if not error <= CLOSE:
            raise SystemExit(f"{what}: numbers are {error:.1e} apart, and may be {CLOSE:.0e}")
    return errors


def farthest(one: tuple[float, Gradients], other: tuple[float, Gradients]) -> float:
    """The largest difference of a loss or a gradient, over the largest of `one`'s."""
    (loss, gradients), (other_loss, others) = one, other
    errors = [abs(other_loss - loss) / abs(loss)]
    for name, each in gradients.items():
        errors.append(float(np.abs(others[name] - each).max() / np.abs(each).max()))
    return max(errors)


def count(crews: Sequence[Ranks]) -> list[dict[str, float]]:
    """What a step counts on each rank; ends the program where backends differ."""
    first, second = (each.ask("counted") for each in crews)
    if first != second:
        both = " and ".join(f"{crew.backend}: {found}" for crew, found in zip(crews, (first, second)))
        raise SystemExit(f"units count different bytes, {both}")
    return first


def measure(crews: Sequence[Ranks], rounds: int, steps: int) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Milliseconds a step by backend, mode and round. The order changes from round to round."""
    found = {crew.backend: {mode: [] for mode in MODES} for crew in crews}
    turns = [(crew, mode) for mode in MODES for crew in crews]
    for number in range(rounds + 1):  # the first round warms up
        for crew, mode in turns[number % len(turns) :] + turns[: number % len(turns)]:
            ranks = crew.ask("timed", mode, steps, ranks=MODES[mode])
            row = {name: fmean(each[name] for each in ranks) for name in ranks[0]}
            row |= {"wall": max(each["wall"] for each in ranks), "busy": sum(each["busy"] for each in ranks)}
            if number:
                found[crew.backend][mode].append(row)
    for modes in found.values():
        modes["added"] = [
            {clock: sharded[clock] - crowded[clock] for clock in CLOCKS}
            for sharded, crowded in zip(modes["sharded"], modes["crowded"])
        ]
    return found


# What is printed


def summary(times: dict[str, dict[str, list[dict[str, float]]]]) -> dict[str, Any]:
    """Medians over rounds, and of the ratios within rounds: of MindSpore over PyTorch, and of sharded over crowded.

    What is added is a difference, so that its ratio in a single round means little: there it is that of the medians."""
    medians = {backend: {mode: middle(rows) for mode, rows in modes.items()} for backend, modes in times.items()}
    theirs, ours = (times[backend] for backend in BACKENDS)
    ratios = {mode: {clock: ratio(ours[mode], theirs[mode], clock) for clock in CLOCKS} for mode in ours}
    ratios["added"] = {
        clock: medians["mindspore"]["added"][clock] / medians["torch"]["added"][clock] for clock in CLOCKS
    }
    over = {
        backend: {clock: ratio(modes["sharded"], modes["crowded"], clock) for clock in CLOCKS}
        for backend, modes in times.items()
    }
    return {"medians": medians, "mindspore over torch": ratios, "sharded over crowded": over}


def middle(rows: list[dict[str, float]]) -> dict[str, float]:
    """The medians over rounds."""
    return {clock: median(row[clock] for row in rows) for clock in rows[0]}


def ratio(rows: list[dict[str, float]], others: list[dict[str, float]], clock: str) -> float:
    """The median over rounds of one time over another."""
    return median(row[clock] / other[clock] for row, other in zip(rows, others))


def print_tables(found: dict[str, Any], counted: Sequence[dict[str, float]]) -> None:
    """Times by mode, collectives by kind, and bytes."""
    medians, ratios = found["medians"], found["mindspore over torch"]
    columns = [(clock, backend) for clock in CLOCKS for backend in BACKENDS]
    print(f"{'':<8}" + "".join(f" {backend + ' ' + clock:>15}" for clock, backend in columns) + "   mindspore/torch")
    for mode, row in ratios.items():
        cells = "".join(f" {medians[backend][mode][clock]:>15.1f}" for clock, backend in columns)
        print(f"{mode:<8}{cells}   {row['wall']:.2f}, {row['busy']:.2f}")
    for backend, over in found["sharded over crowded"].items():
        row = medians[backend]["sharded"]
        spent = ", ".join(f"{kind} {row[f'start {kind}']:.1f} + {row[f'wait {kind}']:.1f}" for kind in KINDS)
        print(
            f"{backend}: sharded over crowded {over['wall']:.2f} wall, {over['busy']:.2f} busy; start + wait: {spent}"
        )
    most = {name: max(each[name] for each in counted) / 1e6 for name in counted[0]}
    print(
        f"received: fast tier {most['gathered']:.1f} MB gathered and {most['scattered']:.1f} scattered, "
        f"slow tier {most['summed']:.1f} summed; copied: {most['gather_copied'] + most['reduce_copied']:.1f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256, help="of hidden states, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--samples", type=int, default=1, help="of each rank")
    parser.add_argument("--tokens", type=int, default=128, help="of a sample")
    parser.add_argument("--rounds", type=int, default=7, help="the median of so many counts")
    parser.add_argument("--steps", type=int, default=2, help="in a round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers to this file")
    options = parser.parse_args()
    size = Size(options.width, options.layers, options.vocabulary, options.samples, options.tokens)

    # Read by the ranks. Several do not share one accelerator, and of MindSpore's log only errors are shown.
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": "", "GLOG_v": "3"}
    load_before, begun = os.getloadavg()[0], time.time()
    with ExitStack() as stack:
        crews = [stack.enter_context(Ranks(backend, size)) for backend in BACKENDS]
        for crew in crews:
            crew.join()
        errors, counted = check(crews), count(crews)
        times = measure(crews, options.rounds, options.steps)
        resting = {crew.backend: crew.resting for crew in crews}
    took, found = time.time() - begun, summary(times)
    print(f"{os.cpu_count()} cores, load {load_before:.1f} at the start, {asdict(size)}, {took:.0f} s")
    print("largest differences: " + ", ".join(f"{what} {error:.1e}" for what, error in errors.items()))
    print("resting: " + ", ".join(f"{backend} {seconds:.1f} s" for backend, seconds in resting.items()))
    print_tables(found, counted)
    if options.json:
        content = {"load": load_before, "size": asdict(size), "errors": errors, "counts": counted, "resting": resting}
        options.json.write_text(json.dumps({**content, **found, "times": times}, indent=1))


if __name__ == "__main__":
    main()
