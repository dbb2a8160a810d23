"""QK-clip inside of an optimizer: maxima that the model has told, and what they do to parameters and their copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping, Sequence

import numpy as np

from hyper_parallel.core.backend import Backend
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.muon.groups import Request
from hyper_parallel.core.muon.qk_clip import ClipOfRank, QKClip, on_host, plan
from hyper_parallel.core.muon.storage import Stored

if TYPE_CHECKING:
    from hyper_parallel.core.muon.optimizer import MuonEngine


class AttentionClip:
    """What one rank does. Maxima are kept from one step to the next; ranks tell each other theirs before an update, in
    each step, so that none waits for another that has seen nothing."""

    def __init__(self, backend: Backend, request: Request, clip: QKClip, members: Sequence[Stored]):
        if request.description is None:
            raise ConfigError("Muon: qk_clip looks for attention in a model; give the model, not its parameters")
        self._backend = backend
        self._plan = plan(request.description, clip)
        self._members = {each.name: number for number, each in enumerate(members)}
        frozen = [name for name in self._plan.parameters if name not in self._members]
        if frozen:
            raise ConfigError(f"Muon: qk_clip would scale {frozen[0]}, which asks for no gradient; leave qk_clip out")
        layouts = {name: members[self._members[name]].layout for name in self._plan.parameters}
        self._rank = ClipOfRank(self._plan, layouts, backend.collectives.rank())
        self._seen: dict[str, np.ndarray] = {}

    def describe(self) -> str:
        """Which attention it acts on."""
        return self._plan.describe()

    def observe(self, maxima: Mapping[str, Any]) -> None:
        """Take the largest logits of a micro-batch: the larger ones count until the next step."""
        found = on_host(self._backend, maxima)
        self._rank.pack(found)  # refuses what is unknown
        for path, values in found.items():
            self._seen[path] = np.maximum(self._seen[path], values) if path in self._seen else values

    def exchange(self) -> np.ndarray:
        """The largest logits of all ranks since the last step. Called by all ranks. What was seen is over with that,
        also where it is refused: a step that is tried again would be refused for ever."""
        seen, self._seen = self._seen, {}
        return self._rank.exchange(self._backend, seen)

    def apply(self, engine: MuonEngine, largest: np.ndarray) -> None:
        """Scale this rank's parts of queries and keys, and of their float32 copies."""
        tensors = self._backend.tensors
        for name, boxes, factors in self._rank.scales(largest):
            member = self._members[name]
            for tensor in (engine.local(engine.members[member].parameter), engine.master_of(member)):
                if tensor is not None:
                    scaled = tensor if tensor.is_contiguous() else tensors.duplicate(tensor)
                    self._backend.muon.scale_blocks_(scaled, boxes, factors)
                    if scaled is not tensor:
                        tensors.copy_(tensor, scaled)
