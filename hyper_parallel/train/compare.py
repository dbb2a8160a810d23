"""Train the same configuration with both backends and set the results side by side."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Sequence

import numpy as np

from hyper_parallel.train.config import Config
from hyper_parallel.train.files import read_json, write_json
from hyper_parallel.train.launch import check_backend, start_local
from hyper_parallel.train.metrics import StepMetrics, read_metrics
from hyper_parallel.train.plot import plot_losses

BACKENDS = ("mindspore", "torch")
TITLES = {"mindspore": "MindSpore", "torch": "PyTorch"}

COMPARED_STEPS = 50
LOSS_TOLERANCE = 1e-4
# Two runs round differently, by about 1e-7, and AdamW divides by the root of a small average, so that the difference
# grows with the steps. In the demo it reaches about 1e-6; training that is less steady amplifies more.
PARAMETER_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Comparison:
    """How far two runs agree. Differences are relative to the second run."""

    compared_steps: int
    loss_difference: float
    loss_difference_all_steps: float
    held_out_difference: float
    parameter_difference: float
    parameter: str

    @property
    def losses_agree(self) -> bool:
        """Losses of the first `COMPARED_STEPS` steps agree."""
        return self.loss_difference <= LOSS_TOLERANCE

    @property
    def parameters_agree(self) -> bool:
        """Every parameter agrees at the end."""
        return self.parameter_difference <= PARAMETER_TOLERANCE


def compare(config: Config, run_dir: Path) -> bool:
    """Train with MindSpore, then with PyTorch, below `run_dir`; print a table; tell whether they agree."""
    for backend in BACKENDS:
        check_backend(backend)
    for number, backend in enumerate(BACKENDS, start=1):
        print(f"\n{number}. {TITLES[backend]}", flush=True)
        start_local(replace(config, backend=backend), run_dir / backend)
    runs = {backend: read_metrics(run_dir / backend) for backend in BACKENDS}
    found = compare_runs(*runs.values(), *(_parameters(run_dir / backend) for backend in BACKENDS))
    write_json(run_dir / "compare.json", {**asdict(found), "agree": found.losses_agree and found.parameters_agree})
    plot_losses(run_dir / "loss.png", {TITLES[backend]: metrics for backend, metrics in runs.items()})
    print_comparison(runs["mindspore"], runs["torch"], found, run_dir)
    return found.losses_agree and found.parameters_agree


def compare_runs(
    ours: Sequence[StepMetrics],
    theirs: Sequence[StepMetrics],
    our_parameters: dict[str, np.ndarray],
    their_parameters: dict[str, np.ndarray],
) -> Comparison:
    """Measure how far two runs of one configuration agree."""
    losses = [_relative(a.loss, b.loss) for a, b in zip(ours, theirs, strict=True)]
    parameters = {name: _distance(our_parameters[name], value) for name, value in their_parameters.items()}
    # NaN must not hide behind a comparison: max() of numpy keeps it.
    worst = max(parameters, key=lambda name: np.nan_to_num(parameters[name], nan=np.inf))
    return Comparison(
        compared_steps=min(COMPARED_STEPS, len(losses)),
        loss_difference=float(np.max(losses[:COMPARED_STEPS])),
        loss_difference_all_steps=float(np.max(losses)),
        held_out_difference=_relative(ours[-1].held_out_loss, theirs[-1].held_out_loss),
        parameter_difference=parameters[worst],
        parameter=worst,
    )


def print_comparison(
    ours: Sequence[StepMetrics], theirs: Sequence[StepMetrics], found: Comparison, run_dir: Path
) -> None:
    """The table on the screen."""
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout, highlight=False)
    table = Table(title="One plan, one set of initial weights, two frameworks")
    for heading in ("", "MindSpore", "PyTorch", "relative difference"):
        table.add_column(heading, justify="right" if heading else "left")
    for index in _shown_steps(len(ours)):
        a, b = ours[index], theirs[index]
        table.add_row(f"loss, step {a.step}", f"{a.loss:.6f}", f"{b.loss:.6f}", f"{_relative(a.loss, b.loss):.1e}")
    table.add_section()
    held_out = [f"{run[-1].held_out_loss:.6f}" for run in (ours, theirs)]
    table.add_row("held-out loss", *held_out, f"{found.held_out_difference:.1e}")
    speeds = [f"{read_json(run_dir / backend / 'summary.json')['tokens_per_s']:,.0f}" for backend in BACKENDS]
    table.add_row("tokens/s", *speeds, "")
    console.print(table)
    for line in _verdicts(found):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"files in {run_dir}", markup=False, soft_wrap=True)


def _verdicts(found: Comparison) -> list[str]:
    def verdict(agree: bool) -> str:
        return "agree" if agree else "DIFFER"

    return [
        f"losses of the first {found.compared_steps} steps {verdict(found.losses_agree)}: largest relative difference "
        f"{found.loss_difference:.1e}, allowed {LOSS_TOLERANCE:.0e} (over all {found.loss_difference_all_steps:.1e})",
        f"parameters at the end {verdict(found.parameters_agree)}: largest relative difference "
        f"{found.parameter_difference:.1e} ({found.parameter}), allowed {PARAMETER_TOLERANCE:.0e}",
    ]


def _shown_steps(steps: int) -> list[int]:
    """The first steps, then about every tenth of the rest, and the last."""
    every = max(1, steps // 15)
    return sorted({*range(min(5, steps)), *range(every - 1, steps, every), steps - 1})


def _relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b) if b else abs(a)


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """The norm of the difference over the norm."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), np.finfo(np.float64).tiny))


def _parameters(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(folder / "model.safetensors")
