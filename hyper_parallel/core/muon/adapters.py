"""Which matrices each parameter holds: from the planner's roles, what architectures say of themselves, or a user."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache
from math import prod
from typing import Any, Iterable, Mapping, Sequence

from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.muon.architectures import CONVOLUTIONS, FUSED_ROWS, LATENT_ROLES, FusedRows
from hyper_parallel.core.muon.matrices import LogicalMatrix, MatrixView, usual_view
from hyper_parallel.core.plan.architectures import GATED_QUERIES, PACKED_EXPERTS
from hyper_parallel.core.plan.assignment import Assignment, RoleResult
from hyper_parallel.core.plan.forms import matches
from hyper_parallel.core.plan.model import ModelDescription, ParameterDescription
from hyper_parallel.core.plan.names import Name, acts_in, parse
from hyper_parallel.core.plan.patterns import matching, problem_of
from hyper_parallel.core.plan.role_rules import CONFIG_KEYS, TRANSPOSED_CLASSES
from hyper_parallel.core.plan.roles import assign_roles

Part = tuple[str, int]
"""What some outputs are, and how many."""

View = MatrixView | Mapping[str, Any] | str
"""A view, or a short form: "whole", or a mapping with keys of `SHORT_FORMS`."""

SHORT_FORMS: Mapping[str, str] = {
    "split_rows": "sizes of the matrices that stand one below the other",
    "labels": "a name for each of them",
    "groups": "that many times over",
    "heads": "so many matrices of the same size, one below the other",
    "interleaved": "so many matrices whose rows alternate one by one",
    "transposed": "whether the parameter is stored as [in, out]",
    "experts": "whether the first dim counts matrices",
}


def views_of(
    description: ModelDescription, given: Mapping[str, View] | None = None, roles: RoleResult | None = None
) -> dict[str, MatrixView]:
    """The logical matrices of every parameter of two dims or more, by its first name, in global coordinates.

    A fused parameter holds the matrices that the same model would have unfused: queries, keys and values; gates and
    ups; what a latent attention splits each head into. Packed experts are matrices of their own.

    Args:
        description: the model.
        given: views or short forms by pattern over names, further names of tied parameters included; the later entry
            wins. In a short form rows are outputs, also where the parameter stores them as columns; what it does not
            say of `transposed` and `experts` is as the model tells.
        roles: pass 1 of the planner, where it is known already.

    Raises:
        ConfigError: a pattern that is none or that fits no parameter of two dims, a short form that is none, a view
            that does not fit the parameter; names the pattern and the parameter.
    """
    model = _Model(description, roles or assign_roles(description))
    views = {}
    for parameter in description.parameters:
        if len(parameter.shape) > 1 and 0 not in parameter.shape:
            views[parameter.name] = model.view(parameter)
    names = {parameter.name: parameter.name for parameter in description.parameters} | dict(description.tied)
    for pattern, form in (given or {}).items():
        for name in dict.fromkeys(names[each] for each in fitting(pattern, names, "matrices")):
            if name not in views:
                shape = next(list(each.shape) for each in description.parameters if each.name == name)
                raise ConfigError(f"matrices {pattern!r}: {name} {shape} is no matrix; name those of two dims or more")
            views[name] = _given_view(f"matrices {pattern!r}: {name}", views[name], form)
    return views


def fitting(pattern: Any, names: Iterable[str], key: str) -> list[str]:
    """The names that a user's pattern fits.

    Raises:
        ConfigError: it is no pattern, or fits none.
    """
    problem = problem_of(pattern)
    if problem:
        raise ConfigError(f"{key}: {pattern!r}: {problem}")
    names = list(names)
    found = matching(pattern, names)
    if not found:
        tail = str(pattern).rpartition(".")[2]
        alike = [each for each in names if tail.strip("*") and tail.strip("*") in each] or names
        raise ConfigError(
            f"{key}: {pattern!r} fits no parameter; names are as {', '.join(alike[:3])}; * is one part of a name "
            "between dots, ** any number of them"
        )
    return found


def packed_view(
    shape: Sequence[int], parts: Sequence[Part], groups: int = 1, transposed: bool = False, lead: int = 0
) -> MatrixView:
    """A parameter whose outputs are, `groups` times over, `parts` one below the other: a matrix for each part.

    Outputs are the first dim after the `lead` ones, or, where the parameter is stored `transposed`, all after that.

    Raises:
        ConfigError: the parts leave outputs out or are too many.
    """
    shape = tuple(shape)
    rows, columns = prod(shape[lead : lead + 1]), prod(shape[lead + 1 :])
    outputs, inputs = (columns, rows) if transposed else (rows, columns)
    period = sum(size for _, size in parts)
    if period * groups != outputs or min((size for _, size in parts), default=0) < 1:
        sizes = " + ".join(str(size) for _, size in parts)
        raise ConfigError(
            f"{list(shape)} has {outputs} outputs, found {groups} x ({sizes}) = {period * groups} of them"
        )
    matrices, start = [], 0
    for label, size in parts:
        own = _ranges(start, size, period, groups)
        whole = (range(inputs),)
        matrices.append(LogicalMatrix(*((whole, own) if transposed else (own, whole)), transposed, label))
        start += size
    return MatrixView(shape, lead, lead + 1, tuple(matrices))


def _ranges(start: int, size: int, period: int, groups: int) -> tuple[range, ...]:
    """`size` indices from `start` on, and again in each period."""
    if size == period:
        return (range(start, period * groups),)
    if size == 1 and groups > 1:
        return (range(start, period * groups, period),)
    return tuple(range(start + group * period, start + group * period + size) for group in range(groups))


class _Model:
    """A description, read once for all of its parameters."""

    def __init__(self, description: ModelDescription, roles: RoleResult) -> None:
        self._description = description
        self._roles = roles
        text = description.config.get("text_config")
        self._config: Mapping[str, Any] = text if isinstance(text, Mapping) else description.config
        self._latents = {
            acts_in(parse(name)) for name, role in roles.assignments.items() if role.role == "key_value_up"
        }

    def view(self, parameter: ParameterDescription) -> MatrixView:
        """What the model tells of one parameter of two dims or more."""
        name, role = parse(parameter.name), self._roles.assignments.get(parameter.name)
        lead, transposed = _storage(parameter, role)
        outputs = prod(parameter.shape[lead + 1 :]) if transposed else parameter.shape[lead]
        parts, groups = self._parts(name, parameter, role, outputs)
        if sum(size for _, size in parts) * groups != outputs:
            parts, groups = (("", outputs),), 1
        return _view(parameter.shape, tuple(parts), groups, transposed, lead)

    def _parts(
        self, name: Name, parameter: ParameterDescription, role: Assignment | None, outputs: int
    ) -> tuple[Sequence[Part], int]:
        """Parts of the outputs, and how many times over; no parts for one matrix."""
        entry = self._entry(name)
        if entry:
            groups = _number(entry.groups, self._config)
            return _sized(entry.parts, outputs // groups if groups else 0, self._config), groups or 1
        latent = self._latent(name, role, outputs)
        if latent is not None:
            return latent
        if role is None:
            return _packed_gates(parameter, outputs)
        if role.output_dim is None or role.input_dim is None or name.adapter == "in":
            return (), 1
        labels = ("query", "key", "value") if role.role == "qkv" else ("gate", "up")
        if role.packing:
            return tuple(zip(labels, role.packing)), 1
        if role.interleaved > 1:
            return tuple((label, 1) for label in labels), outputs // role.interleaved
        if role.role == "qkv":
            return self._grouped(role.heads or 0, outputs)
        owner, heads = self.class_of(name, len(acts_in(name))), role.heads or 1
        if role.role == "query" and owner in GATED_QUERIES and outputs % (2 * heads) == 0:
            each = outputs // (2 * heads)
            return (("query", each), ("gate", each)), heads
        return (), 1

    def _grouped(self, groups: int, outputs: int) -> tuple[Sequence[Part], int]:
        """For each key head its queries, its key, its value."""
        heads = self._heads()
        if not groups or heads % groups or outputs % (heads + 2 * groups):
            return (), 1
        each = outputs // (heads + 2 * groups)
        return (("query", heads // groups * each), ("key", each), ("value", each)), groups

    def _latent(self, name: Name, role: Assignment | None, outputs: int) -> tuple[Sequence[Part], int] | None:
        """What each head has in latent attention, whose features with positions stand apart; None elsewhere. Names of
        their own tell it too, where the planner knows no role; sizes have to fit all the same."""
        kind = role.role if role and acts_in(name) in self._latents else ""
        if role is None or role.role == "latent":
            kind = LATENT_ROLES.get(name.path[-1], "") if name.path and name.leaf == "weight" else ""
        keys = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        plain, turned, value = (_number(key, self._config) for key in keys)
        heads = (role.heads if role else None) or self._heads()
        if not (kind and plain and turned and value and heads) or name.adapter == "in":
            return None
        if kind in ("query", "query_up"):
            return (("query", plain), ("rotated query", turned)), heads
        if kind == "key_value_up":
            return (("key", plain), ("value", value)), heads
        return ((("latent", outputs - turned), ("rotated key", turned)), 1) if kind == "latent" else None

    def _heads(self) -> int:
        """The configured number of query heads; 0 where nothing tells one for all layers."""
        told = (self._config.get(key) for key in CONFIG_KEYS["heads"])
        return next((each for each in told if _is_count(each)), 0)

    def _entry(self, name: Name) -> FusedRows | None:
        bare = name.leaf not in ("weight", "bias")
        path = name.path + (name.leaf,) if bare else name.path
        if name.adapter or not path:
            return None
        around = self.class_of(name, len(path) - 1)
        return next((each for each in FUSED_ROWS if around in each.classes and path[-1] in each.linears), None)

    def class_of(self, name: Name, depth: int) -> str:
        """The class of the module `name.path[:depth]`."""
        return self._description.modules.get(name.inner(depth), "")


@lru_cache(maxsize=1024)
def _view(shape: tuple[int, ...], parts: tuple[Part, ...], groups: int, transposed: bool, lead: int) -> MatrixView:
    """A view; layers are alike by the hundred, and experts by the thousand."""
    return packed_view(shape, parts, groups, transposed, lead)


def _storage(parameter: ParameterDescription, role: Assignment | None) -> tuple[int, bool]:
    """How many leading dims count matrices, and whether outputs come last."""
    owner, dims = parameter.module_class, len(parameter.shape)
    if any(fnmatchcase(owner, each) for each in CONVOLUTIONS):
        return 0, "Transpose" in owner
    if role and role.output_dim is not None and role.input_dim is not None:
        return min(role.output_dim, role.input_dim), role.output_dim > role.input_dim
    if dims == 2:
        return 0, matches(owner, TRANSPOSED_CLASSES)
    known = next((each for each in PACKED_EXPERTS if owner in each.classes), None)
    return (1, known.transposed) if known and dims == 3 else (usual_view(parameter.shape).lead, False)


def _packed_gates(parameter: ParameterDescription, outputs: int) -> tuple[Sequence[Part], int]:
    """Gates and ups of packed experts of a class that is known, where the planner could not place them."""
    known = next((each for each in PACKED_EXPERTS if parameter.module_class in each.classes), None)
    if not known or len(parameter.shape) != 3 or not parameter.name.endswith("gate_up_proj") or outputs % 2:
        return (), 1
    groups = outputs // 2 if known.interleaved > 1 else 1
    return tuple((label, outputs // 2 // groups) for label in ("gate", "up")), groups


def one_matrix(view: MatrixView, transposed: bool) -> MatrixView:
    """One matrix in each plane of a view."""
    rows, columns = view.plane
    whole = LogicalMatrix((range(rows),), (range(columns),), transposed)
    return MatrixView(view.shape, view.lead, view.split, (whole,))


def _given_view(where: str, derived: MatrixView, form: Any) -> MatrixView:
    """A user's view, or what a short form says of a parameter that the model tells `derived` of."""
    if isinstance(form, MatrixView):
        if form.shape != derived.shape:
            raise ConfigError(f"{where} has the shape {list(derived.shape)}, and the view is of {list(form.shape)}")
        return form
    if form == "whole":
        return one_matrix(derived, derived.matrices[0].transposed)
    _check_form(where, form)
    transposed = form.get("transposed", derived.matrices[0].transposed)
    lead = derived.lead if "experts" not in form else int(form["experts"])
    split = lead + 1 if lead != derived.lead else derived.split
    if split >= len(derived.shape):
        raise ConfigError(f"{where} {list(derived.shape)}: with experts along dim 0 it needs three dims")
    usual = MatrixView(derived.shape, lead, split)
    rows, columns = usual.plane
    parts, groups = _parts_of(where, form, columns if transposed else rows)
    if not parts:
        return one_matrix(usual, transposed)
    try:
        return packed_view(derived.shape, parts, groups, transposed, lead)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_form(where: str, form: Any) -> None:
    """A short form has known keys, numbers where numbers belong, and one way to split."""
    known = ", ".join(f"{key} ({words})" for key, words in SHORT_FORMS.items())
    if not isinstance(form, Mapping):
        raise ConfigError(f'{where}: {form!r} is no view; write "whole", a MatrixView, or a mapping of {known}')
    for key, value in form.items():
        if key not in SHORT_FORMS:
            raise ConfigError(f"{where}: there is no {key!r}; known are {known}")
        if key in ("transposed", "experts"):
            good = isinstance(value, bool)
        elif key == "labels":
            good = isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)
        elif key == "split_rows":
            good = isinstance(value, (list, tuple)) and len(value) > 0 and all(map(_is_count, value))
        else:
            good = _is_count(value)
        if not good:
            raise ConfigError(f"{where}: {key} is {SHORT_FORMS[key]}, found {value!r}")
    ways = [key for key in ("split_rows", "heads", "interleaved") if key in form]
    if len(ways) > 1:
        raise ConfigError(f"{where}: {' and '.join(ways)} are two ways to split; give one")
    for key in ("labels", "groups"):
        if key in form and "split_rows" not in form:
            raise ConfigError(f"{where}: {key} belongs to split_rows, which is not given")


def _parts_of(where: str, form: Mapping[str, Any], outputs: int) -> tuple[Sequence[Part], int]:
    if "split_rows" in form:
        sizes = form["split_rows"]
        labels = form.get("labels", [""] * len(sizes))
        if len(labels) != len(sizes):
            raise ConfigError(f"{where}: {len(sizes)} split_rows and {len(labels)} labels; give one for each")
        return tuple(zip(labels, sizes)), form.get("groups", 1)
    for key, label in (("heads", "head"), ("interleaved", "kind")):
        if key in form:
            count = form[key]
            if outputs % count:
                raise ConfigError(f"{where}: {outputs} outputs are no multiple of {key} {count}")
            each = outputs // count if key == "heads" else 1
            return tuple((f"{label} {index}", each) for index in range(count)), outputs // (each * count)
    return (), 1


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _number(text: str, config: Mapping[str, Any]) -> int:
    """The value of a product of numbers and keys, divided by others; 0 where the configuration does not tell."""
    above, _, below = text.partition("/")
    top, bottom = _product(above, config), _product(below, config)
    return top // bottom if bottom and top % bottom == 0 else 0


def _product(text: str, config: Mapping[str, Any]) -> int:
    words = [each.strip() for each in text.split("*") if each.strip()]
    values = [int(word) if word.isdigit() else config.get(word) for word in words]
    return prod(value if _is_count(value) else 0 for value in values)


def _sized(parts: Sequence[tuple[str, str]], outputs: int, config: Mapping[str, Any]) -> Sequence[Part]:
    """Parts with their sizes; none where the sizes don't make up the outputs."""
    sizes = [_number(size, config) if size else None for _, size in parts]
    open_, left = sizes.count(None), outputs - sum(size or 0 for size in sizes)
    if 0 in sizes or left < 0 or (left % open_ if open_ else left):
        return ()
    return tuple((label, left // open_ if size is None else size) for (label, _), size in zip(parts, sizes))
