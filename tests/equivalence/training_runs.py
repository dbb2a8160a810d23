"""Runs of the command line on a very small model, for the tests of the trainer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Callable

REPOSITORY = Path(__file__).parents[2]

CONFIG = """\
backend: torch
ranks: 4
mesh: {replicate: 2, shard: 2}
model:
  vocab_size: 256
  hidden_size: 24
  intermediate_size: 40
  num_layers: 2
  num_heads: 2
  num_kv_heads: 1
  head_dim: 8
  max_position_embeddings: 16
data: {path: text, sequence_length: 16, held_out_fraction: 0.2}
optimizer: {name: muon, learning_rate: 3e-3, warmup_steps: 2, eps: 1.0e-6, muon: {ns_dtype: float32}}
train: {steps: 6, global_batch_size: 8, evaluate_every: 3, evaluation_batches: 2}
"""


def write_project(folder: Path) -> Path:
    """A configuration with its own text, in files that do not fill their last window. Returns the configuration."""
    (folder / "text").mkdir(parents=True)
    for number in range(12):
        lines = [f"{number} times {factor} is {number * factor}" for factor in range(number + 3)]
        (folder / "text" / f"{number}.txt").write_text("\n".join(lines))
    (folder / "config.yaml").write_text(CONFIG)
    return folder / "config.yaml"


def command(*arguments: object) -> list[str]:
    """The command line of `hyper-parallel` with this Python."""
    return [sys.executable, "-m", "hyper_parallel", *map(str, arguments)]


def environment(folder: Path) -> dict[str, str]:
    """One in which the package is found, no launcher's variables are left, and temporary files go below `folder`."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MS_ROLE", "RANK_ID")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**kept, "PYTHONPATH": str(REPOSITORY), "PATH": path, "TMPDIR": str(folder)}


def run(*arguments: object, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess:
    """Run a command of `hyper-parallel` to its end."""
    return subprocess.run(
        command(*arguments), cwd=cwd, env=environment(cwd), capture_output=True, text=True, timeout=timeout
    )


ADAMW = ["--set", "optimizer.name=adamw", "--set", "optimizer.muon.ns_dtype=bfloat16"]
"""Options for AdamW alone."""


def sizes(replicate: int, shard: int) -> list[str]:
    """Options that choose the mesh and as many ranks."""
    settings = {"ranks": replicate * shard, "mesh.replicate": replicate, "mesh.shard": shard}
    return [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]


def metrics(folder: Path) -> list[dict]:
    """The steps of a run; every line must be whole."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank -> process, of the training ranks that descend from a launcher."""
    parents, ranks, commands = {}, {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            variables = dict(
                item.split("=", 1)
                for item in (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                if "=" in item
            )
        except (OSError, ValueError):
            continue
        pid = int(folder.name)
        parents[pid] = int(stat.rpartition(")")[2].split()[1])
        # msrun has the rank's command among its own arguments, and its scheduler runs it too.
        starts = {"mindspore.parallel.cluster.run"} & set(arguments) or variables.get("MS_ROLE") == "MS_SCHED"
        if "hyper_parallel.train.worker" in arguments and not starts:
            commands[pid] = arguments, variables
    for pid, (arguments, variables) in commands.items():
        ancestor = pid
        while ancestor in parents and ancestor != launcher:
            ancestor = parents[ancestor]
        if ancestor == launcher:
            given = [argument.partition("=")[2] for argument in arguments if argument.startswith("--rank=")]
            ranks[int(given[0] if given else variables.get("RANK", variables.get("RANK_ID")))] = pid
    return ranks


def alive(pid: int) -> bool:
    """Tell whether a process still runs; one that only waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Return when the condition holds; fail after the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.05)


class Training:
    """A run that goes on until something ends it. Leaving the block kills what is left."""

    def __init__(self, backend: str, project: Path, *options: str):
        self.folder = project.parent / "run"
        self._arguments = ["train", project, "--backend", backend, "--run-dir", self.folder, *options]
        self._arguments += ["--set", "train.steps=100000"]
        self._project = project
        self._start = [sys.executable, "-m", "hyper_parallel"]
        self.ranks: dict[int, int] = {}

    def as_on_ascend(self) -> Training:
        """Start the ranks in the way that is taken where there are Ascend devices: through msrun."""
        script = "import sys, hyper_parallel.cli, hyper_parallel.train.launch as launch\n"
        script += "launch.ascend_present = lambda: True\nsys.exit(hyper_parallel.cli.main(sys.argv[1:]))"
        self._start = [sys.executable, "-c", script]
        return self

    def __enter__(self) -> Training:
        self.process = subprocess.Popen(
            [*self._start, *map(str, self._arguments)],
            cwd=self._project.parent,
            env=environment(self._project.parent),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell that starts the tests in the background lets them ignore it, and so would what they start.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        wait_until(lambda: len(metrics_so_far(self.folder)) >= 10, 90, "step 10")
        self.ranks = ranks_of(self.process.pid)
        return self

    def end(self, seconds: float) -> tuple[int, str]:
        """Exit status and error messages of a run that must end within the time."""
        _, errors = self.process.communicate(timeout=seconds)
        return self.process.returncode, errors

    def __exit__(self, *error: object) -> None:
        for pid in [*self.ranks.values(), self.process.pid]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


def metrics_so_far(folder: Path) -> list[str]:
    """Lines of a run that goes on."""
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []
