"""Which parameters Muon updates, and which AdamW, each with the reason."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Iterable, Mapping, NamedTuple

from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.muon.adapters import fitting, views_of
from hyper_parallel.core.muon.architectures import (
    BY_ELEMENT_NAMES,
    BY_ELEMENT_ROLES,
    CONVOLUTIONS,
    HEAD_NAMES,
    INPUT_NAMES,
    LOOKED_UP_NAMES,
    NAMES_OF_SEVERAL,
    NO_MATRIX_ROLES,
)
from hyper_parallel.core.muon.matrices import MatrixView
from hyper_parallel.core.plan.assignment import Assignment, RoleResult
from hyper_parallel.core.plan.folding import fold
from hyper_parallel.core.plan.forms import matches
from hyper_parallel.core.plan.model import ModelDescription, ParameterDescription
from hyper_parallel.core.plan.names import Name, parse
from hyper_parallel.core.plan.role_rules import EMBEDDING_CLASSES, NORM_CLASSES, ROLES
from hyper_parallel.core.plan.roles import all_names, assign_roles, outside_blocks

ALGORITHMS = ("muon", "adamw")


class Route(NamedTuple):
    """Who updates a parameter: "muon" or "adamw". `why` says it in words. What is used element by element, as norms and
    biases are, is not to decay."""

    algorithm: str
    why: str
    decays: bool = True


def routes_of(
    description: ModelDescription,
    given: Mapping[str, str] | None = None,
    views: Mapping[str, MatrixView] | None = None,
    roles: RoleResult | None = None,
) -> dict[str, Route]:
    """A route for every parameter, frozen ones too, by its first name.

    Matrices inside of the model go to Muon, routers and convolutions included. To AdamW go vectors, embeddings, what
    makes the model's outputs, norms, biases, depthwise kernels, factors of low-rank adapters, and what is tied to one
    of these. The planner's roles decide where they are known, classes and names where they are not.

    Args:
        description: the model.
        given: "muon" or "adamw" by pattern over names, further names of tied parameters included; the later entry
            wins.
        views: what `views_of` gave, and `roles` what the planner's pass 1 did, where they are known already.

    Raises:
        ConfigError: another word, a pattern that is none or that fits no parameter, and a parameter of fewer than two
            dims that is given to Muon; names the pattern and the parameters.
    """
    roles = roles or assign_roles(description)
    views = views if views is not None else views_of(description, roles=roles)
    vocabulary = _vocabulary(description)
    names: dict[str, list[ParameterDescription]] = {each.name: [] for each in description.parameters}
    for each in all_names(description):
        names[description.tied.get(each.name, each.name)].append(each)
    routes = {}
    for name, uses in names.items():
        found = [_route(each, roles.assignments.get(each.name), views.get(name), vocabulary) for each in uses]
        first = next((number for number, each in enumerate(found) if each.algorithm == "adamw"), 0)
        tied = f"tied to {uses[first].name}, " if first else ""
        routes[name] = found[first]._replace(why=tied + found[first].why)
    for name, route in _given_routes(description, given or {}).items():
        routes[name] = route._replace(decays=routes[name].decays)
    return routes


def describe_routes(routes: Mapping[str, Route], views: Mapping[str, MatrixView]) -> str:
    """A line for each parameter: name, algorithm, the matrices [out, in] that Muon sees, and why. Layers that are alike
    share one."""
    rows = [("parameter", "goes to", "matrices", "")]
    for name, ((algorithm, why, _), shapes) in fold(
        [(name, (route, _matrices(views[name]) if route.algorithm == "muon" else "")) for name, route in routes.items()]
    ):
        rows.append((name, algorithm, shapes, why))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]]).rstrip() for row in rows
    )


def _matrices(view: MatrixView) -> str:
    """`4 x (24x32, 24x32)` for four planes of two matrices."""
    shapes = [f"{rows}x{columns}" for rows, columns in (matrix.shape for matrix in view.matrices)]
    text = ", ".join(shapes) if len(shapes) < 5 else f"{shapes[0]}, ... ({len(shapes)})"
    return f"{view.planes} x ({text})" if view.lead else text


def _given_routes(description: ModelDescription, given: Mapping[str, str]) -> dict[str, Route]:
    shapes = {each.name: each.shape for each in description.parameters}
    firsts = {name: name for name in shapes} | dict(description.tied)
    routes = {}
    for pattern, algorithm in given.items():
        if algorithm not in ALGORITHMS:
            raise ConfigError(f"routes: {pattern!r} goes to {algorithm!r}; write muon or adamw")
        found = dict.fromkeys(firsts[each] for each in fitting(pattern, firsts, "routes"))
        vectors = [f"{name} {list(shapes[name])}" for name in found if len(shapes[name]) < 2]
        if algorithm == "muon" and vectors:
            more = f" and {len(vectors) - 3} more" if len(vectors) > 3 else ""
            raise ConfigError(
                f"routes: {pattern!r} gives Muon what is no matrix: {', '.join(vectors[:3])}{more}; Muon "
                "orthogonalizes matrices, so name those of two dims or more only, or write adamw"
            )
        routes.update({name: Route(algorithm, f"given by routes {pattern!r}") for name in found})
    return routes


def _route(parameter: ParameterDescription, role: Assignment | None, view: MatrixView | None, vocabulary: int) -> Route:
    """Where one parameter goes, under one of its names."""
    name, shape = parse(parameter.name), parameter.shape
    reason = _by_element(parameter, name, role)
    if reason:
        return Route("adamw", reason, decays=False)
    reason = _no_matrix(parameter, name, role, vocabulary)
    if reason:
        return Route("adamw", reason)
    if view is None or all(min(matrix.stored_shape) == 1 for matrix in view.matrices):
        return Route("adamw", f"{list(shape)} is a vector in the shape of a matrix")
    own = role.role.replace("_", " ") if role else f"{parameter.module_class} inside of the model"
    count = len(view.matrices)
    parts = ", ".join(matrix.label or f"matrix {number}" for number, matrix in enumerate(view.matrices))
    told = f"{own}: {ROLES[role.role].description}" if role else own
    if count > 1:
        return Route("muon", f"{told}; as {parts}" if count < 8 else f"{told}; as {count} matrices")
    several = (name.path[-1:] if name.leaf == "weight" else (name.leaf,))[:1]
    if role is None and several and several[0] in NAMES_OF_SEVERAL:
        return Route("muon", f"{told}; taken as one matrix, though its name says several: tell which by `matrices`")
    return Route("muon", told)


def _by_element(parameter: ParameterDescription, name: Name, role: Assignment | None) -> str:
    """Why a parameter is used element by element, whatever its shape; "" for one that is not."""
    shape, owner = parameter.shape, parameter.module_class
    if len(shape) < 2:
        return "a vector" if shape else "a number"
    if name.adapter:
        return ""
    if role and role.role in BY_ELEMENT_ROLES:
        return BY_ELEMENT_ROLES[role.role]
    if name.leaf == "bias" or (role and name.leaf.endswith("_bias")):
        return "a bias"
    if matches(owner, NORM_CLASSES):
        return f"{owner}: a norm"
    bare = name.leaf != "weight" and (role is None or role.input_dim is None)
    return f"{name.leaf} is used element by element" if bare and _is_one_of([name.leaf], BY_ELEMENT_NAMES) else ""


def _no_matrix(parameter: ParameterDescription, name: Name, role: Assignment | None, vocabulary: int) -> str:
    """Why a parameter is none of the matrices inside of a model; "" for one that is."""
    shape, owner = parameter.shape, parameter.module_class
    if 0 in shape:
        return "empty"
    if name.adapter:
        return NO_MATRIX_ROLES["adapter"]
    if role and role.role in NO_MATRIX_ROLES:
        return NO_MATRIX_ROLES[role.role]
    if matches(owner, EMBEDDING_CLASSES):
        return f"{owner}: an embedding"
    if any(fnmatchcase(owner, each) for each in CONVOLUTIONS) and shape[1] == 1:
        return f"{owner}: a depthwise kernel, a filter of its own for each channel"
    if name.leaf != "weight" and (role is None or role.input_dim is None):
        if _is_one_of([name.leaf], LOOKED_UP_NAMES):
            return f"{name.leaf} is looked up, or added"
    return _end(name, shape, vocabulary) if role is None and outside_blocks(name.path) else ""


def _end(name: Name, shape: tuple[int, ...], vocabulary: int) -> str:
    """Why something outside of repeated blocks belongs to the model's inputs or outputs; "" where it does not."""
    if vocabulary and vocabulary in shape:
        return f"one dim is over the {vocabulary} tokens of the vocabulary"
    if _is_one_of(name.path, INPUT_NAMES):
        return "makes hidden states of inputs"
    if _is_one_of(name.path, HEAD_NAMES):
        return "makes outputs"
    return ""


def _is_one_of(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _vocabulary(description: ModelDescription) -> int:
    """The configured number of tokens, 0 where nothing tells it."""
    text = description.config.get("text_config")
    value = (text if isinstance(text, Mapping) else description.config).get("vocab_size")
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
