"""Values as YAML text, and back: the same text whenever the values are, by the hundred thousand in seconds."""

from __future__ import annotations

import re
import reprlib
from functools import lru_cache
from typing import Any, Iterable, Iterator

import yaml

from hyper_parallel.core.host import collector_at_rest

WIDTH = 120
"""A list or mapping that is no longer stands on one line."""

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.()\-]*")
_RESERVED = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})


@collector_at_rest()
def to_yaml(values: dict[str, Any]) -> str:
    """Dictionaries with text as keys, lists, text, whole numbers, booleans and None as YAML. Equal values, equal text.

    The form is PyYAML's, made here since a plan has hundreds of thousands of values and PyYAML takes a minute for them.
    """
    return "\n".join(_block(_form(values)[1])) + "\n"


Entry = tuple[str, str, list]
"""What stands before a value, the value on one line, and its own entries."""


def _form(value: Any) -> tuple[str, list[Entry]]:
    """A value on one line, and its entries where it is a mapping or list."""
    if isinstance(value, dict):
        entries = [(f"{_scalar(key)}: ", *_form(each)) for key, each in value.items()]
        return "{" + ", ".join([head + flow for head, flow, _ in entries]) + "}", entries
    if isinstance(value, list):
        entries = [(_ITEM, *_form(each)) for each in value]
        return "[" + ", ".join([flow for _, flow, _ in entries]) + "]", entries
    return _scalar(value), []


_ITEM = "- "


def _block(entries: Iterable[Entry]) -> Iterator[str]:
    """The lines of a mapping or list, one for each entry that fits."""
    for head, flow, inner in entries:
        if not inner or len(head) + len(flow) <= WIDTH:
            yield head + flow
        elif head != _ITEM:
            yield head.rstrip()
            yield from (f"  {line}" for line in _block(inner))
        else:
            first, *rest = _block(inner)
            yield head + first
            yield from (f"  {line}" for line in rest)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else str(value)


@lru_cache(maxsize=65536)
def _text(value: str) -> str:
    if _PLAIN.fullmatch(value) and value.lower() not in _RESERVED:
        return value
    return yaml.safe_dump(value, default_style='"', width=float("inf")).rstrip("\n")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """YAML itself takes the last of two equal keys and says nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        own = node.value  # what `<<` brings in is put before it, and may be overridden
        found = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            seen = set()
            for key, _ in own:
                if key.value in seen:
                    line = key.start_mark.line + 1
                    raise ValueError(f"line {line}: the key {reprlib.repr(key.value)} stands twice; put both into one")
                seen.add(key.value)
        return found


@collector_at_rest()
def load_yaml(text: str) -> Any:
    """The values of YAML text; raises YAMLError or ValueError."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
