"""Ways to break a plan: every change of one parameter, one contract or one boundary that a slip could make."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Iterator, Mapping

from hyper_parallel import Partial, Replicate, Shard, ShardingPlan, StridedShard
from hyper_parallel.core.placement import Placement
from hyper_parallel.core.plan.contracts import BoundaryPlan, Contract
from hyper_parallel.core.plan.plan import ParameterPlan

WHOLE = Replicate()
SIDES = ("inputs", "outputs")


@dataclass(frozen=True)
class Mutation:
    """`kind` groups them, `what` tells the change. An error has to name the module `where`, or something in it, or the
    module `to` which a boundary was moved."""

    kind: str
    what: str
    where: str
    plan: ShardingPlan
    to: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


@dataclass(frozen=True)
class Breaker:
    """Breaks `plan` along `axis`; takes `other` for it where the mesh has that too. `modules` are the names of the
    model's modules, to which boundaries may be moved."""

    plan: ShardingPlan
    modules: tuple[str, ...]
    axis: str = "tensor"
    other: str = "shard"

    @property
    def on_two_axes(self) -> bool:
        return self.plan.mesh.axis_size(self.other) > 1

    def mutations(self) -> Iterator[Mutation]:
        """All of them."""
        yield from self._of_parameters()
        yield from self._of_contracts()
        yield from self._of_boundaries()

    # Parameters

    def _of_parameters(self) -> Iterator[Mutation]:
        plan = self.plan
        for each in plan.parameters:
            for kind, changes in self._changes_of(each):
                parameters = tuple(replace(other, **changes) if other is each else other for other in plan.parameters)
                what = ", ".join(f"{field} {_text(value)}" for field, value in changes.items())
                module = each.name.rpartition(".")[0]
                yield Mutation(kind, f"{each.name}: {what}", module, replace(plan, parameters=parameters))

    def _changes_of(self, each: ParameterPlan) -> Iterator[tuple[str, dict]]:
        found, dims = each.placements.get(self.axis), range(len(each.shape))
        if found is None:
            yield from (("cut instead of whole", self._placed(each, Shard(dim))) for dim in dims)
        else:
            yield "whole instead of cut", self._placed(each, None)
            yield from (("cut along another dim", self._placed(each, Shard(dim))) for dim in dims if dim != found.dim)
            for split in _other_splits(each, found, self.plan.mesh.axis_size(self.axis)):
                yield "split another way", self._placed(each, split)
        if self.on_two_axes and each.placements.get(self.axis) != each.placements.get(self.other):
            exchanged = {self.axis: self.other, self.other: self.axis}
            placements = {exchanged.get(axis, axis): placement for axis, placement in each.placements.items()}
            yield "another axis", {"placements": placements}
        without = tuple(axis for axis in each.pending if axis != self.axis)
        if self.axis not in each.pending:
            yield "sum of the gradient added", {"pending": (*each.pending, self.axis)}
        else:
            yield "sum of the gradient dropped", {"pending": without}
            if self.on_two_axes and self.other not in without:
                yield "another axis", {"pending": (*without, self.other)}

    def _placed(self, each: ParameterPlan, placement: Placement | None) -> dict:
        placements = {axis: other for axis, other in each.placements.items() if axis != self.axis}
        return {"placements": placements | ({} if placement is None else {self.axis: placement})}

    # Contracts

    def _of_contracts(self) -> Iterator[Mutation]:
        for boundary in self.plan.boundaries:
            for side in SIDES:
                for number, contract in enumerate(getattr(boundary, side)):
                    for kind, changes in self._ends(contract):
                        what = ", ".join(f"{end} {_text(value)}" for end, value in changes.items())
                        contracts = list(getattr(boundary, side))
                        contracts[number] = replace(contract, **changes)
                        changed = self._with(boundary, replace(boundary, **{side: tuple(contracts)}))
                        told = f"{boundary.module}, {side[:-1]} {contract.name}: {what}"
                        yield Mutation(kind, told, boundary.module, changed)

    def _ends(self, contract: Contract) -> Iterator[tuple[str, dict]]:
        if contract.dims < 3:
            return
        before, after = contract.before, contract.after
        back, gradient = contract.source_gradient, contract.gradient
        if not contract.is_trivial:
            yield "ends swapped", {"before": after, "after": before, "gradient": back, "gradient_before": gradient}
            yield "transition dropped", {"after": before, "gradient": back}
            yield "transition dropped", {"before": after, "gradient_before": gradient}
        ends = (("before", before, "gradient_before", back), ("after", after, "gradient", gradient))
        for end, lies, returns, its_gradient in ends:
            now = lies.get(self.axis, WHOLE)
            for placement in (WHOLE, Shard(1), Shard(2), Partial()):
                if placement != now:
                    usual = WHOLE if isinstance(placement, Partial) else placement
                    changes = {end: {**lies, self.axis: placement}, returns: {**_own(lies), self.axis: usual}}
                    yield f"{end} replaced", changes
            if now == WHOLE:
                pending = isinstance(its_gradient.get(self.axis), Partial)
                changed = {**its_gradient, self.axis: WHOLE if pending else Partial()}
                yield "gradient replaced", {returns: changed}
            if self.on_two_axes and self.axis in lies and lies.get(self.other) != lies[self.axis]:
                yield "another axis", {end: self._exchanged(lies), returns: self._exchanged(_own(lies))}

    def _exchanged(self, lies: Mapping[str, Placement]) -> dict:
        return {**lies, self.axis: lies.get(self.other, WHOLE), self.other: lies.get(self.axis, WHOLE)}

    # Boundaries

    def _of_boundaries(self) -> Iterator[Mutation]:
        taken = {each.module for each in self.plan.boundaries}
        for boundary in self.plan.boundaries:
            if all(each.is_trivial for each in (*boundary.inputs, *boundary.outputs)):
                continue
            name = boundary.module
            yield Mutation("boundary dropped", name, name, self._with(boundary))
            for other in self._near(name):
                if other not in taken:
                    there = replace(boundary, module=other)
                    yield Mutation("boundary moved", f"{name} to {other}", name, self._with(boundary, there), other)
                    both = self._with(boundary, boundary, there)
                    yield Mutation("boundary doubled", f"{name} at {other} too", name, both, other)
            sides = replace(boundary, inputs=boundary.outputs, outputs=boundary.inputs)
            yield Mutation("sides swapped", name, name, self._with(boundary, sides))

    def _near(self, name: str) -> Iterator[str]:
        """The module around, and those just below."""
        around = name.rpartition(".")[0]
        if around:
            yield around
        yield from (each for each in self.modules if each.rpartition(".")[0] == name)

    def _with(self, boundary: BoundaryPlan, *instead: BoundaryPlan) -> ShardingPlan:
        boundaries = [each for old in self.plan.boundaries for each in (instead if old is boundary else (old,))]
        return replace(self.plan, boundaries=tuple(boundaries))


def _other_splits(each: ParameterPlan, found: Placement, ranks: int) -> Iterator[Placement]:
    blocks = getattr(found, "split_factor", 1)
    for other in (1, 2, 3):
        if other != blocks and each.shape[found.dim] % (ranks * other) == 0:
            yield Shard(found.dim) if other == 1 else StridedShard(found.dim, other)


def _own(lies: Mapping[str, Placement]) -> dict[str, Placement]:
    return {axis: WHOLE if isinstance(each, Partial) else each for axis, each in lies.items()}


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    return "{" + ", ".join(f"{axis}: {each}" for axis, each in value.items()) + "}"
