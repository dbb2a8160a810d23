"""Pass 1: what every parameter is, by its name, its module's class and its shape. A contradiction makes it unknown."""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Iterable, Iterator, Mapping

from hyper_parallel.core.plan.adapters import assign_adapter
from hyper_parallel.core.plan.agreement import disagreements, second_attentions
from hyper_parallel.core.plan.assignment import Assignment, RoleResult
from hyper_parallel.core.plan.forms import FORMS, Match, matches
from hyper_parallel.core.plan.model import ModelDescription, ParameterDescription
from hyper_parallel.core.plan.names import Name, parse
from hyper_parallel.core.plan.role_rules import (
    EMBEDDING_CLASSES,
    KINDS,
    NORM_CLASSES,
    OTHER_ATTENTION,
    OTHER_ATTENTION_CLASSES,
    ROLES,
    RULES,
    TOKEN_MIXING_NORM_CLASSES,
    RoleKind,
    Rule,
)
from hyper_parallel.core.plan.sizes import Contradiction, Path, Size, Sizes

__all__ = ["ROLES", "Assignment", "RoleKind", "RoleResult", "assign_roles"]


def assign_roles(model: ModelDescription, given: Mapping[str, tuple[str, str]] | None = None) -> RoleResult:
    """Give each parameter, under each of its names, a role; or say what was tried.

    Rules look at names, classes and sizes; then the members of each module are held against each other; then adapters
    follow the linears that they stand around. Reads nothing but the description. `given` are roles that a user decides,
    `{name: (role, who says so)}`; they must fit the shape as any other.
    """
    given = given or {}
    parameters = tuple(all_names(model))
    names = [parse(each.name) for each in parameters]
    rules = _Rules(model, list(zip(names, parameters)))
    assigned: dict[str, Assignment] = {}
    unknown: dict[str, list[str]] = {}
    for name, parameter in zip(names, parameters):
        if name.adapter and parameter.name not in given:
            continue
        if parameter.name in given:
            outcome = rules.assign_as(name, parameter, *given[parameter.name])
        else:
            outcome = rules.assign(name, parameter)
        if isinstance(outcome, Assignment):
            assigned[parameter.name] = outcome
        else:
            unknown[parameter.name] = outcome
    known = [
        (name, each, assigned[each.name])
        for name, each in zip(names, parameters)
        if each.name in assigned and not name.adapter
    ]
    for name, reason in (*disagreements(known), *second_attentions(known, given)):
        unknown.setdefault(name, []).append(reason)
        assigned.pop(name, None)
    linears = {(name.path, name.leaf): (each, assigned.get(each.name)) for name, each, _ in known}
    inner = {name.path: each.shape for name, each in zip(names, parameters) if name.adapter == "in"}
    for name, parameter in zip(names, parameters):
        if not name.adapter or parameter.name in given:
            continue
        try:
            assigned[parameter.name] = assign_adapter(name, parameter, linears.get((name.path, "weight")), inner)
        except Contradiction as error:
            unknown[parameter.name] = [str(error)]
    order = [each.name for each in parameters]
    return RoleResult(
        {name: assigned[name] for name in order if name in assigned},
        {name: unknown[name] for name in order if name in unknown},
        rules.sizes.hidden.value if rules.sizes.hidden else 0,
    )


def all_names(model: ModelDescription) -> Iterator[ParameterDescription]:
    """Every parameter under every name, tied ones as if each were a parameter of its own."""
    first = {each.name: each for each in model.parameters}
    yield from model.parameters
    for name, other in model.tied.items():
        owner = name.rpartition(".")[0]
        yield replace(first[other], name=name, module_class=model.modules.get(owner, first[other].module_class))


class _Rules:
    """The rule table over one model."""

    def __init__(self, model: ModelDescription, named: list[tuple[Name, ParameterDescription]]) -> None:
        self._classes: dict[Path, str] = {}
        for name, _ in named:
            for depth in range(len(name.path), -1, -1):
                path = name.path[:depth]
                if path in self._classes and not name.adapter:
                    break
                self._classes.setdefault(path, model.modules.get(name.inner(depth), ""))
        self.sizes = Sizes(model.config, named, self.class_of)
        self._kinds: dict[tuple[Path, str], bool] = {}
        self._complete_sizes(named)

    def class_of(self, path: Path) -> str:
        """The class of a module by its logical path; "" for one that the description does not list."""
        return self._classes.get(path, "")

    def assign(self, name: Name, parameter: ParameterDescription) -> Assignment | list[str]:
        """The role that the first fitting rule gives, or what was tried."""
        tried: list[str] = []
        segments = name.path + (name.leaf,)
        for rule, pattern in _candidates(segments):
            start = len(segments) - len(pattern)
            if start < 0 or not all(self._fits(segments, start + i, each) for i, each in enumerate(pattern)):
                continue
            anchor = segments[: start + 1] if start + 1 <= len(name.path) else name.path
            match = Match(
                rule,
                name,
                parameter,
                anchor,
                parameter.module_class,
                self.class_of(name.path[:-1]),
                self.sizes,
            )
            failed = next((guard for guard in rule.where if not self._guard(guard, match)), None)
            matched = ".".join(
                own if isinstance(each, frozenset) or each == "*" else each
                for own, each in zip(segments[start:], pattern)
            )
            if failed:
                if rule.pattern[0] != "*":
                    tried.append(f"'{matched}' may be {_article(rule.role)}, but only {failed}")
                continue
            try:
                fields = FORMS[rule.form](match)
            except Contradiction as error:
                return tried + [f"'{matched}' is {_article(rule.role)}, but {error}"]
            why = fields.pop("why")
            role = fields.pop("role", rule.role)
            return Assignment(parameter.name, role, f"'{matched}' is {_article(role)}: {why}", **fields)
        return tried + [self._stranger(name, parameter)]

    def assign_as(self, name: Name, parameter: ParameterDescription, role: str, source: str) -> Assignment | list[str]:
        """The role that a user gives, if the shape is one that the role can have; name and place don't matter."""
        if role == "whole":
            return Assignment(parameter.name, role, f"{source} keeps it whole")
        if name.adapter:
            return [
                f"{source} makes it {_article(role)}, but a factor of an adapter has the role of its linear, or none"
            ]
        own = name.leaf in ("weight", "bias")
        anchor = name.path[:-1] if own else name.path
        around = parameter.module_class, self.class_of(name.path[:-1]), self.sizes
        tried: dict[str, None] = {}
        for rule in _rules_for(role, own, name.path[-2:-1]):
            try:
                fields = FORMS[rule.form](Match(rule, name, parameter, anchor, *around))
            except Contradiction as error:
                tried[str(error)] = None
                continue
            why, found = fields.pop("why"), fields.pop("role", rule.role)
            if found == role:
                return Assignment(parameter.name, role, f"{source} makes it {_article(role)}: {why}", **fields)
            tried[f"its shape is that of {_article(found)}"] = None
        kind = "weight or bias" if own else "parameter that stands bare in its module"
        return [
            f"{source} makes it {_article(role)}, but {each}" for each in tried or {f"no {kind} has that role": None}
        ]

    def _stranger(self, name: Name, parameter: ParameterDescription) -> str:
        around = self.class_of(name.path[:-1]) or "the model"
        tail = ".".join((name.path + (name.leaf,))[-2:])
        told = f"no rule knows '{tail}', {list(parameter.shape)} of a {parameter.module_class} in a {around}"
        inside = (name.path[:depth] for depth in range(1, len(name.path) + 1))
        cut = next((path for path in inside if any(self._is_kind(path, kind) for kind in KINDS)), None)
        if cut is None:
            return told
        return (
            f"{told}; '{cut[-1]}' is cut around it, so it may be kept whole only if it mixes no heads or inner features"
        )

    def _fits(self, segments: Path, index: int, pattern: str | frozenset[str]) -> bool:
        if isinstance(pattern, frozenset):
            return segments[index] in pattern
        if pattern == "*":
            return True
        if pattern == "#":
            return segments[index].isdigit()
        return self._is_kind(segments[: index + 1], pattern[1:])

    def _is_kind(self, path: Path, kind: str) -> bool:
        key = (path, kind)
        if key not in self._kinds:
            names, classes = KINDS[kind]
            other = path[-1] in OTHER_ATTENTION or matches(self.class_of(path), OTHER_ATTENTION_CLASSES)
            self._kinds[key] = not other and (path[-1] in names or matches(self.class_of(path), classes))
        return self._kinds[key]

    def _guard(self, guard: str, match: Match) -> bool:
        return _GUARDS[guard](self, match)

    def child_of_block(self, match: Match) -> bool:
        """A block is an element of a list; norms outside of any list stand before or after the blocks."""
        path = match.name.path
        if len(path) > 1 and path[-2].isdigit():
            return True
        inside = len(path) > 1 and any(self._is_kind(path[:-1], kind) for kind in KINDS)
        return not inside and outside_blocks(path)

    def _complete_sizes(self, named: Iterable[tuple[Name, ParameterDescription]]) -> None:
        """What no configuration tells: norms in blocks are as wide as hidden states, or else the tokens' table is."""
        norms: list[Size] = []
        tables: list[ParameterDescription] = []
        for name, parameter in named:
            path, dims = name.path, len(parameter.shape)
            if name.adapter or name.leaf != "weight" or not path:
                continue
            if dims == 1 and path[-2:-1] and path[-2].isdigit() and _is_norm(parameter.module_class):
                norms.append(Size(parameter.shape[0], f"the size of {parameter.name}"))
            if dims == 2 and outside_blocks(path) and _is_embedding(path[-1], parameter.module_class):
                tables.append(parameter)
        widths = norms + [Size(each.shape[1], f"columns of {each.name}") for each in tables]
        rows = [Size(each.shape[0], f"rows of {each.name}") for each in tables]
        self.sizes.hidden = self.sizes.hidden or next(iter(widths), None)
        self.sizes.vocabulary = self.sizes.vocabulary or next(iter(rows), None)


def _is_norm(class_name: str) -> bool:
    return matches(class_name, NORM_CLASSES) and not matches(class_name, TOKEN_MIXING_NORM_CLASSES)


def _rules_for(role: str, own: bool, above: Path) -> Iterator[Rule]:
    """Rules whose forms a parameter of this role can have: a module's own weight or bias, or one that stands bare."""
    norms = ("head_norm", "wide_norm", "per_head_norm")
    for rule in RULES:
        pattern = rule.pattern.split(".")
        fitting = (
            rule.role == role
            or (role in norms and rule.role in norms)
            or (role, rule.form) == ("router_bias", "router")
        )
        listed = "#" not in pattern[1:-1] or (above and above[0].isdigit())
        if fitting and listed and (set(pattern[-1].split("|")) <= {"weight", "bias"}) == own:
            yield rule


def _article(role: str) -> str:
    return f"{'an' if role[0] in 'aeiou' else 'a'} {role}"


def outside_blocks(path: Path) -> bool:
    """Tell whether no module on the path is an element of a list."""
    return not any(segment.isdigit() for segment in path)


def _is_embedding(segment: str, class_name: str) -> bool:
    first = _compile(next(rule for rule in RULES if rule.role == "embedding").pattern)[-2]
    return segment in first and matches(class_name, EMBEDDING_CLASSES)


_GUARDS: Mapping[str, Callable[[_Rules, Match], bool]] = {
    "in an embedding's class": lambda rules, match: matches(match.owner, EMBEDDING_CLASSES),
    "in a norm's class": lambda rules, match: _is_norm(match.owner),
    "outside of repeated blocks": lambda rules, match: outside_blocks(match.name.path),
    "directly in a block or outside of all": lambda rules, match: rules.child_of_block(match),
    "beside experts": lambda rules, match: _has_experts(rules, match),
    "where no experts are beside it": lambda rules, match: not _has_experts(rules, match),
    "beside a w3": lambda rules, match: "w3" in rules.sizes.children.get(match.name.path[:-1], ()),
    "with three dims": lambda rules, match: len(match.shape) == 3,
}


def _has_experts(rules: _Rules, match: Match) -> bool:
    return "experts" in rules.sizes.children.get(match.anchor, ())


Pattern = tuple["str | frozenset[str]", ...]


def _compile(pattern: str) -> Pattern:
    """A pattern's segments: a set of names, or "#", "*", "@kind"."""
    return tuple(each if each[0] in "#*@" else frozenset(each.split("|")) for each in pattern.split("."))


def _index() -> tuple[dict[str, list[tuple[Rule, Pattern]]], list[tuple[Rule, Pattern]]]:
    """Rules by the name of the module that owns weight or bias, or of the bare parameter; and those for any name."""
    named: dict[str, list[tuple[Rule, Pattern]]] = {}
    general: list[tuple[Rule, Pattern]] = []
    for rule in RULES:
        pattern = _compile(rule.pattern)
        key = pattern[-2] if len(pattern) > 1 and pattern[-1] <= {"weight", "bias"} else pattern[-1]
        if isinstance(key, frozenset):
            for segment in key:
                named.setdefault(segment, []).append((rule, pattern))
        else:
            general.append((rule, pattern))
    return named, general


_NAMED, _GENERAL = _index()


def _candidates(segments: Path) -> list[tuple[Rule, Pattern]]:
    own = segments[-2:-1] if segments[-1] in ("weight", "bias") else segments[-1:]
    return _NAMED.get(own[0] if own else "", []) + _GENERAL
