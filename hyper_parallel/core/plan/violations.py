"""What lint finds, and how it is told: every violation with the line that mends it, alike ones together."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Iterable, Mapping, Sequence

import yaml

from hyper_parallel.core.plan.patterns import matching

_PLAIN_KEY = re.compile(r"[A-Za-z_](?:[\w.*-]*[\w*])?", re.ASCII)


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong with a plan.

    `rule` names the check, `where` the parameter or boundary, `message` what is wrong, with sizes, and `because` the
    rule of pass 1 that led there. `line` mends it, below the key `section` of an override file ("" for its top level);
    "" where no line can.
    `more` counts others of the same kind in other layers.
    """

    rule: str
    where: str
    message: str
    line: str = ""
    section: str = "parameters"
    because: str = ""
    more: int = 0

    def __str__(self) -> str:
        more = f" and {self.more} more like it" if self.more else ""
        told = f"[{self.rule}] {self.where or 'the model itself'}{more}: {self.message}"
        if self.because:
            told += f" ({self.because})"
        if not self.line:
            return told
        place = f"below `{self.section}:`" if self.section else "at the top level"
        return "\n".join([f"{told}; write {place}", *(f"    {line}" for line in self.line.split("\n"))])


@dataclass(frozen=True)
class Finding:
    """A violation before alike ones are put together: `fix` is what to write for the pattern `target`, and `also` are
    further (pattern, what to write) that mend it together with that."""

    rule: str
    where: str
    message: str
    target: str = ""
    fix: str = ""
    section: str = "parameters"
    because: str = ""
    also: tuple[tuple[str, str], ...] = ()

    @property
    def fixes(self) -> tuple[tuple[str, str], ...]:
        """All of its lines."""
        return ((self.target, self.fix), *self.also) if self.fix else ()


def together(findings: Iterable[Finding], names: Mapping[str, Sequence[str]]) -> list[Violation]:
    """One violation for those that differ in the number of their layer or expert only.

    `names` are all names that a pattern in a section can fit: where one pattern fits exactly those that need it, it is
    one line, else there is a line for each.
    """
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for each in findings:
        lines = [text for line in each.fixes for text in line]
        key = (each.rule, each.section, *map(numberless, (each.where, _countless(each.message), *lines)))
        alike.setdefault(key, []).append(each)
    return [_one(group, names) for group in alike.values()]


def _one(group: Sequence[Finding], names: Mapping[str, Sequence[str]]) -> Violation:
    first = group[0]
    columns = zip(*(each.fixes for each in group))
    lines = dict.fromkeys(line for column in columns for line in _lines(column, names.get(first.section, ())))
    more = len({each.where for each in group}) - 1
    return Violation(first.rule, first.where, first.message, "\n".join(lines), first.section, first.because, more)


def _lines(column: Sequence[tuple[str, str]], names: Sequence[str]) -> list[str]:
    """The lines of alike findings, as one where a pattern fits what they name and nothing else."""
    fixes, common = dict(column), numberless(column[0][0])
    if len(fixes) > 1 and len(set(fixes.values())) == 1:
        wanted = fixes.keys() & set(names)
        wanted |= {name for target in fixes if "*" in target for name in matching(target, names)}
        if set(matching(common, names)) == wanted:
            fixes = {common: column[0][1]}
    return [f"{_key(target)}: {fix}" for target, fix in fixes.items()]


def numberless(text: str) -> str:
    """Text with "*" for the numbers of layers and experts in names."""
    return re.sub(r"(?<=[.'])\d+(?=\.|$|[^\w.])|^\d+(?=\.)", "*", text)


def _countless(message: str) -> str:
    """A message with "*" for the numbers of experts and of the ranks that hold them."""
    return re.sub(r"\b(expert|expert rank) \d+\b", r"\1 *", message)


def _key(pattern: str) -> str:
    return pattern if _PLAIN_KEY.fullmatch(pattern) else '"' + pattern.replace("\\", "\\\\").replace('"', '\\"') + '"'


def report(violations: Sequence[Violation]) -> str:
    """All violations, and, where several lines mend them, all lines as one override file."""
    told = [str(each) for each in violations]
    lines = {(each.section, line) for each in violations for line in each.line.split("\n") if line}
    if len(lines) > 1:
        told.append("all lines together, as an override file:")
        told += [f"  {line}" for line in dict.fromkeys(each.line for each in violations if not each.section)]
        for section, entries in _merged(violations).items():
            told += [f"  {section}:", *(f"    {_key(pattern)}: {_flow(entry)}" for pattern, entry in entries.items())]
    return "\n".join(told)


def _merged(violations: Sequence[Violation]) -> dict[str, dict[str, dict]]:
    """The lines of each section by pattern, each pattern once."""
    sections: dict[str, dict[str, dict]] = {}
    for each in violations:
        for line in each.line.split("\n") if each.line and each.section else ():
            for pattern, entry in yaml.safe_load(line).items():
                _merge(sections.setdefault(each.section, {}).setdefault(pattern, {}), entry)
    return sections


def _merge(into: dict, entry: Mapping) -> None:
    for key, value in entry.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _flow(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)}: {_flow(each)}" for key, each in value.items()) + "}"
    return str(value)
