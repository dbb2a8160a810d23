"""The worker pool: whatever a rank does, the test ends in time and names it, and the next test works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.core import pool_bodies as bodies
from tests.pool import REPOSITORY, Pool, RankDied, RankRaised, RankStuck


@pytest.fixture(scope="module")
def trio():
    """A pool of three ranks of its own: these tests kill it."""
    pool = Pool("torch", ranks=3)
    yield pool
    pool.close()


def test_every_rank_runs_the_body_with_its_arguments(trio):
    assert trio.run(bodies.place, 5, word="x") == [(rank, 3, (5,), {"word": "x"}) for rank in range(3)]


def test_a_body_can_be_given_by_name(trio):
    assert trio.run("tests.core.pool_bodies:place") == [(rank, 3, (), {}) for rank in range(3)]


def test_the_same_processes_serve_one_test_after_another_with_one_thread_each(trio):
    first = trio.run(bodies.process)
    assert trio.run(bodies.process) == first
    assert [pid for pid, _ in first] == trio.pids()
    assert [threads for _, threads in first] == [1, 1, 1]


def test_the_rank_that_raises_is_shown_with_its_traceback(trio):
    with pytest.raises(RankRaised) as caught:
        trio.run(bodies.raise_in_a_collective, 1)
    message = str(caught.value)
    assert caught.value.rank == 1
    assert message.startswith("rank 1 of 3 (torch) was the first to raise in tests.core.pool_bodies:raise_in_a_coll")
    assert "in _deep_inside" in message
    assert "ValueError: the cause of it all" in message
    assert "pool_worker.py" not in message
    assert_works(trio)


def test_of_several_failures_the_earliest_is_shown_and_the_others_are_counted(trio):
    with pytest.raises(RankRaised) as caught:
        trio.run(bodies.raise_one_after_another, [2, 0, 1])
    assert caught.value.rank == 2
    assert "RuntimeError: failure of rank 2" in str(caught.value).splitlines()[0]
    assert not {"failure of rank 0", "failure of rank 1"} & {line[-17:] for line in str(caught.value).splitlines()}
    assert "(ranks 0, 1 failed after it)" in str(caught.value)
    assert_works(trio)


def test_a_rank_that_exits_is_named_with_its_last_words(trio):
    with pytest.raises(RankDied, match=r"(?s)rank 2 of 3 .* exit code 3 in .*:exit_in_a_collective.*last words"):
        trio.run(bodies.exit_in_a_collective, 2)
    assert_works(trio)


def test_a_rank_that_is_killed_is_named_with_the_signal(trio):
    with pytest.raises(RankDied, match=r"rank 0 of 3 \(torch\) was killed by SIGKILL in .*:be_killed"):
        trio.run(bodies.be_killed, 0)
    assert_works(trio)


def test_a_rank_that_died_between_two_tests_is_named(trio):
    assert_works(trio)
    os.kill(trio.pids()[1], signal.SIGKILL)
    with pytest.raises(RankDied, match="rank 1 of 3 .* killed by SIGKILL"):
        trio.run(bodies.place)
    assert_works(trio)


def test_a_rank_that_does_not_come_back_is_named_within_the_limit_with_the_line_it_is_in(trio):
    assert_works(trio)  # the limit does not count the start
    began = time.monotonic()
    with pytest.raises(RankStuck) as caught:
        trio.run(bodies.oversleep, 1, timeout=2)
    assert time.monotonic() - began < 60  # it would sleep for ten minutes
    message = str(caught.value)
    assert message.startswith("rank 1 of 3 (torch) did not finish tests.core.pool_bodies:oversleep within 2 s")
    assert "pool_bodies.py" in message and "in oversleep" in message
    assert_works(trio)


def test_a_result_that_cannot_be_pickled_is_an_error_of_the_body(trio):
    with pytest.raises(RankRaised, match="(?s)result_that_cannot_travel.*pickle"):
        trio.run(bodies.result_that_cannot_travel)
    assert_works(trio)


def test_a_body_that_does_not_exist_is_an_error(trio):
    with pytest.raises(RankRaised, match="AttributeError.*no_such_body"):
        trio.run("tests.core.pool_bodies:no_such_body")
    assert_works(trio)


def test_two_pools_of_the_same_size_live_side_by_side(trio):
    other = Pool("torch", ranks=3)
    try:
        assert_works(other)
        assert_works(trio)
        assert not set(other.pids()) & set(trio.pids())
    finally:
        other.close()


def test_closing_ends_the_workers():
    pool = Pool("torch", ranks=2)
    assert_works(pool)
    pids = pool.pids()
    pool.close()
    pool.close()
    assert not any(map(is_alive, pids))


def test_workers_end_with_the_process_that_started_them_even_inside_a_body():
    script = (
        "from tests.pool import Pool\n"
        "pool = Pool('torch', ranks=2)\n"
        "pool.run('tests.core.pool_bodies:place')\n"
        "print(*pool.pids(), flush=True)\n"
        "pool.run('tests.core.pool_bodies:oversleep', 1, timeout=60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_alive, pids))
        parent.kill()
    deadline = time.monotonic() + 60
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


def assert_works(pool: Pool) -> None:
    assert [rank for rank, *_ in pool.run(bodies.place)] == list(range(pool.ranks))


def is_alive(pid: int) -> bool:
    """Whether the process exists and is more than a zombie that nobody has reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
