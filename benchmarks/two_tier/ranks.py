"""Ranks of PyTorch with gloo on such a network, as processes forked from one that has loaded what they need."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, Callable

import torch
import torch.distributed as dist

from .network import INTERFACE, Network, sent_bytes

_SIGNAL_OF_PARENT = 1  # PR_SET_PDEATHSIG
_REAL_TIME_PRIORITY = 5


class RankFailed(Exception):
    """A rank raised, ended, or did not end in time."""


@dataclass(frozen=True)
class Place:
    """What a body is told of its rank."""

    rank: int
    network: Network

    @property
    def supernodes(self) -> dict[int, str]:
        """The supernode of every rank."""
        return {rank: str(self.network.supernode(rank)) for rank in range(self.network.size)}

    def sent_bytes(self) -> dict[str, int]:
        """What this rank has sent on each tier so far, headers included."""
        return sent_bytes()


def run(
    network: Network, body: Callable[..., Any], *args: Any, timeout_s: float = 120.0, real_time: bool = False
) -> list[Any]:
    """What `body(place, *args)` returns on each rank, with `torch.distributed` initialised there.

    `real_time` lets ranks go before all other programs of the machine. Only for bodies that hardly compute.

    Raises:
        RankFailed: a rank failed, or all had not ended in `timeout_s` seconds; all are ended then.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks, pipes = [], {}
        try:
            for rank in range(network.size):
                ours, theirs = context.Pipe(duplex=False)
                pipes[ours] = rank
                arguments = (
                    Place(rank, network),
                    os.path.join(folder, "store"),
                    theirs,
                    timeout_s,
                    real_time,
                    body,
                    args,
                )
                ranks.append(context.Process(target=_rank_main, args=arguments, daemon=True))
                ranks[-1].start()
                theirs.close()
            return _collect(pipes, timeout_s)
        finally:
            for each in ranks:
                each.kill()
                each.join()


def _collect(pipes: dict[Connection, int], timeout_s: float) -> list[Any]:
    end, results = time.monotonic() + timeout_s, {}
    while len(results) < len(pipes):
        ready = wait([each for each, rank in pipes.items() if rank not in results], end - time.monotonic())
        if not ready:
            late = sorted(set(pipes.values()) - set(results))
            raise RankFailed(f"the ranks {late} had not ended after {timeout_s:g} s")
        for pipe in ready:
            rank = pipes[pipe]
            try:
                results[rank], failure = pipe.recv()
            except EOFError:
                failure = "it ended without a word"
            if failure is not None:
                raise RankFailed(f"rank {rank}: {failure}")
    return [results[rank] for rank in range(len(results))]


def _rank_main(
    place: Place, store: str, pipe: Connection, timeout_s: float, real_time: bool, body: Callable[..., Any], args: tuple
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENT, signal.SIGKILL)
    try:
        place.network.enter(place.rank)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        torch.set_num_threads(1)
        if real_time:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_REAL_TIME_PRIORITY))
        size, timeout = place.network.size, timedelta(seconds=timeout_s)
        # Ranks meet at a file, so that nothing but what a body sends is on the links.
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=place.rank, world_size=size, timeout=timeout
        )
        result = body(place, *args)
        dist.barrier()
        pipe.send((result, None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
        raise
