"""Joining ranks that a launcher has started, and watching over our own: here scripts that need no framework."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from hyper_parallel import cli
from hyper_parallel.core.backend import Launch
from hyper_parallel.core.errors import CommunicationError, ConfigError
from hyper_parallel.core.launch import is_further_rank, is_scheduler, launch_from_environment
from hyper_parallel.train.config import load_config
from hyper_parallel.train.job import Failure, Job, first
from hyper_parallel.train.launch import joined
from hyper_parallel.train.supervise import Processes, RanksFailed, Terminated, termination_as_exception
from tests.work import imported

REPOSITORY = Path(__file__).parents[2]

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "2950"}
MSRUN = {
    "MS_ROLE": "MS_WORKER",
    "MS_WORKER_NUM": "4",
    "MS_NODE_ID": "3",
    "RANK_ID": "3",
    "DEVICE_ID": "1",
    "MS_SCHED_HOST": "node0",
    "MS_SCHED_PORT": "2950",
}


def test_torchrun_tells_a_rank_its_place():
    assert launch_from_environment("torch", TORCHRUN) == Launch(3, 4, 1, "node0", 2950, "torchrun")


def test_msrun_tells_a_rank_its_place():
    assert launch_from_environment("mindspore", MSRUN) == Launch(3, 4, 1, "node0", 2950, "msrun")


def test_the_scheduler_of_msrun_joins_as_well():
    scheduler = {name: MSRUN[name] for name in ("MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT")}
    found = launch_from_environment("mindspore", {**scheduler, "MS_ROLE": "MS_SCHED", "RANK_ID": "0"})
    assert found == Launch(0, 4, 0, "node0", 2950, "msrun")


def test_a_rank_table_tells_a_rank_its_place(tmp_path: Path):
    table = tmp_path / "table.json"
    table.write_text("{}")
    variables = {"RANK_TABLE_FILE": str(table), "RANK_ID": "3", "RANK_SIZE": "4", "DEVICE_ID": "1"}
    launch = launch_from_environment("mindspore", variables)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.launcher) == (3, 4, 1, "rank_table")
    table.unlink()
    with pytest.raises(ConfigError, match="RANK_TABLE_FILE names .*table.json, which is not a file"):
        launch_from_environment("mindspore", variables)


@pytest.mark.parametrize("backend", ["torch", "mindspore"])
def test_without_a_launcher_a_process_is_alone(backend: str):
    assert launch_from_environment(backend, {}) == Launch()


@pytest.mark.parametrize("name", ["LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(name: str):
    rest = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(ConfigError, match=f"torchrun did not set {name}"):
        launch_from_environment("torch", rest)


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(ConfigError, match="torchrun set RANK to 'x', which is not a whole number"):
        launch_from_environment("torch", {**TORCHRUN, "RANK": "x"})


def test_the_launcher_of_the_other_framework_is_refused():
    with pytest.raises(ConfigError, match="torchrun has started this process, but mindspore needs msrun"):
        launch_from_environment("mindspore", {**TORCHRUN, "TORCHELASTIC_RUN_ID": "1"})
    with pytest.raises(ConfigError, match="msrun has started this process, but torch needs torchrun"):
        launch_from_environment("torch", MSRUN)


def test_one_rank_speaks_for_all():
    assert is_further_rank(TORCHRUN) and not is_further_rank({**TORCHRUN, "RANK": "0"})
    assert is_further_rank(MSRUN) and not is_further_rank({**MSRUN, "RANK_ID": "0"})
    scheduler = {**MSRUN, "MS_ROLE": "MS_SCHED", "RANK_ID": "0"}
    assert is_scheduler(scheduler) and is_further_rank(scheduler)
    assert not is_further_rank({})


@pytest.mark.parametrize("rank, waits", [("0", []), ("1", [5.0])], ids=["first", "other"])
def test_a_mistake_of_another_rank_is_told_when_the_first_has_had_time_to(rank, waits, monkeypatch, capsys):
    """What the launcher ends once the first rank has told it never comes to that."""
    waited = []
    for name, value in {**TORCHRUN, "RANK": rank}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli.time, "sleep", waited.append)
    assert cli.main(["train", "nowhere.yaml"]) == 2
    assert waited == waits
    assert capsys.readouterr().err.startswith("hyper-parallel: can't read the configuration nowhere.yaml")


def test_the_launcher_must_start_as_many_ranks_as_the_configuration_asks_for():
    config = load_config(REPOSITORY / "examples" / "demo.yaml", backend="torch")
    assert joined(config, {}) is None
    assert joined(config, TORCHRUN).rank == 3
    with pytest.raises(ConfigError, match="torchrun has started 8 ranks, but the configuration asks for 4"):
        joined(config, {**TORCHRUN, "WORLD_SIZE": "8"})


def failure(rank: int, time: float, kind: str) -> Failure:
    return Failure(rank, time, kind, "text")


def test_the_first_failure_is_the_one_that_the_others_follow_from():
    crash, later, lost = failure(1, 5.0, "crash"), failure(0, 6.0, "user"), failure(2, 1.0, "communication")
    assert first([lost, later, crash]) is crash
    killed = failure(3, 7.0, "killed")
    assert first([crash, lost, killed]) is killed, "its peers may notice before its parent does"
    assert first([lost, Failure.of_exit(3, -signal.SIGABRT)]).rank == 3


def test_a_failure_says_what_the_user_must_know():
    assert Failure.of_exception(1, ConfigError("write four")).message() == "write four"
    assert Failure.of_exception(1, CommunicationError("lost rank 2")).message() == "rank 1: lost rank 2"
    assert Failure.of_exit(2, -9).message().startswith("rank 2 was killed by signal 9 (SIGKILL")
    assert Failure.of_exit(2, 3).message() == "rank 2 left with exit status 3 and no message"
    try:
        raise ValueError("odd")
    except ValueError as error:
        message = Failure.of_exception(1, error).message()
    assert message.startswith("rank 1 failed:\nTraceback") and message.endswith("ValueError: odd")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "job").mkdir()
    return Job(tmp_path / "job")


RANK = """\
import os, signal, sys, time
from pathlib import Path
from hyper_parallel.core.errors import CommunicationError, ConfigError
from hyper_parallel.train.job import Failure, Job
job, rank = Job(Path(sys.argv[1])), int(sys.argv[2])
def fail(error, after=0.0):
    time.sleep(after)
    try:
        raise error
    except Exception as caught:
        job.report(Failure.of_exception(rank, caught))
    os._exit(1)
job.begin(rank)
"""


def watch(job: Job, *bodies: str, silent_agent: bool = False) -> None:
    """Run one script a rank and wait for all."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with Processes(job, environment) as processes:
        for rank, body in enumerate(bodies):
            processes.start(f"rank-{rank}", ["-c", RANK + body, str(job.folder), str(rank)], rank=rank)
        processes.wait()


def failed(job: Job, *bodies: str) -> Failure:
    """The failure that is shown; it must come although other ranks would go on for ten minutes."""
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        watch(job, *bodies)
    assert time.monotonic() - start < 60
    return caught.value.failure


GO_ON = "time.sleep(600)"


def test_ranks_that_end_well_end_the_wait(job: Job):
    watch(job, "pass", "time.sleep(0.3)")
    assert job.failures() == []


def test_the_first_failing_ranks_traceback_is_shown_and_the_others_end(job: Job):
    late = "while not job.failures(): time.sleep(0.01)\nfail(ValueError('late'))"
    shown = failed(job, late, GO_ON, "fail(ZeroDivisionError('early'))")
    assert shown.rank == 2 and shown.text.endswith("ZeroDivisionError: early\n")


def test_a_rank_that_lost_its_peer_waits_for_the_peers_own_account(job: Job):
    shown = failed(job, "fail(CommunicationError('lost'))", "fail(ValueError('cause'), after=2)")
    assert shown.rank == 1 and "cause" in shown.text


def test_a_users_mistake_on_every_rank_is_shown_once_without_traceback(job: Job):
    shown = failed(job, *["fail(ConfigError('too few rows'))"] * 3)
    assert shown.message() == "too few rows" and shown.exit_status == 2


def test_a_killed_rank_is_named_with_its_signal(job: Job):
    shown = failed(job, GO_ON, "os.kill(os.getpid(), signal.SIGKILL)")
    assert shown.message().startswith("rank 1 was killed by signal 9 (SIGKILL")


def test_a_rank_that_leaves_without_a_word_is_named(job: Job):
    assert failed(job, "os._exit(7)", GO_ON).message() == "rank 0 left with exit status 7 and no message"


def test_a_rank_that_ignores_the_request_to_end_is_killed(job: Job):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    assert failed(job, stubborn, "fail(ValueError('odd'), after=1)").rank == 1


def test_an_agent_that_fails_by_itself_shows_its_last_words(job: Job):
    with Processes(job, dict(os.environ)) as processes:
        processes.start("agent", ["-c", "import no_such_module"])
        with pytest.raises(RanksFailed, match="the ranks could not be started:\n(.*\n)*ModuleNotFoundError"):
            processes.wait()


def test_a_rank_below_a_silent_agent_is_missed(job: Job):
    rank = ["-c", RANK + "os._exit(0)"]
    agent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, *{rank!r}, *sys.argv[1:]])"
    with Processes(job, {**os.environ, "PYTHONPATH": str(REPOSITORY)}) as processes:
        processes.start("agent", ["-c", f"{agent}; {GO_ON}", str(job.folder), "0"], silent_agent=True)
        with pytest.raises(RanksFailed, match="rank 0 ended without a message"):
            processes.wait()


def test_a_request_to_end_is_an_exception_so_that_ranks_are_ended():
    with pytest.raises(Terminated) as caught, termination_as_exception():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert caught.value.signum == signal.SIGTERM


def test_help_imports_nothing_but_what_the_command_line_can_be_asked_for():
    own, others = imported("from hyper_parallel.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass")
    assert own == {"hyper_parallel"} | {
        f"hyper_parallel.{name}" for name in ("cli", "arguments", "core", "core.errors")
    }
    assert others == set()
