"""What differs between two sharding plans, line by line."""

from __future__ import annotations

import json
from typing import Any, Iterator, Mapping

from hyper_parallel.core.plan.plan import ShardingPlan


def differences(first: ShardingPlan, second: ShardingPlan, names: tuple[str, str] = ("first", "second")) -> list[str]:
    """One line for each value that differs: the way to it, then both values; empty when the plans are equal.

    `names` are what the lines call the two. The plans are compared as `to_dict` gives them, so whatever a plan holds
    is compared. Things that have names are compared by name; their order counts, since a run follows it.
    """
    return list(_compare("", first.to_dict(), second.to_dict(), names))


def _compare(path: str, first: Any, second: Any, names: tuple[str, str]) -> Iterator[str]:
    one, other = _by_name(first), _by_name(second)
    if one is None or other is None:
        if first != second:
            yield f"{path}: {_text(first)} -> {_text(second)}"
        return
    for key in [*one, *(key for key in other if key not in one)]:
        below = f"{path}: {key}" if path else str(key)
        if key not in other:
            yield f"{below}: only in {names[0]}{_value(one[key])}"
        elif key not in one:
            yield f"{below}: only in {names[1]}{_value(other[key])}"
        else:
            yield from _compare(below, one[key], other[key], names)
    common = [key for key in one if key in other]
    if path and _are_things(one) and common != [key for key in other if key in one]:
        yield f"{path}: what both have stands in another order"


def _by_name(values: Any) -> Mapping[str, Any] | None:
    """A mapping as it is, a list of named things by their names; None for what is compared whole."""
    if isinstance(values, Mapping):
        return values
    if isinstance(values, list) and all(isinstance(each, Mapping) and "name" in each for each in values):
        things = {_title(each["name"]): {key: value for key, value in each.items() if key != "name"} for each in values}
        return things if len(things) == len(values) else None
    return None


def _are_things(values: Mapping[str, Any]) -> bool:
    return all(isinstance(each, Mapping) for each in values.values())


def _title(name: Any) -> str:
    return "(the model itself)" if name == "" else str(name)


def _value(value: Any) -> str:
    return "" if isinstance(value, Mapping) else f" ({_text(value)})"


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, default=str)
