"""All that is put around the modules of a model, in the order in which it acts."""

from __future__ import annotations

from hyper_parallel.core.backend import Module
from hyper_parallel.core.execution.adaptations import Adaptations
from hyper_parallel.core.execution.boundary import Boundary, Change, ChangeArguments
from hyper_parallel.core.execution.crossing import Crossing, changed_axes
from hyper_parallel.core.execution.facts import Facts, is_in
from hyper_parallel.core.execution.tokens import Tokens
from hyper_parallel.core.hooks import Handles
from hyper_parallel.core.placement import Shard
from hyper_parallel.core.plan.contracts import SEQUENCE, BoundaryPlan, Contract
from hyper_parallel.core.plan.role_rules import LIST_CLASSES


class Maker:
    """Makes what production puts around modules. Validation makes the same, and has it looked at."""

    def __init__(self, facts: Facts):
        self.facts = facts
        self._tokens = Tokens(facts.backend, facts.plan.mesh)

    def hooks(self, found: Adaptations) -> list[Handles]:
        """Hook all modules that have anything around them."""
        hooks = [boundary.attach() for boundary in self.boundaries(found)]
        module = self.facts.modules.get(self._around_sequences())
        if module is not None:
            modules, tokens = self.facts.backend.modules, self._tokens
            hooks.append(Handles(modules.around_forward(module, tokens.begin, tokens.end)))
        return hooks

    def boundaries(self, found: Adaptations) -> list[Boundary]:
        """The changes around every module, in the order of the model; a module that stands in two places comes once."""
        made: dict[int, Boundary] = {}
        for name, module in self.facts.modules.items():
            if id(module) in made:
                continue
            boundary = made[id(module)] = self.boundary(name, module)
            planned = self.facts.boundaries.get(name) or BoundaryPlan(name, "", (), ())
            boundary.arguments += map(self.on_arguments, found.arguments.get(name, ()))
            for number, contract in enumerate(planned.inputs):
                if (change := self.crossing(planned, contract, "input")) is not None:
                    boundary.inputs.append((number, contract.name, change))
            boundary.region = found.regions.get(name)
            boundary.outputs += found.results.get(name, ())
            outputs = (self.crossing(planned, contract, "output") for contract in planned.outputs)
            boundary.outputs += (change for change in outputs if change is not None)
            boundary.outputs += (self.handed_on(change, name) for change in found.handed_on.get(name, ()))
        return list(made.values())

    def boundary(self, name: str, module: Module) -> Boundary:
        """An empty one."""
        return Boundary(self.facts.backend, name, module)

    def crossing(self, planned: BoundaryPlan, contract: Contract, side: str) -> Change | None:
        """What brings a tensor to the other side of a contract; None where it is there as it comes."""
        if not changed_axes(contract, self.facts.plan.mesh):
            return None
        where = f"the {side} {contract.name!r} of {planned.module}"
        return Crossing(self.facts.backend, contract, self.facts.plan.mesh, self._tokens, where)

    def on_arguments(self, change: ChangeArguments) -> ChangeArguments:
        """A change of arguments that an adaptation has found."""
        return change

    def handed_on(self, change: Change, module: str) -> Change:
        """A change of what a module hands on, likewise."""
        return change

    def _around_sequences(self) -> str | None:
        """The innermost module in whose forward sequences are cut, worked on and put together; None where none are."""
        cut = [each.module for each in self.facts.plan.boundaries if _cuts_sequences(each)]
        around = cut[0] if cut else None
        while around and (self._is_list(around) or around in cut or not all(is_in(each, around) for each in cut)):
            around = around.rpartition(".")[0]
        return around

    def _is_list(self, name: str) -> bool:
        """Tell whether a module holds others that are called one by one, or may be."""
        return self.facts.backend.modules.class_name(self.facts.modules[name]) in (*LIST_CLASSES, "Sequential")


def _cuts_sequences(boundary: BoundaryPlan) -> bool:
    """Tell whether `tensor` ranks have parts of a sequence on some side of a boundary."""
    contracts = (*boundary.inputs, *boundary.outputs)
    return any(Shard(SEQUENCE) == side.get("tensor") for each in contracts for side in (each.before, each.after))
