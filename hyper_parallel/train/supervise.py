"""Child processes that end together: when one fails, when the launcher is interrupted, or when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Mapping, Sequence

from hyper_parallel.train.job import Failure, Job, first

_POLL_S = 0.05
# The first failure that is seen need not be the first that happened. Ranks that only lost a peer are given longer:
# the peer's own failure explains theirs.
_SETTLE_S = 0.3
_SETTLE_LOST_S = 5.0
_GRACE_S = 2.0


class RanksFailed(Exception):
    """A rank failed. `failure` is the first one; `job` holds the logs."""

    def __init__(self, failure: Failure, job: Job):
        super().__init__(failure.message())
        self.failure, self.job = failure, job


class Terminated(BaseException):
    """This process was asked to end by the signal `signum`."""

    def __init__(self, signum: int):
        super().__init__(signum)
        self.signum = signum


class Processes:
    """The processes of one job. Leaving the `with` block ends those that still run."""

    def __init__(self, job: Job, environment: Mapping[str, str]):
        self.job = job
        self._environment = environment
        self._running: dict[str, subprocess.Popen] = {}
        self._ranks: dict[str, int] = {}
        self._silent = False

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self, name: str, arguments: Sequence[str], rank: int | None = None, silent_agent: bool = False) -> None:
        """Run this Python with `arguments`.

        `rank` if the process is one, None for an agent with ranks below it; a silent one does not report what became
        of them.
        """
        self._silent |= silent_agent
        with open(self.job.log(name), "ab") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stderr=log,
                env=self._environment,
                # Ctrl-C in the terminal reaches the launcher alone, which then ends the others in order.
                start_new_session=True,
            )
        if rank is not None:
            self._ranks[name] = rank

    def wait(self) -> None:
        """Return when every process has ended well; raise `RanksFailed` as soon as one has not."""
        failures: list[Failure] = []
        since = time.monotonic()
        while self._running:
            failures.extend(self._ended_badly())
            known = [*failures, *self.job.failures()]
            if self._silent and not known:
                failures.extend(self.job.vanished())
            if not known:
                since = time.monotonic()
            elif time.monotonic() > since + (_SETTLE_LOST_S if _only_lost_peers(known) else _SETTLE_S):
                break
            time.sleep(_POLL_S)
        self.stop()
        known = [*failures, *self.job.failures()]
        if known:
            raise RanksFailed(first(known), self.job)

    def _ended_badly(self) -> list[Failure]:
        failures = []
        for name, process in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[name]
            reported = {failure.rank for failure in self.job.failures()}
            if name in self._ranks and code != 0 and self._ranks[name] not in reported:
                failures.append(Failure.of_exit(self._ranks[name], code))
            elif name not in self._ranks and code != 0 and not reported:
                failures.append(Failure(None, time.time(), "left", _tail(self.job.log(name))))
        return failures

    def stop(self) -> None:
        """End what still runs: ask, wait a little, then kill. Returns when all have ended."""
        with _ignoring_interrupts():
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + _GRACE_S
            while time.monotonic() < deadline and any(p.poll() is None for p in self._running.values()):
                time.sleep(_POLL_S)
            self._signal(signal.SIGKILL)
            for process in self._running.values():
                process.wait()
            self._running.clear()

    def _signal(self, signum: int) -> None:
        for process in self._running.values():
            try:
                # The whole session: msrun leaves helpers behind.
                os.killpg(process.pid, signum)
            except ProcessLookupError:
                pass


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    previous = {signum: signal.signal(signum, signal.SIG_IGN) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextmanager
def termination_as_exception() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise `Terminated`, so that cleaning up happens as for Ctrl-C."""

    def terminate(signum: int, frame: object) -> None:
        raise Terminated(signum)

    previous = {signum: signal.signal(signum, terminate) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _only_lost_peers(failures: Sequence[Failure]) -> bool:
    return all(failure.kind == "communication" for failure in failures)


def _tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
