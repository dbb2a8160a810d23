"""Pass 5: what a user decides otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.plan.assignment import RoleResult
from hyper_parallel.core.plan.contracts import BoundaryPlan
from hyper_parallel.core.plan.model import ModelDescription
from hyper_parallel.core.plan.placing import Placed


@dataclass(frozen=True)
class Overrides:
    """An override file, checked against a model and a mesh."""

    sequence_parallel: bool = True
    tokens: tuple[int, int] = (1, 4096)

    @classmethod
    def read(cls, source: Any, model: ModelDescription, mesh: DeviceMesh) -> Overrides:
        """Read a mapping or a YAML file."""
        return cls(**dict(source or {}))

    def roles(self, found: RoleResult) -> RoleResult:
        return found

    def placed(self, name: str, placed: Placed) -> Placed:
        return placed

    def remembered(self) -> dict[str, str]:
        """For `ShardingPlan.overrides`: each parameter and boundary that an entry applied to, and the entry as a line."""
        return {}

    def boundaries(self, plans: list[BoundaryPlan]) -> list[BoundaryPlan]:
        return plans
