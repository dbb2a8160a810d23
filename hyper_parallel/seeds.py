"""Seeds for users: the library's own generator, and those of the framework, by where ranks stand in a mesh."""

from __future__ import annotations

from hyper_parallel import backends
from hyper_parallel.core import random
from hyper_parallel.core.backend import Backend, Module
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.execution.apply import execution_of
from hyper_parallel.core.execution.randomness import seed_for
from hyper_parallel.core.fsdp import build
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.philox import word64
from hyper_parallel.core.random import Generator


def manual_seed(seed: int, mesh_or_model: DeviceMesh | Module | None = None) -> Generator:
    """Seed what draws random numbers. Called by every rank, with the same `seed`.

    The default `Generator` starts again at draw 0. With a mesh or a model the framework's own generators, of the host
    and of the device, are seeded too: alike on the ranks that compute one model (along `tensor` and `context`), where
    dropout has to drop the same of what they all hold, and otherwise along `replicate`, `shard` and `expert`, whose
    ranks work on samples of their own. On one device, and on the first ranks of a mesh, their seed is `seed` itself.

    Args:
        seed: a whole number in [0, 2**64); of the frameworks' generators its lower 63 bits.
        mesh_or_model: the mesh of the plan, or a model that has been parallelized or fully sharded; on a process alone
            any model.

    Returns:
        The default generator.

    Raises:
        ConfigError: the seed is out of range; no backend has joined (for a mesh); the model has no mesh yet while
            there are several ranks. Nothing is seeded then.
        LayoutError: the mesh does not hold this rank.
    """
    seed = word64(seed, "a seed")
    if mesh_or_model is not None:
        is_mesh = isinstance(mesh_or_model, DeviceMesh)
        backend = backends.joined() if is_mesh else backends.of_model(mesh_or_model)
        mesh = mesh_or_model if is_mesh else _mesh_of(backend, mesh_or_model)
        backend.randomness.seed(seed_for(seed, mesh, backend.collectives.rank()) % 2**63)
    return random.manual_seed(seed)


def _mesh_of(backend: Backend, model: Module) -> DeviceMesh:
    """The mesh that a model has been spread over."""
    execution = execution_of(model)
    if execution is not None:
        return execution.plan.mesh
    layouts = (build.layout_of(use.parameter) for use in backend.modules.parameter_uses(model))
    layout = next((each for each in layouts if each is not None), None)
    if layout is not None:
        return layout.mesh
    if backend.collectives.world_size() > 1:
        raise ConfigError(
            "manual_seed: the model has not been parallelized, so nothing tells which ranks work on the same samples; "
            "call it afterwards, or give the mesh: hyper_parallel.manual_seed(seed, plan.mesh)"
        )
    return DeviceMesh((1,), ("shard",), [backend.collectives.rank()])
