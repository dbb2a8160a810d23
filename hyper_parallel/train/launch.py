"""Join ranks that a launcher has started, or start local ones and watch over them."""

from __future__ import annotations

import glob
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Mapping

from hyper_parallel.backends import available, load
from hyper_parallel.core.backend import Launch
from hyper_parallel.core.errors import BackendUnavailable, ConfigError
from hyper_parallel.core.launch import launch_from_environment
from hyper_parallel.train.config import Config
from hyper_parallel.train.job import Failure, Job
from hyper_parallel.train.screen import screen_on
from hyper_parallel.train.supervise import Processes, RanksFailed


def joined(config: Config, environment: Mapping[str, str]) -> Launch | None:
    """The place of this process among ranks that a launcher has started; None when none has.

    Raises `ConfigError` as `launch_from_environment` does, and when the launcher has started another number of ranks
    than the configuration asks for.
    """
    launch = launch_from_environment(config.backend, environment)
    if launch.launcher == "single":
        return None
    if launch.world_size != config.ranks:
        raise ConfigError(
            f"ranks: {launch.launcher} has started {launch.world_size} ranks, but the configuration asks for "
            f"{config.ranks}; write ranks: {launch.world_size} with a mesh of as many, or start {config.ranks}"
        )
    return launch


def join_and_train(config: Config, launch: Launch, run_dir: Path | None) -> None:
    """Train as one of the ranks that a launcher has started. On an error this process says so and ends at once."""
    from hyper_parallel.train.loop import train

    os.environ.update(_environment(config))
    try:
        train(config, launch, run_dir, screen_on(sys.stdout if launch.rank == 0 else None))
    except BaseException as error:
        failure = Failure.of_exception(launch.rank, error)
        print(f"hyper-parallel: {failure.message()}", file=sys.stderr, flush=True)
        # Leaving the ordinary way could wait for peers that will never answer.
        os._exit(failure.exit_status)
    leave(launch)


def leave(launch: Launch) -> None:
    """End a rank that has done its work.

    At once, since threads of a framework may still run and abort the process while Python takes itself down. Under
    msrun the ordinary way, in which MindSpore tells its scheduler; otherwise it would count as a lost rank.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if launch.launcher != "msrun":
        os._exit(0)


def serve_as_scheduler(config: Config) -> None:
    """Be msrun's scheduler: join, hold no rank, and leave when the workers have left."""
    os.environ.update(_environment(config))
    load(config.backend).collectives.initialize(Launch(world_size=config.ranks, launcher="msrun"))


def check_backend(name: str) -> None:
    """Raise `BackendUnavailable` if it is clear, without importing it, that the framework can't be used."""
    reason = available()[name]
    if reason is not None:
        raise BackendUnavailable(reason)


def start_local(config: Config, run_dir: Path) -> None:
    """Run all ranks on this machine and return when they have finished.

    Raises `RanksFailed` with the first rank's failure when one fails; KeyboardInterrupt and `Terminated` pass
    through. Every rank has ended when this returns or raises, and ends with this process even if that is killed.
    """
    check_backend(config.backend)
    job = Job.create(config, run_dir)
    keep = False
    try:
        with Processes(job, _environment(config)) as processes:
            _start(config, processes)
            processes.wait()
    except RanksFailed as failed:
        keep = failed.failure.kind != "user"
        raise
    finally:
        if not keep:
            shutil.rmtree(job.folder, ignore_errors=True)


def _start(config: Config, processes: Processes) -> None:
    module = "hyper_parallel.train"
    if config.ranks == 1:
        processes.start("rank-0", ["-m", f"{module}.worker", str(processes.job.folder), "--rank=0"], rank=0)
    elif config.backend == "torch":
        processes.start("agent", ["-m", f"{module}.torch_agent", str(processes.job.folder), str(config.ranks)])
    elif ascend_present():
        start_msrun(config, processes)
    else:
        port = free_port()
        for rank in range(config.ranks):
            arguments = [str(processes.job.folder), f"--rank={rank}", f"--port={port}"]
            processes.start(f"rank-{rank}", ["-m", f"{module}.worker", *arguments], rank=rank)


def start_msrun(config: Config, processes: Processes) -> None:
    """Start the ranks through msrun: what Ascend needs, and possible, though slow, on a CPU."""
    options = [
        f"--worker_num={config.ranks}",
        f"--local_worker_num={config.ranks}",
        "--master_addr=127.0.0.1",
        f"--master_port={free_port()}",
        "--join=True",
        f"--log_dir={processes.job.folder / 'msrun'}",
        "--tail_worker_log=0",
    ]
    # msrun knows "python" as a command, found on the path, and takes anything else for a script.
    command = ["python", "-m", "hyper_parallel.train.worker", str(processes.job.folder)]
    arguments = ["-m", "mindspore.parallel.cluster.run", *options, *command]
    processes.start("msrun", arguments, silent_agent=True)


def ascend_present() -> bool:
    """Tell whether this machine has Ascend devices."""
    return bool(glob.glob("/dev/davinci[0-9]*"))


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(config: Config) -> dict[str, str]:
    """The ranks' environment. What the user has set stands."""
    environment = dict(os.environ)
    if config.ranks > 1:
        # Ranks that share a CPU must not each take all its cores.
        environment.setdefault("OMP_NUM_THREADS", "1")
    if config.backend == "mindspore":
        environment.setdefault("GLOG_v", "3")
    # So that "python" is this one, also for msrun.
    environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), environment.get("PATH", os.defpath)])
    return environment
