"""What the workers do in `test_primitives.py`: the small operations that transitions are made of, beside numpy."""

from __future__ import annotations

import socket
from typing import Any, Callable

import numpy as np

from hyper_parallel.core.backend import Backend, Group, Launch, Move, Tensor
from hyper_parallel.core.errors import LayoutError

FLOATS = ("float32", "float16", "bfloat16", "float64")
DTYPES = (*FLOATS, "int64", "int32", "int16", "int8", "uint8", "bool")

MOVES = {
    "contiguous": [Move((5,), 2, (1,), 7, (1,))],
    "rows into columns": [Move((3, 4), 1, (1, 3), 0, (4, 1))],
    "three dims": [Move((2, 3, 2), 3, (12, 1, 5), 1, (9, 2, 1))],
    "one element": [Move((), 4, (), 9, ())],
    "several": [Move((2,), 0, (5,), 1, (1,)), Move((3,), 10, (1,), 4, (6,)), Move((), 29, (), 0, ())],
    "one source for many": [Move((4, 2), 0, (2, 1), 3, (0, 1))],
    "nothing": [Move((0,), 0, (1,), 0, (1,)), Move((3, 0, 2), 99, (1, 1, 1), -1, (1, 1, 1))],
    "no move": [],
}
NUMEL = 30
MARGIN = 3


def numbers(dtype: str, size: int, seed: int = 0) -> np.ndarray:
    """Small integers, exact in every dtype; bfloat16 as float32, which is how a backend takes and returns it."""
    drawn = np.random.default_rng([seed, size]).integers(0, 2 if dtype == "bool" else 100, size)
    return drawn.astype("float32" if dtype == "bfloat16" else dtype)


def moved(target: np.ndarray, source: np.ndarray, moves: list[Move]) -> np.ndarray:
    """`target` after the moves, one element at a time."""
    target = target.copy()
    for move in moves:
        for index in np.ndindex(*move.sizes):
            to = move.target_start + sum(i * stride for i, stride in zip(index, move.target_strides))
            of = move.source_start + sum(i * stride for i, stride in zip(index, move.source_strides))
            target[to] = source[of]
    return target


def buffers_and_zeros(backend: Backend) -> None:
    tensors = backend.tensors
    for dtype in DTYPES:
        holder = tensors.from_numpy(np.ones(6), dtype)
        for zero in (False, True):
            made = tensors.buffer(holder, 4, zero)
            assert tuple(made.shape) == (4,) and tensors.dtype_name(made) == dtype
            assert not zero or tensors.to_numpy(made).tolist() == [0, 0, 0, 0]
        tensors.zero_(tensors.alias(holder, 1, (2, 2)))
        assert tensors.to_numpy(holder).tolist() == [1, 0, 0, 0, 0, 1]
        tensors.zero_(tensors.buffer(holder, 0))
    weight = parameter(backend, np.ones(2, "float32"))
    tensors.zero_(weight)
    assert tensors.to_numpy(weight).tolist() == [0, 0]


def moves_like_numpy(backend: Backend) -> None:
    tensors = backend.tensors
    for dtype in DTYPES:
        for name, moves in MOVES.items():
            for embedded in (False, True):
                before, source = numbers(dtype, NUMEL, seed=1), numbers(dtype, NUMEL, seed=2)
                margin = numbers(dtype, MARGIN, seed=3)
                holder = tensors.from_numpy(np.concatenate([margin, before, margin]), dtype)
                other = tensors.from_numpy(np.concatenate([margin, source, margin]), dtype)
                if embedded:
                    tensors.move_(tensors.alias(holder, MARGIN, (5, 6)), tensors.alias(other, MARGIN, (NUMEL,)), moves)
                else:
                    whole = tensors.from_numpy(before, dtype)
                    tensors.move_(whole, tensors.from_numpy(source, dtype), moves)
                    tensors.copy_(tensors.alias(holder, MARGIN, (NUMEL,)), whole)
                expected = np.concatenate([margin, moved(before, source, moves), margin])
                np.testing.assert_array_equal(tensors.to_numpy(holder), expected, err_msg=f"{dtype}, {name}")


def moves_between_single_elements(backend: Backend) -> None:
    tensors = backend.tensors
    target, source = tensors.zeros((), "float32"), tensors.from_numpy(np.float32(7))
    tensors.move_(target, source, [Move((), 0, (), 0, ())])
    assert tensors.to_numpy(target) == 7
    tensors.move_(tensors.zeros((0,), "bfloat16"), tensors.zeros((0,), "bfloat16"), [Move((0,), 0, (1,), 0, (1,))])


def moves_keep_every_bit(backend: Backend) -> None:
    """A NaN keeps its payload: elements are copied, not converted."""
    tensors = backend.tensors
    bits = np.uint32([0x7FC00001, 0xFFC12345, 0x80000000, 1])
    target = tensors.zeros((4,), "float32")
    tensors.move_(target, tensors.from_numpy(bits.view("float32")), [Move((2, 2), 0, (2, 1), 0, (2, 1))])
    assert tensors.to_numpy(target).view("uint32").tolist() == bits.tolist()


def refused_moves(backend: Backend) -> dict[str, str]:
    """Moves that would read or write outside; returns the messages. The buffers around stay as they are."""
    tensors = backend.tensors
    holder = tensors.from_numpy(np.arange(12, dtype="float32"))
    inner, other = tensors.alias(holder, 4, (4,)), tensors.zeros((4,), "float32")
    wrong = {
        "target too small": (inner, other, Move((4,), 1, (1,), 0, (1,))),
        "source too small": (other, inner, Move((2, 2), 0, (2, 1), 0, (3, 1))),
        "target before its start": (inner, other, Move((2,), -1, (1,), 0, (1,))),
        "source before its start": (other, inner, Move((), 0, (), -1, ())),
        "backwards": (other, inner, Move((3,), 2, (-1,), 0, (1,))),
        "another dtype": (inner, tensors.zeros((4,), "float64"), Move((4,), 0, (1,), 0, (1,))),
        "strided": (strided(backend, holder), other, Move((4,), 0, (1,), 0, (1,))),
    }
    messages = {name: refused(lambda: tensors.move_(to, of, [move])) for name, (to, of, move) in wrong.items()}
    assert tensors.to_numpy(holder).tolist() == list(range(12))
    return messages


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except LayoutError as error:
        return str(error)
    return "accepted"


def strided(backend: Backend, flat: Tensor) -> Tensor:
    """The transpose of a 3 by 4 matrix."""
    matrix = flat.reshape(3, 4)
    return matrix.t() if backend.name == "torch" else matrix.transpose(0, 1)


def reduces_like_numpy(backend: Backend) -> None:
    tensors = backend.tensors
    ops = {"sum": np.add, "max": np.maximum, "min": np.minimum}
    for dtype in DTYPES:
        for op, fold in ops.items():
            if (dtype, op) == ("bool", "sum"):
                continue
            for rows, length in ((1, 5), (2, 1), (3, 4), (4, 0)):
                table = numbers(dtype, rows * length).reshape(rows, length) % 30  # sums stay within int8 and bfloat16
                source = tensors.from_numpy(table.reshape(-1), dtype)
                result = tensors.reduce_rows(source, rows, op)
                expected = fold.reduce(table, axis=0)
                np.testing.assert_array_equal(tensors.to_numpy(result), expected, err_msg=f"{dtype}, {op}, {rows}")
                assert tuple(result.shape) == (length,) and tensors.dtype_name(result) == dtype
                tensors.copy_(result, tensors.zeros((length,), dtype))  # memory of its own, also for one row
                np.testing.assert_array_equal(tensors.to_numpy(source), table.reshape(-1))


def reduces_parts_of_buffers(backend: Backend) -> None:
    tensors = backend.tensors
    holder = tensors.from_numpy(np.float32([9, 1, 2, 3, 4, 9]))
    assert tensors.to_numpy(tensors.reduce_rows(tensors.alias(holder, 1, (4,)), 2, "sum")).tolist() == [4, 6]


def sums_rows_in_order(backend: Backend) -> list[float]:
    """1e8 - 1e8 + 1 is 1 only from left to right; halves are rounded once: 2048 + 1 + 1 is 2050, 256 + 1 + 1 is 258."""
    tensors = backend.tensors
    return [
        float(tensors.to_numpy(tensors.reduce_rows(tensors.from_numpy(np.float32(column), dtype), 3, "sum"))[0])
        for dtype, column in (
            ("float32", [1e8, -1e8, 1]),
            ("float32", [1, 1e8, -1e8]),
            ("float16", [2048, 1, 1]),
            ("bfloat16", [256, 1, 1]),
        )
    ]


def nan_wins(backend: Backend) -> None:
    tensors = backend.tensors
    for dtype in FLOATS:
        for op in ("max", "min"):
            for column in ([np.nan, 1.0], [1.0, np.nan]):
                result = tensors.reduce_rows(tensors.from_numpy(np.float32(column), dtype), 2, op)
                assert np.isnan(tensors.to_numpy(result)[0]), (dtype, op, column)


def shares_of_ties(backend: Backend) -> None:
    tensors = backend.tensors
    nan = np.nan
    table = np.float32([[3, 1, 2, nan, nan, 0.0], [3, 5, 1, 1.0, nan, -0.0], [3, 5, 0, 2.0, 1, 0.0]])
    highest = np.float32([3, 5, 2, nan, nan, 0.0])
    expected = [[1 / 3, 0, 1, 1, 1 / 2, 1 / 3], [1 / 3, 1 / 2, 0, 0, 1 / 2, 1 / 3], [1 / 3, 1 / 2, 0, 0, 0, 1 / 3]]
    for dtype in FLOATS:
        source, result = tensors.from_numpy(table.reshape(-1), dtype), tensors.from_numpy(highest, dtype)
        shares = tensors.tie_shares(source, 3, result)
        rounded = tensors.to_numpy(tensors.from_numpy(np.float64(expected).reshape(-1), dtype))
        np.testing.assert_array_equal(tensors.to_numpy(shares), rounded, err_msg=dtype)
        assert tensors.dtype_name(shares) == dtype
    nothing = tensors.zeros((0,), "bfloat16")
    assert tuple(tensors.tie_shares(nothing, 3, nothing).shape) == (0,)


def products_of_rows(backend: Backend) -> None:
    tensors = backend.tensors
    for dtype in [name for name in DTYPES if name != "bool"]:
        table, row = np.arange(6) % 4, np.array([2, 0, 3])
        product = tensors.multiply_rows(tensors.from_numpy(table, dtype), 2, tensors.from_numpy(row, dtype))
        assert tensors.to_numpy(product).tolist() == (table.reshape(2, 3) * row).reshape(-1).tolist(), dtype
        assert tensors.dtype_name(product) == dtype
    nothing = tensors.zeros((0,), "bfloat16")
    assert tuple(tensors.multiply_rows(nothing, 2, nothing).shape) == (0,)


def refused_rows(backend: Backend) -> dict[str, str]:
    tensors = backend.tensors

    def ones(size: int, dtype: str = "float32") -> Tensor:
        return tensors.from_numpy(np.ones(size), dtype)

    return {
        "uneven": refused(lambda: tensors.reduce_rows(ones(5), 2, "sum")),
        "no rows": refused(lambda: tensors.reduce_rows(ones(5), 0, "sum")),
        "unknown": refused(lambda: tensors.reduce_rows(ones(4), 2, "avg")),
        "sum of bools": refused(lambda: tensors.reduce_rows(ones(4, "bool"), 2, "sum")),
        "short result": refused(lambda: tensors.tie_shares(ones(4), 2, ones(1))),
        "long row": refused(lambda: tensors.multiply_rows(ones(4), 2, ones(4))),
        "row of another dtype": refused(lambda: tensors.multiply_rows(ones(4), 2, ones(2, "float16"))),
    }


def parameter(backend: Backend, array: np.ndarray) -> Any:
    """A trainable parameter of the framework."""
    value = backend.tensors.from_numpy(array)
    if backend.name == "torch":
        import torch

        return torch.nn.Parameter(value)
    import mindspore

    return mindspore.Parameter(value, name="weight")


# Groups


def total(backend: Backend, group: Group) -> float:
    """The sum over the group of 10 to the power of the rank: its decimal digits tell who took part."""
    tensor = backend.tensors.from_numpy(np.float32([10.0 ** backend.collectives.rank()]))
    backend.collectives.all_reduce(tensor, group)
    return float(backend.tensors.to_numpy(tensor)[0])


def groups_of_some(backend: Backend) -> list[float]:
    """Ranks 0 and 1 make and use a group alone, between collectives in which all take part."""
    comm = backend.collectives
    totals = [total(backend, comm.world())]
    if comm.rank() < 2:
        totals.append(total(backend, comm.groups([[0, 1]])))
    totals.append(total(backend, comm.groups([[0, 2], [1, 3]])))
    totals.append(total(backend, comm.world()))
    return totals


def overlapping_groups(backend: Backend) -> list[float]:
    """Each rank makes only its own groups, some of them before others have begun with theirs."""
    comm = backend.collectives
    mine = {
        0: ([0, 3], [0, 1, 2]),
        1: ([1, 2], [1, 2, 3], [0, 1, 2]),
        2: ([1, 2], [1, 2, 3], [0, 1, 2]),
        3: ([0, 3], [1, 2, 3]),
    }
    return [total(backend, comm.groups([ranks])) for ranks in mine[comm.rank()]]


def groups_in_a_job_of_the_program(backend: Backend) -> list[float]:
    """The program has joined by itself, bound to a device; HyperParallel comes and goes twice, and leaves it alone."""
    import torch
    import torch.distributed as dist

    comm = backend.collectives
    place = (comm.rank(), comm.world_size())
    port = comm.gather_objects(free_port())[0]
    comm.shutdown()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=place[0], world_size=place[1])
    dist.group.WORLD.bound_device_id = bound = torch.device("cuda:0")  # gloo does not look at it
    totals = []
    for _ in range(2):
        comm.initialize(Launch(*place, launcher="torchrun"))
        if comm.rank() < 2:
            totals.append(total(backend, comm.groups([[0, 1]])))
        totals.append(total(backend, comm.groups([[0], [1, 2]])))
        comm.shutdown()
    assert dist.group.WORLD.bound_device_id == bound
    numbers = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(numbers)
    return [*totals, float(numbers)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def groups_are_reused(backend: Backend) -> None:
    """One process group for one set of ranks, whichever partition names it; that of all ranks is the world's."""
    comm = backend.collectives
    assert comm.groups([[0, 1, 2, 3]]) is comm.world()
    pair = [0, 1] if comm.rank() < 2 else [2, 3]
    assert comm.groups([[0, 1], [2, 3]]) is comm.groups([pair])
    alone = comm.groups([[each] for each in range(4)])
    assert (alone.ranks, alone.index, alone.size) == ((comm.rank(),), 0, 1)
