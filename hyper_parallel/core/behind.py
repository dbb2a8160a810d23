"""Collectives that begin by themselves when others have come to an end, while whoever has asked for both goes on.

How depends on who waits for collectives. Where the device does, in the order of a stream, another stream waits and
begins (`on_stream`). Where the host does, a thread waits and begins (`Follower`). Where they are over when they have
been issued there is nothing to wait for (`at_once`).
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Any, Callable, ContextManager, Protocol, Sequence

from hyper_parallel.core.backend import Work

Start = Callable[[], Sequence[Work]]
"""Issues collectives."""


class Works:
    """Several collectives as one `Work`."""

    def __init__(self, works: Sequence[Work] = ()):
        self._works = works

    def wait(self) -> None:
        """Wait for them one by one; harmless when done twice."""
        works, self._works = self._works, ()
        for each in works:
            each.wait()


def at_once(works: Sequence[Work], start: Start) -> tuple[Work, Work]:
    """See `core.backend.Collectives.behind`: `works` are over."""
    Works(works).wait()
    return Works(), Works(start())


class Stream(Protocol):
    """What the frameworks' streams have in common."""

    def wait_stream(self, stream: Stream) -> None:
        """Go on when `stream` has done what it has been given so far."""

    def wait_event(self, event: Any) -> None:
        """Go on when the event has been reached."""

    def record_event(self) -> Any:
        """The event of having done what it has been given so far."""


def on_stream(
    side: Stream,
    current: Callable[[], Stream],
    inside: Callable[[Stream], ContextManager],
    works: Sequence[Work],
    start: Start,
) -> tuple[Work, Work]:
    """See `core.backend.Collectives.behind`: the stream `side` waits for `works`, the host for nothing.

    `current` tells which stream operators go to, `inside` lets them go to another. What `start` computes before it
    issues collectives is waited for with `works`: until then it is kept, and with it the memory that it reads."""
    side.wait_stream(current())
    with inside(side):
        Works(works).wait()
        begun = Works(start())
        event = side.record_event()
    return _Reached(event, current, start), begun


class _Reached:
    """An event of another stream, as the `Work` that it ends."""

    def __init__(self, event: Any, current: Callable[[], Stream], start: Start):
        self._event = event
        self._current = current
        self._start: Start | None = start

    def wait(self) -> None:
        """Let the current stream wait."""
        self._current().wait_event(self._event)
        self._start = None


class Follower:
    """A thread that waits for collectives and issues others, in the order in which it is asked to. Those that it issues
    need groups of their own: on any other its order and that of the program's thread would mix, on each rank anew."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hyper_parallel follower", daemon=True)
        self._thread.start()

    def behind(self, works: Sequence[Work], start: Start) -> tuple[Work, Work]:
        """See `core.backend.Collectives.behind`. What goes wrong is raised by whatever is waited for next."""
        task = _Task(works, start)
        self._tasks.put(task)
        return _Waiting(task.wait_before), _Waiting(task.wait)

    def end(self) -> None:
        """Return when all is issued that it has been asked for; it can't be asked again."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()


class _Task:
    def __init__(self, works: Sequence[Work], start: Start):
        self._works = works
        self._start: Start | None = start
        self._done, self._issued = threading.Event(), threading.Event()
        self._begun = Works()
        self._error: BaseException | None = None

    def run(self) -> None:
        """On the follower's thread. Whatever happens is told to the one that waits."""
        try:
            Works(self._works).wait()
            self._done.set()
            self._begun = Works(self._start())
        except BaseException as error:
            self._error = error
        self._works, self._start = (), None  # they hold what was sent
        self._done.set()
        self._issued.set()

    def wait_before(self) -> None:
        self._done.wait()
        self._raise()

    def wait(self) -> None:
        self._issued.wait()
        self._raise()
        self._begun.wait()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


class _Waiting:
    """A `Work` by what waits for it."""

    def __init__(self, wait: Callable[[], None]):
        self.wait = wait
