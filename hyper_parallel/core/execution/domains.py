"""Around which modules ranks draw for themselves, read off the plan: where hidden states, or what is made of them, are
cut.

Outside of the blocks hidden states are whole, and inside of them they may be a part of the sequence; a boundary says
how its module wants them. A module that holds weights that are cut works on cut features from its entry until a weight
is met that is cut along its inputs: what that gives is a pending sum. Only modules that can drop at all are looked at.
"""

from __future__ import annotations

from typing import Iterator, Mapping

from hyper_parallel.core.backend import HookHandle, Module
from hyper_parallel.core.execution.facts import Facts, is_cut, is_in
from hyper_parallel.core.execution.randomness import SHARED, Axes, Randomness, Switch
from hyper_parallel.core.placement import Placement, Shard, StridedShard
from hyper_parallel.core.plan.blocks import EDGES
from hyper_parallel.core.plan.contracts import SEQUENCE, BoundaryPlan
from hyper_parallel.core.plan.names import block_of
from hyper_parallel.core.plan.role_rules import ROLES


class Domains:
    """The switches of one model, and the generators that they switch.

    `inside` are the modules inside of which, and `after` those from which on, ranks draw for themselves along other
    axes than before.
    """

    def __init__(self, facts: Facts):
        self.randomness = Randomness(facts.backend, facts.plan.mesh, facts.rank)
        self.inside: dict[str, Axes] = {}
        self.after: dict[str, Axes] = {}
        self._facts = facts
        self._droppers = {name: module for name, module in facts.modules.items() if can_drop(facts, module)}
        if self.randomness.axes and self._droppers:
            self._find()

    def attach(self) -> list[HookHandle]:
        """Hook the modules; none where nothing can drop."""
        modules, hooks, seen = self._facts.backend.modules, [], set()
        for name, axes in [*self.inside.items(), *self.after.items()]:
            module, around = self._facts.modules[name], name in self.inside
            if id(module) in seen:
                continue
            seen.add(id(module))
            holder = name if around else self._holder(name)
            switch = Switch(self.randomness, name, axes, self._below(holder))
            if around:
                hooks.append(modules.around_forward(module, switch.enter, switch.leave))
            else:
                hooks.append(modules.before_forward(module, switch.go_on))
        if hooks:
            begin = self.randomness.begin
            hooks.append(modules.before_forward(self._facts.model, lambda args, kwargs: begin()))
        return hooks

    def _find(self) -> None:
        planned = [each for each in self._facts.plan.boundaries if each.kind not in EDGES]
        for block, axes in _streams(self._facts.plan.boundaries).items():
            if self._below(block):
                self.inside[block] = axes
        for boundary in sorted(planned, key=lambda each: each.module.count(".")):
            if self._below(boundary.module):
                self._find_in(boundary)

    def _find_in(self, boundary: BoundaryPlan) -> None:
        hidden = next((each for each in boundary.inputs if each.dims > 2), None)
        wanted = () if hidden is None else _cut(hidden.after)
        if boundary.module in self.inside or wanted != self._around(boundary.module):
            self.inside[boundary.module] = wanted
        if "tensor" not in self.randomness.axes:
            return
        own = tuple(axis for axis in SHARED if axis == "tensor" or axis in wanted)
        inputs, others = self._holders(boundary.module)
        for scope in self._scopes(boundary.module, inputs, others):
            if self._below(scope):
                self.inside[scope] = own
                for name in inputs:
                    if name != scope and is_in(name, scope):
                        self.after[name] = self._handed_on(name, wanted)

    def _handed_on(self, name: str, wanted: Axes) -> Axes:
        """Where what a linear gives is cut: as its own boundary hands it on, or a sum that is as what was taken in."""
        planned = self._facts.boundaries.get(name)
        return _cut(planned.outputs[0].after) if planned and planned.outputs else wanted

    def _holders(self, boundary: str) -> tuple[list[str], list[str]]:
        """The modules of a boundary that hold weights cut along their inputs, and those that hold weights cut
        otherwise."""
        inputs, others = [], []
        for parameter in self._facts.plan.parameters:
            if parameter.boundary == boundary and is_cut(parameter) and parameter.role:
                found = inputs if ROLES[parameter.role].tensor == "input" else others
                found.append(parameter.name.rpartition(".")[0])
        return inputs, others

    def _scopes(self, boundary: str, inputs: list[str], others: list[str]) -> Iterator[str]:
        """The modules that work on cut features: the smallest ones that hold both kinds of weights, as each expert of a
        list does; all of the boundary where there is none of a kind."""
        if not inputs and not others:
            return
        found = dict.fromkeys(_smallest_around(name, others, boundary) for name in inputs) or {boundary: None}
        yield from found

    def _around(self, module: str) -> Axes:
        """What holds around a module by what has been found so far."""
        while module:
            module = module.rpartition(".")[0]
            if module in self.inside:
                return self.inside[module]
        return ()

    def _holder(self, name: str) -> str:
        """The module that has been entered when a module inside of it is met."""
        while name and name not in self.inside:
            name = name.rpartition(".")[0]
        return name

    def _below(self, name: str) -> list[Module]:
        """The modules in a module that can drop."""
        return [module for each, module in self._droppers.items() if is_in(each, name)]


def can_drop(facts: Facts, module: Module) -> bool:
    """Tell whether a module drops elements by chance when it is training: a layer for that with p above 0, or one whose
    code reads a probability off an attribute that says so."""
    layer = "dropout" in facts.backend.modules.class_name(module).lower()
    return any(
        isinstance(value, float) and value > 0 and ("drop" in name or "noise" in name or (layer and name == "p"))
        for name, value in vars(module).items()
    )


def _streams(boundaries: tuple[BoundaryPlan, ...]) -> dict[str, Axes]:
    """The blocks in which hidden states are cut between all boundaries, and over which axes."""
    found: dict[str, Axes] = {}
    for boundary in boundaries:
        if boundary.kind in EDGES:
            continue
        ends = [each.before for each in boundary.inputs if each.dims > 2]
        ends += [each.after for each in boundary.outputs if each.dims > 2]
        block = block_of(boundary.module)
        axes = {axis for each in ends for axis in _cut(each) if each[axis].dim == SEQUENCE}
        if block and axes:
            found[block] = tuple(axis for axis in SHARED if axis in axes or axis in found.get(block, ()))
    return found


def _cut(placements: Mapping[str, Placement]) -> Axes:
    return tuple(axis for axis in SHARED if isinstance(placements.get(axis), (Shard, StridedShard)))


def _smallest_around(name: str, others: list[str], boundary: str) -> str:
    """The smallest module around `name`, itself perhaps, that one of the others stands in too."""
    module = name
    while module != boundary and not any(is_in(other, module) for other in others):
        module = module.rpartition(".")[0]
    return module
