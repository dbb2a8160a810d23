"""Collectives that begin when others have ended: in which order, on which thread or stream, and what errors become."""

import threading
from contextlib import contextmanager

import pytest

from hyper_parallel.core.behind import Follower, Works, at_once, on_stream


class Noted:
    """A collective that notes when it has been waited for, once something has happened if need be."""

    def __init__(self, name, notes, happened=None, error=None):
        self.name, self.notes, self.happened, self.error = name, notes, happened, error

    def wait(self):
        if self.happened is not None:
            assert self.happened.wait(10)
        if self.error is not None:
            raise self.error
        self.notes.append(self.name)


@pytest.fixture
def follower():
    follower = Follower()
    yield follower
    follower.end()


def issuing(name, notes, **options):
    """What issues one collective, and notes it."""

    def start():
        notes.append(f"issue {name}")
        return [Noted(name, notes, **options)]

    return start


def test_what_is_over_when_it_was_issued_is_followed_at_once():
    notes = []
    before, begun = at_once([Noted("scatter", notes)], issuing("sum", notes))
    assert notes == ["scatter", "issue sum"]
    for each in (before, begun, begun):
        each.wait()
    assert notes == ["scatter", "issue sum", "sum"]


def test_a_thread_waits_and_begins_while_the_program_goes_on(follower):
    notes, arrived = [], threading.Event()
    before, begun = follower.behind([Noted("scatter", notes, arrived)], issuing("sum", notes))
    notes.append("the program")
    arrived.set()
    before.wait()
    begun.wait()
    begun.wait()
    assert notes == ["the program", "scatter", "issue sum", "sum"]


def test_what_is_put_behind_begins_in_the_order_of_the_program_whatever_ends_first(follower):
    notes, last, first = [], threading.Event(), threading.Event()
    one = follower.behind([Noted("scatter 1", notes, first)], issuing("sum 1", notes))
    two = follower.behind([Noted("scatter 2", notes, last)], issuing("sum 2", notes))
    last.set()
    first.set()
    for before, _ in (two, one):
        before.wait()
    follower.behind([], issuing("sum 3", notes))[1].wait()
    assert [each for each in notes if each.startswith("issue")] == ["issue sum 1", "issue sum 2", "issue sum 3"]


@pytest.mark.parametrize("when", ["while it waits", "while it begins", "later"])
def test_an_error_is_raised_once_by_what_is_waited_for_next_and_the_thread_goes_on(follower, when):
    notes, error = [], RuntimeError("a rank is gone")

    def failing():
        raise error

    works = [Noted("scatter", notes, error=error if when == "while it waits" else None)]
    start = failing if when == "while it begins" else issuing("sum", notes, error=error if when == "later" else None)
    works = follower.behind(works, start)
    raised = []
    for each in (*works, *works):
        try:
            each.wait()
        except RuntimeError as found:
            raised.append(found)
    assert raised == [error]
    follower.behind([], issuing("another", notes))[1].wait()
    assert notes[-2:] == ["issue another", "another"]


class FakeStream:
    """Notes what it is told."""

    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def wait_stream(self, other):
        self.notes.append(f"{self.name} waits for {other.name}")

    def record_event(self):
        self.notes.append(f"event of {self.name}")
        return "event"

    def wait_event(self, event):
        self.notes.append(f"{self.name} waits for the {event}")


def test_a_stream_waits_and_begins_and_the_host_waits_for_nothing():
    notes = []
    side, main = FakeStream("side", notes), FakeStream("main", notes)
    running = [main]

    @contextmanager
    def inside(stream):
        running.append(stream)
        yield
        running.pop()

    def start():
        assert running[-1] is side
        return issuing("sum", notes)()

    before, begun = on_stream(side, lambda: running[-1], inside, [Noted("scatter", notes)], start)
    assert notes == ["side waits for main", "scatter", "issue sum", "event of side"]
    before.wait()
    begun.wait()
    assert notes[4:] == ["main waits for the event", "sum"]


def test_several_works_are_waited_for_in_order_and_once():
    notes = []
    works = Works([Noted("a", notes), Noted("b", notes)])
    works.wait()
    works.wait()
    assert notes == ["a", "b"]
