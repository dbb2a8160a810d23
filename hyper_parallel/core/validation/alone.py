"""Modules that are called by themselves, while the unit that their parameters belong to does not run."""

from __future__ import annotations

from typing import Iterator

from hyper_parallel.core.backend import Backend, Module, Tensor
from hyper_parallel.core.fsdp.parameter import ShardedParameter
from hyper_parallel.core.fsdp.unit import Unit, units_of
from hyper_parallel.core.validation.messages import alone_error


def begin_alone(backend: Backend, model: Module, name: str, module: Module) -> None:
    """A module of the model is called from outside. Let it see its parameters as they are followed, though their units
    do not run, where production would be right: where a unit has nothing to gather and nothing to sum up.

    Raises:
        ContractError: production would read this rank's rows for those of the whole, or leave each rank with a
            gradient of its own. All ranks raise that call the module.
    """
    if backend.autograd.in_backward():  # a checkpoint computes it again, inside of its unit
        return
    below = {id(each) for _, each in backend.modules.named_modules(module)}
    for unit in units_of(backend, model):
        used = [] if _runs_in(unit, below) else list(_used(unit, below))
        needing = [each for each in used if each.needs_unit]
        missing = [each for each in needing if not _is_there(backend, each)]
        if missing:
            raise alone_error(name, missing[0].uses[0].name, unit.name)
        if used and not needing:
            unit.show()


def _runs_in(unit: Unit, below: set[int]) -> bool:
    return any(id(module) in below for module in unit.modules)


def _used(unit: Unit, below: set[int]) -> Iterator[ShardedParameter]:
    return (each for each in unit.parameters if any(id(use.owner) in below for use in each.uses))


def _is_there(backend: Backend, parameter: ShardedParameter) -> bool:
    """Tell whether a unit that has run shows the whole parameter still, with a history if one is wanted."""
    use, autograd = parameter.uses[0], backend.autograd
    shown: Tensor | None = vars(use.owner).get(use.attribute)
    if shown is None or not (autograd.grad_enabled() and backend.modules.is_trainable(parameter.parameter)):
        return shown is not None
    return autograd.takes_part(shown)
