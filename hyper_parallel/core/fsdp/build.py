"""`fully_shard` and what undoes it or looks into it, for any backend."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Mapping

import numpy as np

from hyper_parallel.core.backend import Backend, Module, Parameter, ParameterUse
from hyper_parallel.core.errors import ConfigError, LayoutError
from hyper_parallel.core.fsdp.parameter import ShardedParameter
from hyper_parallel.core.fsdp.spec import ShardSpec
from hyper_parallel.core.fsdp.unit import Unit, unit_of, units_of
from hyper_parallel.core.identity import IdentityMap
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Shard
from hyper_parallel.core.plan.plan import ShardingPlan

_sharded = IdentityMap()  # a parameter at rest -> its ShardedParameter
_replaced = IdentityMap()  # a parameter object that a shard has replaced -> the name of its unit


def fully_shard(
    backend: Backend,
    module: Module,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Callable[[Parameter], Shard | None] | None = None,
    ignored_params: Iterable[Parameter] = (),
    name: str = "",
) -> Unit:
    """Make one unit of the parameters below `module` that no unit holds yet. See `hyper_parallel.fully_shard`.

    Everything is checked before anything is changed.
    """
    if not backend.collectives.is_initialized():
        raise ConfigError("fully_shard needs the ranks to be joined; call hyper_parallel.initialize() first")
    rank, world = backend.collectives.rank(), backend.collectives.world_size()
    mesh = DeviceMesh((world,), ("shard",)) if mesh is None else mesh
    _check_mesh(mesh, rank, world)
    if unit_of(module) is not None:
        raise ConfigError(f"fully_shard: this {type(module).__name__} is a unit already; wrap every module once")
    chosen = _uses_to_shard(backend, module, ignored_params)
    specs = [_spec(backend, uses[0], mesh, rank, shard_placement_fn) for uses in chosen]
    shard_group = backend.collectives.groups(mesh.groups(("shard",)))
    replica_group = backend.collectives.groups(mesh.groups(("replicate",)))
    parameters = []
    backend.modules.place_buffers(module)
    with backend.autograd.no_grad():
        for spec, uses in zip(specs, chosen):
            old = uses[0].parameter
            sharded = ShardedParameter(backend, spec, uses)
            if sharded.parameter is not old:
                _replaced.set(old, name)
            _sharded.set(sharded.parameter, sharded)
            parameters.append(sharded)
    return Unit(backend, name, module, parameters, shard_group, replica_group, reshard_after_forward)


def apply_plan(backend: Backend, model: Module, plan: ShardingPlan) -> None:
    """Make the units that a plan names, blocks before the model itself.

    Raises:
        ConfigError: the plan was made for another model; then nothing is changed.
    """
    _check_plan(backend, model, plan)
    modules = dict(backend.modules.named_modules(model))
    for unit in plan.units:
        fully_shard(backend, modules[unit.name], plan.mesh, unit.reshard_after_forward, name=unit.name)


def restore(backend: Backend, model: Module) -> None:
    """Undo `fully_shard` on a module and below: whole parameters, no hooks. Called by every rank."""
    for unit in list(units_of(backend, model)):
        unit.detach()
        for sharded in unit.parameters:
            _sharded.pop(sharded.parameter)
            if sharded.spec.is_whole:
                continue
            whole = backend.tensors.from_numpy(gather_to_numpy(backend, unit, sharded), sharded.spec.dtype)
            backend.modules.replace_parameter(sharded.uses, whole)


def full_parameters(backend: Backend, model: Module) -> dict[str, np.ndarray]:
    """Every parameter whole, on every rank, by its first name. Called by every rank; one parameter at a time."""
    unit_by_parameter = {id(each.parameter): unit for unit in units_of(backend, model) for each in unit.parameters}
    values: dict[str, np.ndarray] = {}
    done: set[int] = set()
    for use in backend.modules.parameter_uses(model):
        if id(use.parameter) in done:
            continue
        done.add(id(use.parameter))
        unit = unit_by_parameter.get(id(use.parameter))
        values[use.name] = (
            backend.tensors.to_numpy(use.parameter)
            if unit is None
            else gather_to_numpy(backend, unit, _sharded.get(use.parameter))
        )
    return values


def gather_to_numpy(backend: Backend, unit: Unit, sharded: ShardedParameter) -> np.ndarray:
    """One whole parameter on the host; the unit stays gathered or not as it was."""
    with backend.autograd.no_grad():
        if not unit.is_gathered():
            sharded.issue_gather(unit.shard_group).wait()
        value = backend.tensors.to_numpy(sharded.full())
        if not unit.is_gathered():
            sharded.free()
    return value


def sharded_of(parameter: Parameter) -> ShardedParameter | None:
    """What `fully_shard` knows of a parameter at rest."""
    return _sharded.get(parameter)


def layout_of(parameter: Parameter) -> Layout | None:
    """The layout of a parameter at rest; None when it was never sharded."""
    sharded = _sharded.get(parameter)
    return None if sharded is None else sharded.layout


def _check_mesh(mesh: Any, rank: int, world: int) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"fully_shard: mesh must be a hyper_parallel.DeviceMesh, found {type(mesh).__name__}; write for example "
            f'DeviceMesh(({world},), ("shard",))'
        )
    extra = [axis for axis, size in zip(mesh.names, mesh.shape) if axis not in ("replicate", "shard") and size > 1]
    if extra:
        raise ConfigError(f"fully_shard uses the mesh axes 'replicate' and 'shard'; this mesh {mesh} has {extra[0]!r}")
    if max(mesh.ranks) >= world or rank not in mesh.ranks:
        raise LayoutError(
            f"the mesh {mesh} holds the ranks {min(mesh.ranks)} to {max(mesh.ranks)}, "
            f"but this is rank {rank} of {world}"
        )


def _uses_to_shard(backend: Backend, module: Module, ignored: Iterable[Parameter]) -> list[list[ParameterUse]]:
    """The uses of every parameter that this unit is to hold, in definition order."""
    ignored_ids = {id(parameter) for parameter in ignored}
    owned_uses = {
        (id(use.owner), use.attribute)
        for unit in units_of(backend, module)
        for sharded in unit.parameters
        for use in sharded.uses
    }
    chosen: dict[int, list[ParameterUse]] = {}
    for use in backend.modules.parameter_uses(module):
        if id(use.parameter) in ignored_ids or (id(use.owner), use.attribute) in owned_uses:
            continue
        if _replaced.get(use.parameter) is not None or _sharded.get(use.parameter) is not None:
            raise ConfigError(
                f"fully_shard: the parameter {use.name} is tied to one that an inner unit holds already; "
                "make no unit of the inner module, so that one unit holds both uses"
            )
        if use.parameter.is_meta:
            raise ConfigError(
                f"fully_shard: the parameter {use.name} has no values, it is on the meta device; load it before sharding"
            )
        chosen.setdefault(id(use.parameter), []).append(use)
    return list(chosen.values())


def _spec(
    backend: Backend,
    use: ParameterUse,
    mesh: DeviceMesh,
    rank: int,
    shard_placement_fn: Callable[[Parameter], Shard | None] | None,
) -> ShardSpec:
    shape = tuple(int(size) for size in use.parameter.shape)
    placement = shard_placement_fn(use.parameter) if shard_placement_fn is not None else None
    placement = Shard(0) if placement is None else placement
    if not isinstance(placement, Shard):
        raise ConfigError(
            "fully_shard: shard_placement_fn must return a hyper_parallel.Shard or None, "
            f"found {placement!r} for {use.name}"
        )
    split = "shard" in mesh.names and shape
    layout = Layout(mesh, {"shard": placement} if split else {}, shape)
    dtype = backend.tensors.dtype_name(use.parameter)
    return ShardSpec(use.name, layout, rank, dtype, backend.modules.is_trainable(use.parameter))


def _check_plan(backend: Backend, model: Module, plan: ShardingPlan) -> None:
    found: Mapping[str, tuple[int, ...]] = {
        use.name: tuple(int(size) for size in use.parameter.shape) for use in backend.modules.parameter_uses(model)
    }
    wanted = {each.name: each.shape for each in plan.parameters}
    wanted.update({other: plan[first].shape for other, first in plan.tied.items()})
    wrong = [f"{name} is in the plan only" for name in wanted if name not in found]
    wrong += [f"{name} is in the model only" for name in found if name not in wanted]
    wrong += [
        f"{name} has shape {found[name]}, planned was {shape}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    modules = {name for name, _ in backend.modules.named_modules(model)}
    wrong += [f"the unit {unit.name} is no module of the model" for unit in plan.units if unit.name not in modules]
    if wrong:
        raise ConfigError(f"this plan was made for another model ({plan.model_class}): " + "; ".join(wrong[:8]))
