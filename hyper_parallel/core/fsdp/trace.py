"""What a step's schedule did and when: as a Chrome trace, and as ranges in the framework's own profiler."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Callable, ContextManager, Iterator, Mapping

from hyper_parallel.core.backend import Backend, Module
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.fsdp.schedule import Runtime, Schedule
from hyper_parallel.core.topology_sources import topology_of

if TYPE_CHECKING:
    from hyper_parallel.core.fsdp.reduction import UnitReduction
    from hyper_parallel.core.fsdp.unit import Unit

EVENTS = {
    "issue_gather": "issue gather",
    "wait_gather": "wait gather",
    "shrink": "shrink",
    "free": "free",
    "retain": "retain",
    "keep": "keep",
    "issue_reduce_scatter": "issue reduce-scatter",
    "wait_reduce_scatter": "wait reduce-scatter",
    "accumulate": "accumulate",
    "issue_all_reduce": "issue all-reduce",
    "wait_all_reduce": "wait all-reduce",
    "settle": "settle",
}
"""The schedule's events, and what they are called."""

Around = Callable[[str, Any], ContextManager[None]]
"""From the name of an event and what it is about, a unit or a reduction, to what it is to happen in."""


class ObservedRuntime:
    """A `Runtime` whose events another one carries out, each inside of `around`."""

    def __init__(self, runtime: Runtime, around: Around):
        self.observed = runtime
        self._around = around

    def __getattr__(self, name: str) -> Any:
        carry_out = getattr(self.observed, name)
        if name not in EVENTS:
            return carry_out

        def observed(subject: Any) -> None:
            with self._around(name, subject):
                carry_out(subject)

        return observed


def unit_in(subject: Unit | UnitReduction) -> Unit:
    """The unit that an event is about."""
    return getattr(subject, "unit", subject)


def name_in(subject: Unit | UnitReduction) -> str:
    """Its name; units are named after their modules, the outermost has none."""
    return unit_in(subject).name or "(root)"


@dataclass(frozen=True)
class Span:
    """Something that took from `start` to `end`, in seconds since the trace began."""

    name: str
    row: str
    start: float
    end: float
    details: Mapping[str, Any]


class StepTrace:
    """What happened while a model was traced. Rows are the step's thread and, for each group of ranks, what was on its
    way there: from when it was issued until its result had been waited for, which may be later than it came."""

    def __init__(self, rank: int, rows: Callable[[str, Any], str]):
        self.rank = rank
        self.spans: list[Span] = []
        self._row_of = rows
        self._begun = perf_counter()
        self._on_the_way: dict[tuple[str, int], tuple[float, str]] = {}

    @contextmanager
    def around(self, event: str, subject: Any) -> Iterator[None]:
        """Note an event of the schedule."""
        start = self._now()
        kind, _, what = event.partition("_")
        key = what, id(subject)
        if kind == "issue":
            self._on_the_way[key] = start, self._row_of(what, subject)
        yield
        unit = name_in(subject)
        self._add(f"{EVENTS[event]} {unit}", "step", start, unit)
        if kind == "wait" and key in self._on_the_way:
            issued, row = self._on_the_way.pop(key)
            self._add(f"{what.replace('_', '-')} {unit}", row, issued, unit)

    def chrome_events(self) -> list[dict[str, Any]]:
        """Complete events ("X", in microseconds) of Chrome's trace format, and the names of rows. What overlaps on a
        row stands on several lines."""
        lines: list[tuple[str, float]] = []  # the row of each line, and when it is free again
        events = []
        for span in sorted(self.spans, key=lambda each: (each.start, -each.end)):
            free = (n for n, (row, end) in enumerate(lines) if row == span.row and (end <= span.start or row == "step"))
            line = next(free, len(lines))
            if line == len(lines):
                lines.append((span.row, span.end))
            lines[line] = span.row, span.end
            times = {"ts": round(span.start * 1e6, 1), "dur": round((span.end - span.start) * 1e6, 1)}
            about = {"cat": span.row, "args": dict(span.details)}
            events.append({"name": span.name, "ph": "X", "pid": self.rank, "tid": line, **times, **about})
        names = [("process_name", 0, f"rank {self.rank}")]
        names += [("thread_name", line, row) for line, (row, _) in enumerate(lines)]
        named = [
            {"name": what, "ph": "M", "pid": self.rank, "tid": line, "args": {"name": name}}
            for what, line, name in names
        ]
        return named + events

    def save(self, path: str | os.PathLike) -> None:
        """Write the trace as JSON, which https://ui.perfetto.dev and chrome://tracing open. One file for each rank."""
        content = {"traceEvents": self.chrome_events(), "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(content), encoding="utf-8")

    def _now(self) -> float:
        return perf_counter() - self._begun

    def _add(self, name: str, row: str, start: float, unit: str) -> None:
        self.spans.append(Span(name, row, start, self._now(), {"unit": unit}))


@contextmanager
def trace_step(backend: Backend, model: Module, schedules: list[Schedule]) -> Iterator[StepTrace]:
    """See `hyper_parallel.trace_step`."""
    if not schedules:
        raise ConfigError(f"trace_step: no part of this {type(model).__name__} is sharded; call fully_shard first")
    trace = StepTrace(backend.collectives.rank(), rows_of(backend))
    before = [schedule.runtime for schedule in schedules]
    for schedule, runtime in zip(schedules, before):
        schedule.runtime = ObservedRuntime(runtime, trace.around)
    try:
        yield trace
    finally:
        for schedule, runtime in zip(schedules, before):
            schedule.runtime = runtime


def rows_of(backend: Backend) -> Callable[[str, Any], str]:
    """What a collective's row is called: its axis, and its tier where that is known."""
    topology = topology_of(backend)

    def row(what: str, subject: Any) -> str:
        unit = unit_in(subject)
        axis, ranks = "shard", unit.shard_group.ranks
        if what == "all_reduce":
            axis, ranks = "replicate", {rank for each in unit.parameters for rank in each.sum_group.ranks}
        return axis if topology is None else f"{axis} ({topology.tier(tuple(ranks))} tier)"

    return row


def range_for(backend: Backend) -> Around:
    """Ranges of the framework's profiler around events, named after them and their units."""

    def around(event: str, subject: Any) -> ContextManager[None]:
        return backend.training.profiler_range(f"{EVENTS[event]} {name_in(subject)}")

    return around


def show_in_profiler(backend: Backend, schedule: Schedule) -> None:
    """Put ranges around the events of a schedule while the framework's profiler runs, and none while it doesn't. Asked
    when a step begins."""
    shown = isinstance(schedule.runtime, _ProfiledRuntime)
    if backend.training.is_profiled() != shown:
        runtime = schedule.runtime
        schedule.runtime = runtime.observed if shown else _ProfiledRuntime(runtime, range_for(backend))


class _ProfiledRuntime(ObservedRuntime):
    """One that `show_in_profiler` has put there."""
