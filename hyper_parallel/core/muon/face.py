"""What users see of an optimizer that is planned, on either backend, beside what its framework's optimizers have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping, NoReturn

from hyper_parallel.core.backend import Tensor
from hyper_parallel.core.errors import ConfigError

if TYPE_CHECKING:
    from hyper_parallel.core.muon.optimizer import MuonEngine

NO_COPY = (
    "a Muon optimizer can't be copied or pickled: it holds this rank's part of a plan. Keep state_dict(), for the same "
    "ranks, or full_state()"
)


def refuse_copy() -> NoReturn:
    """Say why an optimizer can't be copied."""
    raise ConfigError(NO_COPY)


class Planned:
    """Stands before the framework's optimizer among the bases of a backend's `Muon`.

    `_engine` does the work; until it is set, the framework's own constructor is adding the groups."""

    _engine: MuonEngine | None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is made: who orthogonalizes what is planned for all parameters together."""
        if self._engine is not None:
            raise ConfigError(
                "Muon: no group can be added once the optimizer is made, for who orthogonalizes what is planned for "
                "all parameters together; make a new optimizer with all groups, and give it full_state() of this one"
            )
        super().add_param_group(param_group)

    def full_state(self) -> dict[str, Any]:
        """All state, whole, as numpy on every rank; see `hyper_parallel.Muon`. Called by all ranks."""
        return self._engine.full_state(self.param_groups)

    def load_full_state(self, values: Mapping[str, Any]) -> None:
        """Go on from what `full_state` gave, on any mesh and from either framework. Each rank takes its part.

        Raises:
            CheckpointError: lists what is missing, unknown or of another shape; nothing is changed then.
        """
        self._engine.load_full_state(values, self.param_groups)

    def observe_attention(self, maxima: Mapping[str, Tensor]) -> None:
        """Tell the largest attention logits of each head, for `qk_clip`; see `hyper_parallel.Muon`."""
        self._engine.observe_attention(maxima)

    def describe(self) -> str:
        """The plan, in words."""
        return self._engine.describe()
