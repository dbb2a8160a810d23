"""All ranks of a mesh as threads of one process, for tests and for checks without a launcher.

    world = InProcessWorld(backend, ranks=4)
    results = world.run(body)  # calls body(backend_of_the_rank) in a thread for each rank

A rank's backend differs from the given one in its collectives, and has no random generators of its own. The framework
has to allow a forward and a backward in several threads at once; PyTorch does.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import replace
from itertools import accumulate
from typing import Any, Callable, Sequence

from hyper_parallel.core import collective_checks as checks
from hyper_parallel.core.backend import Backend, Tensor, Tensors
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.execution.joined import DONE, Done, JoinedRank
from hyper_parallel.core.job import Call, RankGroup


class InProcessWorld:
    """The ranks, and where they meet. After an error it is of no more use: nobody knows who waits for whom."""

    def __init__(self, backend: Backend, ranks: int, timeout_s: float = 120.0):
        if ranks < 1:
            raise ConfigError(f"a world of {ranks} ranks: write at least 1")
        self.size = ranks
        self._timeout_s = timeout_s
        self._meetings: dict[tuple[int, ...], _Meeting] = {}
        self._wires: dict[tuple[int, int], _Wire] = defaultdict(lambda: _Wire(timeout_s))
        self._lock = threading.Lock()
        self._ended = False
        self.backends = [
            replace(
                backend,
                collectives=InProcessCollectives(self, backend.tensors, rank),
                randomness=SharedGenerators() if ranks > 1 else backend.randomness,
            )
            for rank in range(ranks)
        ]

    def run(self, body: Callable[[Backend], Any]) -> list[Any]:
        """What `body` returns for the backend of each rank, in rank order; raises the first error that a rank met."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                results[rank] = body(self.backends[rank])
            except BaseException as error:
                errors.append(error)
                self._end()

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def meeting(self, ranks: tuple[int, ...]) -> _Meeting:
        """Where the ranks of a group meet."""
        with self._lock:
            if ranks not in self._meetings:
                self._meetings[ranks] = _Meeting(len(ranks), self._timeout_s)
                if self._ended:
                    self._meetings[ranks].barrier.abort()
            return self._meetings[ranks]

    def wire(self, source: int, destination: int) -> _Wire:
        """What one rank sends to another."""
        with self._lock:
            wire = self._wires[source, destination]
            if self._ended:
                wire.cut()
            return wire

    def _end(self) -> None:
        with self._lock:
            self._ended = True
            for meeting in self._meetings.values():
                meeting.barrier.abort()
            for wire in self._wires.values():
                wire.cut()


class SharedGenerators:
    """`core.backend.Randomness` of ranks that are threads: a framework's default generators belong to the process, so
    that each rank draws what the others have left. A model that drops nothing does not ask for them."""

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(
            "ranks that are threads of one process share its random generators, so they can't draw the same where they "
            "have to: call model.eval(), set the probabilities of dropout to 0, or take processes as ranks"
        )


class _Meeting:
    """What the ranks of one group show each other."""

    def __init__(self, size: int, timeout_s: float):
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self._shown: list[Any] = [None] * size

    def show(self, index: int, value: Any) -> list[Any]:
        """Every rank's value; they stay as they are until all have called `leave`."""
        self._shown[index] = value
        self._wait()
        return list(self._shown)

    def leave(self) -> None:
        """Say that this rank has read what it needs."""
        self._wait()

    def _wait(self) -> None:
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RuntimeError("another rank has failed, or did not come in time") from error


class _Wire:
    """Messages from one rank to another; the first receive gets the first, whichever is waited for first."""

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._messages: list[Tensor | None] = []
        self._expected = 0
        self._changed = threading.Condition()
        self._is_cut = False

    def send(self, message: Tensor) -> None:
        """Leave a message, for as long as it takes."""
        with self._changed:
            self._messages.append(message)
            self._changed.notify_all()

    def expect(self) -> int:
        """The number of the next message to be received."""
        self._expected += 1
        return self._expected - 1

    def receive(self, number: int) -> Tensor:
        """A message by its number, once."""
        with self._changed:
            come = self._changed.wait_for(lambda: self._is_cut or number < len(self._messages), self._timeout_s)
            if not come or number >= len(self._messages):
                raise RuntimeError("the message has not come" + (f" for {self._timeout_s} s" if not come else ""))
            message, self._messages[number] = self._messages[number], None
            return message

    def cut(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self._is_cut = True
            self._changed.notify_all()


class _Receive:
    """A message on its way."""

    def __init__(self, take: Callable[[], None]):
        self._take: Callable[[], None] | None = take

    def wait(self) -> None:
        """Have it; harmless when done twice."""
        take, self._take = self._take, None
        if take is not None:
            take()


class InProcessCollectives(JoinedRank):
    """`core.backend.Collectives` of one rank of an `InProcessWorld`; every call is over when it returns."""

    def __init__(self, world: InProcessWorld, tensors: Tensors, rank: int):
        everyone = tuple(range(world.size))
        super().__init__(RankGroup(everyone, rank, world.meeting(everyone)), "world in this process")
        self._world = world
        self._tensors = tensors

    def groups(self, partition: Sequence[Sequence[int]], apart: bool = False) -> RankGroup | None:
        """See `core.backend.Collectives`. A thread is a rank, and issues all of its collectives: one group will do."""
        return self._job.groups(partition, lambda ranks, index: self._world.meeting(ranks))

    def all_gather(
        self,
        output: Tensor,
        input: Tensor,
        group: RankGroup,
        async_op: bool = False,
        pieces: Sequence[int] | None = None,
    ) -> Done:
        """See `core.backend.Collectives`."""
        call = Call("all_gather", group)
        checks.check_all_gather(call, output, input, pieces)
        return self._join(call, output, self._exchange(call, input))

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        group: RankGroup,
        async_op: bool = False,
        pieces: Sequence[int] | None = None,
        scale: float = 1.0,
    ) -> Done:
        """See `core.backend.Collectives`. Contributions are summed in rank order."""
        call = Call("reduce_scatter", group)
        checks.check_reduce_scatter(call, output, input, pieces)
        numel = output.numel()
        start = sum(pieces[: group.index]) if pieces else group.index * numel
        rows = [self._tensors.alias(whole, start, (numel,)) for whole in self._exchange(call, input)]
        return self._sum(call, output, rows, scale)

    def all_reduce(self, tensor: Tensor, group: RankGroup, async_op: bool = False) -> Done:
        """See `core.backend.Collectives`. Contributions are summed in rank order."""
        call = Call("all_reduce", group)
        checks.check_all_reduce(call, tensor)
        return self._sum(call, tensor, self._exchange(call, tensor))

    def broadcast(self, tensor: Tensor, source: int, group: RankGroup, async_op: bool = False) -> Done:
        """See `core.backend.Collectives`."""
        call = Call("broadcast", group)
        checks.check_broadcast(call, tensor, source)
        value = self._exchange(call, tensor)[group.ranks.index(source)]
        if group.ranks[group.index] != source:
            self._tensors.copy_(self._tensors.flat(tensor), value)
        self._leave(call)
        return DONE

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        group: RankGroup,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Done:
        """See `core.backend.Collectives`."""
        call = Call("all_to_all", group)
        checks.check_all_to_all(call, output, input, output_splits, input_splits)
        splits = list(input_splits or [input.numel() // group.size] * group.size)
        sent = self._exchange(call, (self._tensors.flat(input), splits))
        pieces = []
        for whole, counts in sent:
            start = [0, *accumulate(counts)][group.index]
            pieces.append(self._tensors.alias(whole, start, (counts[group.index],)))
        return self._join(call, output, pieces)

    def send(self, tensor: Tensor, destination: int, group: RankGroup, async_op: bool = False) -> Done:
        """See `core.backend.Collectives`."""
        checks.check_peer(Call("send", group), tensor, "destination", destination)
        letter = self._tensors.buffer(tensor, tensor.numel())
        self._tensors.copy_(letter, self._tensors.flat(tensor))
        self._world.wire(self.rank(), destination).send(letter)
        return DONE

    def receive(self, tensor: Tensor, source: int, group: RankGroup, async_op: bool = False) -> _Receive:
        """See `core.backend.Collectives`."""
        call = Call("receive", group)
        checks.check_peer(call, tensor, "source", source)
        wire = self._world.wire(source, self.rank())
        number = wire.expect()

        def take() -> None:
            with call:
                message = wire.receive(number)
            self._tensors.copy_(self._tensors.flat(tensor), message)

        work = _Receive(take)
        if not async_op:
            work.wait()
        return work

    def barrier(self, group: RankGroup | None = None) -> None:
        """See `core.backend.Collectives`."""
        self.gather_objects(None, group)

    def gather_objects(self, value: object, group: RankGroup | None = None) -> list[object]:
        """See `core.backend.Collectives`. The values are the ranks' own, not copies."""
        call = Call("gather_objects", group or self.world())
        values = self._exchange(call, value)
        self._leave(call)
        return values

    def _exchange(self, call: Call, value: Any) -> list[Any]:
        """Every rank's value, tensors flat. To be followed by one `_leave`."""
        if self._tensors.is_tensor(value):
            value = self._tensors.flat(value)
        if call.group.size == 1:
            return [value]
        with call:
            return call.group.handle.show(call.group.index, value)

    def _leave(self, call: Call) -> None:
        if call.group.size > 1:
            with call:
                call.group.handle.leave()

    def _join(self, call: Call, output: Tensor, pieces: Sequence[Tensor]) -> Done:
        flat, start = self._tensors.flat(output), 0
        for piece in pieces:
            if piece.numel():
                self._tensors.copy_(self._tensors.alias(flat, start, (piece.numel(),)), piece)
            start += piece.numel()
        self._leave(call)
        return DONE

    def _sum(self, call: Call, output: Tensor, rows: Sequence[Tensor], scale: float = 1.0) -> Done:
        numel = output.numel()
        if not numel:
            self._leave(call)
            return DONE
        tensors, total = self._tensors, rows[0]
        if len(rows) > 1:
            table = tensors.buffer(output, len(rows) * numel)
            for index, row in enumerate(rows):
                tensors.copy_(tensors.alias(table, index * numel, (numel,)), row)
            if tensors.dtype_name(table) in ("float16", "bfloat16"):  # to be rounded once, after it is scaled
                halves, table = table, tensors.empty(table.shape, "float32")
                tensors.copy_(table, halves)
            total = tensors.reduce_rows(table, len(rows), "sum")
        self._leave(call)  # the output may be what others read
        tensors.copy_(tensors.flat(output), total, scale)
        return DONE
