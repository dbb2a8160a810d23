"""The figures of each step and where they are kept."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Sequence


@dataclass(frozen=True)
class StepMetrics:
    """One step over all ranks.

    `step` counts from 1. `loss` is the mean over all valid tokens of the global batch, in nats, before the update;
    `held_out_loss` the same over the held-out text after the update, or None. `grad_norm` is measured before
    clipping. `memory_bytes` is the peak so far of the rank that needs most: of its device, or on a CPU of its process.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    tokens_per_s: float
    memory_bytes: int
    held_out_loss: float | None = None


class Recorder:
    """Keeps each step's metrics in `metrics.jsonl` and as TensorBoard events in `folder`."""

    def __init__(self, folder: Path):
        # Unbuffered, so that a step's line is written whole, at once.
        self._lines = open(folder / "metrics.jsonl", "ab", buffering=0)
        self._events = _event_writer(folder / "tensorboard")

    @property
    def keeps_events(self) -> bool:
        """False when tensorboard is not installed."""
        return self._events is not None

    def add(self, metrics: StepMetrics) -> None:
        """Keep one step."""
        values = {name: value for name, value in asdict(metrics).items() if value is not None}
        self._lines.write((json.dumps(values) + "\n").encode())
        if self._events is not None:
            self._add_events(values)

    def _add_events(self, values: dict[str, float]) -> None:
        import time

        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=f"train/{k}", simple_value=v) for k, v in values.items() if k != "step"]
        self._events.add_event(Event(wall_time=time.time(), step=values["step"], summary=Summary(value=scalars)))

    def close(self) -> None:
        """Write what is still in memory."""
        self._lines.close()
        if self._events is not None:
            self._events.close()


def _event_writer(folder: Path):
    """TensorBoard's own writer of event files, or None when tensorboard is not installed."""
    try:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        return None
    return EventFileWriter(str(folder))


def read_metrics(folder: Path) -> list[StepMetrics]:
    """The steps that `Recorder` kept in `folder`."""
    with open(folder / "metrics.jsonl", encoding="utf-8") as lines:
        return [StepMetrics(**json.loads(line)) for line in lines]


def mean_tokens_per_s(metrics: Sequence[StepMetrics]) -> float:
    """Tokens per second over all steps; without the first, which also warms up, when there are others."""
    counted = metrics[1:] or metrics
    return sum(m.tokens for m in counted) / sum(m.seconds for m in counted)
