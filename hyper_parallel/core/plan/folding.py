"""Repeated modules shown once: `layers.0-47.mlp` for forty-eight layers that are alike."""

from __future__ import annotations

from itertools import groupby
from typing import Any, Hashable, Iterator, Sequence

Entry = tuple[tuple[str, ...], Hashable]
"""A path of segments, and what stands there."""


def fold(entries: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Entries of qualified names and hashable things, with neighbours whose names differ only in a number made one.

    Elements of one list are alike when all that is below them is, in the same order. The first of them decides the
    place; its number becomes a text such as "0-2,5".
    """
    return [
        (".".join(path), thing) for path, thing in _fold([(tuple(name.split(".")), each) for name, each in entries])
    ]


def _fold(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """The same on paths."""
    folded: list[tuple[str, tuple[Entry, ...]]] = []
    for head, members in groupby(entries, key=lambda entry: entry[0][0]):
        folded.append((head, tuple(_below(list(members)))))
    return tuple(((head, *path), thing) for head, below in _merged(folded) for path, thing in below)


def _below(entries: list[Entry]) -> Iterator[Entry]:
    """What is below one segment; an entry that ends there stands for itself."""
    for ends, members in groupby(entries, key=lambda entry: len(entry[0]) == 1):
        rest = [(path[1:], thing) for path, thing in members]
        yield from rest if ends else _fold(rest)


def _merged(folded: Sequence[tuple[str, tuple[Entry, ...]]]) -> Iterator[tuple[str, tuple[Entry, ...]]]:
    """Neighbours that are numbers, those with the same things below as one."""
    for numbered, members in groupby(folded, key=lambda each: each[0].isdigit()):
        if not numbered:
            yield from members
            continue
        alike: dict[tuple[Entry, ...], list[int]] = {}
        for head, below in members:
            alike.setdefault(below, []).append(int(head))
        yield from ((_ranges(numbers), below) for below, numbers in alike.items())


def _ranges(numbers: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as "0-2,5"; what goes up by a larger step as "0-46 by 2"."""
    steps = {later - earlier for earlier, later in zip(numbers, numbers[1:])}
    if len(numbers) > 2 and len(steps) == 1 and min(steps) > 1:
        return f"{numbers[0]}-{numbers[-1]} by {min(steps)}"
    parts: list[str] = []
    start = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            parts.append(str(numbers[start]) if index - start == 1 else f"{numbers[start]}-{numbers[index - 1]}")
            start = index
    return ",".join(parts)
