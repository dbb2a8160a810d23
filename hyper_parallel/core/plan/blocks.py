"""Where sequence parallelism holds: from the first block to the last.

A model's own code outside of its blocks adds positions to embedded tokens, makes masks, reads the number of tokens off
hidden states and views them by it. So hidden states are whole there on every tensor rank. The first block takes its
part of the sequence when it is called, and the last one hands all of it on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Sequence

from hyper_parallel.core.plan.assignment import RoleResult
from hyper_parallel.core.plan.contracts import BoundaryPlan, Contract
from hyper_parallel.core.plan.model import ModelDescription
from hyper_parallel.core.plan.names import block_around, block_of
from hyper_parallel.core.plan.role_rules import ROLES
from hyper_parallel.core.plan.templates import Streams

EDGES = ("entry", "exit")
"""The kinds of boundaries that only cut the sequence, or put it together."""


@dataclass(frozen=True)
class Blocks:
    """The blocks between which each tensor rank has a part of the sequence, and how hidden states lie there.

    `lists` are the lists of blocks that hold more than what is kept whole; of several nobody knows which comes first.
    `first` and `last` are blocks, "" where the sequence is not cut: without sequence parallelism, and in a model
    without a list of blocks.
    """

    streams: Streams
    lists: tuple[str, ...] = ()
    first: str = ""
    last: str = ""

    def streams_at(self, module: str) -> Streams:
        """The layouts around a module."""
        return self.streams if self.contain(module) else self._around

    def contain(self, module: str) -> bool:
        """Tell whether a module or parameter is or stands in one of the blocks."""
        block = block_of(module)
        return bool(block) and block.rpartition(".")[0] in self.lists

    def streams_beside(self, module: str, side: str) -> Streams:
        """The layouts on one side ("inputs" or "outputs") of a module: at an edge of the blocks those outside."""
        edge = self.first if side == "inputs" else self.last
        return self.streams_at("" if module == edge else module)

    def holds(self, outer: str, module: str, side: str) -> bool:
        """Tell whether hidden states on one side of a module are those inside of `outer`, a module around it: no edge
        of the blocks lies between them."""
        return self.streams_at(outer) == self.streams_beside(module, side)

    @property
    def _around(self) -> Streams:
        return replace(self.streams, sequence_parallel=False)

    def with_edges(self, plans: Sequence[BoundaryPlan]) -> list[BoundaryPlan]:
        """The boundaries with those of the first and the last block. A block that is a boundary itself takes whole
        hidden states in, or hands them on."""
        plans = list(plans)
        if not self.first:
            return plans
        whole, part = self._around.outside, self.streams.outside
        known = {plan.module: place for place, plan in enumerate(plans)}
        if self.first in known:
            plans[known[self.first]] = _with_end(plans[known[self.first]], "inputs", before=whole, gradient_before=None)
        else:
            inside = [place for place, plan in enumerate(plans) if plan.module.startswith(f"{self.first}.")]
            taken = (self.streams.contract("hidden", whole, part),)
            edge = BoundaryPlan(self.first, "entry", taken, (), note="each tensor rank takes its part of the sequence")
            plans.insert(min(inside, default=len(plans)), edge)
        known = {plan.module: place for place, plan in enumerate(plans)}
        handed = self.streams.contract("hidden", part, whole)
        if self.last not in known:
            inside = [place for place, plan in enumerate(plans) if plan.module.startswith(f"{self.last}.")]
            edge = BoundaryPlan(self.last, "exit", (), (handed,), note="the sequence is put together")
            plans.insert(max(inside, default=len(plans) - 1) + 1, edge)
        elif plans[known[self.last]].kind == "entry":
            plans[known[self.last]] = replace(plans[known[self.last]], outputs=(handed,))
        else:
            place = known[self.last]
            plans[place] = _with_end(plans[place], "outputs", after=whole, gradient=handed.gradient)
        return plans


def _with_end(plan: BoundaryPlan, side: str, **ends: object) -> BoundaryPlan:
    def changed(contract: Contract) -> Contract:
        return replace(contract, **ends) if contract.name == "hidden" else contract

    return replace(plan, **{side: tuple(changed(each) for each in getattr(plan, side))})


def find_blocks(model: ModelDescription, roles: RoleResult, streams: Streams) -> Blocks:
    """The blocks of a model."""
    if not streams.sequence_parallel:
        return Blocks(streams)
    owners = {name.rpartition(".")[0]: ROLES[each.role].boundary != "whole" for name, each in roles.assignments.items()}
    found = dict.fromkeys(block_of(module) for module, is_known in owners.items() if is_known)
    lists = tuple(dict.fromkeys(block.rpartition(".")[0] for block in found if block))
    if not lists:
        return Blocks(streams)
    listed = {block for block in map(block_of, (*model.modules, *owners)) if block.rpartition(".")[0] == lists[0]}
    blocks = sorted((block for block in listed if block), key=lambda block: int(block.rpartition(".")[2]))
    return Blocks(streams, lists, blocks[0], blocks[-1])


def same_blocks(model: ModelDescription) -> dict[str, str]:
    """Blocks that hold the parameters of another one and no others, and that other: a module that stands in its list
    more than once."""
    if not model.tied:
        return {}
    held: dict[str, dict[str, str]] = {}
    for name in (*(each.name for each in model.parameters), *model.tied):
        if block := block_around(name):
            held.setdefault(block, {})[name.removeprefix(block)] = model.tied.get(name, name)
    first: dict[frozenset[tuple[str, str]], str] = {}
    others = {block: first.setdefault(frozenset(own.items()), block) for block, own in held.items()}
    return {block: other for block, other in others.items() if block != other}
