"""What the operating system knows about this process, and what the interpreter does for it."""

from __future__ import annotations

import gc
import resource
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator


def peak_resident_bytes() -> int:
    """The most memory this process has held in RAM so far, in bytes."""
    if sys.platform == "linux":
        # Not getrusage: its figure starts with that of the process this one was forked from.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """No search for reference cycles inside: where objects are made by the million and all kept, it finds none and
    takes most of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
