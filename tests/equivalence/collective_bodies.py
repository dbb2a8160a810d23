"""What the ranks do in `test_collectives.py`. Every rank can compute every rank's input, and so the expected output,
with numpy. The values are small integers, exact in every dtype and in every sum: results are compared for equality."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import numpy as np
import pytest

from hyper_parallel.core.backend import Backend, Group, Tensor
from hyper_parallel.core.errors import CommunicationError

SUMMABLE = ("float32", "float16", "bfloat16", "float64", "int32", "int64")
MOVABLE = (*SUMMABLE, "uint8", "bool")
SIZES = (0, 1, 7, 1000)  # elements per rank
MARGIN = 5  # elements before and after an embedded tensor
UNTOUCHED = 1  # what the margins hold; exact in every dtype, bool included

# All groups of a job of so many ranks that the cases run on: the world, rows, columns, uneven ones, groups of one,
# and partitions that leave ranks out.
PARTITIONS = {
    1: [[[0]]],
    2: [[[0, 1]], [[0], [1]]],
    3: [[[0, 1, 2]], [[0, 2], [1]], [[1, 2]]],
    4: [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1, 2, 3]], [[1, 3]]],
}


def values(rank: int, size: int, dtype: str) -> np.ndarray:
    """The input of `rank`: `size` small integers; bfloat16 as float32, which is how a backend takes and returns it."""
    drawn = np.random.default_rng([rank, size]).integers(-8, 9, size)
    if dtype == "bool":
        return drawn > 0
    if dtype == "uint8":
        drawn = np.abs(drawn)
    return drawn.astype("float32" if dtype == "bfloat16" else dtype)


@dataclass
class Case:
    """One call of a collective. With `embedded`, its tensors lie inside bigger buffers, at an offset."""

    backend: Backend
    group: Group
    dtype: str
    size: int
    embedded: bool
    async_op: bool

    def __post_init__(self) -> None:
        self._buffers: list[Tensor] = []

    def __str__(self) -> str:
        where = "embedded" if self.embedded else "plain"
        how = "async" if self.async_op else "sync"
        return f"{self.dtype} x {self.size}, {where}, {how}, ranks {self.group.ranks}"

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self.group.ranks[self.group.index]

    def tensor(self, array: np.ndarray) -> Tensor:
        """A tensor with these values."""
        tensors = self.backend.tensors
        if not self.embedded:
            return tensors.from_numpy(array, self.dtype)
        margin = np.full(MARGIN, UNTOUCHED, array.dtype)
        buffer = tensors.from_numpy(np.concatenate([margin, array.ravel(), margin]), self.dtype)
        self._buffers.append(buffer)
        return tensors.alias(buffer, MARGIN, array.shape)

    def blank(self, size: int) -> Tensor:
        """A tensor to be overwritten."""
        return self.tensor(np.zeros(size, "float32" if self.dtype == "bfloat16" else self.dtype))

    def expect(self, tensor: Tensor, expected: np.ndarray) -> None:
        """The tensor has these values, and what surrounds the embedded ones is untouched."""
        tensors = self.backend.tensors
        found = tensors.to_numpy(tensor)
        np.testing.assert_array_equal(found, expected.astype(found.dtype), err_msg=str(self))
        assert tensors.dtype_name(tensor) == self.dtype, str(self)
        for buffer in self._buffers:
            whole = tensors.to_numpy(buffer)
            margins = np.concatenate([whole[:MARGIN], whole[-MARGIN:]])
            np.testing.assert_array_equal(margins, UNTOUCHED, err_msg=f"{self}: margins")
        if self.embedded:  # the buffer itself shows the result, not only the alias
            holds = [tensors.to_numpy(buffer)[MARGIN:-MARGIN] for buffer in self._buffers]
            assert any(np.array_equal(part, expected.astype(part.dtype).ravel()) for part in holds), str(self)

    def expect_unchanged(self, tensor: Tensor, expected: np.ndarray) -> None:
        """An input still has its values."""
        found = self.backend.tensors.to_numpy(tensor)
        np.testing.assert_array_equal(found, expected, err_msg=f"{self}: input")


def cases(backend: Backend, dtypes: tuple[str, ...]) -> Iterator[Case]:
    """Every dtype and size on every group that this rank is in; all members see the same cases in the same order."""
    for partition in PARTITIONS[backend.collectives.world_size()]:
        group = backend.collectives.groups(partition)
        if group is None:
            continue
        for dtype in dtypes:
            for size in SIZES:
                yield Case(backend, group, dtype, size, embedded=False, async_op=False)
                yield Case(backend, group, dtype, size, embedded=True, async_op=True)


def all_gather(backend: Backend) -> None:
    for case in cases(backend, MOVABLE):
        mine = values(case.rank, case.size, case.dtype)
        source, target = case.tensor(mine), case.blank(case.size * case.group.size)
        backend.collectives.all_gather(target, source, case.group, case.async_op).wait()
        case.expect_unchanged(source, mine)
        case.expect(target, np.concatenate([values(rank, case.size, case.dtype) for rank in case.group.ranks]))


def all_gather_from_own_part_of_the_output(backend: Backend) -> None:
    for case in cases(backend, ("float32", "bfloat16")):
        target = case.blank(case.size * case.group.size)
        flat = backend.tensors.flat(target)
        source = backend.tensors.alias(flat, case.group.index * case.size, (case.size,))
        mine = values(case.rank, case.size, case.dtype)
        backend.tensors.copy_(source, backend.tensors.from_numpy(mine, case.dtype))
        backend.collectives.all_gather(target, source, case.group, case.async_op).wait()
        case.expect(target, np.concatenate([values(rank, case.size, case.dtype) for rank in case.group.ranks]))


def reduce_scatter(backend: Backend) -> None:
    for case in cases(backend, SUMMABLE):
        mine = values(case.rank, case.size * case.group.size, case.dtype)
        source, target = case.tensor(mine), case.blank(case.size)
        backend.collectives.reduce_scatter(target, source, case.group, case.async_op).wait()
        case.expect_unchanged(source, mine)
        total = sum(values(rank, case.size * case.group.size, case.dtype) for rank in case.group.ranks)
        case.expect(target, total[case.group.index * case.size :][: case.size])


def reduce_scatter_into_own_part_of_the_input(backend: Backend) -> None:
    for case in cases(backend, ("float32", "bfloat16")):
        source = backend.tensors.from_numpy(values(case.rank, case.size * case.group.size, case.dtype), case.dtype)
        target = backend.tensors.alias(source, case.group.index * case.size, (case.size,))
        backend.collectives.reduce_scatter(target, source, case.group, case.async_op).wait()
        total = sum(values(rank, case.size * case.group.size, case.dtype) for rank in case.group.ranks)
        expected = values(case.rank, case.size * case.group.size, case.dtype)
        own = slice(case.group.index * case.size, (case.group.index + 1) * case.size)
        expected[own] = total[own]
        np.testing.assert_array_equal(backend.tensors.to_numpy(source), expected, err_msg=str(case))


def all_reduce(backend: Backend) -> None:
    for case in cases(backend, SUMMABLE):
        tensor = case.tensor(values(case.rank, case.size, case.dtype))
        backend.collectives.all_reduce(tensor, case.group, case.async_op).wait()
        case.expect(tensor, sum(values(rank, case.size, case.dtype) for rank in case.group.ranks))


def broadcast(backend: Backend) -> None:
    for number, case in enumerate(cases(backend, MOVABLE)):
        source = case.group.ranks[number % case.group.size]
        tensor = case.tensor(values(case.rank, case.size, case.dtype))
        backend.collectives.broadcast(tensor, source, case.group, case.async_op).wait()
        case.expect(tensor, values(source, case.size, case.dtype))


def equal_all_to_all(backend: Backend) -> None:
    for case in cases(backend, MOVABLE):
        total = case.size * case.group.size
        source, target = case.tensor(values(case.rank, total, case.dtype)), case.blank(total)
        backend.collectives.all_to_all(target, source, case.group, async_op=case.async_op).wait()
        own = slice(case.group.index * case.size, (case.group.index + 1) * case.size)
        case.expect(target, np.concatenate([values(rank, total, case.dtype)[own] for rank in case.group.ranks]))


def uneven_all_to_all(backend: Backend) -> None:
    for case in cases(backend, MOVABLE):
        k = case.group.size
        # What member i sends to member j; every third piece is empty, and so is all that the last member sends.
        counts = [[0 if i == k - 1 or (i + j) % 3 == 0 else case.size + i + 2 * j for j in range(k)] for i in range(k)]
        inputs = [values(rank, sum(counts[i]), case.dtype) for i, rank in enumerate(case.group.ranks)]
        me = case.group.index
        received = [np.split(inputs[i], np.cumsum(counts[i])[:-1])[me] for i in range(k)]
        source, target = case.tensor(inputs[me]), case.blank(sum(map(len, received)))
        backend.collectives.all_to_all(
            target, source, case.group, [len(piece) for piece in received], counts[me], async_op=case.async_op
        ).wait()
        case.expect_unchanged(source, inputs[me])
        case.expect(target, np.concatenate(received))


def messages_in_order(backend: Backend) -> None:
    """Each member sends three messages to the next one of its group, which receives them in that order."""
    for case in cases(backend, ("float32", "bfloat16", "int64", "bool")):
        ranks, me = case.group.ranks, case.group.index
        if len(ranks) == 1:
            continue
        following, previous = ranks[(me + 1) % len(ranks)], ranks[me - 1]
        targets = [case.blank(case.size + i) for i in range(3)]
        receives = [backend.collectives.receive(target, previous, case.group, async_op=True) for target in targets]
        sources = [case.tensor(values(case.rank, case.size + i, case.dtype)) for i in range(3)]
        sends = [backend.collectives.send(source, following, case.group, async_op=True) for source in sources]
        for work in receives + sends:
            work.wait()
        for i, target in enumerate(targets):
            case.expect(target, values(previous, case.size + i, case.dtype))


def blocking_messages(backend: Backend) -> None:
    """A token goes round the world; every rank adds one."""
    comm = backend.collectives
    world, me = comm.world(), comm.rank()
    token = backend.tensors.from_numpy(np.zeros(3, "float32"))
    if me > 0:
        comm.receive(token, me - 1, world)
    backend.tensors.add_(token, backend.tensors.from_numpy(np.ones(3, "float32")))
    if me + 1 < world.size:
        comm.send(token, me + 1, world)
    np.testing.assert_array_equal(backend.tensors.to_numpy(token), np.full(3, me + 1.0))


def messages_beside_collectives(backend: Backend) -> None:
    """A message under way is not mistaken for a piece of a collective that begins later, nor the other way round."""
    comm = backend.collectives
    for case in cases(backend, ("float32",)):
        ranks, me, k = case.group.ranks, case.group.index, case.group.size
        if k == 1:
            continue
        message, total = case.blank(case.size), case.blank(case.size)
        receive = comm.receive(message, ranks[me - 1], case.group, async_op=True)
        outgoing = case.tensor(values(case.rank, case.size, "float32"))
        send = comm.send(outgoing, ranks[(me + 1) % k], case.group, async_op=True)
        inputs = [values(rank, case.size * k, "float32") for rank in ranks]
        scattered = comm.reduce_scatter(total, case.tensor(inputs[me]), case.group, async_op=True)
        for work in (scattered, send, receive):
            work.wait()
        case.expect(total, sum(inputs)[me * case.size :][: case.size])
        case.expect(message, values(ranks[me - 1], case.size, "float32"))


def many_in_flight(backend: Backend) -> None:
    """Collectives on several groups at once, waited for in the opposite order, and twice."""
    running: list[tuple[Any, Callable[[], None]]] = []
    comm = backend.collectives
    for round_number in range(3):
        for partition in PARTITIONS[comm.world_size()]:
            group = comm.groups(partition)
            if group is not None:
                running += _one_of_each(backend, group, size=11 + round_number)
    for work, check in reversed(running):
        work.wait()
        work.wait()
        check()


def _one_of_each(backend: Backend, group: Group, size: int) -> Iterator[tuple[Any, Callable[[], None]]]:
    comm, k = backend.collectives, group.size
    inputs = [values(rank, size * k, "float32") for rank in group.ranks]
    own = slice(group.index * size, (group.index + 1) * size)
    case = Case(backend, group, "float32", size, embedded=True, async_op=True)
    mine = inputs[group.index]

    def start(collective: Callable, target_size: int, expected: np.ndarray) -> tuple[Any, Callable[[], None]]:
        target = case.blank(target_size)
        return collective(target, case.tensor(mine), group, async_op=True), lambda: case.expect(target, expected)

    yield start(comm.all_gather, size * k * k, np.concatenate(inputs))
    yield start(comm.reduce_scatter, size, sum(inputs)[own])
    yield start(comm.all_to_all, size * k, np.concatenate([array[own] for array in inputs]))
    reduced, shared = case.tensor(mine), case.tensor(mine)
    yield comm.all_reduce(reduced, group, async_op=True), lambda: case.expect(reduced, sum(inputs))
    yield comm.broadcast(shared, group.ranks[-1], group, async_op=True), lambda: case.expect(shared, inputs[-1])


def uneven_pieces(backend: Backend) -> None:
    """Pieces of different sizes, some of them empty, where this device takes them; an error where it does not."""
    comm, tensors = backend.collectives, backend.tensors
    group, rank = comm.world(), comm.rank()
    for pieces in ([index % 3 for index in range(group.size)], [5, *[0] * (group.size - 1)]):
        starts = np.cumsum([0, *pieces])
        inputs = [values(index, sum(pieces), "float32") for index in group.ranks]
        mine = slice(starts[rank], starts[rank + 1])
        target = tensors.zeros((pieces[rank],), "float32")
        summed = comm.reduce_scatter, target, tensors.from_numpy(inputs[rank]), sum(inputs)[mine]
        whole = tensors.zeros((sum(pieces),), "float32")
        gathered = comm.all_gather, whole, tensors.from_numpy(inputs[0][mine]), inputs[0]
        uneven = {comm.reduce_scatter: comm.scatters_uneven(), comm.all_gather: comm.gathers_uneven()}
        for collective, output, source, expected in (summed, gathered):
            if uneven[collective] or group.size == 1:
                collective(output, source, group, True, pieces).wait()
                np.testing.assert_array_equal(tensors.to_numpy(output), expected)
            else:
                with pytest.raises(CommunicationError, match="moves equal ones only: pad them"):
                    collective(output, source, group, True, pieces)


def scaled_sums(backend: Backend) -> None:
    """The scale of a reduce-scatter is taken after the sum, and both in float32 where elements are halves."""
    comm, size = backend.collectives, 100_001
    inputs = _real_inputs(comm.world_size(), size * comm.world_size())
    for travels, output in (
        ("float32", "float32"),
        ("float16", "float16"),
        ("float16", "float32"),
        ("float32", "float16"),
    ):
        narrow = "float16" in (travels, output) and comm.world_size() > 1  # what stays at home is not cast first
        sources = [array.astype("float16" if narrow else travels) for array in inputs]
        source = backend.tensors.from_numpy(inputs[comm.rank()].astype(travels), travels)
        target = backend.tensors.zeros((size,), output)
        comm.reduce_scatter(target, source, comm.world(), scale=1 / 3)
        total = sources[0].astype("float32")
        for array in sources[1:]:
            total += array
        expected = (total * np.float32(1 / 3)).astype(output)[comm.rank() * size :][:size]
        np.testing.assert_array_equal(backend.tensors.to_numpy(target), expected, err_msg=f"{travels} -> {output}")


def sums_in_rank_order(backend: Backend) -> None:
    """Reduce-scatter of real numbers adds in rank order: the same bits in every run and on every backend."""
    comm, size = backend.collectives, 1001
    inputs = _real_inputs(comm.world_size(), size * comm.world_size())
    target = backend.tensors.zeros((size,), "float32")
    comm.reduce_scatter(target, backend.tensors.from_numpy(inputs[comm.rank()]), comm.world())
    total = inputs[0].copy()
    for array in inputs[1:]:
        total += array
    np.testing.assert_array_equal(backend.tensors.to_numpy(target), total[comm.rank() * size :][:size])


def sums_agree_on_all_ranks(backend: Backend) -> None:
    """All-reduce of real numbers gives every rank the same bits, near the exact sum."""
    comm = backend.collectives
    inputs = _real_inputs(comm.world_size(), 1001)
    tensor = backend.tensors.from_numpy(inputs[comm.rank()])
    comm.all_reduce(tensor, comm.world())
    found = backend.tensors.to_numpy(tensor)
    for other in comm.gather_objects(found):
        np.testing.assert_array_equal(other, found)
    exact = sum(array.astype("float64") for array in inputs)
    # k - 1 additions, each off by at most half a unit in the last place of a partial sum.
    bound = (len(inputs) - 1) * np.finfo("float32").eps * sum(np.abs(array) for array in inputs)
    assert np.all(np.abs(found - exact) <= bound)


def _real_inputs(ranks: int, size: int) -> list[np.ndarray]:
    return [np.random.default_rng(rank).standard_normal(size).astype("float32") for rank in range(ranks)]


def half_precision_sums(backend: Backend) -> list[dict[str, float]]:
    """Sums of one big number and ones that only a wider accumulator gets right; returns what each collective gave."""
    comm, tensors = backend.collectives, backend.tensors
    found = []
    for dtype, big in (("bfloat16", 256.0), ("float16", 2048.0)):
        mine = np.full(comm.world_size(), big if comm.rank() == 0 else 1.0, "float32")
        reduced, scattered = tensors.from_numpy(mine, dtype), tensors.zeros((1,), dtype)
        comm.reduce_scatter(scattered, reduced, comm.world())
        comm.all_reduce(reduced, comm.world())
        results = {"all_reduce": reduced, "reduce_scatter": scattered}
        found.append({name: float(tensors.to_numpy(tensor)[0]) for name, tensor in results.items()})
    return found


def objects(backend: Backend) -> None:
    comm = backend.collectives
    assert comm.gather_objects({"rank": comm.rank()}) == [{"rank": rank} for rank in range(comm.world_size())]
    for partition in PARTITIONS[comm.world_size()]:
        group = comm.groups(partition)
        if group is not None:
            assert comm.gather_objects("x" * comm.rank(), group) == ["x" * rank for rank in group.ranks]


def barrier(backend: Backend) -> None:
    """Nobody leaves before the last one, who dawdles, has come."""
    comm = backend.collectives
    if comm.rank() == comm.world_size() - 1:
        time.sleep(0.3)
    came = time.monotonic()
    comm.barrier()
    left = time.monotonic()
    assert left >= max(comm.gather_objects(came))
    for partition in PARTITIONS[comm.world_size()]:
        group = comm.groups(partition)
        if group is not None:
            comm.barrier(group)


def groups_are_known(backend: Backend) -> None:
    """A partition gives each rank its group, the same object every time; who is in none gets None."""
    comm = backend.collectives
    assert comm.is_initialized()
    assert comm.world().ranks == tuple(range(comm.world_size()))
    assert comm.world().index == comm.rank()
    for partition in PARTITIONS[comm.world_size()]:
        group = comm.groups(partition)
        mine = [ranks for ranks in partition if comm.rank() in ranks]
        if not mine:
            assert group is None
            continue
        assert group.ranks == tuple(mine[0])
        assert group.size == len(mine[0])
        assert group.ranks[group.index] == comm.rank()
        assert comm.groups([list(ranks) for ranks in partition]) is group


def refusals(backend: Backend) -> dict[str, str]:
    """Make every wrong call, then a right one; returns the messages of the errors."""
    comm, tensors = backend.collectives, backend.tensors
    world, k = comm.world(), comm.world_size()

    def zeros(size: int, dtype: str = "float32") -> Tensor:
        return tensors.zeros((size,), dtype)

    wrong: dict[str, Callable[[], Any]] = {
        "gather of the wrong size": lambda: comm.all_gather(zeros(2 * k + 1), zeros(2), world),
        "gather into another dtype": lambda: comm.all_gather(zeros(k, "float16"), zeros(1), world),
        "scatter of the wrong size": lambda: comm.reduce_scatter(zeros(2), zeros(2 * k + 1), world),
        "sum of bools": lambda: comm.all_reduce(zeros(2, "bool"), world),
        "scattered sum of bools": lambda: comm.reduce_scatter(zeros(1, "bool"), zeros(k, "bool"), world),
        "unknown source": lambda: comm.broadcast(zeros(2), k, world),
        "too few splits": lambda: comm.all_to_all(zeros(k), zeros(k), world, [1] * k, [1] * (k - 1)),
        "splits beyond the end": lambda: comm.all_to_all(zeros(k), zeros(k), world, [1] * k, [2] * k),
        "negative split": lambda: comm.all_to_all(zeros(k), zeros(k), world, [-1] * k, [1] * k),
        "message to itself": lambda: comm.send(zeros(2), comm.rank(), world),
        "message from itself": lambda: comm.receive(zeros(2), comm.rank(), world),
        "strided tensor": lambda: comm.all_reduce(_strided(backend), world),
        "rank named twice": lambda: comm.groups([[0], [0]]),
        "rank out of the world": lambda: comm.groups([[k]]),
        "group without ranks": lambda: comm.groups([[]]),
    }
    if k > 1:
        wrong["indivisible exchange"] = lambda: comm.all_to_all(zeros(k + 1), zeros(k + 1), world)
        wrong["ranks out of order"] = lambda: comm.groups([[1, 0]])
    messages = {}
    for name, call in wrong.items():
        try:
            call()
        except CommunicationError as error:
            messages[name] = str(error)
    all_reduce(backend)
    return messages


def _strided(backend: Backend) -> Tensor:
    matrix = backend.tensors.from_numpy(np.zeros((2, 3), "float32"))
    if backend.name == "torch":
        return matrix.t()
    import mindspore

    return mindspore.mint.transpose(matrix, 0, 1)
