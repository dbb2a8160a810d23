"""How much work a call is, counted so that no machine changes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Callable

REPOSITORY = Path(__file__).parents[1]


def work(function: Callable, *arguments: Any) -> int:
    """Lines of Python that `function(*arguments)` runs, each turn of a loop counted, in this thread."""
    lines = 0

    def follow(frame: FrameType, event: str, argument: Any) -> Callable:
        nonlocal lines
        lines += event == "line"
        return follow

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        function(*arguments)
    finally:
        sys.settrace(before)
    return lines


def imported(code: str) -> tuple[set[str], set[str]]:
    """What a new Python imports while it runs `code`: the modules of this package, and the packages that are neither
    this one nor Python's own."""
    probe = f"import sys\nbefore = set(sys.modules)\n{code}\nprint(*set(sys.modules) - before)"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(
        [sys.executable, "-c", probe], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    modules = set(ended.stdout.splitlines()[-1].split())
    own = {module for module in modules if module.partition(".")[0] == "hyper_parallel"}
    others = {module.partition(".")[0] for module in modules - own}
    return own, others - set(sys.stdlib_module_names)
