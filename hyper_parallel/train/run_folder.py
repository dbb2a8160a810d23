"""What a run leaves behind.

config.yaml          the settings, all of them
plan.yaml            the sharding plan
metrics.jsonl        one JSON object a step
tensorboard/         the same as TensorBoard events
loss.png             the loss curve
model.safetensors    the final parameters, whole
summary.json         the figures of the whole run
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Mapping

import numpy as np

from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.plan.plan import ShardingPlan
from hyper_parallel.train.config import Config
from hyper_parallel.train.data import Corpus
from hyper_parallel.train.files import whole_file, write_json, write_text
from hyper_parallel.train.metrics import Recorder, mean_tokens_per_s, read_metrics
from hyper_parallel.train.options import to_yaml
from hyper_parallel.train.plot import plot_losses


def choose_run_dir(wanted: Path | None, default_name: str) -> Path:
    """The folder for a new run: `wanted`, or the first of runs/NAME, runs/NAME-2, ... that does not exist.

    Nothing is created. Raises `ConfigError` if `wanted` is taken: a run never mixes its files with others.
    """
    if wanted is not None:
        if wanted.exists() and (not wanted.is_dir() or any(wanted.iterdir())):
            raise ConfigError(f"--run-dir: {wanted} exists and is not an empty directory; name another, or remove it")
        return wanted
    candidate, number = Path("runs", default_name), 1
    while candidate.exists():
        number += 1
        candidate = Path("runs", f"{default_name}-{number}")
    return candidate


class RunFolder:
    """The folder of a run that goes on; rank 0 alone has one."""

    def __init__(self, path: Path, config: Config):
        self._path, self._config = path, config
        self._recorder = Recorder(path)

    @classmethod
    def create(cls, path: Path, config: Config, plan: ShardingPlan) -> RunFolder:
        """Make the folder and write down what is about to be run."""
        path.mkdir(parents=True, exist_ok=True)
        write_text(path / "config.yaml", to_yaml(config))
        plan.save(path / "plan.yaml")
        return cls(path, config)

    @property
    def keeps_events(self) -> bool:
        """False when tensorboard is not installed."""
        return self._recorder.keeps_events

    def add(self, metrics) -> None:
        """Keep the metrics of one step."""
        self._recorder.add(metrics)

    def finish(self, parameters: Mapping[str, np.ndarray], corpus: Corpus) -> list[str]:
        """Write what is known at the end only; returns lines that say how the run went and where its files are."""
        self._recorder.close()
        metrics = read_metrics(self._path)
        _save_parameters(self._path / "model.safetensors", parameters)
        summary = {
            "backend": self._config.backend,
            "ranks": self._config.ranks,
            "steps": len(metrics),
            "parameters": int(sum(value.size for value in parameters.values())),
            "first_loss": metrics[0].loss,
            "final_loss": metrics[-1].loss,
            "held_out_loss": metrics[-1].held_out_loss,
            "tokens_per_s": mean_tokens_per_s(metrics),
            "memory_bytes": metrics[-1].memory_bytes,
            "text": {"files": len(corpus.texts), "bytes": corpus.total_bytes, "sha256": corpus.digest()},
        }
        write_json(self._path / "summary.json", summary)
        lines = [
            f"loss {metrics[0].loss:.4f} -> {metrics[-1].loss:.4f}, held out {metrics[-1].held_out_loss:.4f}, "
            f"{summary['tokens_per_s']:,.0f} tokens/s; files in {_short(self._path)}"
        ]
        if not plot_losses(self._path / "loss.png", {self._config.backend: metrics}):
            lines.append("matplotlib is not installed, no loss.png is drawn: run pip install 'hyper-parallel[train]'")
        return lines


def _short(path: Path) -> str:
    """Relative to the working directory where that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)


def _save_parameters(path: Path, parameters: Mapping[str, np.ndarray]) -> None:
    from safetensors.numpy import save_file

    with whole_file(path) as temporary:
        save_file({name: np.ascontiguousarray(value) for name, value in parameters.items()}, str(temporary))
