"""benchmarks/fsdp_backends.py: what it checks before it measures, what it counts, and that nothing is left of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from math import prod
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fsdp_backends import MESH, Ranks, Size, check, count
from hyper_parallel import Layout, Shard
from hyper_parallel.models.weights import parameter_shapes

REPOSITORY = Path(__file__).parents[2]
SMALL = Size(width=64, layers=2, vocabulary=128, samples=1, tokens=8)
LAYOUT = Layout(MESH, {"shard": Shard(0)}, (4,))


def test_a_small_run_counts_what_the_sizes_of_the_decoder_say(tmp_path):
    options = [word for name, value in vars(SMALL).items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "benchmarks/fsdp_backends.py", "--json", str(tmp_path / "run.json"), *options]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(
        [*command, "--rounds", "1", "--steps", "1"],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "run.json").read_text())
    sizes = {name: 4 * prod(shape) for name, shape in parameter_shapes(SMALL.config()).items()}
    whole = sum(sizes.values())
    again = sum(size for name, size in sizes.items() if "layers.0." in name)  # what backward does not begin with
    for counted in found["counts"]:
        assert counted["gathered"] == (whole + again) / 2
        assert counted["scattered"] == whole / 2
        assert whole / 2 <= counted["summed"] <= whole / 2 + 4 * 512  # four buffers, filled up to 512 bytes
        assert not any(counted[name] for name in ("gather_copied", "reduce_copied", "cast", "scaled", "moved"))
    for modes in found["medians"].values():
        assert all(modes[mode][clock] > 0 for mode in ("alone", "crowded", "sharded") for clock in ("wall", "busy"))


class Told:
    """Ranks that answer what they are told to."""

    def __init__(self, backend, **answers):
        self.backend, self._answers = backend, answers

    def ask(self, method, *arguments):
        return self._answers["_".join([method, *arguments])]


def told(backend, whole, sharded):
    """Four ranks with the same loss, and with these gradients of one parameter."""
    answers = {"numbers_whole": whole, "numbers_sharded": [sharded[rank % 2] for rank in range(4)]}
    numbers = {name: [(2.0, {"weight": np.array(each)}) for each in rows] for name, rows in answers.items()}
    return Told(backend, layouts=[{"weight": LAYOUT}], **numbers)


def test_numbers_of_the_backends_that_are_apart_end_it():
    whole, sharded = [[1.0, 2.0, 3.0, rank] for rank in range(4)], [[1.0, 2.0], [3.0, 1.5]]
    right = told("torch", whole, sharded)
    assert max(check([right, told("mindspore", whole, sharded)]).values()) == 0
    wrong = [[1.0, 2.0], [3.0, 1.5001]]
    with pytest.raises(SystemExit, match=r"^sharded, mindspore and torch: numbers are 3.3e-05 apart"):
        check([right, told("mindspore", whole, wrong)])
    with pytest.raises(SystemExit, match=r"^torch, sharded and whole: numbers are 3.3e-05 apart"):
        check([told("torch", whole, wrong), told("mindspore", whole, wrong)])


def test_counts_that_differ_end_it():
    one, other = ([{"gathered": size}] * 4 for size in (8, 12))
    assert count([Told("torch", counted=one), Told("mindspore", counted=one)]) == one
    with pytest.raises(SystemExit, match="units count different bytes, torch: .* and mindspore: "):
        count([Told("torch", counted=one), Told("mindspore", counted=other)])


def test_a_rank_that_fails_ends_all():
    with pytest.raises(SystemExit, match=r"(?s)^jax, rank \d: Traceback.*ConfigError"), Ranks("jax", SMALL) as ranks:
        ranks.join()
    assert not multiprocessing.active_children()
