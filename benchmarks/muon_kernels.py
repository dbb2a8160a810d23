"""Newton-Schulz of many small matrices in one batch, against one after another, and "gram" against "direct".

The same matrices, settings and kernels: what differs is the size of the batch that they are called with. On a CPU it is
CPU time, of one thread; on an accelerator the time until the results are there. Both ways, and both methods, take turns
in rounds, so that a busy machine slows all of them; medians count. Microseconds for each matrix.

    python benchmarks/muon_kernels.py [--backend torch] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Callable

import numpy as np

from hyper_parallel import backends
from hyper_parallel.core.backend import Backend, Launch
from hyper_parallel.core.muon.newton_schulz import NewtonSchulz

COUNTS = (8, 16, 32, 64, 128, 256)
SHAPES = ((32, 32), (64, 64), (64, 256), (128, 512))
METHODS = (
    ("bfloat16", "direct"),
    ("float32", "direct"),
    ("float32", "gram"),
    ("float16", "direct"),
    ("float16", "gram"),
)


def clock(backend: Backend) -> tuple[str, Callable[[], float]]:
    """What is measured, and a function that tells it when everything that was asked for is done."""
    if backend.name == "mindspore":
        from mindspore import get_current_device, runtime

        if get_current_device().device_target == "CPU":
            return "CPU", process_time
        return "Ascend", lambda: (runtime.synchronize(), perf_counter())[1]
    import torch

    if not torch.accelerator.is_available():
        torch.set_num_threads(1)
        return "CPU", process_time
    device = torch.accelerator.current_accelerator()
    name = torch.cuda.get_device_name() if device.type == "cuda" else device.type
    return name, lambda: (torch.accelerator.synchronize(), perf_counter())[1]


def measured(
    now: Callable[[], float], calls: dict[str, Callable[[], Any]], rounds: int, least_s: float
) -> dict[str, float]:
    """The median time of each call in seconds; in a round each is repeated for `least_s` and more."""
    repeats = {}
    for name, call in calls.items():
        call()
        start = now()
        call()
        repeats[name] = max(1, int(least_s / max(now() - start, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = now()
            for _ in range(repeats[name]):
                call()
            times[name].append((now() - start) / repeats[name])
    return {name: median(each) for name, each in times.items()}


def row(backend: Backend, now: Callable, shape: tuple[int, int], dtype: str, count: int, options: Any) -> list[dict]:
    """Batched and one by one, for each method that there is in `dtype`."""
    numbers = np.random.default_rng(0).standard_normal((count, *shape)).astype(np.float32)
    calls: dict[str, Callable[[], Any]] = {}
    for method in [method for each, method in METHODS if each == dtype]:
        settings = NewtonSchulz(options.coefficients, dtype=dtype, method=method)
        batch = backend.tensors.from_numpy(numbers, settings.wire_dtype)
        alone = [backend.tensors.from_numpy(each[None], settings.wire_dtype) for each in numbers]
        calls[f"{method} batched"] = lambda b=batch, s=settings: backend.muon.newton_schulz(b, s)
        calls[f"{method} alone"] = lambda a=alone, s=settings: [backend.muon.newton_schulz(each, s) for each in a]
    times = measured(now, calls, options.rounds, options.least)
    found = []
    for method in dict.fromkeys(name.split()[0] for name in calls):
        batched, alone = (times[f"{method} {way}"] / count * 1e6 for way in ("batched", "alone"))
        flops = NewtonSchulz(options.coefficients, dtype="float32", method=method).flops(*shape)
        found.append(
            {"shape": shape, "dtype": dtype, "method": method, "count": count, "batched_us": batched, "alone_us": alone}
            | {"ratio": batched / alone, "gflops": flops / batched / 1e3}
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=backends.NAMES, default="torch")
    parser.add_argument("--coefficients", default="legacy", help='"legacy", "asym5" or "polar_express"')
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, help="how many matrices")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="float16 too where it is quick")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--least", type=float, default=0.02, help="seconds for each way and round (default 0.02)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what is printed, and the load, as JSON")
    options = parser.parse_args()

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when the framework is imported
    backend = backends.load(options.backend)
    backend.collectives.initialize(Launch())
    device, now = clock(backend)
    load = os.getloadavg()[0]
    print(
        f"{options.backend} on {device}, {options.coefficients}, 5 steps, medians of {options.rounds}; load {load:.1f}"
    )
    print(
        f"{'shape':>9} {'dtype':>9} {'method':>7} {'count':>6} {'batched':>9} {'alone':>9} {'ratio':>6} {'GFLOP/s':>8}"
    )
    rows = []
    for shape in SHAPES:
        for dtype in options.dtypes:
            for count in options.counts:
                for each in row(backend, now, shape, dtype, count, options):
                    rows.append(each)
                    what = f"{'x'.join(map(str, shape)):>9} {dtype:>9} {each['method']:>7} {count:>6}"
                    times = f"{each['batched_us']:>9.1f} {each['alone_us']:>9.1f} {each['ratio']:>6.2f}"
                    print(what, times, f"{each['gflops']:>8.0f}", flush=True)
    backend.collectives.shutdown()
    if options.json:
        settings = {"backend": options.backend, "device": device, "coefficients": options.coefficients, "load": load}
        options.json.write_text(json.dumps({**settings, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
