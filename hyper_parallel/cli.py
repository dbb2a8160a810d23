"""The command line: `hyper-parallel train`, `compare`, `plan` and `validate`.

Exit status: 0 done; 1 a rank failed, the backends or two plans differ, or a plan does not hold; 2 something that the
user can put right; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Sequence

from hyper_parallel.arguments import parse
from hyper_parallel.core.errors import HyperParallelError

_FIRST_RANK_S = 5.0  # how long the others leave the first rank to tell what is wrong on all


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    options = parse(arguments)
    from hyper_parallel.train.supervise import RanksFailed, Terminated, termination_as_exception

    try:
        with termination_as_exception():
            return _COMMANDS[options.command](options)
    except HyperParallelError as error:
        return _complain(str(error), 2)
    except RanksFailed as failed:
        logs = f"\nwhat every rank printed is in {failed.job.folder}" if failed.failure.kind != "user" else ""
        return _complain(f"{failed}{logs}", failed.failure.exit_status, ranks_ran=True)
    except KeyboardInterrupt:
        return _complain("interrupted; every rank has ended", 130, ranks_ran=True)
    except Terminated as terminated:
        return _complain("asked to end; every rank has ended", 128 + terminated.signum, ranks_ran=True)


def _train(options: argparse.Namespace) -> int:
    from hyper_parallel.core.launch import is_scheduler
    from hyper_parallel.train.config import load_config
    from hyper_parallel.train.launch import join_and_train, joined, serve_as_scheduler, start_local
    from hyper_parallel.train.run_folder import choose_run_dir

    config = load_config(options.config, options.set, options.backend)
    if is_scheduler(os.environ):
        serve_as_scheduler(config)
        return 0
    launch = joined(config, os.environ)
    # Rank 0 alone writes; the others would find the folder that it has made.
    writes = launch is None or launch.rank == 0
    run_dir = choose_run_dir(options.run_dir, f"{Path(options.config).stem}-{config.backend}") if writes else None
    if launch is None:
        start_local(config, run_dir)
    else:
        join_and_train(config, launch, run_dir)
    return 0


def _compare(options: argparse.Namespace) -> int:
    from hyper_parallel.train.compare import compare
    from hyper_parallel.train.config import load_config
    from hyper_parallel.train.run_folder import choose_run_dir

    config = load_config(options.config, options.set)
    run_dir = choose_run_dir(options.run_dir, Path(options.config).stem)
    return 0 if compare(config, run_dir) else 1


def _plan(options: argparse.Namespace) -> int:
    from hyper_parallel.plan_command import run

    return run(options)


def _validate(options: argparse.Namespace) -> int:
    from hyper_parallel.validate_command import run

    return run(options)


_COMMANDS = {"train": _train, "compare": _compare, "plan": _plan, "validate": _validate}


def _complain(message: str, status: int, ranks_ran: bool = False) -> int:
    from hyper_parallel.core.launch import is_further_rank, is_scheduler

    if ranks_ran and sys.stdout.isatty():
        # A rank that ended under its progress bar has left the cursor hidden, in the middle of a line.
        print("\x1b[?25h")
    further = is_further_rank(os.environ)
    if further and (ranks_ran or is_scheduler(os.environ)):
        return status
    if further:
        # What is wrong before the ranks have met is wrong on every rank, as a rule: the first one tells it, and its
        # launcher, which ends all when one has ended, needs time for that. Who is left has a mistake of its own.
        time.sleep(_FIRST_RANK_S)
    print(f"hyper-parallel: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
