"""PyTorch's FSDP2 with the streams that it has on accelerators and lacks on a CPU, where everything waits.

A stream is a thread and a process group of its own. What waits for what is as on accelerators: gathers overlap what
runs, a reduce-scatter begins when the gradients are copied in, one is on its way at a time, the all-reduce of a group
follows its reduce-scatter, and all of them have to be there before the optimizer.

The reduce-scatter is gloo's, as FSDP2 calls it, or a direct exchange: gloo's sends twice the bytes between two ranks.
"""

from __future__ import annotations

import queue
import threading
from typing import Any, Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


class Streams:
    """Gives the units of `model` streams: `wait` before the optimizer reads a gradient.

    Args:
        model: the outermost unit.
        units: what FSDP2 gathers together, in the order of forward; of several modules the first.
        shard_ranks: the groups of ranks that shard together.
        replicate_group: the group over which FSDP2 will all-reduce; used by this model alone.
        direct: exchange instead of calling gloo's reduce-scatter.
    """

    def __init__(
        self,
        model: FSDPModule,
        units: Sequence[nn.Module],
        shard_ranks: Sequence[Sequence[int]],
        replicate_group: dist.ProcessGroup,
        direct: bool,
    ):
        groups = [dist.new_group(list(ranks)) for ranks in shard_ranks]
        rank = dist.get_rank()
        self._shard_group = next(group for group, ranks in zip(groups, shard_ranks) if rank in ranks)
        self._replicate_group = replicate_group
        self._reduce = _exchange if direct else _gloo
        self._scatters, self._sums = _Stream(), _Stream()
        self._last_scatter: threading.Event | None = None
        self._issued: list[threading.Event] = []
        model._set_unshard_async_op(True)
        for unit, following in zip(units, units[1:]):
            unit.set_modules_to_forward_prefetch([following])
        for unit in units:
            unit.set_custom_reduce_scatter(_Scatter(self))
        _redirect_all_reduces(replicate_group, self.all_reduce)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """The mean over the shard group, on its stream. FSDP2 keeps one input at a time."""
        if self._last_scatter is not None:
            self._last_scatter.wait()
        self._last_scatter = self._scatters.submit(lambda: self._reduce(output, input, self._shard_group))
        self._issued.append(self._last_scatter)

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        """On its stream, once the reduce-scatter before it is done."""
        before = self._last_scatter
        self._issued.append(
            self._sums.submit(lambda: dist.all_reduce(tensor, op=op, group=self._replicate_group), before)
        )

    def wait(self) -> None:
        """Return when all gradients are there."""
        for event in self._issued:
            event.wait()
        self._issued.clear()
        self._last_scatter = None


class _Stream:
    """What is submitted runs in order, beside the thread that submits it."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, function: Callable[[], object], after: threading.Event | None = None) -> threading.Event:
        """Run `function` once `after` has happened; the event happens when it has run."""
        done = threading.Event()
        self._work.put((function, after, done))
        return done

    def _run(self) -> None:
        while True:
            function, after, done = self._work.get()
            if after is not None:
                after.wait()
            function()
            done.set()


class _Scatter(ReduceScatter):
    def __init__(self, streams: Streams):
        self._streams = streams

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._streams.reduce_scatter(output_tensor, input_tensor)


def _gloo(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.reduce_scatter_single(output, input, op=dist.ReduceOp.AVG, group=group)


def _exchange(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup) -> None:
    size, own = dist.get_world_size(group), dist.get_rank(group)
    parts = input.view(size, -1)
    received = torch.empty_like(parts)
    others = [rank for rank in range(size) if rank != own]
    works = [dist.irecv(received[rank], group=group, group_src=rank) for rank in others]
    works += [dist.isend(parts[rank], group=group, group_dst=rank) for rank in others]
    for work in works:
        work.wait()
    received[own] = parts[own]
    torch.sum(received, dim=0, out=output)
    output.div_(size)


def _redirect_all_reduces(group: dist.ProcessGroup, all_reduce: Callable[[torch.Tensor, Any], None]) -> None:
    """FSDP2 has no way to ask for this: its module of collectives gets another `dist`."""
    if not isinstance(_fsdp_collectives.dist, _Redirected):
        _fsdp_collectives.dist = _Redirected()
    _fsdp_collectives.dist.ways[group] = all_reduce


class _Redirected:
    """`torch.distributed`, but for the all-reduces of some groups."""

    def __init__(self) -> None:
        self.ways: dict[dist.ProcessGroup, Callable[[torch.Tensor, Any], None]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        if group in self.ways:
            self.ways[group](tensor, op)
        else:
            dist.all_reduce(tensor, op=op, group=group)
