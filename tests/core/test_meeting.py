"""Ranks as threads that meet over their own connections."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable

import pytest

from hyper_parallel.core.backend import Launch
from hyper_parallel.core.errors import CommunicationError
from hyper_parallel.core.job import Call, RankGroup
from hyper_parallel.core.meeting import Meeting

RANKS = 3
LIMIT_S = 60  # nothing here waits so long unless it would wait forever


def on_all_ranks(body: Callable[[Meeting, int, Call], Any], timeout_s: float = LIMIT_S, share=None) -> list[Any]:
    """What `body` returns on each rank, or the message of the error that it raises."""
    told: Future = Future()

    def tell(value: Any) -> Any:
        if value is not None:
            told.set_result(value)
        return told.result(LIMIT_S)

    def rank(number: int) -> Any:
        launch = Launch(number, RANKS, number, "127.0.0.1", 9, "local", timeout_s)
        call = Call("barrier", RankGroup(tuple(range(RANKS)), number))
        try:
            meeting = Meeting(launch, share or tell, call)
        except CommunicationError as error:
            return str(error)
        try:
            return body(meeting, number, call)
        except CommunicationError as error:
            return str(error)
        finally:
            meeting.close()

    with ThreadPoolExecutor(RANKS) as threads:
        return list(threads.map(rank, range(RANKS)))


@pytest.mark.parametrize("last", range(RANKS))
def test_nobody_goes_on_before_the_last_rank_has_come(last: int) -> None:
    came = threading.Event()

    def body(meeting: Meeting, rank: int, call: Call) -> bool:
        for _ in range(3):
            meeting.hold(call)
        if rank == last:
            time.sleep(0.2)  # the others would be through by then
            came.set()
        meeting.hold(call)
        return came.is_set()

    assert on_all_ranks(body) == [True] * RANKS


def test_a_rank_that_has_left_is_named_and_nobody_waits_for_it() -> None:
    def body(meeting: Meeting, rank: int, call: Call) -> str:
        if rank != 1:
            meeting.hold(call)
        return "left"

    first, left, last = on_all_ranks(body)
    assert left == "left"
    assert first == "barrier on ranks [0, 1, 2], at rank 0: rank 1 has left"
    assert last == "barrier on ranks [0, 1, 2], at rank 2: rank 0 has left"


def test_a_rank_that_is_silent_is_named_within_the_timeout() -> None:
    over = threading.Event()

    def body(meeting: Meeting, rank: int, call: Call) -> None:
        if rank == 2:
            over.wait(LIMIT_S)
        try:
            meeting.hold(call)
        finally:
            if rank == 0:
                over.set()

    first, _, last = on_all_ranks(body, timeout_s=0.5)
    assert first == "barrier on ranks [0, 1, 2], at rank 0: rank 2 has not come within 0.5 s"
    assert last == "barrier on ranks [0, 1, 2], at rank 2: rank 0 has left", "a word too late is for no other meeting"


def test_ranks_that_never_connect_are_named_within_the_timeout() -> None:
    launch = Launch(0, RANKS, 0, "127.0.0.1", 9, "local", timeout_s=0.2)
    with pytest.raises(CommunicationError, match=r"at rank 0: .*ranks \[1, 2\] have not come within 0.2 s"):
        Meeting(launch, lambda value: value, Call("initialize", RankGroup(tuple(range(RANKS)), 0)))


def test_a_stranger_is_turned_away() -> None:
    told: Future = Future()

    def share(value: Any) -> Any:
        if value is not None:
            with socket.create_connection(value[0]) as stranger:
                stranger.sendall(bytes(20))
            told.set_result(value)
        return told.result(LIMIT_S)

    assert on_all_ranks(lambda meeting, rank, call: meeting.hold(call), share=share) == [None] * RANKS
