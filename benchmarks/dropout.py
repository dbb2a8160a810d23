"""Dropout with a mask of one rank's own numbers, against the framework's dropout, on one thread.

The mask is made by global index on the host, brought to the framework and multiplied with the tensor; the framework
draws for the same number of elements, without regard to a layout. "columns" is rank 3 of 8 that share 4096 columns: its
elements come in runs too short and too far apart for the bits between them to be made and dropped.

    python benchmarks/dropout.py --backend torch
"""

from __future__ import annotations

import argparse
import os
from time import perf_counter
from typing import Any, Callable

from hyper_parallel import DeviceMesh, Layout, Replicate, Shard, backends
from hyper_parallel.core.backend import Launch
from hyper_parallel.core.random import Generator, dropout_mask

SIZES = [2**power for power in (16, 18, 20, 22, 24)]
RANKS, RANK, COLUMNS = 8, 3, 4096


def layouts(size: int) -> dict[str, Layout]:
    """Two layouts in which a rank holds `size` elements."""
    mesh = DeviceMesh((RANKS,), ("tensor",))
    local_columns = COLUMNS // RANKS
    return {
        "whole": Layout(mesh, [Replicate()], (size // local_columns, local_columns)),
        "columns": Layout(mesh, [Shard(1)], (size // local_columns, COLUMNS)),
    }


def framework_dropout(backend: str, p: float) -> Callable[[Any], Any]:
    """The framework's own dropout of a tensor."""
    if backend == "torch":
        import torch

        torch.set_num_threads(1)
        return lambda tensor: torch.nn.functional.dropout(tensor, p)
    from mindspore import ops

    return lambda tensor: ops.dropout(tensor, p, training=True)


def best_ms(calls: list[Callable[[], Any]], repeats: int) -> list[float]:
    """The least time of each call in milliseconds. They take turns, so that a busy machine slows all of them."""
    best = [float("inf")] * len(calls)
    for _ in range(repeats):
        for place, call in enumerate(calls):
            start = perf_counter()
            call()
            best[place] = min(best[place], (perf_counter() - start) * 1e3)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=backends.NAMES, required=True)
    parser.add_argument("--p", type=float, default=0.1, help="probability to drop an element (default 0.1)")
    parser.add_argument("--repeats", type=int, default=7, help="the best of so many runs counts (default 7)")
    options = parser.parse_args()

    os.environ["OMP_NUM_THREADS"] = "1"  # read when the framework is imported
    backend = backends.load(options.backend)
    backend.collectives.initialize(Launch())
    tensors, theirs, generator = backend.tensors, framework_dropout(options.backend, options.p), Generator(1)

    print(f"{options.backend}, float32, p = {options.p}, best of {options.repeats}, milliseconds")
    print(f"{'elements':>10} {'layout':>8} {'mask':>9} {'dropout':>9} {'theirs':>9} {'ratio':>6}")
    for size in SIZES:
        for name, layout in layouts(size).items():
            local = tensors.zeros(layout.local_shape(RANK), "float32")

            def mask(layout: Layout = layout) -> Any:
                return dropout_mask(layout, RANK, generator, options.p)

            def dropout(local: Any = local, mask: Callable[[], Any] = mask) -> Any:
                return local * tensors.from_numpy(mask())

            calls = [mask, dropout, lambda local=local: theirs(local)]
            mask_ms, ours_ms, theirs_ms = best_ms(calls, options.repeats)
            print(
                f"{size:>10} {name:>8} {mask_ms:>9.2f} {ours_ms:>9.2f} {theirs_ms:>9.2f} {ours_ms / theirs_ms:>6.2f}",
                flush=True,
            )
    backend.collectives.shutdown()


if __name__ == "__main__":
    main()
