"""Sizes that tell of a cut: those of heads, experts and features that an axis deals out in a module."""

from __future__ import annotations

from typing import Iterator, NamedTuple, Sequence

from hyper_parallel.core.plan.templates import Member

HEADS = ("heads", "key/value heads")
"""In which words sizes are counts of heads."""


class CutSize(NamedTuple):
    """A size of what `axis` cuts: what there are so many of, in which parameter, and the module of its group."""

    size: int
    words: str
    axis: str
    parameter: str
    module: str


def cut_sizes(module: str, members: Sequence[Member], cut: bool) -> Iterator[CutSize]:
    """Every size above one of what is cut in a group; `cut` says that `tensor` cuts something around it.

    Beside whole sizes stand those of natural parts: a kind of features in a fused projection, the queries of one key,
    and several kinds end to end.
    """
    if cut:
        for find in (_heads, _features, _parts):
            for member in members:
                name = member.description.name
                yield from (
                    CutSize(size, words, "tensor", name, module) for size, words in find(member, members) if size > 1
                )
    for member in members:
        if "expert" in member.placed.placements and (count := _experts(member, members)) > 1:
            yield CutSize(count, "experts", "expert", member.description.name, module)


def _heads(member: Member, members: Sequence[Member]) -> Iterator[tuple[int, str]]:
    assignment = member.assignment
    if member.tensor == "heads" or assignment.role == "attention_output":
        words = HEADS[assignment.role in ("key", "value")]
        yield from ((count, words) for count in (assignment.heads, *assignment.packed_heads) if count)


def _features(member: Member, members: Sequence[Member]) -> Iterator[tuple[int, str]]:
    dim = _cut_dim(member)
    if dim is not None:
        yield member.width(dim), "tokens" if dim == member.assignment.vocab_dim else "features"


def _parts(member: Member, members: Sequence[Member]) -> Iterator[tuple[int, str]]:
    assignment, width = member.assignment, member.width(_cut_dim(member))
    yield from ((part, "features of one kind") for part in assignment.packing)
    yield width // assignment.interleaved, "features of one kind"
    if assignment.role in ("query", "qkv") and assignment.heads:
        yield 2 * assignment.heads, "halves of heads"
    if assignment.role in ("gate", "up", "expert_gate", "expert_up"):
        yield 2 * width, "features of gate and up"
    if assignment.role == "query":
        others = [each for each in members if each.assignment.role in ("key", "value") and each.linear]
        weights = [each for each in others if each.assignment.input_dim is not None]
        yield width + sum(each.width(each.assignment.output_dim) for each in weights), "features with keys and values"
        keys = next((each.assignment.heads for each in weights), None)
        if keys and assignment.heads and keys < assignment.heads:
            yield width // keys, "features for one key"


def _cut_dim(member: Member) -> int | None:
    """The dim that `tensor` cuts, or would where key/value heads were not fewer than ranks."""
    if member.assignment.role in ("key", "value"):
        return member.assignment.output_dim
    return getattr(member.placed.placements.get("tensor"), "dim", None)


def _experts(member: Member, members: Sequence[Member]) -> int:
    """How many experts the group of a member has."""
    if member.assignment.expert_dim is not None:
        return member.width(member.assignment.expert_dim)
    return 1 + max(each.assignment.expert for each in members if each.assignment.expert is not None)
