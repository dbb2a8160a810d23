"""`core.backend.Collectives` for PyTorch: gloo on a CPU, the device's own library (nccl, hccl) elsewhere.

What the libraries lack is made up for here. Dtypes that they do not know travel as bytes and are summed in wider ones.
The reduce-scatter of gloo is an all-reduce underneath and writes the result only inside `wait`, so on a CPU the ranks
exchange their pieces directly and sum them in rank order. It sums half precision in half precision, so there sums go
through float32. Its all-gather takes equal pieces only, and two ranks get half of what their link carries both ways.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.backends.torch.exchange import (
    HALF,
    exchange_and_sum,
    flat_memory,
    gather_pieces,
    movable,
    send_pieces,
    swap_and_sum,
)
from hyper_parallel.backends.torch.joining import join, set_device
from hyper_parallel.backends.torch.tensors import copy_, device, wide
from hyper_parallel.core import collective_checks as checks
from hyper_parallel.core.backend import Launch, Work
from hyper_parallel.core.behind import Follower, on_stream
from hyper_parallel.core.job import Call, Job, RankGroup

# The newer name first: torch 2.13 warns about the older one.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_job = Job()
_joined_here = False  # or a process group of the program is used as it is
_follower: Follower | None = None  # begins what is `behind` on a CPU
_side: torch.Stream | None = None  # elsewhere


def initialize(launch: Launch) -> None:
    """Join the job: set the device, connect to the other ranks. Called once per process, before anything else.

    A process group that the program has made itself is used as it is. Raises `CommunicationError` when a rank does
    not come within `launch.timeout_s`, `ConfigError` for a launcher that is not one of PyTorch's."""
    global _joined_here
    _job.require_outside()
    set_device(launch)
    _joined_here = launch.launcher != "single" and not dist.is_initialized()
    if _joined_here:
        join(launch)
    world = RankGroup(ranks=(0,), index=0)
    if dist.is_initialized():
        world = RankGroup(tuple(range(dist.get_world_size())), dist.get_rank(), dist.group.WORLD)
    _job.enter(launch, world, "torch.distributed")


def shutdown() -> None:
    """Leave the job; harmless when not initialised."""
    global _follower
    if not is_initialized():
        return
    if _follower is not None:
        _follower.end()
        _follower = None
    made = _job.leave()
    if _joined_here:
        dist.destroy_process_group()
    else:
        for group in made:
            dist.destroy_process_group(group.handle)


def is_initialized() -> bool:
    """Tell whether `initialize` has run."""
    return _job.launch is not None


def rank() -> int:
    """Global rank of this process; 0 before `initialize`."""
    return _job.rank


def world_size() -> int:
    """Number of ranks; 1 before `initialize`."""
    return _job.world.size


def world() -> RankGroup:
    """The group of all ranks."""
    return _job.world


def groups(partition: Sequence[Sequence[int]], apart: bool = False) -> RankGroup | None:
    """The group of `partition` (disjoint, ascending lists of global ranks) that holds this rank, or None.

    Called by the ranks of each group in the same order; ranks that the partition leaves out need not call. Process
    groups are made once and reused. With `apart` it is one for collectives that begin `behind` others; streams keep
    the order of the host, so only on a CPU is it another one."""
    apart = apart and device().type == "cpu"
    return _job.groups(partition, partial(_make_group, apart), apart)


def gathers_uneven() -> bool:
    """See `core.backend.Collectives`. What is composed here can."""
    return device().type == "cpu"


def scatters_uneven() -> bool:
    """See `core.backend.Collectives`. What is composed here can."""
    return device().type == "cpu"


def folds_scale(casts: bool) -> bool:
    """See `core.backend.Collectives`. NCCL multiplies what it reads."""
    return casts or device().type == "cpu" or dist.get_backend() == "nccl"


def all_gather(
    output: torch.Tensor,
    input: torch.Tensor,
    group: RankGroup,
    async_op: bool = False,
    pieces: Sequence[int] | None = None,
) -> _Work:
    """`output` (k*n elements) receives the `input` (n elements) of every rank, in group order. Where they differ in
    size, `pieces` tells the elements of each."""
    call = Call("all_gather", group)
    checks.check_all_gather(call, output, input, pieces, gathers_uneven())
    target, source = movable(output), movable(input)
    if _stays_here(group, target):
        return _copied(target, source)
    if target.device.type == "cpu" and (async_op or (pieces and len(set(pieces)) > 1)):
        counts = [target.numel() // output.numel() * count for count in pieces or [input.numel()] * group.size]
        return _launch(call, async_op, lambda: gather_pieces(target, source, counts, group))
    return _launch(call, async_op, lambda: [_all_gather_single(target, source, group=group.handle, async_op=async_op)])


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    group: RankGroup,
    async_op: bool = False,
    pieces: Sequence[int] | None = None,
    scale: float = 1.0,
) -> _Work:
    """`output` (n elements) receives this rank's part of the sum of all `input`s (k*n elements), times `scale`.

    Where parts differ in size, `pieces` tells the elements of each. `output` may be of another floating dtype: it is
    the one that is summed in, unless that is half precision and can be summed better, and elements travel in the
    narrower of both."""
    call = Call("reduce_scatter", group)
    checks.check_reduce_scatter(call, output, input, pieces, scatters_uneven())
    target, source = _summable(output), _summable(input)
    if group.size == 1 or source.numel() == 0:
        copy_(target, source, scale)
        return _DONE
    if source.device.type == "cpu":
        counts = [source.numel() // input.numel() * count for count in pieces] if pieces else None
        return _launch(call, async_op, *exchange_and_sum(target, source, counts, scale, group, async_op))
    return _reduce_on_device(call, target, source, scale, async_op)


def all_reduce(tensor: torch.Tensor, group: RankGroup, async_op: bool = False) -> _Work:
    """Sum over the group, in place."""
    call = Call("all_reduce", group)
    checks.check_all_reduce(call, tensor)
    target = _summable(tensor)
    if _stays_here(group, target):
        return _DONE
    precision = _summed_in(target)
    if group.size == 2 and target.device.type == "cpu" and (async_op or precision != target.dtype):
        return _launch(call, async_op, *swap_and_sum(target, group))  # as many bytes as gloo would send
    if precision != target.dtype:
        total = target.to(precision)
        return _launch(
            call,
            async_op,
            lambda: [dist.all_reduce(total, group=group.handle, async_op=async_op)],
            finish=lambda: target.copy_(total),
        )
    return _launch(call, async_op, lambda: [dist.all_reduce(target, group=group.handle, async_op=async_op)])


def broadcast(tensor: torch.Tensor, source: int, group: RankGroup, async_op: bool = False) -> _Work:
    """Overwrite `tensor` with that of global rank `source`."""
    call = Call("broadcast", group)
    checks.check_broadcast(call, tensor, source)
    target = movable(tensor)
    if _stays_here(group, target):
        return _DONE
    return _launch(call, async_op, lambda: [dist.broadcast(target, source, group=group.handle, async_op=async_op)])


def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    group: RankGroup,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    async_op: bool = False,
) -> _Work:
    """Send piece j of the flat `input` to group member j, receive piece i of the flat `output` from member i.
    Splits are element counts (zero allowed), equal when not given."""
    call = Call("all_to_all", group)
    checks.check_all_to_all(call, output, input, output_splits, input_splits)
    if group.size == 1:
        return _copied(movable(output), movable(input))
    return _launch(
        call, async_op, lambda: send_pieces(output, input, output_splits, input_splits, group, async_op=async_op)
    )


def send(tensor: torch.Tensor, destination: int, group: RankGroup, async_op: bool = False) -> _Work:
    """Send to global rank `destination`. Sends and receives of a pair match in order; there are no tags."""
    call = Call("send", group)
    checks.check_peer(call, tensor, "destination", destination)
    source = movable(tensor)
    return _launch(call, async_op, lambda: [dist.isend(source, destination, group=group.handle)])


def receive(tensor: torch.Tensor, source: int, group: RankGroup, async_op: bool = False) -> _Work:
    """Receive into `tensor` from global rank `source`."""
    call = Call("receive", group)
    checks.check_peer(call, tensor, "source", source)
    target = movable(tensor)
    return _launch(call, async_op, lambda: [dist.irecv(target, source, group=group.handle)])


def behind(works: Sequence[Work], start: Callable[[], Sequence[Work]]) -> tuple[Work, Work]:
    """See `core.backend.Collectives`: a thread waits on a CPU, a stream elsewhere."""
    global _follower, _side
    if device().type == "cpu":
        _follower = _follower or Follower()
        return _follower.behind(works, start)
    streams = torch.get_device_module(device())
    _side = _side or streams.Stream()
    return on_stream(_side, streams.current_stream, streams.stream, works, start)


def barrier(group: RankGroup | None = None) -> None:
    """Return when every rank of the group (default: world) has called."""
    group = group or world()
    if group.size > 1:
        with Call("barrier", group):
            dist.barrier(group=group.handle)


def gather_objects(value: object, group: RankGroup | None = None) -> list[object]:
    """Every rank's picklable `value`, in group order. For small things outside the step."""
    group = group or world()
    values: list[object] = [value] * group.size
    if group.size > 1:
        with Call("gather_objects", group):
            dist.all_gather_object(values, value, group=group.handle)
    return values


class _Work:
    """A `core.backend.Work`: the framework's handles (None where it has waited), and what is left to do after them."""

    __slots__ = ("_call", "_handles", "_finish")

    def __init__(self, call: Call | None, handles: Sequence[dist.Work], finish: Callable[[], object] | None = None):
        self._call = call
        self._handles = handles
        self._finish = finish

    def wait(self) -> None:
        """Return when the output may be read and the input may be changed. Calling it twice is harmless."""
        handles, self._handles = self._handles, ()
        if handles:
            with self._call:
                for handle in handles:
                    if handle is not None:
                        handle.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


_DONE = _Work(None, ())


def _launch(
    call: Call,
    async_op: bool,
    start: Callable[[], list[dist.Work | None]],
    finish: Callable[[], object] | None = None,
) -> _Work:
    with call:
        handles = start()
        if not async_op:
            for handle in handles:
                if handle is not None:
                    handle.wait()
    if async_op:
        return _Work(call, handles, finish)
    if finish is not None:
        finish()
    return _DONE


def _reduce_on_device(call: Call, target: torch.Tensor, source: torch.Tensor, scale: float, async_op: bool) -> _Work:
    """The library's reduce-scatter. The scale goes along with a cast, or the library takes it, or the result does."""
    group, precision = call.group, _summed_in(target)
    op = dist.ReduceOp.SUM
    if source.dtype != precision:
        cast = torch.empty_like(source, dtype=precision)
        copy_(cast, source, scale)
        source, scale = cast, 1.0
    elif scale != 1.0 and dist.get_backend(group.handle) == "nccl":
        op, scale = dist.ReduceOp.PREMUL_SUM(scale), 1.0
    total = target if target.dtype == precision else torch.empty_like(target, dtype=precision)
    return _launch(
        call,
        async_op,
        lambda: [_reduce_scatter_single(total, source, op=op, group=group.handle, async_op=async_op)],
        finish=None if total is target and scale == 1.0 else lambda: copy_(target, total, scale),
    )


def _stays_here(group: RankGroup, target: torch.Tensor) -> bool:
    """Nothing travels: the rank is alone, or there are no elements."""
    return group.size == 1 or target.numel() == 0


def _copied(target: torch.Tensor, source: torch.Tensor) -> _Work:
    """The whole collective where nothing travels."""
    target.copy_(source)
    return _DONE


def _summable(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as `flat_memory` gives them, complex numbers as their parts, which are summed alike."""
    flat = flat_memory(tensor)
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _summed_in(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which elements are summed; accelerators sum half precision themselves."""
    dtype = tensor.dtype
    if dtype is torch.float32 or (dtype in HALF and tensor.device.type != "cpu"):
        return dtype
    return wide(dtype)


def _make_group(apart: bool, ranks: tuple[int, ...], index: int) -> dist.ProcessGroup:
    """What `dist.new_group` does for its members, under a name that depends on the arguments alone.

    `new_group` puts the number of groups that a process knows into the name, also with `use_local_synchronization`:
    ranks that are in different numbers of groups would wait for each other in different places."""
    everyone = dist.group.WORLD
    # A group bound to a device would be split off the world's communicator, in which every rank must take part.
    bound, everyone.bound_device_id = everyone.bound_device_id, None
    try:
        made, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            index,
            list(ranks),
            dist.get_backend(),
            distributed_c10d._get_default_store(),
            f"hyper_parallel/{_job.number}/{'-'.join(map(str, ranks))}{'/apart' * apart}",
            timeout=timedelta(seconds=_job.launch.timeout_s),
        )
    finally:
        everyone.bound_device_id = bound
    distributed_c10d._world.pg_group_ranks[made] = {member: place for place, member in enumerate(ranks)}
    return made
