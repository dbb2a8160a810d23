"""The whole suite, as `make test` runs it: two runs of pytest side by side, so that two cores always have work.

One has the folders whose tests start ranks, which often wait: for each other, and for frameworks that start. The other
has all the rest, most of which is one busy process; what it says is printed when both have ended. Options go to both,
as in `python -m tests -x --durations=20`. `python -m pytest` runs the same tests one after the other.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Sequence

REPOSITORY = Path(__file__).resolve().parents[1]
WITH_RANKS = ("tests/equivalence", "tests/mindspore")
NO_TESTS = 5
"""The exit status of pytest where options, such as -k, leave it no test."""


def main(options: Sequence[str]) -> int:
    """Run both; returns 0 where all tests pass, else the exit status of a run that says otherwise."""
    # Threads of one process and of the ranks beside it would wait for each other's cores.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    rest = ["tests", *(f"--ignore={folder}" for folder in WITH_RANKS)]
    with tempfile.TemporaryFile() as said:
        runs = [
            subprocess.Popen(
                [sys.executable, "-m", "pytest", *which, *options], cwd=REPOSITORY, env=environment, stdout=output
            )
            for which, output in ((WITH_RANKS, None), (rest, said))
        ]
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to both, which end their workers and report
        signal.signal(signal.SIGTERM, lambda *_: [run.terminate() for run in runs])
        statuses = {run.wait() for run in runs}
        said.seek(0)
        print(said.read().decode(errors="replace"))
    return max(statuses - {NO_TESTS}, key=abs, default=NO_TESTS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
