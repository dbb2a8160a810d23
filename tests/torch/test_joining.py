"""How a PyTorch process joins the others, and what it says when they do not come."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from hyper_parallel.backends.torch import collectives
from hyper_parallel.core.backend import Launch
from hyper_parallel.core.errors import CommunicationError, ConfigError
from tests.pool import REPOSITORY, free_port


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
    with pytest.raises(ConfigError, match='no launcher \'msrun\': "torchrun", "local" or "single"'):
        collectives.initialize(Launch(launcher="msrun", world_size=2))
    assert not collectives.is_initialized()


def test_one_process_alone_cannot_be_told_that_it_is_one_of_two():
    with pytest.raises(ConfigError, match="rank 0 of 2 by 'single', but torch.distributed says rank 0 of 1"):
        collectives.initialize(Launch(launcher="single", world_size=2))
    assert not collectives.is_initialized()


def test_a_rank_that_never_comes_is_reported_within_the_timeout():
    began = time.monotonic()
    launch = Launch(launcher="local", world_size=2, master_port=free_port(), timeout_s=1.0)
    with pytest.raises(CommunicationError, match=r"rank 0 of 2 could not join the others at 127.0.0.1:\d+ within 1 s"):
        collectives.initialize(launch)
    assert time.monotonic() - began < 30
    assert not collectives.is_initialized()


RUN_AS_TORCHRUN_DOES = """
import torch.distributed as dist
from hyper_parallel.backends.torch import collectives
from hyper_parallel.core.backend import Launch
if {first}: dist.init_process_group("gloo")
collectives.initialize(Launch(launcher="torchrun"))
assert dist.is_initialized()
collectives.shutdown()
print("left the group alone" if dist.is_initialized() else "left the group")
"""


@pytest.mark.parametrize("first, says", [(False, "left the group\n"), (True, "left the group alone\n")])
def test_a_group_that_the_program_made_itself_is_used_and_not_destroyed(first, says):
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    assert run(RUN_AS_TORCHRUN_DOES.format(first=first), environment).stdout == says


WAIT_FOR_A_MESSAGE = """
import sys, time, torch
from hyper_parallel.backends.torch import collectives
from hyper_parallel.core.backend import Launch
from hyper_parallel.core.errors import CommunicationError
rank = int(sys.argv[1])
collectives.initialize(Launch(rank, 2, rank, master_port=int(sys.argv[2]), launcher="local", timeout_s=2.0))
if rank == 1:
    {other}
else:
    try:
        collectives.receive(torch.zeros(1), 1, collectives.world())
    except CommunicationError as error:
        print(error)
"""


@pytest.mark.parametrize("other", ["time.sleep(6)", "sys.exit(0)"], ids=["is silent", "is gone"])
def test_a_message_that_never_comes_is_reported_within_the_timeout(other):
    script, port = WAIT_FOR_A_MESSAGE.format(other=other), str(free_port())
    peer = subprocess.Popen([sys.executable, "-c", script, "1", port], cwd=REPOSITORY)
    try:
        began = time.monotonic()
        said = run(script, {}, "0", port).stdout
        assert time.monotonic() - began < 30
        assert said.startswith("receive on ranks [0, 1], at rank 0: failed: ")
    finally:
        peer.kill()
        peer.wait()


def run(script: str, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    """Run a script in a fresh process; its standard output is what matters."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
