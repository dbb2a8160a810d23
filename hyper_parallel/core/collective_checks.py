"""What every backend checks before it launches a collective.

A wrong argument raises `CommunicationError` before anything is launched, so that the ranks stay in step when all of
them made the same mistake. These checks stand before every collective, so where nothing is wrong they are cheap.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Sequence

from hyper_parallel.core.backend import Tensor
from hyper_parallel.core.job import Call


def check_all_gather(
    call: Call, output: Tensor, input: Tensor, pieces: Sequence[int] | None = None, uneven: bool = True
) -> None:
    """`output` holds one `input` per rank, or pieces of these sizes, which may differ where `uneven` says so."""
    _check_pair(call, output, input)
    if pieces is not None:
        _check_pieces(call, "output", output, "input", input, pieces, uneven)
    elif output.numel() != call.group.size * input.numel():
        raise _wrong_ratio(call, "output", output, "input", input)


def check_reduce_scatter(
    call: Call, output: Tensor, input: Tensor, pieces: Sequence[int] | None = None, uneven: bool = True
) -> None:
    """`input` holds one `output` per rank, or pieces of these sizes, which may differ where `uneven` says so; the dtype
    has a sum, and that of the output is the same or as real."""
    _check_contiguous(call, "output", output)
    _check_contiguous(call, "input", input)
    if output.dtype != input.dtype and not all("float" in _name(each.dtype) for each in (output, input)):
        raise _other_dtype(call, output, input)
    _check_sum(call, input)
    if pieces is not None:
        _check_pieces(call, "input", input, "output", output, pieces, uneven)
    elif input.numel() != call.group.size * output.numel():
        raise _wrong_ratio(call, "input", input, "output", output)


def check_all_reduce(call: Call, tensor: Tensor) -> None:
    """The dtype has a sum."""
    _check_contiguous(call, "tensor", tensor)
    _check_sum(call, tensor)


def check_broadcast(call: Call, tensor: Tensor, source: int) -> None:
    """`source` is a global rank of the group."""
    _check_contiguous(call, "tensor", tensor)
    _check_member(call, "source", source)


def check_all_to_all(
    call: Call,
    output: Tensor,
    input: Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
) -> None:
    """The splits of output and input add up; where None is given, equal ones do."""
    _check_pair(call, output, input)
    _check_splits(call, "output", output, output_splits)
    _check_splits(call, "input", input, input_splits)


def check_peer(call: Call, tensor: Tensor, role: str, peer: int) -> None:
    """`peer`, the "source" or "destination", is another global rank of the group."""
    _check_contiguous(call, "tensor", tensor)
    _check_member(call, role, peer)
    if peer == call.group.ranks[call.group.index]:
        raise call.error(f"{role} is this rank itself: name one of the other ranks, or copy")


def _check_pair(call: Call, output: Tensor, input: Tensor) -> None:
    _check_contiguous(call, "output", output)
    _check_contiguous(call, "input", input)
    if output.dtype != input.dtype:
        raise _other_dtype(call, output, input)


def _other_dtype(call: Call, output: Tensor, input: Tensor) -> Exception:
    return call.error(
        f"output is {_name(output.dtype)} and input is {_name(input.dtype)}: cast one of them, "
        "a collective moves elements as they are"
    )


def _check_pieces(
    call: Call, large: str, larger: Tensor, small: str, smaller: Tensor, pieces: Sequence[int], uneven: bool
) -> None:
    size, numel, part = call.group.size, larger.numel(), smaller.numel()
    if len(pieces) != size or min(pieces) < 0 or sum(pieces) != numel or pieces[call.group.index] != part:
        raise call.error(
            f"pieces {list(pieces)} must be {size} counts of at least 0 that sum up to the {numel} elements of "
            f"{large}, number {call.group.index} being the {part} of {small}"
        )
    if not uneven and len(set(pieces)) > 1:
        raise call.error(f"pieces {list(pieces)} differ, and this device's library moves equal ones only: pad them")


def _check_contiguous(call: Call, name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise call.error(f"{name} is not contiguous: pass a contiguous tensor or an alias of one")


def _check_sum(call: Call, tensor: Tensor) -> None:
    if _name(tensor.dtype) == "bool":
        raise call.error("bool has no sum: cast to an integer dtype")


@cache
def _name(dtype: Any) -> str:
    """The numpy spelling of a framework's dtype, whose own text is like "torch.float32" or "Float32"."""
    return str(dtype).rpartition(".")[2].lower()


def _wrong_ratio(call: Call, large: str, larger: Tensor, small: str, smaller: Tensor) -> Exception:
    size, part = call.group.size, smaller.numel()
    return call.error(
        f"{large} has {larger.numel()} elements and {small} {part}: "
        f"with {size} ranks {large} must have {size} x {part} = {size * part}"
    )


def _check_member(call: Call, role: str, rank: int) -> None:
    if rank not in call.group.ranks:
        raise call.error(f"{role} {rank} is not in the group: name one of its global ranks")


def _check_splits(call: Call, name: str, tensor: Tensor, splits: Sequence[int] | None) -> None:
    size, numel = call.group.size, tensor.numel()
    if splits is None:
        if numel % size:
            raise call.error(f"{name} has {numel} elements, not divisible by {size} ranks: give {name}_splits")
    elif len(splits) != size or min(splits) < 0 or sum(splits) != numel:
        raise call.error(
            f"{name}_splits {list(splits)} must be {size} counts of at least 0 that sum up to the {numel} elements "
            f"of {name}; their sum is {sum(splits)}"
        )
