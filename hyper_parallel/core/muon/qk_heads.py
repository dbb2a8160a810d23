"""Which rows of which parameters make each head's queries and keys: what QK-clip scales, in global coordinates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, NamedTuple

from hyper_parallel.core.muon.adapters import views_of
from hyper_parallel.core.muon.architectures import NORMS_WITHOUT_WEIGHTS
from hyper_parallel.core.muon.matrices import MatrixView
from hyper_parallel.core.plan.assignment import Assignment, RoleResult
from hyper_parallel.core.plan.model import ModelDescription, ParameterDescription
from hyper_parallel.core.plan.names import Name, acts_in, parse
from hyper_parallel.core.plan.role_rules import CONFIG_KEYS
from hyper_parallel.core.plan.roles import assign_roles
from hyper_parallel.core.plan.sizes import Path
from hyper_parallel.core.regions import Box, Interval, take, total

_NORMS = ("head_norm", "wide_norm", "per_head_norm")


class HeadRows(NamedTuple):
    """A box of a parameter, in global coordinates, that the logits of some query heads go with.

    `share` says how much of the factor it takes: "query", "key", or "whole" for what its counterpart can't take.
    """

    parameter: str
    box: Box
    heads: Interval
    share: str


@dataclass(frozen=True)
class Attention:
    """One attention module: its qualified name, its query heads, and what makes their queries and keys."""

    path: str
    heads: int
    rows: tuple[HeadRows, ...]


class Member(NamedTuple):
    """A parameter of an attention module."""

    name: Name
    parameter: ParameterDescription
    role: Assignment


class _Unclear(Exception):
    """Why nothing can be said of a module. Never leaves this file."""


def attentions_of(
    description: ModelDescription, roles: RoleResult | None = None
) -> tuple[tuple[Attention, ...], dict[str, str]]:
    """The attention modules that QK-clip can act on, in the model's order, and why it can't on others, by name."""
    roles = roles or assign_roles(description)
    views = views_of(description, roles=roles)
    text = description.config.get("text_config")
    config = text if isinstance(text, Mapping) else description.config
    modules: dict[Path, list[Member]] = {}
    for parameter in description.parameters:
        name, role = parse(parameter.name), roles.assignments.get(parameter.name)
        if role and role.role in ("query", "query_up", "key", "key_value_up", "qkv", *_NORMS):
            modules.setdefault(acts_in(name), []).append(Member(name, parameter, role))
    found, unclear = [], {}
    for holder, members in modules.items():
        path = members[0].name.module(len(holder))
        try:
            _refuse_norms(members, description.modules.get(path, ""), config)
            found.append(_attention(path, members, views, config))
        except _Unclear as reason:
            unclear[path] = str(reason)
    return tuple(found), unclear


def _attention(
    path: str, members: list[Member], views: Mapping[str, MatrixView], config: Mapping[str, object]
) -> Attention:
    linears = {each.role.role: each for each in members if len(each.parameter.shape) == 2 and not each.name.adapter}
    query = next((linears[role] for role in ("qkv", "query", "query_up") if role in linears), None)
    key = next((linears[role] for role in ("qkv", "key", "key_value_up") if role in linears), None)
    if query is None or key is None:
        raise _Unclear("nothing tells what makes its queries and keys")
    heads = _heads(query.role, config)
    if not heads:
        raise _Unclear("nothing tells the number of its heads")
    queries, keys = _outputs(views[query.parameter.name]), _outputs(views[key.parameter.name])
    plain = queries.get("query") or queries.get("")
    keyed = keys.get("key") or ([] if key is query or key.role.role == "key_value_up" else keys.get(""))
    if not plain or not keyed or ("rotated query" in queries) != (key.role.role == "key_value_up"):
        raise _Unclear("nothing tells which of its features are queries and which keys")
    key_heads = key.role.heads if key is not query else heads * total(keyed) // total(plain)
    rows = _rows(members, query, plain, heads, heads, "query")
    rows += _rows(members, query, queries.get("rotated query", []), heads, heads, "whole")
    rows += _rows(members, key, keyed, key_heads or 0, heads, "key")
    return Attention(path, heads, tuple(rows))


def _refuse_norms(members: list[Member], owner: str, config: Mapping[str, object]) -> None:
    """A norm of queries or keys undoes whatever their projections are scaled by."""
    norm = next((each.parameter.name for each in members if each.role.role in _NORMS), "")
    key = NORMS_WITHOUT_WEIGHTS.get(owner)
    if norm or (key is not None and (not key or config.get(key))):
        raise _Unclear(f"{norm or owner} norms what it would scale")


def _heads(role: Assignment, config: Mapping[str, object]) -> int:
    """Query heads of what makes queries; 0 where nothing tells."""
    if role.role != "qkv":
        return role.heads or 0
    if role.packed_heads:
        return role.packed_heads[0]
    return next((config[key] for key in CONFIG_KEYS["heads"] if isinstance(config.get(key), int)), 0)


def _outputs(view: MatrixView) -> dict[str, list[Interval]]:
    """The outputs of each matrix of a linear, as intervals in their order."""
    found = {}
    for matrix in view.matrices:
        ranges = matrix.columns if matrix.transposed else matrix.rows
        found[matrix.label] = [
            part
            for each in ranges
            for part in ([(each.start, each.stop)] if each.step == 1 else [(index, index + 1) for index in each])
        ]
    return found


def _rows(
    members: list[Member], linear: Member, outputs: list[Interval], count: int, heads: int, share: str
) -> list[HeadRows]:
    """What each of `count` heads has of some outputs of a linear: in its weight, its bias, and adapters around it."""
    if not outputs:
        return []
    length = total(outputs)
    if not count or length % count or heads % count:
        raise _Unclear(f"{length} features of {linear.parameter.name} don't make {count} heads for {heads} queries")
    each, group, found = length // count, heads // count, []
    for name, parameter, role in members:
        if name.path != linear.name.path or name.adapter == "in" or role.output_dim is None:
            continue
        if not parameter.trainable:
            raise _Unclear(f"{parameter.name} is frozen")
        for head in range(count):
            for part in take(outputs, head * each, (head + 1) * each):
                box = [slice(0, size) for size in parameter.shape]
                box[role.output_dim] = slice(*part)
                found.append(HeadRows(parameter.name, tuple(box), (head * group, (head + 1) * group), share))
    return found
