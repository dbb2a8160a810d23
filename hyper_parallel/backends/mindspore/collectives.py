"""`core.backend.Collectives` for MindSpore: hccl on Ascend, mccl on a CPU.

mccl has few collectives, each for a few dtypes, and writes only into tensors that are no views. So on a CPU all data
travels as bytes, results are written through the memory of the output, sums that mccl can't make (half precision,
float64) are made here in rank order, and reduce-scatter and all-to-all are direct exchanges.

mccl's messages carry no tag: what a pair of ranks exchanges is matched by its order alone. Every collective here is
finished when it returns, except an asynchronous `receive`, which would block two ranks that receive before they send.
It is finished in `wait`, or before the next collective that shares a rank with it, whichever comes first.

A sender waits until the receiver has answered, which a thread of the receiver does. A rank that ended right after a
collective could take that answer with it, and the sender would wait until its time is up. So the barrier of all ranks
ends with a `Meeting`, after which every rank may end.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, Callable, Sequence

import mindspore as ms
from mindspore.communication import GlobalComm, get_group_size, get_rank
from mindspore.mint import distributed as dist

from hyper_parallel.backends.mindspore.exchange import (
    as_bytes,
    exchange,
    exchange_and_sum,
    gather_bytes,
    gather_pieces,
    receive_bytes,
    send_bytes,
    sum_in_place,
)
from hyper_parallel.backends.mindspore.joining import join, rest_when_idle, set_device
from hyper_parallel.backends.mindspore.tensors import (
    copy_,
    dtype_name,
    empty,
    flat,
    memory,
    on_cpu,
    scale_,
)
from hyper_parallel.core import collective_checks as checks
from hyper_parallel.core.backend import Launch, Work
from hyper_parallel.core.behind import at_once, on_stream
from hyper_parallel.core.errors import CommunicationError
from hyper_parallel.core.job import Call, Job, RankGroup
from hyper_parallel.core.meeting import Meeting

_job = Job()
_store: Any = None  # must live as long as the job: the first rank's serves the others
_meeting: Meeting | None = None  # of all ranks, where there are several on CPUs
_side: ms.runtime.Stream | None = None  # where collectives wait that begin `behind` others
_has_left = False  # MindSpore can connect to the others only once in the life of a process
# Receives that wait for their message, by source, in the order in which they were asked for.
_receives: defaultdict[int, deque[_Receive]] = defaultdict(deque)


def initialize(launch: Launch) -> None:
    """Join the job: set the device, connect to the other ranks. Called once per process, before anything else.

    Raises `CommunicationError` when a rank does not come within `launch.timeout_s`, or when this process has left
    other ranks before, `ConfigError` for a launcher that is not one of MindSpore's."""
    global _meeting, _store
    _job.require_outside()
    if _has_left:
        raise CommunicationError("this process has left its job, and MindSpore joins only once: start a new process")
    set_device(launch)
    world = RankGroup(ranks=(0,), index=0)
    if launch.launcher != "single" and (launch.launcher, launch.world_size) != ("local", 1):
        _store = join(launch)
        size = get_group_size()
        world = RankGroup(tuple(range(size)), get_rank(), GlobalComm.WORLD_COMM_GROUP if size > 1 else None)
    _job.enter(launch, world, "MindSpore")
    rest_when_idle()
    if world.size > 1 and on_cpu():
        _meeting = Meeting(launch, lambda value: gather_objects(value)[0], Call("initialize", world))
    barrier()  # the first rank to join must not end before the last one has


def shutdown() -> None:
    """Leave the job; harmless when not initialised. Where all goes well it comes after a `barrier`."""
    global _has_left, _meeting, _store
    if _meeting is not None:
        _meeting.close()
        _meeting = None
    if _job.world.handle is not None:
        dist.destroy_process_group()
        _has_left = True
    _job.leave()
    _receives.clear()
    _store = None


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
    groups are made once and reused. What is `behind` others is issued by the same thread, so one group will do for
    what is `apart`, too."""
    return _job.groups(partition, _make_group)


def gathers_uneven() -> bool:
    """See `core.backend.Collectives`. What is composed here can."""
    return on_cpu()


def scatters_uneven() -> bool:
    """See `core.backend.Collectives`. What is composed here can."""
    return on_cpu()


def folds_scale(casts: bool) -> bool:
    """See `core.backend.Collectives`."""
    return casts or on_cpu()


def all_gather(
    output: ms.Tensor,
    input: ms.Tensor,
    group: RankGroup,
    async_op: bool = False,
    pieces: Sequence[int] | None = None,
) -> Work:
    """`output` (k*n elements) receives the `input` (n elements) of every rank, in group order. Where they differ in
    size, `pieces` tells the elements of each."""
    call = Call("all_gather", group)
    checks.check_all_gather(call, output, input, pieces, gathers_uneven())
    if group.size == 1 or output.size == 0:
        return _copied(output, input)
    if on_cpu() and pieces and len(set(pieces)) > 1:
        return _finished(call, lambda: gather_pieces(output, input, pieces, group))
    if on_cpu():
        return _finished(call, lambda: gather_bytes(as_bytes(output), as_bytes(input), group))
    return _launch(call, async_op, lambda: dist.all_gather_into_tensor(flat(output), flat(input), group.handle, True))


def reduce_scatter(
    output: ms.Tensor,
    input: ms.Tensor,
    group: RankGroup,
    async_op: bool = False,
    pieces: Sequence[int] | None = None,
    scale: float = 1.0,
) -> Work:
    """`output` (n elements) receives this rank's part of the sum of all `input`s (k*n elements), times `scale`.

    Where parts differ in size, `pieces` tells the elements of each. `output` may be of another floating dtype: it is
    the one that is summed in, unless that is half precision and can be summed better, and elements travel in the
    narrower of both."""
    call = Call("reduce_scatter", group)
    checks.check_reduce_scatter(call, output, input, pieces, scatters_uneven())
    if group.size == 1 or input.size == 0:
        copy_(output, input, scale)
        return _DONE
    if on_cpu():
        counts = _counts(input, pieces, group)
        return _finished(call, lambda: exchange_and_sum(memory(output), memory(input), counts, scale, group))
    return _reduce_on_device(call, output, input, scale, async_op)


def all_reduce(tensor: ms.Tensor, group: RankGroup, async_op: bool = False) -> Work:
    """Sum over the group, in place."""
    call = Call("all_reduce", group)
    checks.check_all_reduce(call, tensor)
    if group.size == 1 or tensor.size == 0:
        return _DONE
    if on_cpu():
        return _finished(call, lambda: sum_in_place(memory(tensor), group))
    return _launch(call, async_op, lambda: dist.all_reduce(flat(tensor), group=group.handle, async_op=True))


def broadcast(tensor: ms.Tensor, source: int, group: RankGroup, async_op: bool = False) -> Work:
    """Overwrite `tensor` with that of global rank `source`."""
    call = Call("broadcast", group)
    checks.check_broadcast(call, tensor, source)
    if group.size == 1 or tensor.size == 0:
        return _DONE
    if on_cpu():
        return _finished(call, lambda: dist.broadcast(ms.from_numpy(as_bytes(tensor)), source, group.handle))
    return _launch(call, async_op, lambda: dist.broadcast(flat(tensor), source, group.handle, True))


def all_to_all(
    output: ms.Tensor,
    input: ms.Tensor,
    group: RankGroup,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
    async_op: bool = False,
) -> Work:
    """Send piece j of the flat `input` to group member j, receive piece i of the flat `output` from member i.
    Splits are element counts (zero allowed), equal when not given."""
    call = Call("all_to_all", group)
    checks.check_all_to_all(call, output, input, output_splits, input_splits)
    if group.size == 1:
        return _copied(output, input)
    splits = _counts(output, output_splits, group), _counts(input, input_splits, group)
    if on_cpu():
        return _finished(call, lambda: exchange(output, input, *splits, group))
    return _launch(
        call, async_op, lambda: dist.all_to_all_single(flat(output), flat(input), *splits, group.handle, True)
    )


def send(tensor: ms.Tensor, destination: int, group: RankGroup, async_op: bool = False) -> Work:
    """Send to global rank `destination`. Sends and receives of a pair match in order; there are no tags."""
    call = Call("send", group)
    checks.check_peer(call, tensor, "destination", destination)
    if tensor.size == 0:
        return _DONE
    if on_cpu():  # buffered: it returns before the other side receives
        _require_joined(call)
        with call:
            send_bytes(as_bytes(tensor), destination, group)
        return _DONE
    return _launch(call, async_op, lambda: dist.isend(flat(tensor), destination, group.handle))


def receive(tensor: ms.Tensor, source: int, group: RankGroup, async_op: bool = False) -> Work:
    """Receive into `tensor` from global rank `source`."""
    call = Call("receive", group)
    checks.check_peer(call, tensor, "source", source)
    if tensor.size == 0:
        return _DONE
    if on_cpu():
        _require_joined(call)
        work = _Receive(call, tensor, source, group)
        return work if async_op else _waited(work)
    return _launch(call, async_op, lambda: dist.irecv(flat(tensor), source, group.handle))


def behind(works: Sequence[Work], start: Callable[[], Sequence[Work]]) -> tuple[Work, Work]:
    """See `core.backend.Collectives`: a stream waits, and on a CPU nobody has to."""
    global _side
    if on_cpu():
        return at_once(works, start)
    _side = _side or ms.runtime.Stream()
    return on_stream(_side, ms.runtime.current_stream, ms.runtime.StreamCtx, works, start)


def barrier(group: RankGroup | None = None) -> None:
    """Return when every rank of the group (default: world) has called. After one of all ranks, any of them may end."""
    group = group or world()
    if group.size > 1 and on_cpu():
        # dist.barrier synchronises too, but logs that a CPU is not supported.
        all_reduce(ms.Tensor([0], ms.int32), group)
        if _meeting is not None and group.ranks == world().ranks:
            _meeting.hold(Call("barrier", group))
    elif group.size > 1:
        with Call("barrier", group):
            dist.barrier(group.handle)


def gather_objects(value: object, group: RankGroup | None = None) -> list[object]:
    """Every rank's picklable `value`, in group order. For small things outside the step."""
    group = group or world()
    values: list[object] = [value] * group.size
    if group.size > 1:
        _finished(Call("gather_objects", group), lambda: dist.all_gather_object(values, value, group.handle))
    return values


# How results come back


class _Work:
    """A collective that runs on the device, or one that is finished."""

    def __init__(self, call: Call | None = None, handle: Any = None, finish: Callable[[], object] | None = None):
        self._call = call
        self._handle = handle
        self._finish = finish

    def wait(self) -> None:
        """Return when operators see the result. Calling it twice is harmless."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with self._call:
                handle.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


_DONE = _Work()


class _Receive:
    """A receive on a CPU whose message is not fetched yet; those from one source are fetched in order."""

    def __init__(self, call: Call, tensor: ms.Tensor, source: int, group: RankGroup):
        self._call = call
        self._tensor = tensor
        self._source = source
        self._group = group
        self._waiting = _receives[source]
        self._waiting.append(self)

    def wait(self) -> None:
        """Fetch the message, and before it those asked for earlier. Calling it twice is harmless."""
        while self in self._waiting:
            self._waiting.popleft()._fetch()

    def _fetch(self) -> None:
        with self._call:
            receive_bytes(as_bytes(self._tensor), self._source, self._group)


def _launch(call: Call, async_op: bool, start: Callable[[], Any], finish: Callable[[], object] | None = None) -> Work:
    """Start a collective on the device."""
    _require_joined(call)
    with call:
        work = _Work(call, start(), finish)
    return work if async_op else _waited(work)


def _finished(call: Call, run: Callable[[], object]) -> Work:
    """Run a collective on the CPU, after the receives that its messages could be mistaken for."""
    _require_joined(call)
    for source in call.group.ranks if _receives else ():
        if waiting := _receives.get(source):
            waiting[-1].wait()
    with call:
        run()
    return _DONE


def _require_joined(call: Call) -> None:
    """A group that was made in a job that is over would crash MindSpore."""
    if not is_initialized():
        raise call.error("this process has not joined the others: call initialize() first")


def _waited(work: Work) -> Work:
    work.wait()
    return work


def _copied(output: ms.Tensor, input: ms.Tensor) -> Work:
    """A group of one, or nothing to move."""
    copy_(output, input)
    return _DONE


def _counts(tensor: ms.Tensor, splits: Sequence[int] | None, group: RankGroup) -> list[int]:
    """How many elements go to, or come from, each member."""
    return [tensor.size // group.size] * group.size if splits is None else list(splits)


def _reduce_on_device(call: Call, output: ms.Tensor, input: ms.Tensor, scale: float, async_op: bool) -> Work:
    """The library's reduce-scatter. The scale goes along with a cast, or else is applied to the result."""
    target, source = flat(output), flat(input)
    if source.dtype != target.dtype:
        cast = empty(source.shape, dtype_name(target))
        copy_(cast, source, scale)
        source, scale = cast, 1.0
    return _launch(
        call,
        async_op,
        lambda: dist.reduce_scatter_tensor(target, source, group=call.group.handle, async_op=True),
        finish=None if scale == 1.0 else lambda: scale_(target, scale),
    )


def _make_group(ranks: tuple[int, ...], index: int) -> str:
    """Called by the members: a call by another rank would fail, and then hang the next one."""
    handle = dist.new_group(list(ranks))
    if not handle:
        raise RuntimeError("MindSpore could not make the process group")  # it has logged the reason
    barrier(RankGroup(ranks, index, handle))  # nobody may leave while others are still joining
    return handle
