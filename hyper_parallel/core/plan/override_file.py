"""An override file, read: what it says, entry by entry, and everything that is wrong with it at once."""

from __future__ import annotations

import difflib
import os
import reprlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping

import yaml

from hyper_parallel.core.errors import LayoutError, PlanError
from hyper_parallel.core.mesh import AXES, MODEL_AXES
from hyper_parallel.core.placement import Partial, Placement, Replicate, parse_placement
from hyper_parallel.core.plan.boundaries import TYPES
from hyper_parallel.core.plan.conditions import Facts
from hyper_parallel.core.plan.patterns import problem_of
from hyper_parallel.core.plan.placing import DATA_PARALLEL
from hyper_parallel.core.plan.role_rules import ROLES
from hyper_parallel.core.plan.yaml_text import load_yaml

AUTO = "auto"
"""Gives a field back to the planner."""

KEYS = ("sequence_parallel", "tokens", "parameters", "boundaries", "regions")
SIDES = ("before", "after", "gradient", "gradient_before")
_SIZES = {"dims": (2, 3), "size": (1, 2**40)}
_FIELDS = {
    "parameters": ("role", "placements", "pending"),
    "boundaries": ("type", "inputs", "outputs"),
    "regions": ("kind", "inputs", "outputs"),
}
_ROLES = tuple(role for role in ROLES if role not in ("whole", "adapter"))

_shortened = reprlib.Repr()
_shortened.maxstring = _shortened.maxother = 80

Path_ = tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """One entry: the `pattern` of names that it holds for, and its fields by their path, as `("placements", "tensor")`.

    A value is a placement, a text, a number, or `AUTO`. `where` says where it stands, `text` what it says.
    """

    section: str
    where: str
    pattern: str
    fields: Mapping[Path_, Any]
    text: str


@dataclass
class OverrideFile:
    """What a file says. Entries whose `when` does not hold are left out; `problems` are lines for the user."""

    origin: str
    sequence_parallel: bool | None = None
    tokens: tuple[int, int] | None = None
    entries: list[Entry] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_overrides(source: Mapping[str, Any] | str | os.PathLike | None, facts: Facts) -> OverrideFile:
    """Read a mapping or a YAML file.

    Raises:
        PlanError: there is nothing to go through: the file can't be read, or is no mapping.
    """
    origin, values = _load(source)
    if not isinstance(values, Mapping):
        raise PlanError(f"{origin}: overrides are a mapping with the keys {', '.join(KEYS)}; found {_short(values)}")
    file = OverrideFile(origin)
    for key, value in values.items():
        if key == "sequence_parallel":
            _read_sequence_parallel(file, value)
        elif key == "tokens":
            _read_tokens(file, value)
        elif key in _FIELDS:
            _read_section(file, key, value, facts)
        else:
            file.problems.append(f"{origin}: {_stranger('key', key, KEYS)}")
    return file


def _load(source: Any) -> tuple[str, Any]:
    if source is None:
        return "overrides", {}
    if not isinstance(source, (str, os.PathLike)):
        return "overrides", source
    origin = Path(source).name
    try:
        return origin, load_yaml(Path(source).read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise PlanError(f"the overrides {source} can't be read: {error}") from error


def _read_sequence_parallel(file: OverrideFile, value: Any) -> None:
    if isinstance(value, bool):
        file.sequence_parallel = value
    elif value != AUTO:
        file.problems.append(f"{file.origin}: sequence_parallel: found {_short(value)}, write true, false or auto")


def _read_tokens(file: OverrideFile, value: Any) -> None:
    fits = isinstance(value, (list, tuple)) and len(value) == 2
    if fits and all(isinstance(each, int) and not isinstance(each, bool) and 0 < each < 2**40 for each in value):
        file.tokens = (value[0], value[1])
    elif value != AUTO:
        file.problems.append(
            f"{file.origin}: tokens: found {_short(value)}, write [SEQUENCES, LENGTH], such as [8, 4096], or auto"
        )


def _read_section(file: OverrideFile, section: str, value: Any, facts: Facts) -> None:
    """A list of entries with `match`, or a mapping from pattern to the rest of an entry."""
    if isinstance(value, Mapping):
        pairs = [
            (pattern, entry, f"{file.origin}: {section}, entry {n + 1}")
            for n, (pattern, entry) in enumerate(value.items())
        ]
    elif isinstance(value, list):
        pairs = []
        for number, entry in enumerate(value):
            where = f"{file.origin}: {section}, entry {number + 1}"
            if not isinstance(entry, Mapping) or "match" not in entry:
                file.problems.append(f"{where}: found {_short(entry)}, write a mapping with `match: PATTERN`")
                continue
            rest = {key: each for key, each in entry.items() if key != "match"}
            pairs.append((entry["match"], rest, where))
    elif value is None:
        return
    else:
        file.problems.append(
            f"{file.origin}: {section}: found {_short(value)}, write a list of entries, or a mapping by pattern"
        )
        return
    for pattern, entry, where in pairs:
        reader = _EntryReader(section, f"{where} ({_short(pattern)})", facts)
        found = reader.read(pattern, entry)
        file.problems.extend(reader.problems)
        if found is not None:
            file.entries.append(found)


class _EntryReader:
    """Reads one entry; `problems` are all that is wrong with it."""

    def __init__(self, section: str, where: str, facts: Facts) -> None:
        self.section, self.where, self.facts = section, where, facts
        self.problems: list[str] = []
        self.fields: dict[Path_, Any] = {}

    def read(self, pattern: Any, entry: Any) -> Entry | None:
        """The entry, or None where it is wrong or does not hold."""
        if problem := problem_of(pattern):
            self.complain(problem)
        if not isinstance(entry, Mapping):
            self.complain(f"found {_short(entry)}, write a mapping with {_either(_FIELDS[self.section])}")
            return None
        holds = self.facts.hold(entry.get("when", {}), self.complain)
        readers: Mapping[str, Callable[[Any], None]] = {
            "role": lambda value: self.choice("role", value, _ROLES),
            "placements": self.placements,
            "pending": self.pending,
            "type": lambda value: self.choice("type", value, TYPES),
            "kind": lambda value: self.choice("kind", value, ("opaque", "transparent"), none=False),
            "inputs": lambda value: self.contracts("inputs", value),
            "outputs": lambda value: self.contracts("outputs", value),
        }
        allowed = _FIELDS[self.section]
        for key, value in entry.items():
            if key in allowed:
                readers[key](value)
            elif key != "when":
                self.complain(_stranger("key", key, (*allowed, "when")))
        if not self.problems and not any(key in allowed for key in entry):
            self.complain(f"decides nothing; write {_either(allowed)}")
        if self.problems or not holds:
            return None
        return Entry(self.section, self.where, pattern, self.fields, entry_line({pattern: dict(entry)}))

    def complain(self, problem: str) -> None:
        """Note what is wrong, and where."""
        self.problems.append(f"{self.where}: {problem}")

    def choice(self, key: str, value: Any, values: Iterable[str], none: bool = True) -> None:
        """A word out of a list."""
        words = (AUTO, *(("none",) if none else ()), *values)
        if isinstance(value, str) and value in words:
            self.fields[(key,)] = value
        else:
            self.complain(f"{key}: {_stranger(key, value, words)}")

    def placements(self, value: Any) -> None:
        """`auto`, `none`, or placements by axis."""
        if isinstance(value, str) and value in (AUTO, "none"):
            each = AUTO if value == AUTO else Replicate()
            self.fields.update({("placements", axis): each for axis in MODEL_AXES})
        else:
            self.by_axis(("placements",), value, pending=False)

    def pending(self, value: Any) -> None:
        """`auto`, `none`, or a list of axes."""
        axes = () if value == "none" else value
        if value == AUTO:
            self.fields[("pending",)] = AUTO
        elif isinstance(axes, (list, tuple)) and all(axis in MODEL_AXES for axis in axes):
            self.fields[("pending",)] = tuple(axes)
        else:
            self.complain(f"pending: found {_short(value)}, write auto, none, or a list of {_either(MODEL_AXES)}")

    def contracts(self, side: str, value: Any) -> None:
        """Contracts by name."""
        if not isinstance(value, Mapping):
            self.complain(f"{side}: found {_short(value)}, write a mapping from the name of a tensor to its layouts")
            return
        allowed = SIDES + (tuple(_SIZES) if self.section == "regions" else ())
        for name, contract in value.items():
            if not isinstance(name, str) or not name:
                self.complain(f"{side}: found the name {_short(name)}, write text, such as hidden")
            elif not isinstance(contract, Mapping) or not contract:
                self.complain(f"{side}.{name}: found {_short(contract)}, write a mapping with {_either(allowed)}")
            else:
                for key, each in contract.items():
                    self.contract((side, name), key, each, allowed)

    def contract(self, path: Path_, key: Any, value: Any, allowed: tuple[str, ...]) -> None:
        """One part of a contract."""
        if key not in allowed:
            self.complain(f"{'.'.join(path)}: {_stranger('key', key, allowed)}")
        elif key in _SIZES:
            least, most = _SIZES[key]
            if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
                self.fields[(*path, key)] = value
            else:
                self.complain(f"{'.'.join(path)}.{key}: found {_short(value)}, write a number from {least} to {most}")
        elif value == AUTO:
            self.fields.update({(*path, key, axis): AUTO for axis in MODEL_AXES})
        else:
            self.by_axis((*path, key), value, pending=True)

    def by_axis(self, path: Path_, value: Any, pending: bool) -> None:
        """Placements by axis, or `auto` for one."""
        name = ".".join(path)
        if not isinstance(value, Mapping) or not value:
            others = "auto" if pending else "auto or none"
            self.complain(f"{name}: found {_short(value)}, write {others}, or a mapping such as {{tensor: replicate}}")
            return
        for axis, text in value.items():
            if axis in DATA_PARALLEL:
                self.complain(
                    f"{name}.{axis}: placements over {axis!r} are never set by hand, fully sharded data parallelism "
                    "decides them; leave it out"
                )
            elif axis == "pipeline":
                self.complain(f"{name}.pipeline: pipelines are not planned; leave it out")
            elif axis not in AXES:
                self.complain(f"{name}: {_stranger('mesh axis', axis, MODEL_AXES)}")
            elif text == AUTO:
                self.fields[(*path, axis)] = AUTO
            else:
                self.placement((*path, axis), text, pending)

    def placement(self, path: Path_, text: Any, pending: bool) -> None:
        """One placement in its text form, or as a value of Python."""
        try:
            found = text if isinstance(text, Placement) else parse_placement(text)
        except LayoutError as error:
            self.complain(f"{'.'.join(path)}: {_short(text) if not isinstance(text, str) else ''}{error}")
            return
        if isinstance(found, Partial) and not pending:
            self.complain(f"{'.'.join(path)}: a parameter is no partial value; write replicate or a shard")
        else:
            self.fields[path] = found


def closest(name: str, names: Iterable[str]) -> str:
    """`; did you mean ...?`, or nothing."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _stranger(what: str, found: Any, known: Iterable[str]) -> str:
    known = list(known)
    near = closest(found, known) if isinstance(found, str) else ""
    return f"there is no {what} {_short(found)}{near or '; write ' + _either(known)}"


def _either(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def _short(value: Any) -> str:
    return _shortened.repr(value)


def entry_line(values: Mapping[str, Any]) -> str:
    """An entry of a mapping on one line."""
    plain = _plain(values)
    return yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=2**20).strip()[1:-1]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Placement) else value
