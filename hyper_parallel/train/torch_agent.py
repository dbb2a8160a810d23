"""`torch.distributed.run` over one job: `python -m hyper_parallel.train.torch_agent JOB RANKS`.

A process of its own, so that the launcher need not import PyTorch, and as a library, so that the exit status of
each rank is known.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hyper_parallel.train.job import Failure, Job, die_with


def main() -> int:
    """Run the ranks; report those that ended without a word of their own."""
    job, ranks = Job(Path(sys.argv[1])), int(sys.argv[2])
    die_with(job.launcher())
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # "standalone" finds a free port by itself; the short interval lets a failed rank end the others at once.
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", "--monitor-interval=0.1"]
    options.append(f"--log-dir={job.folder / 'torchelastic'}")  # not a folder of its own that nobody removes
    try:
        run.run(run.parse_args([*options, "-m", "hyper_parallel.train.worker", str(job.folder)]))
    except ChildFailedError as error:
        for rank, ended in error.failures.items():
            job.report(Failure.of_exit(rank, ended.exitcode))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
