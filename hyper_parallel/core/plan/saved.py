"""A sharding plan as plain values, read by somebody who believes nothing: a file may be edited by hand."""

from __future__ import annotations

from collections.abc import Mapping  # typing's takes ten times as long to ask whether something is one
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Callable, Iterable

from hyper_parallel.core.errors import LayoutError, PlanError
from hyper_parallel.core.host import collector_at_rest
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Partial, Placement, Replicate, parse_placement
from hyper_parallel.core.plan.boundaries import TYPES
from hyper_parallel.core.plan.contracts import BoundaryPlan, Contract
from hyper_parallel.core.plan.model import ITEM_BYTES
from hyper_parallel.core.plan.role_rules import ROLES

if TYPE_CHECKING:
    from hyper_parallel.core.plan.plan import ParameterPlan, ShardingPlan

FORMAT = 2
"""Version of the YAML form."""

MOST_RANKS = 2**20
"""A mesh of more ranks than this is no mesh that somebody has."""

_KEYS = {
    "plan": "format model mesh ranks units parameters sequence_parallel tokens boundaries tied notes overrides",
    "unit": "name reshard_after_forward",
    "parameter": "shape dtype trainable placements unit role rule boundary pending notes",
    "boundary": "kind region inputs outputs note",
    "contract": "name dims size before after gradient gradient_before",
}
"""The keys of each mapping in a file."""


@collector_at_rest()
def read_plan(values: Any) -> ShardingPlan:
    """The plan that `ShardingPlan.to_dict` gave.

    Raises:
        PlanError: a key is missing, or a value is not what a plan holds; names the place in the file and what was
            found.
    """
    from hyper_parallel.core.plan.plan import ShardingPlan

    if not isinstance(values, Mapping):
        raise PlanError(f"a plan is a mapping, found {_short(values)}")
    if _get(values, "format", int, "") != FORMAT:
        raise PlanError(f"a plan of format {values['format']} can't be read; this version reads {FORMAT}")
    _refuse_others(values, "plan", "")
    mesh = _mesh(values)
    layouts = _Layouts(mesh)
    units = _units(values)
    tokens = _get(values, "tokens", list, "")
    if len(tokens) != 2 or not all(_is(each, int) and each >= 0 for each in tokens):
        raise PlanError(f"tokens: found {_short(tokens)}, write a number of sequences and the tokens of each")
    parameters = tuple(
        _parameter(name, each, layouts, {unit.name for unit in units})
        for name, each in _entries(values, "parameters", Mapping)
    )
    tied = dict(_entries(values, "tied", str))
    names = {each.name for each in parameters}
    for name, first in tied.items():
        if first not in names or name in names:
            raise PlanError(f"tied: {name}: found {_short(first)}, write a parameter's first name, for another name")
    boundaries = _entries(values, "boundaries", Mapping)
    modules = {module for module, _ in boundaries}
    for each in parameters:
        if each.boundary and each.boundary not in modules and not each.name.startswith(f"{each.boundary}."):
            raise PlanError(
                f"parameters: {each.name}: boundary: found {_short(each.boundary)}, write a module around the "
                "parameter, or one of `boundaries`"
            )
    return ShardingPlan(
        model_class=_get(values, "model", str, ""),
        mesh=mesh,
        units=units,
        parameters=parameters,
        tied=tied,
        notes=_texts(values, "notes", ""),
        boundaries=tuple(_boundary(module, each, layouts, tuple(tokens)) for module, each in boundaries),
        sequence_parallel=_get(values, "sequence_parallel", bool, ""),
        tokens=tuple(tokens),
        overrides=dict(_entries(values, "overrides", str)),
    )


class _Layouts:
    """Checks that placements mean something on the mesh; the parameters of a model share a few dozen layouts."""

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh
        self._known: dict[tuple, Layout] = {}

    def check(
        self,
        placements: Mapping[str, Placement],
        shape: tuple[int, ...],
        where: str,
        gradient: Mapping[str, Placement] | None = None,
    ) -> Layout:
        """The layout; raises PlanError."""
        key = (tuple(placements.items()), shape, tuple((gradient or {}).items()))
        if key not in self._known:
            most = max(self.mesh.size, *shape, 1)
            if wide := [each for each in placements.values() if getattr(each, "split_factor", 1) > most]:
                raise PlanError(f"{where}: {wide[0]} makes more blocks than the mesh has ranks or a dim has elements")
            try:
                self._known[key] = Layout(self.mesh, placements, shape, gradient)
            except LayoutError as error:
                raise PlanError(f"{where}: {error}") from error
        return self._known[key]


def _mesh(values: Mapping[str, Any]) -> DeviceMesh:
    sizes = dict(_entries(values, "mesh", int))
    if any(size < 1 for size in sizes.values()) or prod(sizes.values()) > MOST_RANKS:
        raise PlanError(f"mesh: found {_short(sizes)}, write sizes from 1 up, for at most {MOST_RANKS:,} ranks")
    ranks = _require(values, "ranks", "")
    if ranks is not None and not (isinstance(ranks, list) and all(_is(each, int) for each in ranks)):
        raise PlanError(f"ranks: found {_short(ranks)}, write a list of ranks, or null for ranks in order")
    try:
        return DeviceMesh(tuple(sizes.values()), tuple(sizes), ranks)
    except LayoutError as error:
        raise PlanError(f"mesh: {error}") from error


def _units(values: Mapping[str, Any]) -> tuple:
    from hyper_parallel.core.plan.plan import UnitPlan

    units = []
    for number, each in enumerate(_get(values, "units", list, ""), start=1):
        where = f"units: number {number}"
        units.append(UnitPlan(_get(each, "name", str, where), _get(each, "reshard_after_forward", bool, where)))
        _refuse_others(each, "unit", where)
    _refuse_twice((unit.name for unit in units), "units")
    return tuple(units)


def _parameter(name: str, values: Mapping[str, Any], layouts: _Layouts, units: set[str]) -> ParameterPlan:
    from hyper_parallel.core.plan.plan import ParameterPlan

    where = f"parameters: {name}"
    _refuse_others(values, "parameter", where)
    shape = _numbers(values, "shape", where)
    placements = _placements(values, "placements", where)
    if summed := [axis for axis, each in placements.items() if isinstance(each, Partial)]:
        raise PlanError(
            f"{where}: placements: {summed[0]}: a parameter is no partial value; write replicate or a shard"
        )
    layout = layouts.check(placements, shape, f"{where}: placements")
    return ParameterPlan(
        name=name,
        shape=shape,
        dtype=_one_of(values, "dtype", ITEM_BYTES, where),
        trainable=_get(values, "trainable", bool, where),
        placements=placements,
        unit=_one_of(values, "unit", units, where),
        role=_one_of(values, "role", ("", *ROLES), where),
        rule=_get(values, "rule", str, where),
        boundary=_get(values, "boundary", str, where),
        pending=_axes(values, "pending", where, layouts.mesh),
        local_shape=layout.local_shape(layouts.mesh.ranks[0]),  # follows: a placement may be edited by hand
        notes=_texts(values, "notes", where),
    )


def _boundary(module: str, values: Mapping[str, Any], layouts: _Layouts, tokens: tuple[int, int]) -> BoundaryPlan:
    where = f"boundaries: {module or '(the model itself)'}"
    _refuse_others(values, "boundary", where)
    inputs, outputs = (
        tuple(
            _contract(each, layouts, tokens, f"{where}: {side}: number {number}")
            for number, each in enumerate(_get(values, side, list, where), start=1)
        )
        for side in ("inputs", "outputs")
    )
    for side, contracts in (("inputs", inputs), ("outputs", outputs)):
        _refuse_twice((each.name for each in contracts), f"{where}: {side}")
    region = _one_of(values, "region", ("checked", "transparent", "opaque"), where)
    kind = _one_of(values, "kind", TYPES, where)
    return BoundaryPlan(module, kind, inputs, outputs, region, _get(values, "note", str, where))


def _contract(values: Any, layouts: _Layouts, tokens: tuple[int, int], where: str) -> Contract:
    dims, size = _get(values, "dims", int, where), _get(values, "size", int, where)
    if dims not in (1, 2, 3) or size < 0:
        raise PlanError(
            f"{where}: found dims {_short(dims)} and size {_short(size)}, write 1 to 3 dims, a size from 0 up"
        )
    _refuse_others(values, "contract", where)
    sides = ("before", "after", "gradient", *(("gradient_before",) if "gradient_before" in values else ()))
    contract = Contract(
        _get(values, "name", str, where), dims, size, **{side: _placements(values, side, where) for side in sides}
    )
    shape = (*tokens, size)[:dims]
    ends = (("before", "gradient_before", contract.source_gradient), ("after", "gradient", contract.gradient))
    for end, back, gradient in ends:
        layouts.check(getattr(contract, end), shape, f"{where}: {end}")
        named = {axis: gradient.get(axis, Replicate()) for axis in (*layouts.mesh.names, *gradient)}
        layouts.check(getattr(contract, end), shape, f"{where}: {back}", named)
    return contract


# Values


def _require(values: Any, key: str, where: str) -> Any:
    """A value of a mapping, which must have it."""
    if not isinstance(values, Mapping):
        raise PlanError(f"{where}: found {_short(values)}, write a mapping")
    if key not in values:
        raise PlanError(f"{where or 'a plan'} needs the key {key!r}, which is missing")
    return values[key]


def _get(values: Any, key: str, kind: type, where: str) -> Any:
    """A value of a mapping, of a kind."""
    value = _require(values, key, where)
    if not _is(value, kind):
        raise PlanError(f"{_below(where, key)}: found {_short(value)}, write {_KINDS[kind]}")
    return value


def _entries(values: Mapping[str, Any], key: str, kind: type) -> Iterable[tuple[str, Any]]:
    """The entries of a mapping from text to values of a kind."""
    entries = _get(values, key, Mapping, "")
    for name, value in entries.items():
        if not isinstance(name, str) or not _is(value, kind):
            raise PlanError(f"{key}: found {_short(name)}: {_short(value)}, write text and {_KINDS[kind]}")
    return entries.items()


def _list_of(kind: type, what: str, allowed: Callable[[Any], bool] = lambda value: True) -> Callable[..., tuple]:
    def read(values: Any, key: str, where: str) -> tuple:
        found = _get(values, key, list, where)
        if not all(_is(each, kind) and allowed(each) for each in found):
            raise PlanError(f"{_below(where, key)}: found {_short(found)}, write a list of {what}")
        return tuple(found)

    return read


_texts = _list_of(str, "text")
_numbers = _list_of(int, "whole numbers from 0 up", lambda value: value >= 0)


def _axes(values: Any, key: str, where: str, mesh: DeviceMesh) -> tuple[str, ...]:
    axes = _texts(values, key, where)
    if strange := [axis for axis in axes if axis not in mesh.names]:
        raise PlanError(f"{_below(where, key)}: the mesh {mesh} has no axis {_short(strange[0])}")
    if len(set(axes)) < len(axes):
        _refuse_twice(axes, _below(where, key))
    return axes


def _placements(values: Any, key: str, where: str) -> dict[str, Placement]:
    found = _get(values, key, Mapping, where)
    try:
        return {axis: _parsed(text) if isinstance(text, str) else parse_placement(text) for axis, text in found.items()}
    except (LayoutError, ValueError) as error:  # Python refuses numbers of thousands of digits
        raise PlanError(f"{_below(where, key)}: {error}") from error


_parsed = lru_cache(maxsize=4096)(parse_placement)


def _refuse_others(values: Mapping[str, Any], what: str, where: str) -> None:
    """What is not read must not be there: it may be a slip of the pen."""
    known = _KEYS[what].split()
    if strange := [key for key in values if key not in known]:
        raise PlanError(
            f"{where or 'a plan'} has the key {_short(strange[0])}, which says nothing; write one of {', '.join(known)}"
        )


def _refuse_twice(names: Iterable[str], where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise PlanError(f"{where}: {_short(name)} stands twice; leave one out")
        seen.add(name)


def _one_of(values: Any, key: str, known: Iterable[str], where: str) -> str:
    value = _get(values, key, str, where)
    if value not in known:
        raise PlanError(f"{_below(where, key)}: found {_short(value)}, write one of {', '.join(map(repr, known))}")
    return value


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


_KINDS = {int: "a whole number", str: "text", bool: "true or false", list: "a list", Mapping: "a mapping"}


def _below(where: str, key: str) -> str:
    return f"{where}: {key}" if where else key


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # a number of more digits than Python prints
        return "a huge number"
    return text if len(text) <= 80 else text[:77] + "..."
