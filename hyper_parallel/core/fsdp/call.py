"""One call of a unit's module, as backward shows it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Iterator, Mapping

from hyper_parallel.core.backend import Backend, Tensor

if TYPE_CHECKING:
    from hyper_parallel.core.fsdp.unit import Unit


class Call:
    """One recorded call of a unit's module, from its inputs to the gradients of its inputs.

    A graph that is kept can be run backward again, so what is counted belongs to one backward pass.
    """

    def __init__(self, unit: Unit, inputs: Any):
        self._unit = unit
        self._backward: int | None = None  # the pass in which an output was reached
        watched = [each for each in tensors_in(unit.backend, inputs) if unit.backend.autograd.requires_grad(each)]
        self._inputs = self._missing = len(watched)
        for tensor in watched:
            unit.backend.autograd.on_gradient(tensor, self._input_done)

    def watch_outputs(self, outputs: Any) -> bool:
        """Hear of the first gradient that reaches an output; False when there is no tensor to watch."""
        tensors = list(tensors_in(self._unit.backend, outputs))
        for tensor in tensors:
            if self._unit.backend.autograd.requires_grad(tensor):
                self._unit.backend.autograd.on_gradient(tensor, self._output_reached)
        return bool(tensors)

    def _output_reached(self) -> None:
        self._unit.check_attached()
        schedule = self._unit.schedule
        if self._backward != schedule.backward_number:
            self._backward, self._missing = schedule.backward_number, self._inputs
            schedule.before_backward(self._unit)
            if self._unit.is_gathered():
                self._unit.show()

    def _input_done(self) -> None:
        self._missing -= 1
        if self._missing == 0 and self._backward == self._unit.schedule.backward_number:
            self._unit.schedule.after_backward(self._unit)


def tensors_in(backend: Backend, tree: Any) -> Iterator[Tensor]:
    """The tensors of a nest of tuples, lists, mappings and dataclasses, each once."""
    seen: set[int] = set()
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if backend.tensors.is_tensor(value):
            yield value
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, (tuple, list)):
            waiting.extend(value)
        elif is_dataclass(value) and not isinstance(value, type):
            waiting.extend(getattr(value, each.name, None) for each in fields(value))
