"""What the operating system knows about this process."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_resident_bytes() -> int:
    """The most memory this process has held in RAM so far, in bytes."""
    if sys.platform == "linux":
        # Not getrusage: its figure starts with that of the process this one was forked from.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
