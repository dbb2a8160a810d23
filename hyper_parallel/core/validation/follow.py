"""Carry a plan out on tensors that are followed: the changes of production, each checked or declared."""

from __future__ import annotations

from typing import Any, Callable, Mapping

from hyper_parallel.core.backend import HookHandle, Module, Tensor
from hyper_parallel.core.execution.adaptations import Adaptations
from hyper_parallel.core.execution.around import Maker
from hyper_parallel.core.execution.boundary import Boundary, Change, ChangeArguments
from hyper_parallel.core.execution.domains import Domains
from hyper_parallel.core.execution.facts import Facts, is_in
from hyper_parallel.core.plan.contracts import BoundaryPlan, Contract
from hyper_parallel.core.plan.plan import ParameterPlan
from hyper_parallel.core.validation.agreement import Agreement
from hyper_parallel.core.validation.alone import begin_alone
from hyper_parallel.core.validation.checked import CheckedBoundary, CheckedCrossing, Rows
from hyper_parallel.core.validation.contracts import check_ends, contract_states
from hyper_parallel.core.validation.declared import declared_arguments, declared_change, tables
from hyper_parallel.core.validation.draws import Draws
from hyper_parallel.core.validation.heads import head_units
from hyper_parallel.core.validation.outside import CHOICES, Outside, WholeNumbers, named_arguments
from hyper_parallel.core.validation.parameters import line_of, parameter_states
from hyper_parallel.core.validation.regions import RegionLook
from hyper_parallel.core.validation.samples import check_samples
from hyper_parallel.core.validation.watch import Track, Watch

FOLLOWED = ("context", "tensor")
"""Axes along which several ranks compute one model; along the others each works on samples of its own."""


class Following(Maker):
    """One model under one plan, followed on this rank. `is_real` says that there are other ranks to compare with.

    Raises:
        ContractError: what the plan says of a parameter contradicts itself.
    """

    def __init__(self, facts: Facts, adaptations: Adaptations, is_real: bool = True):
        mesh = facts.plan.mesh
        axes = tuple(axis for axis in FOLLOWED if mesh.axis_size(axis) > 1)
        check_samples(facts.plan)
        for boundary in facts.plan.boundaries:
            for side, contracts in (("input", boundary.inputs), ("output", boundary.outputs)):
                for contract in contracts:
                    check_ends(boundary.module, side, contract)
        super().__init__(facts)
        self._rows = Rows()
        self._adaptations = adaptations
        self._interception = facts.backend.interception
        self._opaque = [each.module for each in facts.plan.boundaries if each.region == "opaque"]
        self._agreement = Agreement(facts.backend, mesh, is_real)
        self._outside = Outside(facts.backend, mesh, axes, is_real, facts.plan.model_class)
        for each in adaptations.collectives:
            each.look = RegionLook(facts.backend, mesh, self._agreement)
        self.watch = Watch(
            facts.backend,
            axes,
            tuple(mesh.axis_size(axis) for axis in axes),
            tables=tables(adaptations),
            name_of=self._name_of,
            agreement=self._agreement,
            outside=self._outside,
            boundary_modules=frozenset(facts.boundaries),
        )
        self.domains = Domains(facts)
        if axes:
            self.watch.draws = Draws(self.domains.randomness, self._agreement)
        units = head_units(facts)
        self._states = {
            each.name: parameter_states(each, axes, each.name in adaptations.shares, units.get(each.name, 1))
            for each in facts.plan.parameters
        }

    def shown(self, parameter: ParameterPlan) -> Callable[[Tensor], Tensor]:
        """What modules are shown of a parameter, for the plain tensor of its local part."""
        share = self._adaptations.shares.get(parameter.name, _unchanged)
        if not self.watch.axes or self._is_in_opaque(parameter.name):
            return share  # without an axis along which ranks share a model there is nothing to follow
        states, line = self._states[parameter.name], line_of(parameter)

        def follow(tensor: Tensor) -> Tensor:
            return self._interception.follow(share(tensor), Track(self.watch, states, line, parameter.trainable))

        return follow

    def boundary(self, name: str, module: Module) -> Boundary:
        """See `Maker`. Tokens and choices of experts are no numbers that a contract holds."""
        made = CheckedBoundary(self.watch, name, module, name in self._opaque)
        planned = self.facts.boundaries.get(name)
        chooses = planned is not None and planned.kind == "experts"
        if chooses or (planned is not None and any(each.dims <= 2 for each in planned.inputs)):
            made.arguments.append(WholeNumbers(self._outside, name, module, CHOICES if chooses else ""))
        return made

    def crossing(self, planned: BoundaryPlan, contract: Contract, side: str) -> Change | None:
        """See `Maker`. Contracts are held where they change nothing too, but for those of tokens, which are indices."""
        crossing = super().crossing(planned, contract, side)
        if contract.dims <= 2 or self._is_inside_opaque(planned.module):
            return crossing
        if crossing is None and side == "input" and planned.region == "opaque":
            crossing = _one_of_its_own
        vouched = side == "output" and planned.region == "opaque" and bool(self.watch.axes)
        return CheckedCrossing(
            self.watch, contract, crossing, self._rows, self._agreement, planned.module, side, vouched
        )

    def on_arguments(self, change: ChangeArguments) -> ChangeArguments:
        """See `Maker`."""
        return declared_arguments(self.watch, change)

    def handed_on(self, change: Change, module: str) -> Change:
        """See `Maker`."""
        return declared_change(self.watch, change, module)

    def trusted(self, name: str, args: tuple, kwargs: Mapping[str, Any]) -> Tensor:
        """What the boundary at a module says of its output, which has the shape of what it takes in: for code that
        can't be run."""
        tensors, planned = self.facts.backend.tensors, self.facts.boundaries[name]
        numbers = (each for each in (*args, *kwargs.values()) if tensors.is_tensor(each))
        taken = next(each for each in numbers if "float" in tensors.dtype_name(each))
        track = self.watch.track_of(taken)
        made = self._interception.plain(taken) * 1
        if planned.region == "opaque":
            return made
        contract = planned.outputs[0]
        dims = len(made.shape)
        states = contract_states(contract.before, contract.source_gradient, self.watch.axes, dims, made.shape[0])
        return self._interception.follow(made, Track(self.watch, states, "", track is not None and track.live))

    def paths(self) -> list[HookHandle]:
        """Hooks that tell the watch which module is running."""
        modules, seen, hooks = self.facts.backend.modules, set(), []
        for name, module in self.facts.modules.items():
            if id(module) not in seen:
                seen.add(id(module))
                path = _Path(self.watch, name, module, self.facts.model)
                hooks.append(modules.around_forward(module, path.enter, path.leave))
        return hooks

    def _name_of(self, tensor: Tensor) -> str | None:
        uses = self.facts.backend.modules.parameter_uses(self.facts.model)
        return next((use.name for use in uses if use.parameter is tensor), None)

    def _is_in_opaque(self, name: str) -> bool:
        """Tell whether something is an opaque region, or stands in one."""
        return any(is_in(name, each) for each in self._opaque)

    def _is_inside_opaque(self, name: str) -> bool:
        """Tell whether something stands below an opaque region."""
        return any(name != each and is_in(name, each) for each in self._opaque)


class _Path:
    """A module's place, told to the watch while it runs."""

    def __init__(self, watch: Watch, name: str, module: Module, model: Module):
        self._watch = watch
        self._name = name
        self._module = module
        self._model = model

    def enter(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The module begins. Where it is the outermost one, its arguments come from outside."""
        if not self._name:
            self._watch.running.clear()  # an exception may have left something behind
            if self._watch.draws is not None:
                self._watch.draws.begin()
        outside = self._watch.outside
        if not self._watch.running and outside is not None and outside.is_real:
            outside.check(self._name, named_arguments(self._module, args, kwargs))
        if self._name and not self._watch.running:
            begin_alone(self._watch.backend, self._model, self._name, self._module)
        self._watch.running.append(self._name)
        return args, kwargs

    def leave(self, output: Any) -> Any:
        """It ends."""
        while self._watch.running and self._watch.running.pop() != self._name:
            pass
        return output


def _one_of_its_own(tensor: Tensor) -> Tensor:
    """The same values in a tensor that nobody else has, so that its gradient is what an opaque region sends back."""
    return tensor * 1


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
