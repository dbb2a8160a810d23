"""One rank that the launcher started: `python -m hyper_parallel.train.worker JOB [--rank R --port P]`.

Without `--rank` an agent (`torch.distributed.run`, `msrun`) stands between, and its environment says who this is.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TextIO

from hyper_parallel.core.backend import Launch
from hyper_parallel.core.launch import is_scheduler
from hyper_parallel.train.config import Config
from hyper_parallel.train.job import Failure, Job, die_with
from hyper_parallel.train.launch import joined, leave, serve_as_scheduler
from hyper_parallel.train.screen import screen_on


def main() -> None:
    """Train; on an error leave a report and end at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    job = Job(arguments.job)
    die_with(job.launcher())
    config = job.config()
    if is_scheduler(os.environ):
        serve_as_scheduler(config)
        return
    launch = _launch(config, arguments)
    screen = _take_over_output(job, launch.rank)
    job.begin(launch.rank)
    try:
        # Frameworks are imported from here on, so that what they print goes to the log.
        from hyper_parallel.train.loop import train

        train(config, launch, job.run_dir(), screen_on(screen))
    except BaseException as error:
        failure = Failure.of_exception(launch.rank, error)
        job.report(failure)
        print(failure.message(), file=sys.stderr, flush=True)
        # Leaving the ordinary way could wait for peers that will never answer.
        os._exit(1)
    job.end(launch.rank)
    leave(launch)


def _launch(config: Config, arguments: argparse.Namespace) -> Launch:
    if arguments.rank is None:
        return joined(config, os.environ)
    if config.ranks == 1:
        return Launch()
    rank = arguments.rank
    return Launch(rank, config.ranks, rank, "127.0.0.1", arguments.port, "local")


def _take_over_output(job: Job, rank: int) -> TextIO | None:
    """Send whatever this process prints to the rank's log; rank 0 gets its old standard output back to write on."""
    screen = os.fdopen(os.dup(1), "w", encoding="utf-8") if rank == 0 else None
    sys.stdout.flush()
    log = os.open(job.log(f"rank-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return screen


if __name__ == "__main__":
    main()
