"""Typed settings: dataclasses filled from YAML files and `key=value` overrides, with every mistake told at once.

A setting is a field of a (nested) frozen dataclass; its key is dotted, like `optimizer.learning_rate`. Types that
a field may have: int, float, bool, str, `X | None`, `tuple[X, ...]`, `tuple[X, Y]`, `Literal[...]`, a dataclass.
`field(metadata={"at_least": 1})`, and likewise "more_than", "at_most" and "less_than", bound a number.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Sequence

import yaml

from hyper_parallel.core.errors import ConfigError


@dataclass(frozen=True)
class Entry:
    """One value that the user wrote, and where: "demo.yaml:12" or "--set"."""

    value: Any
    origin: str


class _Wrong(Exception):
    """A value does not have the type that its field wants; the text says what is wanted."""


def read_file(path: Path) -> dict[str, Entry]:
    """The entries of a YAML file by dotted key.

    Raises `ConfigError` when the file is missing, unreadable, not YAML, not a mapping, or writes a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"can't read the configuration {path}: {reason}") from None
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}: expected `key: value` lines, found {loader.construct_document(root)!r}")
        entries: dict[str, Entry] = {}
        _collect(loader, root, "", path.name, entries)
        return entries
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(f"{path}:{line}: this is not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: this is not YAML: {error}") from None
    finally:
        loader.dispose()


def _collect(loader: yaml.SafeLoader, node: yaml.MappingNode, prefix: str, name: str, into: dict[str, Entry]) -> None:
    for key_node, value_node in node.value:
        key = f"{prefix}{loader.construct_object(key_node, deep=True)}"
        origin = f"{name}:{key_node.start_mark.line + 1}"
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            _collect(loader, value_node, f"{key}.", name, into)
        elif key in into:
            raise ConfigError(f"{origin}: {key} is written twice, first at {into[key].origin}; keep one")
        else:
            into[key] = Entry(loader.construct_object(value_node, deep=True), origin)


def read_overrides(assignments: Sequence[str], option: str = "--set") -> dict[str, Entry]:
    """The entries of `key=value` texts, values as YAML; a later one wins over an earlier one.

    Raises `ConfigError` for a text without `=` or with a value that is not YAML.
    """
    entries = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{option} {assignment}: write {option} key=value, for example {option} train.steps=20")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"{option} {assignment}: the value {text!r} is not YAML; quote it") from None
        entries.update(_flatten(key.strip(), value, option))
    return entries


def _flatten(key: str, value: Any, origin: str) -> dict[str, Entry]:
    if not isinstance(value, Mapping) or not value:
        return {key: Entry(value, origin)}
    return {k: entry for name, inner in value.items() for k, entry in _flatten(f"{key}.{name}", inner, origin).items()}


def fill(cls: type, entries: Mapping[str, Entry]) -> Any:
    """An instance of the dataclass `cls` from entries by dotted key.

    Raises one `ConfigError` that lists every unknown key (with the nearest valid one), every value of a wrong type
    or out of bounds, and every missing key.
    """
    problems: list[str] = []
    valid = list(keys_of(cls))
    for key, entry in entries.items():
        if key not in valid:
            problems.append(f"{entry.origin}: {key}: {_unknown(key, entry.value, valid)}")
    filled = _fill(cls, entries, "", problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return filled


def keys_of(cls: type, prefix: str = "") -> typing.Iterator[str]:
    """Every valid dotted key below the dataclass `cls`, in order of definition."""
    for field, kind in _fields(cls):
        if dataclasses.is_dataclass(kind):
            yield from keys_of(kind, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def defaults_of(cls: type, prefix: str = "") -> dict[str, Any]:
    """The default of every key that has one, as YAML would give it."""
    found = {}
    for field, kind in _fields(cls):
        if dataclasses.is_dataclass(kind):
            found |= defaults_of(kind, f"{prefix}{field.name}.")
        elif field.default is not dataclasses.MISSING:
            found[prefix + field.name] = _plain(field.default)
    return found


def _fields(cls: type) -> list[tuple[dataclasses.Field, Any]]:
    hints = typing.get_type_hints(cls)
    return [(field, hints[field.name]) for field in dataclasses.fields(cls) if field.init]


def _unknown(key: str, value: Any, valid: Sequence[str]) -> str:
    inside = [name for name in valid if name.startswith(f"{key}.")]
    if inside:
        return f"this is a section, not a value (found {value!r}); it holds {', '.join(inside)}"
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.75)
    if not near:
        # Right name in the wrong section, or no section at all.
        leaf = key.rpartition(".")[2]
        near = [name for name in valid if name.rpartition(".")[2] == leaf]
    if not near:
        near = difflib.get_close_matches(key, valid, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"valid keys: {', '.join(valid)}"
    return f"there is no such key; {hint}"


def _fill(cls: type, entries: Mapping[str, Entry], prefix: str, problems: list[str]) -> Any:
    values, found = {}, len(problems)
    for field, kind in _fields(cls):
        key = prefix + field.name
        if dataclasses.is_dataclass(kind):
            values[field.name] = _fill(kind, entries, f"{key}.", problems)
        elif key in entries:
            try:
                values[field.name] = _bounded(_convert(entries[key].value, kind), field.metadata)
            except _Wrong as wrong:
                problems.append(f"{entries[key].origin}: {key}: wants {wrong}, found {entries[key].value!r}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"{key}: this key is missing; it wants {_describe(kind)}")
    if len(problems) > found:
        return None
    try:
        return cls(**values)
    except ConfigError as error:
        problems.extend(_located(line, prefix, entries) for line in str(error).splitlines())
        return None


def _located(message: str, prefix: str, entries: Mapping[str, Entry]) -> str:
    """A dataclass's own complaint, which begins with a field's name, with the place of that key in front."""
    entry = entries.get(prefix + message.partition(" ")[0])
    return f"{entry.origin}: {prefix}{message}" if entry else prefix + message


def _convert(value: Any, kind: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, kind, arguments)
    if origin is typing.Literal:
        if value in arguments:
            return value
    elif origin is tuple:
        if isinstance(value, (list, tuple)):
            return _convert_items(value, kind, arguments)
    elif kind is float:
        # YAML reads 1e-3, without a point, as a text.
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            try:
                return float(value)
            except ValueError:
                pass
    elif isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise _Wrong(_describe(kind))


def _convert_union(value: Any, kind: Any, arguments: tuple) -> Any:
    if value is None and type(None) in arguments:
        return None
    for argument in arguments:
        try:
            return _convert(value, argument)
        except (_Wrong, TypeError):
            continue
    raise _Wrong(_describe(kind))


def _convert_items(value: Sequence[Any], kind: Any, arguments: tuple) -> tuple:
    kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
    if len(kinds) != len(value):
        raise _Wrong(_describe(kind))
    try:
        return tuple(_convert(item, inner) for item, inner in zip(value, kinds, strict=True))
    except _Wrong:
        raise _Wrong(_describe(kind)) from None


def _bounded(value: Any, bounds: Mapping[str, float]) -> Any:
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, (int, float)):
            holds = {
                "at_least": lambda bound, number=number: number >= bound,
                "more_than": lambda bound, number=number: number > bound,
                "at_most": lambda bound, number=number: number <= bound,
                "less_than": lambda bound, number=number: number < bound,
            }
            # Written so that not-a-number satisfies no bound.
            if not all(holds[name](bound) for name, bound in bounds.items()):
                raise _Wrong("a number " + " and ".join(f"{n.replace('_', ' ')} {b}" for n, b in bounds.items()))
    return value


def _describe(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(argument) for argument in arguments)
    if origin is typing.Literal:
        return " or ".join(repr(argument) for argument in arguments)
    if origin is tuple:
        inner = [_describe(argument) for argument in arguments if argument is not Ellipsis]
        return f"a list, each item {inner[0]}" if arguments[-1] is Ellipsis else f"a list [{', '.join(inner)}]"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}
    return names[kind]


def to_yaml(config: Any) -> str:
    """The settings as YAML that `read_file` and `fill` turn into an equal instance."""
    return yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
