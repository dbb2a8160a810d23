"""Tensors that are followed under another class: finding them, and making them plain for a while."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator


def instances(value: Any, kind: type) -> Iterator[Any]:
    """The instances of a class in a nest of tuples, lists and dicts, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from instances(each, kind)
    elif isinstance(value, dict):
        for each in value.values():
            yield from instances(each, kind)


@contextmanager
def under(kind: type, *objects: Any) -> Iterator[None]:
    """Inside, the objects are of another class; then each is of its own again."""
    own = [type(each) for each in objects]
    try:
        for each in objects:
            each.__class__ = kind
        yield
    finally:
        for each, before in zip(objects, own):
            each.__class__ = before
