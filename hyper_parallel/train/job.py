"""The folder through which the launcher and the ranks that it started talk, and the report of a failed rank.

It holds `job.json` (what to run), `config.yaml`, `rank-N.log` (what rank N and its framework printed), `rank-N.pid`
while rank N is at work, and `rank-N.failed.json` when it met an error.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from hyper_parallel.core.errors import CommunicationError, HyperParallelError
from hyper_parallel.train.config import Config
from hyper_parallel.train.files import read_json, write_json, write_text
from hyper_parallel.train.options import fill, read_file, to_yaml


@dataclass(frozen=True)
class Failure:
    """How a rank ended before its time.

    `kind` is "user" (an error that the user can put right), "communication" (it lost the others, usually because
    one of them failed first), "crash" (any other exception; `text` is the traceback), "killed" (by a signal) or
    "left" (it ended without a message). `time` is in seconds since the epoch. `rank` is None when the process that
    was to start the ranks failed itself.
    """

    rank: int | None
    time: float
    kind: str
    text: str

    @classmethod
    def of_exception(cls, rank: int, error: BaseException) -> Failure:
        """What an exception that left the rank's main function amounts to."""
        if isinstance(error, CommunicationError):
            kind, text = "communication", str(error)
        elif isinstance(error, HyperParallelError):
            kind, text = "user", str(error)
        else:
            kind, text = "crash", "".join(traceback.format_exception(error))
        return cls(rank, time.time(), kind, text)

    @classmethod
    def of_exit(cls, rank: int, code: int) -> Failure:
        """What the exit status of a process without a report amounts to; negative: the signal that killed it."""
        if code >= 0:
            return cls(rank, time.time(), "left", f"left with exit status {code} and no message")
        hint = "; the kernel does so when memory runs out" if code == -signal.SIGKILL else ""
        name = signal.Signals(-code).name
        # A framework aborts a rank that has lost its peers: that is no cause.
        kind = "left" if code == -signal.SIGABRT else "killed"
        return cls(rank, time.time(), kind, f"was killed by signal {-code} ({name}{hint})")

    @property
    def exit_status(self) -> int:
        """The status of the whole run: 2 for what the user can put right, else 1."""
        return 2 if self.kind == "user" else 1

    def message(self) -> str:
        """What to show."""
        if self.rank is None:
            return f"the ranks could not be started:\n{self.text}"
        if self.kind == "user":
            return self.text
        if self.kind == "crash":
            return f"rank {self.rank} failed:\n{self.text.rstrip()}"
        if self.kind == "communication":
            return f"rank {self.rank}: {self.text}"
        return f"rank {self.rank} {self.text}"


def first(failures: list[Failure]) -> Failure:
    """The failure that the others follow from.

    A killed rank goes first: its peers may notice before its parent does. A rank that lost its peers goes last.
    """
    order = {"killed": 0, "user": 1, "crash": 1, "left": 2, "communication": 3}
    return min(failures, key=lambda failure: (order[failure.kind], failure.time))


@dataclass(frozen=True)
class Job:
    """A run of local ranks. `folder` is private to it and temporary."""

    folder: Path

    @classmethod
    def create(cls, config: Config, run_dir: Path) -> Job:
        """A new folder with what the ranks must know."""
        job = cls(Path(tempfile.mkdtemp(prefix="hyper-parallel-")))
        write_text(job.folder / "config.yaml", to_yaml(config))
        write_json(job.folder / "job.json", {"run_dir": str(run_dir.absolute()), "launcher": os.getpid()})
        return job

    def config(self) -> Config:
        """The settings that `create` was given."""
        return fill(Config, read_file(self.folder / "config.yaml"))

    def run_dir(self) -> Path:
        """The run folder, absolute."""
        return Path(read_json(self.folder / "job.json")["run_dir"])

    def launcher(self) -> int:
        """The process that watches over the ranks."""
        return read_json(self.folder / "job.json")["launcher"]

    def log(self, name: str) -> Path:
        """Where the named process prints to."""
        return self.folder / f"{name}.log"

    def begin(self, rank: int) -> None:
        """Note that this process is at work as a rank."""
        write_text(self.folder / f"rank-{rank}.pid", str(os.getpid()))

    def end(self, rank: int) -> None:
        """Note that the rank has done its work."""
        (self.folder / f"rank-{rank}.pid").unlink()

    def vanished(self) -> list[Failure]:
        """Ranks that are gone without having ended: for agents that do not tell what became of their ranks."""
        found = []
        for path in self.folder.glob("rank-*.pid"):
            try:
                pid, rank = int(path.read_text()), int(path.stem.partition("-")[2])
            except FileNotFoundError:
                continue  # it has just ended
            if not _runs(pid):
                found.append(Failure(rank, time.time(), "killed", "ended without a message, as a killed process does"))
        return found

    def report(self, failure: Failure) -> None:
        """Leave a failure for the launcher. A rank's own account stands; a later one by its parent is dropped."""
        path = self.folder / f"rank-{failure.rank}.failed.json"
        if not path.exists():
            write_json(path, asdict(failure))

    def failures(self) -> list[Failure]:
        """Every failure reported so far."""
        return [Failure(**read_json(path)) for path in self.folder.glob("rank-*.failed.json")]


def _runs(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and waits for its parent to notice does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        # No /proc on this system, or the process has ended between the two lines: the next look will tell.
        return True


def die_with(launcher: int) -> None:
    """Let the kernel end this process when its parent ends (Linux), and end it now if the launcher is gone."""
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
    try:
        os.kill(launcher, 0)
    except ProcessLookupError:
        os._exit(1)
