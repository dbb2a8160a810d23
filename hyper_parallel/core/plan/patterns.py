"""Patterns over qualified names: `*` is one segment or part of one, `**` any number of segments."""

from __future__ import annotations

from typing import Any, Iterable


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern fits, in their order."""
    if "*" not in pattern:
        return [name for name in names if name == pattern]
    below = pattern.removesuffix("**")
    if below.endswith(".") and "*" not in below:  # all of one module, which is asked for by the thousand
        return [name for name in names if name.startswith(below) or name == below[:-1]]
    segments = pattern.split(".")
    return [name for name in names if _fits(segments, name.split(".") if name else [])]


def _fits(pattern: list[str], name: list[str]) -> bool:
    """Which beginnings of `name` the pattern fits so far, segment after segment."""
    reached = [True] + [False] * len(name)
    for segment in pattern:
        if segment == "**":
            first = reached.index(True) if True in reached else len(reached)
            reached = [index >= first for index in range(len(reached))]
        else:
            reached = [False] + [before and _segment_fits(segment, own) for before, own in zip(reached, name)]
    return reached[-1]


def _segment_fits(segment: str, own: str) -> bool:
    """One segment against one of a name: the parts between stars in their order, each as early as it can stand."""
    first, *parts = segment.split("*")
    if not parts:
        return own == segment
    last = parts.pop()
    if not (own.startswith(first) and own.endswith(last) and len(own) >= len(first) + len(last)):
        return False
    at, end = len(first), len(own) - len(last)
    for part in parts:
        found = own.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def problem_of(pattern: Any) -> str | None:
    """What is wrong with a pattern, or None."""
    if not isinstance(pattern, str) or not pattern:
        return "a pattern is text, such as model.layers.*.mlp.**; quote it where YAML reads something else"
    if len(pattern) > 1000:
        return f"a pattern of {len(pattern)} characters fits no name"
    for segment in pattern.split("."):
        if "**" in segment and segment != "**":
            return f"the segment {segment!r}: ** stands alone between dots; write * for a part of a segment"
    return None
