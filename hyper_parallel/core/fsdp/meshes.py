"""Which axes of a mesh data parallelism runs over, when they are not called `replicate` and `shard`."""

from __future__ import annotations

from typing import Any, Mapping

from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.mesh import DeviceMesh


def data_parallel_mesh(mesh: DeviceMesh, dims: Any) -> DeviceMesh:
    """A mesh `replicate` x `shard` of the axes of `mesh` that `dims` names for each: one name, several that are joined
    in the order of the mesh, or None. `dims` is a mapping, or has attributes, as PyTorch's `DataParallelMeshDims`.

    Raises:
        ConfigError: no such axis, one that is named twice, or one of several ranks that is not named.
    """
    names = {role: _names(mesh, dims, role) for role in ("replicate", "shard")}
    both = names["replicate"] + names["shard"]
    twice = [name for name in both if both.count(name) > 1]
    if not both or twice:
        what = f"names {twice[0]!r} twice" if twice else "names no axis"
        raise ConfigError(f"fully_shard: dp_mesh_dims {what}; name each axis of the mesh {mesh} for one use")
    left = [name for name, size in zip(mesh.names, mesh.shape) if size > 1 and name not in both]
    if left:
        raise ConfigError(
            f"fully_shard: dp_mesh_dims does not say what the axis {left[0]!r} of the mesh {mesh} is for; add it to "
            "'replicate' or 'shard', or cut the model along it with a plan and hyper_parallel.parallelize"
        )
    groups = mesh.groups(names["shard"])
    ranks = [rank for group in groups for rank in group]
    return DeviceMesh((len(groups), len(groups[0])), ("replicate", "shard"), ranks)


def _names(mesh: DeviceMesh, dims: Any, role: str) -> tuple[str, ...]:
    given = dims.get(role) if isinstance(dims, Mapping) else getattr(dims, role, None)
    names = () if given is None else (given,) if isinstance(given, str) else tuple(given)
    unknown = [name for name in names if name not in mesh.names]
    if unknown:
        raise ConfigError(
            f"fully_shard: dp_mesh_dims names {unknown[0]!r} for {role!r}; the mesh {mesh} has no such axis"
        )
    return names
