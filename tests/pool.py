"""Real worker processes for tests: started once, used by many tests.

    pool = Pool("torch", ranks=4)
    results = pool.run("tests.equivalence.collective_bodies:sums", 3, timeout=30)   # one result per rank

calls `sums(backend, 3)` on every rank at the same time, `backend` being the loaded `core.backend.Backend` with its
collectives initialised. Arguments and results travel as pickles: send numpy arrays, not tensors.

A test never hangs on its workers. A rank that raises, dies or does not come back ends `run` with a `PoolError` that
names the rank and the body; the workers are then ended, since nobody knows what is left on their wires, and the next
`run` starts new ones.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Callable

from hyper_parallel.core.backend import Launch

REPOSITORY = Path(__file__).resolve().parent.parent
START_LIMIT_S = 120.0  # MindSpore needs 8 s for four ranks on a quiet machine; CI machines are not quiet
RUN_LIMIT_S = 100.0  # of a body; four ranks on two busy cores take ten times as long as they would alone
COLLECTIVE_LIMIT_S = 120.0
GRACE_S = 2.0  # how long the others may go on after the first failure
DEATH_HEAD_START_S = 0.5  # a death shows here later than in the collectives of its neighbours
LOG_TAIL_LINES = 30
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
# Several ranks do not share one accelerator; a single one may have it where that is asked for (benchmarks/gpu.sh).
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}
ACCELERATOR = "HYPER_PARALLEL_TEST_ACCELERATOR"
# A collective of MindSpore fails when a rank is that late, and where cores are busy ranks are late. One that is lost is
# noticed here anyway. Of MindSpore's log only errors are kept.
MINDSPORE = {"MS_NODE_TIMEOUT": f"{COLLECTIVE_LIMIT_S:.0f}", "GLOG_v": "3"}


class PoolError(Exception):
    """A body did not finish on every rank. `rank` is the one to look at first."""

    def __init__(self, rank: int, message: str):
        super().__init__(message)
        self.rank = rank


class RankRaised(PoolError):
    """A rank raised an exception; the message holds its traceback."""


class RankDied(PoolError):
    """A rank's process ended; the message holds the last lines that it wrote."""


class RankStuck(PoolError):
    """A rank did not finish in time; the message says where it stood."""


@dataclass(frozen=True)
class Returned:
    """Reply of a worker: the body's result."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """Reply of a worker: the body's exception in one line and in full, and when it was raised on the machine's
    monotonic clock."""

    when: float
    summary: str
    traceback: str


@dataclass(frozen=True)
class Died:
    """What the pool notes for a worker that ended without a reply."""

    when: float


class Pool:
    """`ranks` worker processes with one backend, started at the first `run` and again after a failure."""

    def __init__(self, backend: str, ranks: int):
        self.backend = backend
        self.ranks = ranks
        self._crew: _Crew | None = None

    def run(self, body: str | Callable, *args: Any, timeout: float = RUN_LIMIT_S, **kwargs: Any) -> list[Any]:
        """Call `body(backend, *args, **kwargs)` on every rank and return the results in rank order.

        `body` is a function at the top of an importable module, or its name as "module:function". `timeout` is in
        seconds and does not count the start of the workers. Raises `RankRaised`, `RankDied` or `RankStuck`."""
        __tracebackhide__ = True
        name = body if isinstance(body, str) else f"{body.__module__}:{body.__qualname__}"
        job = pickle.dumps((name, args, kwargs))
        try:
            if self._crew is None:
                self._crew = _start_crew(self.backend, self.ranks)
            return self._crew.run(job, name, timeout)
        except BaseException:  # an interrupted test, too, leaves workers in the middle of something
            self._end(at_once=True)
            raise

    def pids(self) -> list[int]:
        """Process ids by rank; empty while no workers are there."""
        return [] if self._crew is None else [worker.process.pid for worker in self._crew.workers]

    def close(self) -> None:
        """End the workers; harmless when there are none."""
        self._end(at_once=False)

    def _end(self, at_once: bool) -> None:
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.end(at_once)


class _Worker:
    """One process, the pipe to it, and the file that collects what it prints."""

    def __init__(self, backend: str, launch: Launch, log: Path):
        self.log = log
        self.connection, theirs = Pipe()
        devices = {} if launch.world_size == 1 and os.environ.get(ACCELERATOR) else ON_CPU
        environment = {**os.environ, **ONE_THREAD, **devices, **(MINDSPORE if backend == "mindspore" else {})}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.pool_worker", str(theirs.fileno()), str(os.getpid())],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C goes to pytest, which ends the whole group of each worker
            )
        theirs.close()
        self.send(pickle.dumps((backend, launch)))

    def send(self, payload: bytes) -> None:
        """Send a pickle. That the worker is dead is noticed, and told with more, when its reply is awaited."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(payload)

    def receive(self) -> Returned | Raised | Died:
        """The reply that is waiting."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            return Died(time.monotonic())

    def kill(self) -> None:
        """End the process and what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def how_it_ended(self) -> str:
        """The exit status in words."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(timeout=5)
            return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return "closed its pipe but is still running"

    def stacks(self) -> str:
        """Where every thread of the process stands now; it answers even from inside a collective."""
        before = self.log.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.3)
        with self.log.open("rb") as log:
            log.seek(before)
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(line for line in lines if "pool_worker.py" not in line and "<frozen runpy>" not in line)

    def log_tail(self) -> str:
        """The last lines that the process wrote."""
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join(["last lines of its output:", *lines]) if lines else "it had written nothing"


class _Crew:
    """The workers of one life of a pool: from their start to their end or the first failure."""

    def __init__(self, backend: str, ranks: int):
        self.backend = backend
        self.ranks = ranks
        self.workers: list[_Worker] = []
        self._logs = tempfile.TemporaryDirectory(prefix="hyper_parallel_pool_")
        port = free_port()
        try:
            for rank in range(ranks):
                launch = Launch(
                    rank=rank,
                    world_size=ranks,
                    local_rank=rank,
                    master_port=port,
                    launcher="local" if ranks > 1 else "single",
                    timeout_s=COLLECTIVE_LIMIT_S,
                )
                self.workers.append(_Worker(backend, launch, Path(self._logs.name) / f"rank_{rank}.txt"))
            self._collect("starting", START_LIMIT_S)
        except BaseException:
            self.end(at_once=True)
            raise

    def run(self, job: bytes, name: str, limit_s: float) -> list[Any]:
        """Send a job to every rank and return their results."""
        __tracebackhide__ = True
        for worker in self.workers:
            worker.send(job)
        return self._collect(name, limit_s)

    def end(self, at_once: bool) -> None:
        """End every worker: by closing its pipe, or by force."""
        for worker in self.workers:
            worker.connection.close()
        for worker in self.workers:
            if not at_once:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(timeout=5)
            worker.kill()
        self._logs.cleanup()

    def _collect(self, task: str, limit_s: float) -> list[Any]:
        """One reply per rank within `limit_s`, or the error that explains why not."""
        __tracebackhide__ = True
        replies: dict[int, Returned | Raised | Died] = {}
        pending: dict[Connection, int] = {worker.connection: rank for rank, worker in enumerate(self.workers)}
        deadline = time.monotonic() + limit_s
        while pending and (ready := wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = pending.pop(connection)
                replies[rank] = self.workers[rank].receive()
                if not isinstance(replies[rank], Returned):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        failures = {rank: reply for rank, reply in replies.items() if not isinstance(reply, Returned)}
        if failures:
            raise self._failure(failures, sorted(pending.values()), task)
        if pending:
            raise self._stuck(sorted(pending.values()), task, limit_s)
        return [replies[rank].value for rank in range(self.ranks)]

    def _failure(self, failures: dict[int, Raised | Died], busy: list[int], task: str) -> PoolError:
        def moment(rank: int) -> float:
            reply = failures[rank]
            return reply.when - (DEATH_HEAD_START_S if isinstance(reply, Died) else 0.0)

        first, *later = sorted(failures, key=moment)
        who = f"rank {first} of {self.ranks} ({self.backend})"
        others = []
        if later:
            others.append(f"{_ranks(later)} failed after it")
        if busy:
            others.append(f"{_ranks(busy)} still busy {GRACE_S:g} s later and ended")
        rest = f"\n({'; '.join(others)})" if others else ""
        reply = failures[first]
        if isinstance(reply, Raised):
            said = f"{reply.summary}\n{reply.traceback.rstrip()}"  # of a message some reports show the first line only
            return RankRaised(first, f"{who} was the first to raise in {task}: {said}{rest}")
        worker = self.workers[first]
        return RankDied(first, f"{who} {worker.how_it_ended()} in {task}; {worker.log_tail()}{rest}")

    def _stuck(self, ranks: list[int], task: str, limit_s: float) -> PoolError:
        where = "\n".join(f"--- rank {rank}\n{self.workers[rank].stacks()}" for rank in ranks)
        message = f"{_ranks(ranks)} of {self.ranks} ({self.backend}) did not finish {task} within {limit_s:g} s"
        return RankStuck(ranks[0], f"{message}; this is where they stood:\n{where}")


def _start_crew(backend: str, ranks: int) -> _Crew:
    """A new crew; tries again when another process took the chosen port before rank 0 could bind it."""
    __tracebackhide__ = True
    for _ in range(2):
        try:
            return _Crew(backend, ranks)
        except RankRaised as error:
            if "address already in use" not in str(error).lower():
                raise
    return _Crew(backend, ranks)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
