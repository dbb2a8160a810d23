"""What every backend checks before it launches a collective, and how it reports one that failed.

A `Call` names a collective while it is made. A backend describes its tensors as `Buffer`s and asks the function that is
called like the collective; a wrong argument then raises `CommunicationError` before anything is launched, so that the
ranks stay in step when all of them made the same mistake.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Iterator, NamedTuple, Sequence

from hyper_parallel.core.errors import CommunicationError


@dataclass(frozen=True)
class RankGroup:
    """A `core.backend.Group`. `handle` is what the framework calls it, None for a group of one."""

    ranks: tuple[int, ...]
    index: int
    handle: Any = None

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)


class Buffer(NamedTuple):
    """What must be known of a tensor: number of elements, dtype by its numpy spelling, and whether it is contiguous."""

    numel: int
    dtype: str
    contiguous: bool


@dataclass(frozen=True)
class Call:
    """One collective as this rank makes it: operation, global ranks of the group, global rank of this process."""

    operation: str
    ranks: tuple[int, ...]
    rank: int

    def error(self, what: str) -> CommunicationError:
        """The error to raise: `what`, and where it happened."""
        return CommunicationError(f"{self.operation} on ranks {list(self.ranks)}, at rank {self.rank}: {what}")

    @contextmanager
    def reporting(self, *errors: type[Exception]) -> Iterator[None]:
        """Turn the framework's `errors` into a `CommunicationError` that says which collective it was."""
        try:
            yield
        except errors as error:
            raise self.error(f"failed: {error}") from error


def check_all_gather(call: Call, output: Buffer, input: Buffer) -> None:
    """`output` holds one `input` per rank."""
    _check_buffers(call, output=output, input=input)
    _check_ratio(call, "output", output.numel, "input", input.numel)


def check_reduce_scatter(call: Call, output: Buffer, input: Buffer) -> None:
    """`input` holds one `output` per rank; the dtype has a sum."""
    _check_buffers(call, output=output, input=input)
    _check_sum(call, input)
    _check_ratio(call, "input", input.numel, "output", output.numel)


def check_all_reduce(call: Call, tensor: Buffer) -> None:
    """The dtype has a sum."""
    _check_buffers(call, tensor=tensor)
    _check_sum(call, tensor)


def check_broadcast(call: Call, tensor: Buffer, source: int) -> None:
    """`source` is a global rank of the group."""
    _check_buffers(call, tensor=tensor)
    _check_member(call, "source", source)


def check_all_to_all(
    call: Call,
    output: Buffer,
    input: Buffer,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
) -> tuple[list[int], list[int]]:
    """Returns the splits of output and input in elements, equal ones where None was given."""
    _check_buffers(call, output=output, input=input)
    return _splits(call, "output", output, output_splits), _splits(call, "input", input, input_splits)


def check_peer(call: Call, tensor: Buffer, role: str, peer: int) -> None:
    """`peer`, the "source" or "destination", is another global rank of the group."""
    _check_buffers(call, tensor=tensor)
    _check_member(call, role, peer)
    if peer == call.rank:
        raise call.error(f"{role} is this rank itself: name one of the other ranks, or copy")


def check_partition(partition: Sequence[Sequence[int]], world_size: int, rank: int) -> tuple[int, ...] | None:
    """The ranks of the group that holds `rank`. The partition is made of non-empty, ascending, disjoint lists of ranks of
    the world."""
    key = tuple(tuple(int(member) for member in group) for group in partition)
    call = Call("groups", tuple(range(world_size)), rank)
    members = list(chain.from_iterable(key))
    if not all(key):
        raise call.error(f"a group without ranks in {list(key)}: leave it out")
    if strangers := sorted({member for member in members if not 0 <= member < world_size}):
        raise call.error(f"ranks {strangers} do not exist: the world has ranks 0 to {world_size - 1}")
    if twice := sorted({member for member in members if members.count(member) > 1}):
        raise call.error(f"ranks {twice} are named twice: the groups of a partition share no rank")
    for group in key:
        if list(group) != sorted(group):
            raise call.error(f"group {list(group)} is out of order: write {sorted(group)}")
    return next((group for group in key if rank in group), None)


def _check_buffers(call: Call, **buffers: Buffer) -> None:
    for name, buffer in buffers.items():
        if not buffer.contiguous:
            raise call.error(f"{name} is not contiguous: pass a contiguous tensor or an alias of one")
    dtypes = {name: buffer.dtype for name, buffer in buffers.items()}
    if len(set(dtypes.values())) > 1:
        found = " and ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
        raise call.error(f"{found}: cast one of them, a collective moves elements as they are")


def _check_ratio(call: Call, large: str, large_numel: int, small: str, small_numel: int) -> None:
    size = len(call.ranks)
    if large_numel != size * small_numel:
        raise call.error(
            f"{large} has {large_numel} elements and {small} {small_numel}: "
            f"with {size} ranks {large} must have {size} x {small_numel} = {size * small_numel}"
        )


def _check_sum(call: Call, buffer: Buffer) -> None:
    if buffer.dtype == "bool":
        raise call.error("bool has no sum: cast to an integer dtype")


def _check_member(call: Call, role: str, rank: int) -> None:
    if rank not in call.ranks:
        raise call.error(f"{role} {rank} is not in the group: name one of its global ranks")


def _splits(call: Call, name: str, buffer: Buffer, splits: Sequence[int] | None) -> list[int]:
    size = len(call.ranks)
    if splits is None:
        if buffer.numel % size:
            raise call.error(f"{name} has {buffer.numel} elements, not divisible by {size} ranks: give {name}_splits")
        return [buffer.numel // size] * size
    splits = [int(split) for split in splits]
    if len(splits) != size or min(splits) < 0 or sum(splits) != buffer.numel:
        raise call.error(
            f"{name}_splits {splits} must be {size} counts of at least 0 that sum up to the {buffer.numel} elements "
            f"of {name}; their sum is {sum(splits)}"
        )
    return splits
