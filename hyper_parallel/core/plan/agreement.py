"""What the members of one module must agree on: widths, heads, experts; and that a cut which opens also closes."""

from __future__ import annotations

from typing import Container, Iterable, Iterator

from hyper_parallel.core.plan.assignment import Assignment
from hyper_parallel.core.plan.model import ParameterDescription
from hyper_parallel.core.plan.names import Name, acts_in
from hyper_parallel.core.plan.role_rules import ROLES
from hyper_parallel.core.plan.sizes import Path

Known = tuple[Name, ParameterDescription, Assignment]

_OPENING = {
    "mlp": (({"up"}, {"gate_up"}), "an up projection"),
    "experts": (({"expert_up"}, {"expert_gate_up"}), "an up projection"),
    "attention": (
        ({"qkv"}, {"query", "key", "value"}, {"query_up", "key_value_up"}, {"query", "key_value_up"}),
        "q, k, v",
    ),
    "mixer": (({"mixer_input"},), "what opens the mixer"),
}
_CLOSING = {"mlp": "down", "experts": "expert_down", "attention": "attention_output", "mixer": "mixer_output"}


def disagreements(known: Iterable[Known]) -> Iterator[tuple[str, str]]:
    """Names of parameters whose roles contradict those of their neighbours, with the contradiction in words."""
    modules: dict[tuple[Path, str], list[Known]] = {}
    weights: dict[tuple[Path, str], Known] = {}
    for each in known:
        name, _, role = each
        weights[name.path, name.leaf] = each
        family = ROLES[role.role].boundary
        if family in _CLOSING:
            modules.setdefault((acts_in(name), family), []).append(each)
    for each in weights.values():
        reason = _bias(each, weights)
        if reason:
            yield each[1].name, reason
    for (holder, family), members in modules.items():
        reason = _incomplete(family, members) or _widths(family, members) or _experts(members)
        if reason:
            place = ".".join(holder) or "the model"
            for _, parameter, _ in members:
                yield parameter.name, f"'{place}': {reason}"


def second_attentions(known: Iterable[Known], given: Container[str]) -> Iterator[tuple[str, str]]:
    """Names of parameters of attention that stands beside another in one block, with that in words. Two that read the
    same tokens look as one that reads a memory does, and only the first is sure; one that has a role of those `given`
    by a user is as the user says."""
    attentions: dict[Path, list[str]] = {}
    for name, parameter, role in known:
        if ROLES[role.role].boundary in ("attention", "wide_norm"):
            attentions.setdefault(acts_in(name), []).append(parameter.name)
    blocks: dict[Path, list[Path]] = {}
    for path in attentions:
        if block := _block_around(path):
            blocks.setdefault(block, []).append(path)
    for block, paths in blocks.items():
        outer = [path for path in paths if not any(path != each and path[: len(each)] == each for each in paths)]
        for path in outer[1:]:
            names = [each for inner, each in attentions.items() if inner[: len(path)] == path]
            names = [each for own in names for each in own]
            if any(each in given for each in names):
                continue
            first, second = (".".join(each[len(block) :]) for each in (outer[0], path))
            reason = (
                f"'{'.'.join(block)}' holds two attentions, {first} and {second}, and nothing tells that {second} "
                f"reads the same tokens as {first}; a role by hand for one of its parameters does"
            )
            yield from ((each, reason) for each in names)


def _block_around(path: Path) -> Path:
    """The innermost element of a list around a module, () for none."""
    return next((path[:depth] for depth in range(len(path) - 1, 0, -1) if path[depth - 1].isdigit()), ())


def _bias(each: Known, weights: dict[tuple[Path, str], Known]) -> str | None:
    """A bias stands beside a weight of as many outputs."""
    name, parameter, role = each
    if name.leaf == "bias" and role.output_dim is not None:
        beside = (name.path, "weight")
    elif name.leaf.endswith("_bias") and role.expert_dim is not None:
        beside = (name.path, name.leaf.removesuffix("_bias"))
    else:
        return None
    if beside not in weights:
        return f"a bias whose weight, {'.'.join(name.path)}.{beside[1]}, no rule knows"
    _, weight, its = weights[beside]
    found, expected = parameter.shape[role.output_dim], weight.shape[its.output_dim or 0]
    if found != expected:
        return f"{parameter.name} has {found} elements, and {weight.name} {list(weight.shape)} has {expected} outputs"
    return None


def _incomplete(family: str, members: list[Known]) -> str | None:
    roles = {role.role for _, _, role in members}
    openings, words = _OPENING[family]
    closing = [
        parameter.name
        for name, parameter, role in members
        if role.role == _CLOSING[family] and role.input_dim is not None
    ]
    if not any(opening <= roles for opening in openings):
        return f"{words} not found beside {', '.join(sorted(roles))}, so the module can't be cut"
    if len(set(_strip(closing, members))) != 1:
        return f"expected one {_CLOSING[family]} that closes the cut, found {len(closing)}"
    return None


def _strip(names: list[str], members: list[Known]) -> Iterator[Path]:
    """Logical places: a module and the copy that a wrapper keeps of it count once."""
    wanted = set(names)
    for name, parameter, _ in members:
        if parameter.name in wanted:
            yield name.path + (name.leaf,)


def _widths(family: str, members: list[Known]) -> str | None:
    """Inner features must be as many on the way in as on the way out; a mixer makes others of them."""
    if family == "mixer":
        return None
    widths: dict[str, int] = {}
    for name, parameter, role in members:
        width = _width(family, parameter, role)
        if width is not None:
            widths[f"{(name.path + (name.leaf,))[-2]}.{name.leaf} ({role.role})"] = width
    if family == "attention":
        return _attention_widths(members)
    if len(set(widths.values())) > 1:
        return "inner features differ: " + ", ".join(f"{name} has {width}" for name, width in widths.items())
    return None


def _width(family: str, parameter: ParameterDescription, role: Assignment) -> int | None:
    if role.input_dim is None or role.output_dim is None:
        return None
    if role.role == _CLOSING[family]:
        return parameter.shape[role.input_dim]
    return parameter.shape[role.output_dim] // (2 if role.role.endswith("gate_up") else 1)


def _attention_widths(members: list[Known]) -> str | None:
    """Projections must fit each other, whether or not anything tells the heads."""
    rows = {
        role.role: parameter.shape[role.output_dim]
        for _, parameter, role in members
        if role.input_dim is not None and role.output_dim is not None
    }
    closing = next(
        (p.shape[r.input_dim] for _, p, r in members if r.role == "attention_output" and r.input_dim is not None), 0
    )
    query, key, value = rows.get("query"), rows.get("key"), rows.get("value")
    if not (query and key and value):
        return None
    heads, keys = (next((r.heads for _, _, r in members if r.role == each), None) for each in ("query", "key"))
    if heads and keys and query * keys == key * heads and value * heads == closing * keys:
        return None  # values may be of another size than queries and keys
    if key != value or query % key:
        return f"{query} query, {key} key and {value} value features don't make groups of heads"
    if query not in (closing, 2 * closing):
        return f"{query} query features go in and {closing} come out"
    return None


def _experts(members: list[Known]) -> str | None:
    counts = {
        parameter.name: parameter.shape[role.expert_dim]
        for _, parameter, role in members
        if role.expert_dim is not None
    }
    if len(set(counts.values())) > 1:
        return "experts differ in number: " + ", ".join(f"{name} has {count}" for name, count in counts.items())
    return None
