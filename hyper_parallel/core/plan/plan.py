"""The sharding plan: plain data that can be printed, saved, compared and applied."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

import yaml

from hyper_parallel.core.errors import PlanError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Placement
from hyper_parallel.core.plan.contracts import BoundaryPlan
from hyper_parallel.core.plan.model import ITEM_BYTES
from hyper_parallel.core.plan.saved import FORMAT, read_plan
from hyper_parallel.core.plan.yaml_text import load_yaml, to_yaml

if TYPE_CHECKING:
    from hyper_parallel.core.plan.costs import Flow, Memory
    from hyper_parallel.core.topology import Topology


@dataclass(frozen=True)
class ParameterPlan:
    """Where one parameter lies: `placements` per mesh axis, and the unit that gathers it.

    `role` says what it is ("" where nothing had to know), `rule` why, `boundary` the module that it acts in. `pending`
    are the mesh axes along which the raw gradient of the local part is a partial sum. `local_shape` is that of the
    first rank: the most that any holds, except of an expert that lies on another one. `notes` are what is worth
    knowing.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    placements: Mapping[str, Placement]
    unit: str
    role: str = ""
    rule: str = ""
    boundary: str = ""
    pending: tuple[str, ...] = ()
    local_shape: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class UnitPlan:
    """What is gathered and freed together: the parameters of the module `name` ("" is the model itself)."""

    name: str
    reshard_after_forward: bool


@dataclass(frozen=True)
class ShardingPlan:
    """One static plan for one model on one mesh.

    `plan[name]` is a parameter's part, by any of its names. `tied` maps further names to first names. `notes` tell
    what a user may want to know before the run, a sentence each. `boundaries` are the modules whose inputs and outputs
    carry contracts; there are none where no axis but `replicate` and `shard` is active. `sequence_parallel` says that
    hidden states are cut along the sequence over `tensor`. `tokens` is the global batch that traffic is counted for, in
    sequences and tokens of each. `overrides` maps a parameter or the module of a boundary to what an override file said
    of it, as one line, and why that entry applied.
    """

    model_class: str
    mesh: DeviceMesh
    units: tuple[UnitPlan, ...]
    parameters: tuple[ParameterPlan, ...]
    tied: Mapping[str, str]
    notes: tuple[str, ...] = ()
    boundaries: tuple[BoundaryPlan, ...] = ()
    sequence_parallel: bool = False
    tokens: tuple[int, int] = (0, 0)
    overrides: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> ParameterPlan:
        parameter = self._by_name.get(self.tied.get(name, name))
        if parameter is None:
            raise PlanError(f"the plan for {self.model_class} has no parameter {name!r}")
        return parameter

    @cached_property
    def _by_name(self) -> dict[str, ParameterPlan]:
        return {each.name: each for each in self.parameters}

    @cached_property
    def _by_unit(self) -> dict[str, list[ParameterPlan]]:
        units: dict[str, list[ParameterPlan]] = {}
        for each in self.parameters:
            units.setdefault(each.unit, []).append(each)
        return units

    def layout(self, name: str) -> Layout:
        """The layout of a parameter at rest, which is also that of its reduced gradient."""
        parameter = self[name]
        return Layout(self.mesh, parameter.placements, parameter.shape)

    def members(self, unit: str) -> list[ParameterPlan]:
        """The parameters of a unit, in definition order."""
        return list(self._by_unit.get(unit, ()))

    def table(self, topology: Topology | None = None, full: bool = False) -> str:
        """Every boundary with its contracts and transitions, every parameter, and the totals, for people to read.

        Modules that are alike are shown once, by their range, unless `full`. With a topology traffic on the slow tier
        is marked.
        """
        from hyper_parallel.core.plan.text import table

        return table(self, topology, full)

    def summary(self, topology: Topology | None = None) -> str:
        """A few lines: sizes, memory and traffic of the busiest rank."""
        from hyper_parallel.core.plan.text import summary

        return summary(self, topology)

    def traffic(self, topology: Topology | None = None) -> tuple[Flow, ...]:
        """The bytes that the busiest rank receives in a step, by purpose, collective, axes and tier."""
        from hyper_parallel.core.plan.costs import traffic

        return traffic(self, topology)

    def memory(self) -> Memory:
        """The bytes of parameters, gradients and optimizer state on the rank that holds the most."""
        from hyper_parallel.core.plan.costs import memory

        return memory(self)

    def explain(self, name: str) -> str:
        """Why a parameter, or the boundary at a module, is as it is: pass by pass.

        Raises:
            PlanError: the plan has neither; names the closest that it has.
        """
        from hyper_parallel.core.plan.explain import explain

        return explain(self, name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for YAML or JSON. Stable: equal plans give equal dictionaries."""
        return {
            "format": FORMAT,
            "model": self.model_class,
            "mesh": {name: size for name, size in zip(self.mesh.names, self.mesh.shape)},
            "ranks": None if self.mesh.ranks == tuple(range(self.mesh.size)) else list(self.mesh.ranks),
            "units": [{"name": unit.name, "reshard_after_forward": unit.reshard_after_forward} for unit in self.units],
            "parameters": {
                each.name: {
                    "shape": list(each.shape),
                    "dtype": each.dtype,
                    "trainable": each.trainable,
                    "placements": {axis: str(placement) for axis, placement in each.placements.items()},
                    "unit": each.unit,
                    "role": each.role,
                    "rule": each.rule,
                    "boundary": each.boundary,
                    "pending": list(each.pending),
                    "notes": list(each.notes),
                }
                for each in self.parameters
            },
            "sequence_parallel": self.sequence_parallel,
            "tokens": list(self.tokens),
            "boundaries": {each.module: each.to_dict() for each in self.boundaries},
            "tied": dict(self.tied),
            "notes": list(self.notes),
            "overrides": dict(self.overrides),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ShardingPlan:
        """Read back what `to_dict` gave.

        Raises:
            PlanError: a key is missing, or a value is not what a plan holds.
        """
        return read_plan(values)

    def save(self, path: str | os.PathLike) -> None:
        """Write YAML; a file that is there is replaced as a whole."""
        path = Path(path)
        draft = path.with_name(path.name + ".part")
        draft.write_text(to_yaml(self.to_dict()), encoding="utf-8")
        os.replace(draft, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> ShardingPlan:
        """Read what `save` wrote.

        Raises:
            PlanError: the file is missing, no YAML, or no plan.
        """
        try:
            values = load_yaml(Path(path).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError, ValueError) as error:
            raise PlanError(f"the plan {path} can't be read: {error}") from error
        try:
            return read_plan(values)
        except PlanError as error:
            raise PlanError(f"the plan {path}: {error}") from error
