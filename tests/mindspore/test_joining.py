"""How a MindSpore process joins the others on a CPU, and what it says when they do not come."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from hyper_parallel.backends.mindspore import collectives, joining
from hyper_parallel.core.backend import Launch
from hyper_parallel.core.errors import CommunicationError, ConfigError
from tests.pool import REPOSITORY, free_port


@pytest.fixture(autouse=True)
def _no_patience_is_inherited(monkeypatch):
    """Who joins leaves its patience in the environment: neither the next test nor what that starts may find it."""
    monkeypatch.setenv("MS_NODE_TIMEOUT", "any, so that what a test sets is taken back")
    monkeypatch.delenv("MS_NODE_TIMEOUT")


def test_before_joining_a_process_is_a_world_of_one():
    assert not collectives.is_initialized()
    assert (collectives.rank(), collectives.world_size()) == (0, 1)
    assert collectives.world().ranks == (0,)
    assert collectives.groups([[0]]).size == 1
    collectives.barrier()
    assert collectives.gather_objects("me") == ["me"]
    collectives.shutdown()


def test_joining_twice_is_an_error_and_leaving_twice_is_not():
    collectives.initialize(Launch())
    try:
        with pytest.raises(CommunicationError, match="initialised already"):
            collectives.initialize(Launch())
    finally:
        collectives.shutdown()
        collectives.shutdown()
    assert not collectives.is_initialized()


def test_a_launcher_of_another_framework_is_refused():
    with pytest.raises(ConfigError, match='no launcher \'torchrun\': "msrun", "rank_table", "local" or "single"'):
        collectives.initialize(Launch(launcher="torchrun", world_size=2))
    assert not collectives.is_initialized()


def test_one_process_alone_cannot_be_told_that_it_is_one_of_two():
    with pytest.raises(ConfigError, match="rank 0 of 2 by 'single', but MindSpore says rank 0 of 1"):
        collectives.initialize(Launch(launcher="single", world_size=2))
    assert not collectives.is_initialized()


@pytest.mark.parametrize(
    "rank, reason", [(0, r"ranks \[1, 2\] have not come within 1 s"), (1, "timed out")], ids=["first", "other"]
)
def test_ranks_that_never_come_are_reported_within_the_timeout(rank, reason):
    began = time.monotonic()
    launch = Launch(rank=rank, world_size=3, launcher="local", master_port=free_port(), timeout_s=1.0)
    with pytest.raises(CommunicationError, match=rf"rank {rank} of 3 could not join .* at 127.0.0.1:\d+: .*{reason}"):
        collectives.initialize(launch)
    assert time.monotonic() - began < 60
    assert not collectives.is_initialized()


@pytest.mark.parametrize("role, patience", [("MS_WORKER", "120"), ("MS_SCHED", None)], ids=["rank", "scheduler"])
def test_a_rank_waits_as_long_as_it_is_told_and_the_scheduler_misses_ranks_sooner(role, patience, monkeypatch):
    def init(backend):
        raise RuntimeError("nobody is there")

    monkeypatch.setattr(joining, "init", init)
    monkeypatch.setenv("MS_ROLE", role)
    with pytest.raises(CommunicationError, match="rank 0 of 2 could not join the others: nobody is there"):
        joining.join(Launch(world_size=2, launcher="msrun"))
    assert os.environ.get("MS_NODE_TIMEOUT") == patience


JOIN = """
import sys, time
import mindspore as ms
from hyper_parallel.backends.mindspore import collectives
from hyper_parallel.core.backend import Launch
from hyper_parallel.core.errors import CommunicationError
rank, port = int(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
input()  # ranks import at their own pace, and join together
launch = Launch(rank, 2, rank, "localhost", port, "local", timeout_s=10.0)
collectives.initialize(launch)
"""

LEAVE_AND_COME_BACK = """
if rank == 1:
    time.sleep(1)  # the first rank has gone by then
collectives.shutdown()
try:
    collectives.initialize(launch)
except CommunicationError as error:
    print(error)
"""

BUSY_FOR_LONGER = """
if rank == 0:
    all_reduce = collectives.all_reduce
    def longer(*arguments):
        all_reduce(*arguments)
        time.sleep(1)  # as if another rank had not answered yet
    collectives.all_reduce = longer
began = time.monotonic()
collectives.barrier()
print(time.monotonic() - began)
"""

WAIT_FOR_A_MESSAGE = """
if rank == 1:
    {other}
else:
    try:
        collectives.receive(ms.mint.zeros((1,)), 1, collectives.world())
    except CommunicationError as error:
        print(error)
"""


def test_ranks_leave_one_by_one_and_do_not_come_back():
    said, peer_said = both(JOIN + LEAVE_AND_COME_BACK)
    assert said == peer_said
    assert said == "this process has left its job, and MindSpore joins only once: start a new process\n"


def test_no_rank_leaves_a_barrier_while_another_may_still_wait_for_its_answer():
    assert all(float(seconds) >= 1 for seconds in both(JOIN + BUSY_FOR_LONGER))


@pytest.mark.parametrize("other", ["time.sleep(13)", "sys.exit(0)"], ids=["is silent", "is gone"])
def test_a_message_that_never_comes_is_reported_within_the_timeout(other):
    began = time.monotonic()
    said, _ = both(JOIN + WAIT_FOR_A_MESSAGE.format(other=other))
    assert time.monotonic() - began < 110  # nothing else would end it
    assert said.startswith("receive on ranks [0, 1], at rank 0: failed: Recv failed.")


def both(script: str) -> tuple[str, str]:
    """Run a script as two ranks; returns what each wrote to its standard output."""
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, rank, port],
            cwd=REPOSITORY,
            env={**os.environ, "GLOG_v": "3"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["ready\n"] * 2
        for rank in ranks:
            rank.stdin.write("go\n")
            rank.stdin.flush()
        return tuple(rank.communicate(timeout=120)[0] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
