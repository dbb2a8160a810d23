"""What a user hands over (a model, parameters, groups with options) as parameter groups, complete and checked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Iterable, Mapping, Sequence

from hyper_parallel.core.backend import Backend, Module, Parameter
from hyper_parallel.core.dtensor import DTensor
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.muon.adapters import views_of
from hyper_parallel.core.muon.matrices import MatrixView
from hyper_parallel.core.muon.options import ADAMW, ALGORITHMS, MUON, check_options
from hyper_parallel.core.muon.routing import routes_of
from hyper_parallel.core.muon.storage import Stored, found_layout, stored
from hyper_parallel.core.plan.model import ModelDescription, ParameterDescription, describe
from hyper_parallel.core.plan.roles import assign_roles

Defaults = Mapping[str, Mapping[str, Any]]
"""The options of each algorithm where a group says nothing."""

WITHOUT_DECAY = "adamw_without_decay"
"""Beside the algorithms: the options of a model's norms, biases and vectors."""


@dataclass(frozen=True)
class Group:
    """Parameters with one algorithm and one set of options."""

    algorithm: str
    options: Mapping[str, Any]
    members: tuple[Stored, ...]


@dataclass(frozen=True)
class Request:
    """What to optimize. `views` are of all parameters that Muon has, but for those without elements; `description` is
    there where a model was given."""

    groups: tuple[Group, ...]
    views: Mapping[str, MatrixView]
    description: ModelDescription | None = None


@dataclass(frozen=True)
class Asked:
    """What else the user has said of the parameters: routes and matrices by pattern, and where plain ones lie."""

    defaults: Defaults
    routes: Mapping[str, str] = field(default_factory=dict)
    matrices: Mapping[str, Any] = field(default_factory=dict)
    mesh: DeviceMesh | None = None


def read_model(backend: Backend, model: Module, asked: Asked) -> Request:
    """The trainable parameters of a model: matrices inside of it go to Muon, all else to AdamW, as routes say."""
    found: dict[str, Stored] = {}
    seen: set[int] = set()
    for use in backend.modules.parameter_uses(model):
        if backend.modules.is_trainable(use.parameter) and id(use.parameter) not in seen:
            seen.add(id(use.parameter))
            found[use.name] = stored(backend, use.name, use.parameter, asked.mesh)
    if not found:
        raise ConfigError(f"Muon: nothing in this {type(model).__name__} asks for a gradient")
    description = whole_description(backend, model)
    roles = assign_roles(description)
    routes = routes_of(description, asked.routes, roles=roles)
    parts: dict[str, list[Stored]] = {MUON: [], ADAMW: [], WITHOUT_DECAY: []}
    for name, each in found.items():
        algorithm = routes[name].algorithm
        parts[WITHOUT_DECAY if algorithm == ADAMW and not routes[name].decays else algorithm].append(each)
    groups = tuple(
        Group(MUON if part == MUON else ADAMW, dict(asked.defaults[part]), tuple(members))
        for part, members in parts.items()
        if members
    )
    views = views_of(description, asked.matrices, roles)
    return Request(groups, {each.name: views[each.name] for each in parts[MUON] if each.name in views}, description)


def read_groups(backend: Backend, given: Iterable[Any], asked: Asked) -> Request:
    """Parameters, or pairs of name and parameter, or groups of them with options (dicts).

    Without a model nothing is known of a parameter but its name and shape, so all of them go to Muon, but for those of
    groups that say otherwise and what `routes` name.
    """
    items = list(given)
    if not items:
        raise ConfigError("Muon: there are no parameters; give a model, a list of parameters, or groups of them")
    if not any(isinstance(item, Mapping) for item in items):
        items = [{"params": items}]
    named = [_named(item, number) for number, item in enumerate(items)]
    _refuse_twice(named)
    groups, counted = [], 0
    for number, (item, pairs) in enumerate(zip(items, named)):
        members = []
        for name, parameter in pairs:
            name = name or f"parameter.{counted}"
            counted += 1
            if backend.modules.is_trainable(_tensor(parameter)):
                members.append(stored(backend, name, parameter, asked.mesh))
        groups += _routed(item, number, members, asked)
    if not any(group.members for group in groups):
        raise ConfigError("Muon: none of the parameters asks for a gradient")
    _refuse_same_names(groups)
    description = _described(backend, groups)
    routes_of(description, asked.routes)  # refuses patterns that fit nothing, and vectors that Muon is to have
    _refuse_vectors(groups)
    views = views_of(description, asked.matrices)
    wanted = [each.name for group in groups if group.algorithm == MUON for each in group.members]
    return Request(tuple(groups), {name: views[name] for name in wanted if name in views})


def whole_description(backend: Backend, model: Module) -> ModelDescription:
    """The description of a model with the global shapes of its parameters, however they are cut."""
    description = describe(model, backend)
    held = {use.name: use.parameter for use in backend.modules.parameter_uses(model)}
    parameters = []
    for each in description.parameters:
        layout = found_layout(backend, held[each.name])
        parameters.append(each if layout is None else replace(each, shape=layout.shape))
    return replace(description, parameters=tuple(parameters))


def _tensor(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _named(item: Any, number: int) -> list[tuple[str, Parameter]]:
    """The parameters of a group, "" where they have no name."""
    where = f"Muon: group {number}"
    if not isinstance(item, Mapping):
        raise ConfigError(f'{where} is {type(item).__name__} among dicts; write {{"params": [...], ...}} for each')
    if "params" not in item:
        raise ConfigError(f'{where} has no "params"; it has {", ".join(map(repr, item))}')
    params = item["params"]
    if isinstance(params, set):
        raise ConfigError(f"{where}: a set has another order in each run; write a list of parameters")
    single = isinstance(params, (tuple, list)) and len(params) == 2 and isinstance(params[0], str)
    params = [params] if single or not isinstance(params, Iterable) or hasattr(params, "shape") else list(params)
    pairs = []
    for each in params:
        pair = each if isinstance(each, (tuple, list)) else ("", each)
        if len(pair) != 2 or not isinstance(pair[0], str):
            raise ConfigError(f"{where} holds {each!r}; write parameters, or pairs (name, parameter)")
        pairs.append((pair[0], pair[1]))
    return pairs


def _refuse_twice(named: Sequence[Sequence[tuple[str, Parameter]]]) -> None:
    """A parameter belongs to one group, once."""
    seen: dict[int, tuple[int, str]] = {}
    for number, pairs in enumerate(named):
        for name, parameter in pairs:
            tensor = _tensor(parameter)
            if id(tensor) in seen:
                other, called = seen[id(tensor)]
                label = name or called or f"a parameter of shape {list(getattr(tensor, 'shape', ()))}"
                places = f"group {number} twice" if other == number else f"groups {other} and {number}"
                raise ConfigError(f"Muon: {label} is in {places}; it would be updated twice. Leave it in one place")
            seen[id(tensor)] = (number, name)


def _routed(item: Mapping[str, Any], number: int, members: list[Stored], asked: Asked) -> list[Group]:
    """The group that a dict asks for; two where `routes` send a part of it elsewhere."""
    where = f"Muon: group {number}"
    said = {key: value for key, value in item.items() if key not in ("params", "algorithm")}
    algorithm = item.get("algorithm", MUON)
    if algorithm not in ALGORITHMS:
        raise ConfigError(f'{where}: algorithm is {algorithm!r}; write "muon" or "adamw"')
    check_options(algorithm, said, where)
    elsewhere = set()
    if "algorithm" not in item and asked.routes:
        elsewhere = {name for name in _sent(asked.routes, members) if name}
    kept = [each for each in members if each.name not in elsewhere]
    others = [each for each in members if each.name in elsewhere]
    groups = [Group(algorithm, {**asked.defaults[algorithm], **said}, tuple(kept))] if kept or not others else []
    if others:
        groups.append(Group(ADAMW, {**asked.defaults[ADAMW]}, tuple(others)))
    return groups


def _sent(routes: Mapping[str, str], members: Sequence[Stored]) -> list[str]:
    """The names that routes send to AdamW."""
    from hyper_parallel.core.plan.patterns import matching

    names = [each.name for each in members]
    sent: dict[str, str] = {}
    for pattern, algorithm in routes.items():
        sent.update(dict.fromkeys(matching(pattern, names), algorithm))
    return [name for name, algorithm in sent.items() if algorithm == ADAMW]


def _refuse_same_names(groups: Sequence[Group]) -> None:
    names = [each.name for group in groups for each in group.members]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"Muon: two parameters are called {twice[0]!r}; state is kept by name, so give each its own")


def _refuse_vectors(groups: Sequence[Group]) -> None:
    """Muon orthogonalizes matrices; a vector has no other direction than its own."""
    for group in groups:
        for each in group.members if group.algorithm == MUON else ():
            if len(each.layout.shape) < 2:
                raise ConfigError(
                    f"Muon: {each.name} has the shape {list(each.layout.shape)}, and Muon updates matrices; put it "
                    'into a group with "algorithm": "adamw"'
                )


def _described(backend: Backend, groups: Sequence[Group]) -> ModelDescription:
    """All that is known of parameters without a model."""
    parameters = tuple(
        ParameterDescription(each.name, each.layout.shape, backend.tensors.dtype_name(each.parameter), "")
        for group in groups
        for each in group.members
    )
    return ModelDescription("", parameters)
