"""The test bed of benchmarks/two_tier: two supernodes on one machine, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.two_tier import Links, Network, NetworkUnavailable, RankFailed, run
from tests.torch import two_tier_bodies

REPOSITORY = Path(__file__).parents[2]
FAST, SLOW = 2000, 100  # Mbit/s
BYTES = 4 * two_tier_bodies.FLOATS


@pytest.fixture(scope="module")
def network():
    """Skipped where no namespace can be made, which is a matter of the machine and of who runs the tests."""
    with contextlib.ExitStack() as stack:
        try:
            entered = stack.enter_context(Network(Links(FAST, SLOW)))
        except NetworkUnavailable as reason:
            pytest.skip(f"no two-tier network here: {reason}")
        yield entered


def namespaces(owner: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"hp2t{owner}n")]


def fastest(found, axis):
    """Seconds of the fastest all-reduce. Each lasts as long as for the rank that came first to it."""
    return min(max(times) for times in zip(*(each[axis][1] for each in found)))


def test_the_tiers_carry_right_sums_at_their_own_speeds(network):
    found = run(network, two_tier_bodies.sums_and_times, timeout_s=60)
    alone = BYTES * 8 / (SLOW * 1e6)  # seconds: of two ranks, each sends the size of the buffer
    assert fastest(found, "replicate") > 0.95 * alone > fastest(found, "shard")  # 2 % of it may go out at once
    for rank, each in enumerate(found):
        inside, across = each["shard"], each["replicate"]
        assert inside[0] == {0: 1, 1: 5}[rank // 2] and across[0] == {0: 2, 1: 4}[rank % 2]
        # Headers, acknowledgements of what is received and the barriers come on top of three buffers.
        assert 3 * BYTES < inside[2]["fast"] < 3.3 * BYTES and inside[2]["slow"] < 0.01 * BYTES
        assert 3 * BYTES < across[2]["slow"] < 3.3 * BYTES and across[2]["fast"] < 0.01 * BYTES


def test_a_rank_that_fails_ends_all(network):
    with pytest.raises(RankFailed, match="(?s)rank 1: .*rank 1 has had enough"):
        run(network, two_tier_bodies.failing, timeout_s=60)


def test_nothing_is_left_after_a_signal_and_what_a_kill_leaves_goes_with_the_next(network):
    code = (
        "import sys, time; sys.path.insert(0, 'benchmarks/two_tier')\n"
        "from network import Links, Network\n"
        "with Network(Links(2000, 200)): print('up', flush=True); time.sleep(60)"
    )
    for number in (signal.SIGKILL, signal.SIGTERM):
        with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout.readline() == "up\n"
            assert len(namespaces(other.pid)) == 5
            os.kill(other.pid, number)
            other.wait(timeout=30)
        if number == signal.SIGKILL:
            killed = other.pid
            assert namespaces(killed)
        else:
            assert not namespaces(other.pid)
    assert not namespaces(killed)


def test_a_small_run_of_the_benchmark_sends_what_the_plan_predicts(network, tmp_path):
    command = [sys.executable, "benchmarks/fsdp_two_tier.py", "--json", str(tmp_path / "run.json"), "--rounds", "1"]
    command += ["--width", "64", "--layers", "2", "--vocabulary", "512", "--tokens", "16", "--slow", "2000"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "run.json").read_text())
    # The few bytes between them: the buffer of an all-reduce is filled up to 512.
    for tier, predicted in found["predicted"].items():
        assert predicted <= found["received"][tier] <= 1.01 * predicted
    assert found["copied"]["ours"] == 0 < found["copied"]["fsdp2"] and found["peak"] <= found["bound"]


def test_it_says_why_where_it_can_not_be(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NetworkUnavailable, match="(only root|part of Linux|there is no)"):
        Network(Links(2000, 200)).__enter__()
