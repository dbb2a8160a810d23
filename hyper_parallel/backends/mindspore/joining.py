"""How the ranks of a MindSpore job find each other."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

import mindspore as ms
from mindspore.communication import get_group_size, get_rank, init
from mindspore.communication.management import _init_with_store
from mindspore.mint import distributed as dist
from mindspore.mint.distributed import distributed as dist_module

from hyper_parallel.backends.mindspore.tensors import on_cpu
from hyper_parallel.core.backend import Launch
from hyper_parallel.core.errors import CommunicationError, ConfigError
from hyper_parallel.core.launch import is_scheduler

FAILURES = (RuntimeError, ValueError, TypeError)
"""What MindSpore raises when a collective fails."""


def set_device(launch: Launch) -> None:
    """Take this rank's device of the machine; nothing to do on a CPU."""
    if not on_cpu():
        ms.set_device("Ascend", launch.local_rank)


def rest_when_idle() -> None:
    """Let MindSpore's own threads on a CPU sleep while they have nothing to do.

    After each operator they go round for some ten milliseconds, waiting for the next, and where several ranks share few
    cores they take half of them. The end of a graph, of any graph, makes them sleep at once from then on."""
    if on_cpu():
        _graph(ms.Tensor([0.0]))


@ms.jit
def _graph(x: ms.Tensor) -> ms.Tensor:
    return x + x


def join(launch: Launch) -> Any:
    """Connect to the other ranks; returns what must be kept alive for as long as the job runs.

    Raises `CommunicationError` when a rank does not come within `launch.timeout_s`, `ConfigError` for a launcher that
    is not one of MindSpore's."""
    if launch.launcher not in ("local", "msrun", "rank_table"):
        known = '"msrun", "rank_table", "local" or "single"'
        raise ConfigError(f"MindSpore knows no launcher {launch.launcher!r}: {known}")
    # How long a rank waits for a message before it takes the other one for dead. To msrun's scheduler the same variable
    # says how long a rank may be silent, whatever it waits for: after a failure nothing else ends it.
    if on_cpu() and not is_scheduler(os.environ):
        os.environ.setdefault("MS_NODE_TIMEOUT", str(max(1, round(launch.timeout_s))))
    backend = "mccl" if on_cpu() else "hccl"
    store = None
    try:
        if launch.launcher == "local":
            store = _meet(launch)
            _init_with_store(
                backend=backend,
                timeout=timedelta(seconds=launch.timeout_s),
                world_size=launch.world_size,
                rank=launch.rank,
                store=store,
            )
        else:
            init(backend)
    except (*FAILURES, OSError) as error:  # a TimeoutError is an OSError
        where = f" at {launch.master_address}:{launch.master_port}" if launch.launcher == "local" else ""
        raise CommunicationError(
            f"rank {launch.rank} of {launch.world_size} could not join the others{where}: {error}"
        ) from error
    if on_cpu():
        # isend and irecv look up this process's place under a name that mccl does not use.
        dist_module._GROUP_RANK_CACHE["hccl_world_group"] = get_rank()
        dist_module._GROUP_SIZE_CACHE["hccl_world_group"] = get_group_size()
    return store


def _meet(launch: Launch) -> Any:
    """A store that all ranks have reached. MindSpore itself would wait a minute longer and not say who is missing."""
    deadline = time.monotonic() + launch.timeout_s
    store = dist.TCPStore(
        socket.gethostbyname(launch.master_address),  # it takes no names
        launch.master_port,
        world_size=launch.world_size,
        is_master=launch.rank == 0,
        timeout=timedelta(seconds=launch.timeout_s),
        wait_for_workers=False,
    )
    store.add(f"rank {launch.rank}", 1)
    store.add("ranks", 1)
    while store.add("ranks", 0) < launch.world_size:
        if time.monotonic() > deadline:
            missing = [rank for rank in range(launch.world_size) if store.add(f"rank {rank}", 0) == 0]
            raise TimeoutError(f"ranks {missing} have not come within {launch.timeout_s:g} s")
        time.sleep(0.02)
    return store
