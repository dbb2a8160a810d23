"""What a run shows: on a terminal a progress bar, elsewhere plain lines. Rank 0 shows, other ranks are silent."""

from __future__ import annotations

import os
import time
from typing import Protocol, TextIO

from hyper_parallel.train.metrics import StepMetrics

_LINES = 20
_SECONDS_BETWEEN_LINES = 10.0


class Screen(Protocol):
    """Where a run tells how it goes."""

    def say(self, text: str) -> None:
        """Show a text."""

    def begin(self, steps: int) -> None:
        """Show that a run of so many steps begins."""

    def step(self, metrics: StepMetrics) -> None:
        """Show how a step went."""

    def end(self) -> None:
        """Take the progress bar away, if there is one."""


def screen_on(stream: TextIO | None) -> Screen:
    """A screen that suits the stream; a silent one for None."""
    if stream is None:
        return _Silent()
    return _Bar(stream) if stream.isatty() else _Lines(stream)


def bytes_text(count: float) -> str:
    """A number of bytes in the unit that fits: "512 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):  # noqa: B007 (the last one is used below)
        if count < 1024:
            break
        count /= 1024
    else:
        unit = "TiB"
    return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"


def _columns(metrics: StepMetrics) -> list[str]:
    return [
        f"loss {metrics.loss:.4f}",
        f"{metrics.tokens_per_s:,.0f} tokens/s",
        f"gradient {metrics.grad_norm:.3f}",
        f"memory {bytes_text(metrics.memory_bytes)}",
    ]


def _held_out(metrics: StepMetrics) -> str:
    return f"step {metrics.step}: held-out loss {metrics.held_out_loss:.4f}"


class _Silent:
    def say(self, text: str) -> None:
        pass

    def begin(self, steps: int) -> None:
        pass

    def step(self, metrics: StepMetrics) -> None:
        pass

    def end(self) -> None:
        pass


class _Lines:
    """About twenty lines a run, and one at least every ten seconds."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._steps = 0
        self._shown = 0.0

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def begin(self, steps: int) -> None:
        self._steps = steps

    def step(self, metrics: StepMetrics) -> None:
        now, every = time.monotonic(), max(1, self._steps // _LINES)
        due = metrics.step in (1, self._steps) or metrics.step % every == 0
        if due or now - self._shown > _SECONDS_BETWEEN_LINES:
            self._shown = now
            self.say("  ".join([f"step {metrics.step}/{self._steps}", *_columns(metrics)]))
        if metrics.held_out_loss is not None:
            self.say(_held_out(metrics))

    def end(self) -> None:
        pass


class _Bar:
    """rich's progress bar, with the last step's figures behind it."""

    def __init__(self, stream: TextIO):
        from rich.console import Console

        # rich would ask the process's own standard streams, which lead to a log.
        width = os.get_terminal_size(stream.fileno()).columns
        self._console = Console(file=stream, width=width or None, highlight=False)
        self._progress = None

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def begin(self, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        figures = TextColumn("{task.fields[now]}")
        columns = (MofNCompleteColumn(), BarColumn(20), TimeRemainingColumn(compact=True), figures)
        self._progress = Progress(*columns, console=self._console, refresh_per_second=4)
        self._task = self._progress.add_task("", total=steps, now="")
        self._progress.start()

    def step(self, metrics: StepMetrics) -> None:
        self._progress.update(self._task, advance=1, now="  ".join(_columns(metrics)))
        if metrics.held_out_loss is not None:
            self.say(_held_out(metrics))

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
