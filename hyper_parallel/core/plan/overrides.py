"""Pass 5: what a user decides otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Placement
from hyper_parallel.core.plan.contracts import BoundaryPlan
from hyper_parallel.core.plan.model import ModelDescription
from hyper_parallel.core.plan.templates import Streams


@dataclass(frozen=True)
class Overrides:
    """An override file, checked against a model and a mesh."""

    sequence_parallel: bool = True
    tokens: tuple[int, int] = (1, 4096)
    roles: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    chosen: Mapping[str, Mapping[str, Placement]] = field(default_factory=dict)

    @classmethod
    def read(cls, source: Any, model: ModelDescription, mesh: DeviceMesh) -> Overrides:
        """Read a mapping or a YAML file."""
        return cls(**dict(source or {}))

    def placements(self, name: str) -> Mapping[str, Placement]:
        """Placements that the user decides for one parameter."""
        return self.chosen.get(name, {})

    def remembered(self) -> dict[str, str]:
        """For `ShardingPlan.overrides`: each parameter and boundary that an entry applied to, and the entry as a line."""
        return {}

    def boundary_types(self, kinds: Mapping[str, str]) -> Mapping[str, str]:
        """Pass 3 with the types that the user decides."""
        return kinds

    def boundaries(self, plans: Sequence[BoundaryPlan], streams: Streams) -> Sequence[BoundaryPlan]:
        """Pass 4 with the contracts that the user decides."""
        return plans
