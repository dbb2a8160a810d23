"""What modules are told on this rank, so that their own code does its part of the work.

A model's code reads sizes off attributes (the number of heads), adds biases where a sum over ranks is pending, and
looks tokens up in a table of which a rank holds some rows. What has to be another here is found before anything is
changed, as data, and all of it is undone by `restore`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable

from hyper_parallel.core.backend import Module, Tensor
from hyper_parallel.core.execution.boundary import Change, ChangeArguments, Region

if TYPE_CHECKING:
    from hyper_parallel.core.execution.region_collectives import RegionCollectives

_ABSENT = object()


@dataclass
class Adaptations:
    """Everything around modules that is no contract's.

    Changes are by the name of a module: `arguments` come before the contract's transition, `results` after the module
    and before it, `handed_on` after it; `regions` stand closest to the module. `shares` say of a parameter that one
    tensor rank adds what this rank's modules see of it. `collectives` are those that modules are handed. `problems` say
    why the plan can't be run on this model.
    """

    arguments: dict[str, list[ChangeArguments]] = field(default_factory=dict)
    results: dict[str, list[Change]] = field(default_factory=dict)
    handed_on: dict[str, list[Change]] = field(default_factory=dict)
    regions: dict[str, Region] = field(default_factory=dict)
    shares: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    collectives: list[RegionCollectives] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _shown: list[tuple[Module, str, Any]] = field(default_factory=list)
    _before: list[tuple[dict, str, Any]] = field(default_factory=list)

    def show(self, module: Module, attribute: str, value: Any) -> None:
        """Let a module's code find `value` under an attribute, in its instance dictionary."""
        self._shown.append((module, attribute, value))

    def apply(self) -> None:
        """Let modules find what they are told."""
        for module, attribute, value in self._shown:
            self._before.append((vars(module), attribute, vars(module).get(attribute, _ABSENT)))
            vars(module)[attribute] = value

    def undo(self) -> None:
        """Let them find what was there before; harmless when done twice."""
        while self._before:
            attributes, name, value = self._before.pop()
            attributes.pop(name, None)
            if value is not _ABSENT:
                attributes[name] = value
