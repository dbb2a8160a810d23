"""One rank of a `tests.pool.Pool`: joins the others, then runs the bodies it is sent until the pipe closes."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any, Callable

from tests.pool import Raised, Returned

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve the pipe whose number is the first argument, on behalf of the process that is the second."""
    connection, parent = Connection(int(sys.argv[1])), int(sys.argv[2])
    die_with(parent)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    backend = None
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            leave()
        if backend is None:  # the first request says who this is
            backend, reply = start(request)
        else:
            reply = answer(call, backend, request)
        connection.send_bytes(reply)


def die_with(parent: int) -> None:
    """End this process, even inside a collective, when `parent` ends (Linux; elsewhere the closed pipe does it,
    once the body is done)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the line above
            leave()


def start(request: bytes) -> tuple[Any, bytes]:
    """Load the backend and join the job; returns the backend and the reply."""
    loaded: list[Any] = []
    reply = answer(join, request, loaded)
    return (loaded[0] if loaded else None), reply


def join(request: bytes, loaded: list[Any]) -> None:
    """Load the backend into `loaded` once its collectives are initialised."""
    from hyper_parallel.backends import load  # here, so that a broken import becomes a reply

    name, launch = pickle.loads(request)
    backend = load(name)
    backend.collectives.initialize(launch)
    loaded.append(backend)


def call(backend: Any, request: bytes) -> Any:
    """Run one body."""
    name, args, kwargs = pickle.loads(request)
    module, function = name.split(":")
    return getattr(importlib.import_module(module), function)(backend, *args, **kwargs)


def answer(work: Callable, *args: Any) -> bytes:
    """The pickled reply: what `work(*args)` returns or raises, which includes a result that has no pickle."""
    try:
        return pickle.dumps(Returned(work(*args)))
    except BaseException as error:  # whatever it is, the test must see it
        when = time.monotonic()
        story = traceback.TracebackException.from_exception(error)
        frames = [frame for frame in story.stack if frame.filename != __file__]  # this file's tell nothing
        story.stack = traceback.StackSummary.from_list(frames)
        summary = "".join(story.format_exception_only()).strip().partition("\n")[0]
        return pickle.dumps(Raised(when, summary, "".join(story.format())))


def leave() -> None:
    """End at once: frameworks may wait for peers in their exit handlers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
