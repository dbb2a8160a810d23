"""`fully_shard` and what undoes it or looks into it, for any backend."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Iterator, Mapping, NoReturn, Sequence

import numpy as np

from hyper_parallel.core.backend import Backend, Module, Parameter, ParameterUse, Tensor
from hyper_parallel.core.errors import ConfigError, LayoutError
from hyper_parallel.core.fsdp.controls import add_methods, check_names, remove_methods
from hyper_parallel.core.fsdp.meshes import data_parallel_mesh
from hyper_parallel.core.fsdp.parameter import Holding, Listed, ShardedParameter, layouts
from hyper_parallel.core.fsdp.policy import MixedPrecisionPolicy, offload_of, precision_of
from hyper_parallel.core.fsdp.spec import ShardSpec
from hyper_parallel.core.fsdp.unit import Unit, check_reshard_after_forward, unit_of, units_of
from hyper_parallel.core.identity import IdentityMap
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.loading import check_values
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Placement, Shard
from hyper_parallel.core.replay import redistribution
from hyper_parallel.core.topology_sources import check_shard_axis, topology_of

_replaced = IdentityMap()  # a parameter object that a shard has replaced -> True

PlacementOf = Callable[[ParameterUse], Placement | None]
"""The placement of a parameter over `shard`; None for whole on every rank."""


def fully_shard(
    backend: Backend,
    modules: Sequence[Module],
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[Parameter], Shard | None] | None = None,
    ignored_params: Iterable[Parameter] = (),
    replicate_params: Iterable[Parameter] = (),
    dp_mesh_dims: Any = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    allow_shard_across_supernodes: bool = False,
    early_all_reduce: bool = False,
) -> Unit:
    """Make one unit of the parameters below `modules` that no unit holds yet. See `hyper_parallel.fully_shard`.

    Everything is checked before anything is changed.
    """
    mesh = usable_mesh(backend, mesh, dp_mesh_dims)
    check_shard_axis(topology_of(backend), mesh, allow_shard_across_supernodes, "fully_shard")
    precision, offload = precision_of(mp_policy), offload_of(offload_policy)
    for module in modules:
        if unit_of(module) is not None:
            raise ConfigError(f"fully_shard: this {type(module).__name__} is a unit already; wrap every module once")
    check_names(modules)
    check_reshard_after_forward(reshard_after_forward, mesh.axis_size("shard"))
    chosen = _uses_to_shard(backend, modules, _parameters(backend, ignored_params, "ignored_params"))
    lists = _lists_with(backend, modules, chosen)
    whole = {id(each) for each in _parameters(backend, replicate_params, "replicate_params")}
    placement_of = _asked_placement(shard_placement_fn)
    held = []
    for uses in chosen:
        placement = None if id(uses[0].parameter) in whole else placement_of(uses[0])
        spec = spec_of(backend, uses[0], placement, mesh)
        policies = dict(precision=precision, offload=offload, early_all_reduce=early_all_reduce)
        places = lists.get(id(uses[0].parameter), ())
        held.append(Holding(uses, spec, spec.layout, lists=places, **policies))
    return make_unit(backend, "", modules, held, mesh, reshard_after_forward, precision)


def make_unit(
    backend: Backend,
    name: str,
    modules: Sequence[Module],
    held: Sequence[Holding],
    mesh: DeviceMesh,
    reshard_after_forward: bool | int | None,
    precision: MixedPrecisionPolicy,
) -> Unit:
    """Shard parameters and hook `modules`."""
    parameters = []
    for module in modules:
        backend.modules.place_buffers(module)
    with backend.autograd.no_grad():
        for each in held:
            old = each.uses[0].parameter
            sharded = ShardedParameter(backend, each)
            if sharded.parameter is not old:
                _replaced.set(old, True)
            parameters.append(sharded)
    unit = Unit(backend, name, modules, parameters, mesh, reshard_after_forward, precision)
    add_methods(unit)
    return unit


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
        remove_methods(unit)
        for sharded in unit.parameters:
            layouts.pop(sharded.parameter)
            backend.autograd.forget_gradient(sharded.parameter)
            if _is_split(sharded.layout) or sharded.is_offloaded:
                sharded.replace(_whole(backend, sharded))
            for place in sharded.lists:
                place.settle()


def full_parameters(backend: Backend, model: Module) -> dict[str, np.ndarray]:
    """Every parameter whole, on every rank, by its first name. Called by every rank; one parameter at a time."""
    held = _held(backend, model)
    values: dict[str, np.ndarray] = {}
    done: set[int] = set()
    for use in backend.modules.parameter_uses(model):
        if id(use.parameter) in done:
            continue
        done.add(id(use.parameter))
        sharded = held.get(id(use.parameter))
        if sharded is not None:
            sharded.require_values(use.name)
        split = sharded is not None and _is_split(sharded.layout)
        values[use.name] = backend.tensors.to_numpy(_whole(backend, sharded) if split else use.parameter)
    return values


def _held(backend: Backend, model: Module) -> dict[int, ShardedParameter]:
    """What units hold below a module, by the id of the shard."""
    every = [each for unit in units_of(backend, model) for each in unit.parameters]
    for each in every:
        each.adopt()
    return {id(each.parameter): each for each in every}


def _is_split(layout: Layout) -> bool:
    return layout.placements != layout.with_placements({}).placements


def _whole(backend: Backend, sharded: ShardedParameter) -> Tensor:
    """One whole parameter, as the shards have it now."""
    layout = sharded.layout
    if not sharded.has_values:
        return backend.tensors.on_meta(layout.shape, sharded.spec.dtype)
    shard = backend.tensors.to_device(sharded.parameter)
    return redistribution(backend, layout, layout.with_placements({})).run(shard)


def load_full_parameters(backend: Backend, model: Module, values: Mapping[str, np.ndarray]) -> None:
    """See `hyper_parallel.load_full_parameters`."""
    held = _held(backend, model)
    uses = backend.modules.parameter_uses(model)
    check_values(uses, values, {key: each.layout.shape for key, each in held.items()})
    for unit in units_of(backend, model):
        unit.gathers.free(unit)  # what is gathered has the values of before
    with backend.autograd.no_grad():
        for use in uses:
            sharded, whole = held.get(id(use.parameter)), values.get(use.name)
            if whole is not None and sharded is not None:
                part = sharded.layout.shard(whole, sharded.spec.rank)
                sharded.load(backend.tensors.from_numpy(part, sharded.spec.dtype))
            elif whole is not None:
                dtype = backend.tensors.dtype_name(use.parameter)
                backend.tensors.copy_(use.parameter, backend.tensors.from_numpy(whole, dtype))


def layout_of(parameter: Parameter) -> Layout | None:
    """The layout of a parameter at rest; None when it was never sharded."""
    return layouts.get(parameter)


def is_replaced(parameter: Parameter) -> bool:
    """Tell whether a shard has taken the place of this parameter object in its model."""
    return _replaced.get(parameter) is not None


def usable_mesh(backend: Backend, mesh: Any, dp_mesh_dims: Any = None) -> DeviceMesh:
    """The mesh to shard over, all ranks on `shard` when none is given, axes of `dp_mesh_dims` joined and renamed.

    Raises:
        ConfigError: the ranks are not joined, or the mesh has an axis that is of no use here.
        LayoutError: the mesh does not hold this rank, or ranks that have not joined, or not in ascending order along an
            axis.
    """
    _check_joined(backend)
    world, rank = backend.collectives.world_size(), backend.collectives.rank()
    if mesh is None:
        mesh = DeviceMesh((world,), ("shard",))
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"fully_shard: mesh must be a hyper_parallel.DeviceMesh, found {type(mesh).__name__}; write for example "
            f'DeviceMesh(({world},), ("shard",))'
        )
    if dp_mesh_dims is not None:
        mesh = data_parallel_mesh(mesh, dp_mesh_dims)
    extra = [axis for axis, size in zip(mesh.names, mesh.shape) if axis not in ("replicate", "shard") and size > 1]
    if extra:
        raise ConfigError(
            f"fully_shard uses the mesh axes 'replicate' and 'shard'; this mesh {mesh} has {extra[0]!r}: name what it "
            f'is for in dp_mesh_dims, for example {{"shard": ("shard", {extra[0]!r})}}'
        )
    if rank not in mesh.ranks or max(mesh.ranks) >= world:
        raise LayoutError(
            f"the mesh {mesh} has {mesh.size} ranks, {min(mesh.ranks)} to {max(mesh.ranks)}, but {world} have joined, "
            f"and this is rank {rank}; a mesh to shard over holds this rank and none that has not joined"
        )
    _check_order(mesh)
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
    _check_order(mesh)


def _check_order(mesh: DeviceMesh) -> None:
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


def check_have_values(backend: Backend, chosen: Sequence[Sequence[ParameterUse]]) -> None:
    """Refuse parameters without values."""
    for uses in chosen:
        if not backend.tensors.has_values(uses[0].parameter):
            raise ConfigError(
                f"the parameter {uses[0].name} has no values, it is on the meta device or waits to be initialised; "
                "load it before the model is cut"
            )


def check_parameters(backend: Backend, model: Module, chosen: Sequence[Sequence[ParameterUse]]) -> None:
    """Refuse parameters that a module reads past its registry, before a plan cuts them."""
    for name, path, place in _kept_beside(backend, [model], chosen):
        _refuse_list(name, path, place)


def _lists_with(
    backend: Backend, modules: Sequence[Module], chosen: Sequence[Sequence[ParameterUse]]
) -> dict[int, list[Listed]]:
    """The places in lists and tuples beside a registry where a unit shows its parameters too, by the id of each.

    Raises:
        ConfigError: a tuple whose fields have names.
    """
    places: dict[int, list[Listed]] = {}
    seen: set[tuple[int, str, int]] = set()  # a module may stand in two places
    for name, path, place in _kept_beside(backend, modules, chosen):
        if hasattr(place.kind, "_fields"):
            _refuse_list(name, path, place)
        key = id(place.owner), place.attribute, place.index
        if key not in seen:
            seen.add(key)
            places.setdefault(id(place.get()), []).append(place)
    return places


def _kept_beside(
    backend: Backend, modules: Sequence[Module], chosen: Sequence[Sequence[ParameterUse]]
) -> Iterator[tuple[str, str, Listed]]:
    """Lists and tuples beside a registry that hold chosen parameters: each with the name of one, and of the module."""
    names = {id(uses[0].parameter): uses[0].name for uses in chosen}
    for path, owner in (each for module in modules for each in backend.modules.named_modules(module)):
        for attribute, value in vars(owner).items():
            if isinstance(value, (list, tuple)):
                for index, item in enumerate(value):
                    if id(item) in names:
                        yield names[id(item)], path, Listed(owner, attribute, index, type(value))


def _refuse_list(name: str, path: str, place: Listed) -> NoReturn:
    kind = place.kind.__name__
    raise ConfigError(
        f"{type(place.owner).__name__} {path or '(the model itself)'} keeps the parameter {name} in the {kind} "
        f"{place.attribute!r}, where it would see a part of it; read it from the parameter's own attribute and drop "
        f"the {kind}, or leave the parameter out of what fully_shard shards with ignored_params"
    )


def _parameters(backend: Backend, given: Iterable[Parameter], name: str) -> list[Parameter]:
    given = list(given)
    strange = [value for value in given if not backend.tensors.is_tensor(value)]
    if strange:
        raise ConfigError(f"fully_shard: {name} holds parameters, found {strange[0]!r}")
    return given


def _uses_to_shard(
    backend: Backend, modules: Sequence[Module], ignored: Sequence[Parameter]
) -> list[list[ParameterUse]]:
    """The uses of every parameter that this unit is to hold, in definition order."""
    ignored_ids = {id(parameter) for parameter in ignored}
    chosen: dict[int, list[ParameterUse]] = {}
    for use in _uses_outside_units(backend, modules):
        if id(use.parameter) in ignored_ids:
            continue
        if _replaced.get(use.parameter) is not None or layouts.get(use.parameter) is not None:
            raise ConfigError(
                f"fully_shard: the parameter {use.name} is held by another unit already; shard inner modules before "
                "outer ones, and make no units of what shares a parameter, so that their common parent's holds it"
            )
        chosen.setdefault(id(use.parameter), []).append(use)
    return list(chosen.values())


def _uses_outside_units(backend: Backend, modules: Sequence[Module]) -> Iterator[ParameterUse]:
    """Every use of a parameter below `modules` once, without those that inner units hold."""
    seen: set[tuple[int, str]] = set()
    for module in modules:
        inside = _uses_inside_units(backend, module)
        for use in backend.modules.parameter_uses(module):
            place = (id(use.owner), use.attribute)
            if use.name not in inside and place not in seen:
                seen.add(place)
                yield use


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
