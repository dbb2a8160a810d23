"""What a model's modules take in and hand on in one step, values and gradients, written down on the host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Mapping, NamedTuple

import numpy as np

from hyper_parallel.core.backend import Backend, Module, Tensor
from hyper_parallel.core.execution.boundary import Boundary
from hyper_parallel.core.plan.contracts import BoundaryPlan

INPUT, OUTPUT = "input", "output"


@dataclass
class Seen:
    """A tensor at a boundary: what it held, and, once backward has been there, its gradient."""

    value: np.ndarray
    gradient: np.ndarray | None = None


class Key(NamedTuple):
    """Module, side, number of the contract on that side, number of the call, from 0."""

    module: str
    side: str
    number: int
    call: int


class Recorder:
    """Looks at boundaries. `records` are in the order of the forward.

    What goes in is seen as the module's own code gets it, so `watch_inputs` is called before a plan is applied; what
    comes out as others get it, so `watch_outputs` is called afterwards.
    """

    def __init__(self, backend: Backend, model: Module):
        self.records: dict[Key, Seen] = {}
        self._backend = backend
        self._modules: Mapping[str, Module] = dict(backend.modules.named_modules(model))
        self._calls: dict[tuple[str, str, int], int] = {}

    def watch_inputs(self, boundaries: tuple[BoundaryPlan, ...]) -> None:
        """See what modules take in."""
        for each in boundaries:
            self._attach(each, INPUT)

    def watch_outputs(self, boundaries: tuple[BoundaryPlan, ...]) -> None:
        """See what modules hand on."""
        for each in boundaries:
            self._attach(each, OUTPUT)

    def _attach(self, planned: BoundaryPlan, side: str) -> None:
        module = self._modules.get(planned.module)
        if module is None:
            return  # the plan does not fit, which is told when it is applied
        boundary = Boundary(self._backend, planned.module, module)
        contracts = crossed(planned, side)
        for number, contract in enumerate(contracts):
            see = partial(self._see, planned.module, side, number)
            if side == INPUT:
                boundary.inputs.append((number, contract.name, see))
            else:
                boundary.outputs.append(see)
        boundary.attach()

    def _see(self, module: str, side: str, number: int, tensor: Tensor) -> Tensor:
        place = module, side, number
        call = self._calls[place] = self._calls.get(place, -1) + 1
        self.records[Key(*place, call)] = seen = Seen(self._backend.tensors.to_numpy(tensor))

        def returned(gradient: Tensor, _: Any) -> Tensor:
            seen.gradient = self._backend.tensors.to_numpy(gradient)
            return gradient

        # A tensor of its own: what else the model does with the one that comes here must not count as the module's.
        return self._backend.autograd.differentiable(tensor, _same, returned)


def crossed(planned: BoundaryPlan, side: str) -> tuple:
    """The contracts of a side that speak of numbers; those of tokens, which are indices, are not looked at."""
    contracts = planned.inputs if side == INPUT else planned.outputs
    return tuple(each for each in contracts if each.dims > 2)


def _same(tensor: Tensor) -> tuple[Tensor, None]:
    return tensor * 1, None
