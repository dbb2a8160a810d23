"""How the ranks of a PyTorch job find each other."""

from __future__ import annotations

import atexit
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from hyper_parallel.backends.torch.tensors import device
from hyper_parallel.core.backend import Launch
from hyper_parallel.core.errors import CommunicationError, ConfigError


def set_device(launch: Launch) -> None:
    """Take this rank's device of the machine; nothing to do on a CPU.

    Raises `ConfigError` when the machine has fewer devices than ranks."""
    kind = device().type
    if kind == "cpu":
        return
    count = torch.accelerator.device_count()
    if launch.local_rank >= count:
        raise ConfigError(
            f"rank {launch.rank} is number {launch.local_rank} on its machine, which shows {count} {kind} devices: "
            f"start at most {count} ranks there"
        )
    torch.accelerator.set_device_index(launch.local_rank)


def join(launch: Launch) -> None:
    """Connect to the other ranks.

    Raises `CommunicationError` when a rank does not come within `launch.timeout_s`, `ConfigError` for a launcher that
    is not one of PyTorch's."""
    timeout = timedelta(seconds=launch.timeout_s)
    where = f"{launch.master_address}:{launch.master_port}"
    if launch.launcher == "torchrun":
        place = {"init_method": "env://"}
        where = "the address in MASTER_ADDR and MASTER_PORT"
    elif launch.launcher == "local":
        place = {"init_method": f"tcp://{where}", "rank": launch.rank, "world_size": launch.world_size}
    else:
        raise ConfigError(f'PyTorch knows no launcher {launch.launcher!r}: "torchrun", "local" or "single"')
    try:
        dist.init_process_group(dist.get_default_backend_for_device(device()), timeout=timeout, **place)
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(
            f"rank {launch.rank} of {launch.world_size} could not join the others at {where} "
            f"within {launch.timeout_s:g} s: {error}"
        ) from error
    atexit.register(_let_threads_finish)


def _let_threads_finish() -> None:
    """Give gloo's threads the interpreter once more before it goes down.

    A thread of gloo drops the tensors of a collective a moment after the collective is done, and needs the interpreter
    for it. If it asks while Python takes itself down, the process is aborted although all went well."""
    if device().type == "cpu":
        time.sleep(0.1)
