"""`fully_shard` and what undoes it or looks into it, for any backend."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Sequence

import numpy as np

from hyper_parallel.core.backend import Backend, Module, Parameter, ParameterUse, Tensor
from hyper_parallel.core.errors import ConfigError, LayoutError
from hyper_parallel.core.fsdp.parameter import Holding, ShardedParameter
from hyper_parallel.core.fsdp.spec import ShardSpec
from hyper_parallel.core.fsdp.unit import Unit, unit_of, units_of
from hyper_parallel.core.identity import IdentityMap
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Placement, Shard
from hyper_parallel.core.replay import redistribution

_layouts = IdentityMap()  # a parameter at rest -> its layout
_replaced = IdentityMap()  # a parameter object that a shard has replaced -> True

PlacementOf = Callable[[ParameterUse], Placement | None]
"""The placement of a parameter over `shard`; None for whole on every rank."""


def fully_shard(
    backend: Backend,
    module: Module,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Callable[[Parameter], Shard | None] | None = None,
    ignored_params: Iterable[Parameter] = (),
) -> Unit:
    """Make one unit of the parameters below `module` that no unit holds yet. See `hyper_parallel.fully_shard`.

    Everything is checked before anything is changed.
    """
    mesh = usable_mesh(backend, mesh)
    if unit_of(module) is not None:
        raise ConfigError(f"fully_shard: this {type(module).__name__} is a unit already; wrap every module once")
    chosen = _uses_to_shard(backend, module, ignored_params)
    check_parameters(backend, module, chosen)
    placement_of = _asked_placement(shard_placement_fn)
    held = []
    for uses in chosen:
        spec = spec_of(backend, uses[0], placement_of(uses[0]), mesh)
        held.append(Holding(uses, spec, spec.layout))
    return make_unit(backend, "", module, held, mesh, reshard_after_forward)


def make_unit(
    backend: Backend,
    name: str,
    module: Module,
    held: Sequence[Holding],
    mesh: DeviceMesh,
    reshard_after_forward: bool | None,
) -> Unit:
    """Shard parameters and hook `module`."""
    shard_group = backend.collectives.groups(mesh.groups(("shard",)))
    parameters = []
    backend.modules.place_buffers(module)
    with backend.autograd.no_grad():
        for each in held:
            old = each.uses[0].parameter
            sharded = ShardedParameter(backend, each)
            if sharded.parameter is not old:
                _replaced.set(old, True)
            _layouts.set(sharded.parameter, sharded.layout)
            parameters.append(sharded)
    return Unit(backend, name, module, parameters, shard_group, reshard_after_forward)


def cut(backend: Backend, uses: Sequence[ParameterUse], layout: Layout) -> list[ParameterUse]:
    """Leave this rank with its part of a whole parameter, without any communication; the uses as they are then."""
    old = uses[0].parameter
    part = redistribution(backend, layout.with_placements({}), layout).run(old)
    parameter = backend.modules.replace_parameter(uses, part)
    if parameter is not old:
        _replaced.set(old, True)
    return [use._replace(parameter=parameter) for use in uses]


def restore(backend: Backend, model: Module) -> None:
    """Undo `fully_shard` on a module and below: whole parameters, no hooks, and no gradients, of which a rank has a
    part. Called by every rank."""
    for unit in list(units_of(backend, model)):
        unit.detach()
        for sharded in unit.parameters:
            _layouts.pop(sharded.parameter)
            backend.autograd.forget_gradient(sharded.parameter)
            if _is_split(sharded.layout):
                backend.modules.replace_parameter(sharded.uses, _whole(backend, sharded))


def full_parameters(backend: Backend, model: Module) -> dict[str, np.ndarray]:
    """Every parameter whole, on every rank, by its first name. Called by every rank; one parameter at a time."""
    held = {id(each.parameter): each for unit in units_of(backend, model) for each in unit.parameters}
    values: dict[str, np.ndarray] = {}
    done: set[int] = set()
    for use in backend.modules.parameter_uses(model):
        if id(use.parameter) in done:
            continue
        done.add(id(use.parameter))
        sharded = held.get(id(use.parameter))
        split = sharded is not None and _is_split(sharded.layout)
        values[use.name] = backend.tensors.to_numpy(_whole(backend, sharded) if split else use.parameter)
    return values


def _is_split(layout: Layout) -> bool:
    return layout.placements != layout.with_placements({}).placements


def _whole(backend: Backend, sharded: ShardedParameter) -> Tensor:
    """One whole parameter, as the shards have it now."""
    layout = sharded.layout
    return redistribution(backend, layout, layout.with_placements({})).run(sharded.parameter)


def layout_of(parameter: Parameter) -> Layout | None:
    """The layout of a parameter at rest; None when it was never sharded."""
    return _layouts.get(parameter)


def usable_mesh(backend: Backend, mesh: Any) -> DeviceMesh:
    """The mesh to shard over, all ranks on `shard` when none is given.

    Raises:
        ConfigError: the ranks are not joined, or the mesh has an axis that is of no use here.
        LayoutError: the mesh does not hold all ranks, or not in ascending order along an axis.
    """
    _check_joined(backend)
    world = backend.collectives.world_size()
    if mesh is None:
        return DeviceMesh((world,), ("shard",))
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"fully_shard: mesh must be a hyper_parallel.DeviceMesh, found {type(mesh).__name__}; write for example "
            f'DeviceMesh(({world},), ("shard",))'
        )
    extra = [axis for axis, size in zip(mesh.names, mesh.shape) if axis not in ("replicate", "shard") and size > 1]
    if extra:
        raise ConfigError(f"fully_shard uses the mesh axes 'replicate' and 'shard'; this mesh {mesh} has {extra[0]!r}")
    check_ranks(backend, mesh)
    return mesh


def check_ranks(backend: Backend, mesh: DeviceMesh) -> None:
    """Raise unless `mesh` holds every rank, in ascending order along each axis. Errors as those of `usable_mesh`."""
    _check_joined(backend)
    world = backend.collectives.world_size()
    if sorted(mesh.ranks) != list(range(world)):
        raise LayoutError(
            f"the mesh {mesh} has {mesh.size} ranks, {min(mesh.ranks)} to {max(mesh.ranks)}, but {world} have joined; "
            "a mesh to shard over holds every rank"
        )
    for axis in mesh.names:
        for group in mesh.groups((axis,)):
            if list(group) != sorted(group):
                raise LayoutError(
                    f"the mesh {mesh} has the ranks {list(group)} along {axis!r}; "
                    "collectives need them in ascending order"
                )


def _check_joined(backend: Backend) -> None:
    if not backend.collectives.is_initialized():
        raise ConfigError("to shard, the ranks have to be joined; call hyper_parallel.initialize() first")


def check_parameters(backend: Backend, module: Module, chosen: Sequence[Sequence[ParameterUse]]) -> None:
    """Refuse parameters without values, and those that a module reads past its registry."""
    names = {}
    for uses in chosen:
        names[id(uses[0].parameter)] = uses[0].name
        if not backend.tensors.has_values(uses[0].parameter):
            raise ConfigError(
                f"fully_shard: the parameter {uses[0].name} has no values, it is on the meta device; "
                "load it before sharding"
            )
    for path, owner in backend.modules.named_modules(module):
        for attribute, value in vars(owner).items():
            if not isinstance(value, (list, tuple)):
                continue
            kept = [names[id(item)] for item in value if id(item) in names]
            if kept:
                raise ConfigError(
                    f"fully_shard: {type(owner).__name__} {path or '(the model itself)'} keeps {kept[0]} in the list "
                    f"{attribute!r}, where it would see the shard; use the parameter's own attribute and drop the "
                    "list, or leave the parameter out with ignored_params"
                )


def _uses_to_shard(backend: Backend, module: Module, ignored: Iterable[Parameter]) -> list[list[ParameterUse]]:
    """The uses of every parameter that this unit is to hold, in definition order."""
    ignored = list(ignored)
    strange = [value for value in ignored if not backend.tensors.is_tensor(value)]
    if strange:
        raise ConfigError(f"fully_shard: ignored_params holds parameters, found {strange[0]!r}")
    ignored_ids = {id(parameter) for parameter in ignored}
    inside = _uses_inside_units(backend, module)
    chosen: dict[int, list[ParameterUse]] = {}
    for use in backend.modules.parameter_uses(module):
        if id(use.parameter) in ignored_ids or use.name in inside:
            continue
        if _replaced.get(use.parameter) is not None or _layouts.get(use.parameter) is not None:
            raise ConfigError(
                f"fully_shard: the parameter {use.name} is held by another unit already; shard inner modules before "
                "outer ones, and make no units of what shares a parameter, so that their common parent's holds it"
            )
        chosen.setdefault(id(use.parameter), []).append(use)
    return list(chosen.values())


def _uses_inside_units(backend: Backend, module: Module) -> set[str]:
    """Names of uses that the forward of an inner unit's module covers.

    A module that stands in two places is a unit in both; one of its modules that also stands elsewhere is not.
    """
    paths = [(path, each) for path, each in backend.modules.named_modules(module)]
    held = {
        (id(use.owner), use.attribute)
        for unit in units_of(backend, module)
        for sharded in unit.parameters
        for use in sharded.uses
    }
    roots = tuple(f"{path}." if path else "" for path, each in paths if unit_of(each) is not None)
    return {
        use.name
        for use in backend.modules.parameter_uses(module)
        if (id(use.owner), use.attribute) in held and use.name.startswith(roots)
    }


def _asked_placement(shard_placement_fn: Callable[[Parameter], Shard | None] | None) -> PlacementOf:
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise ConfigError(f"fully_shard: shard_placement_fn must be a function, found {shard_placement_fn!r}")

    def placement_of(use: ParameterUse) -> Placement | None:
        asked = None if shard_placement_fn is None else shard_placement_fn(use.parameter)
        if asked is None:
            return Shard(0) if len(use.parameter.shape) else None
        if not isinstance(asked, Shard):
            raise ConfigError(
                "fully_shard: shard_placement_fn must return a hyper_parallel.Shard or None, "
                f"found {asked!r} for {use.name}"
            )
        return asked

    return placement_of


def spec_of(backend: Backend, use: ParameterUse, placement: Placement | None, mesh: DeviceMesh) -> ShardSpec:
    """The split over `shard` of a parameter as it is now; whole where `placement` is None.

    Raises:
        LayoutError: the parameter has no such dim.
    """
    shape = tuple(int(size) for size in use.parameter.shape)
    try:
        on_shard = Layout(DeviceMesh((1,), ("shard",)), {} if placement is None else {"shard": placement}, shape)
    except LayoutError as error:
        raise LayoutError(f"fully_shard: {use.name}: {error}") from error
    split = placement is not None and "shard" in mesh.names
    layout = Layout(mesh, {"shard": on_shard.placement("shard")} if split else {}, shape)
    return ShardSpec(use.name, layout, backend.collectives.rank(), backend.tensors.dtype_name(use.parameter))
