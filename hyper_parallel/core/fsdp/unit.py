"""A unit: the parameters of a module that are gathered and freed together, and the hooks that report its life."""

from __future__ import annotations

from typing import Any, Iterator, Sequence

from hyper_parallel.core.backend import Backend, Group, Module, Tensor
from hyper_parallel.core.fsdp.parameter import ShardedParameter
from hyper_parallel.core.fsdp.runtime import BackendRuntime, UnitReduction
from hyper_parallel.core.fsdp.schedule import Schedule

_ATTRIBUTE = "_hyper_parallel_unit"


class Unit:
    """Made by `fully_shard`; lives on its module until `restore`.

    Its schedule is shared with all units below the same root. The root is the unit whose module is run first with no
    unit above it; it adopts the others at its first forward.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        module: Module,
        parameters: Sequence[ShardedParameter],
        shard_group: Group,
        replica_group: Group,
        reshard_after_forward: bool | None,
    ):
        self.backend = backend
        self.name = name
        self.module = module
        self.parameters = list(parameters)
        self.trainable = [each for each in parameters if each.spec.trainable]
        self.shard_group = shard_group
        self.replica_group = replica_group
        self.needs_reduction = shard_group.size > 1 or replica_group.size > 1
        self.reshard_after_forward = reshard_after_forward is not False
        self._asked_to_reshard = reshard_after_forward
        self._schedule: Schedule | None = None
        self._below: list[Unit] | None = None  # all units of the tree, on the root only
        self._calls: list[_Call | None] = []  # running forwards, innermost last; None where nothing is recorded
        self._attached: list[Tensor] | None = None
        self._hooks = [
            backend.modules.before_forward(module, self._enter),
            backend.modules.after_forward(module, self._leave),
        ]
        vars(module)[_ATTRIBUTE] = self

    @property
    def schedule(self) -> Schedule:
        """The schedule of the tree; a unit that no root has adopted becomes a root."""
        if self._schedule is None:
            self._become_root()
        return self._schedule

    def is_gathered(self) -> bool:
        """Tell whether the full parameters are in memory."""
        return self._schedule is not None and self._schedule.is_gathered(self)

    def detach(self) -> None:
        """Take the hooks away; the parameters stay as they are."""
        self.hide()
        for hook in self._hooks:
            hook.remove()
        vars(self.module).pop(_ATTRIBUTE, None)

    def reset(self) -> None:
        """Forget calls that never came to an end because of an exception."""
        self._calls.clear()

    def _become_root(self) -> None:
        self._schedule = Schedule(BackendRuntime(self.backend))
        self._below = [unit for unit in units_of(self.backend, self.module)]
        for unit in self._below:
            unit._schedule = self._schedule
            unit.reshard_after_forward = unit is not self
            if unit._asked_to_reshard is not None:
                unit.reshard_after_forward = unit._asked_to_reshard
            if unit is not self:
                unit._below = None

    def _enter(self, args: tuple, kwargs: dict) -> None:
        schedule = self.schedule
        if self._below is not None and not self.backend.autograd.in_backward():
            for unit in self._below:
                unit.reset()
            schedule.before_root_forward()
        schedule.before_forward(self)
        recording = self.backend.autograd.grad_enabled()
        self._calls.append(_Call(self, (args, kwargs)) if recording else None)
        self.show()

    def _leave(self, output: Any) -> None:
        call = self._calls.pop()
        if call is not None:
            call.watch_outputs(output)
        self.schedule.after_forward(self, recording=call is not None)

    def show(self) -> None:
        """Let modules see the full parameters until they are freed; recorded ones come out of one autograd node.

        In backward too, where nothing is recorded but a recompute inside the unit may run its modules again.
        """
        recorded = self._recorded()
        if recorded is None:
            recorded = [each.full() for each in self.trainable]
        frozen = [each for each in self.parameters if not each.spec.trainable]
        seen = list(zip(self.trainable, recorded)) + [(each, each.full()) for each in frozen]
        for parameter, tensor in seen:
            for use in parameter.uses:
                self.backend.modules.shadow(use.owner, use.attribute, tensor)

    def hide(self) -> None:
        """Let modules see the shards again."""
        for parameter in self.parameters:
            for use in parameter.uses:
                self.backend.modules.unshadow(use.owner, use.attribute)

    def _recorded(self) -> list[Tensor] | None:
        """Full tensors with a history. One node serves all calls until it has run, so a unit is reduced once."""
        autograd = self.backend.autograd
        if self._attached is None and self.trainable and autograd.grad_enabled():
            self._attached = autograd.attach(
                [each.parameter for each in self.trainable], [each.full() for each in self.trainable], self._reduce
            )
        return self._attached if autograd.grad_enabled() or autograd.in_backward() else None

    def _reduce(self, gradients: list[Tensor | None]) -> list[Tensor]:
        self._attached = None
        reduction = UnitReduction(self, gradients)
        self.schedule.gradients_ready(reduction)
        return reduction.shards


class _Call:
    """One recorded call of a unit's module, from its inputs to the gradients of its inputs.

    A graph that is kept can be run backward again, so what is counted belongs to one backward pass.
    """

    def __init__(self, unit: Unit, inputs: Any):
        self._unit = unit
        self._backward: int | None = None  # the pass in which an output was reached
        watched = list(_recorded_tensors(unit.backend, inputs))
        self._inputs = self._missing = len(watched)
        for tensor in watched:
            unit.backend.autograd.on_gradient(tensor, self._input_done)

    def watch_outputs(self, outputs: Any) -> None:
        """Hear of the first gradient that reaches an output."""
        for tensor in _recorded_tensors(self._unit.backend, outputs):
            self._unit.backend.autograd.on_gradient(tensor, self._output_reached)

    def _output_reached(self) -> None:
        schedule = self._unit.schedule
        if self._backward != schedule.backward_number:
            self._backward, self._missing = schedule.backward_number, self._inputs
            schedule.before_backward(self._unit)
            self._unit.show()

    def _input_done(self) -> None:
        self._missing -= 1
        if self._missing == 0 and self._backward == self._unit.schedule.backward_number:
            self._unit.schedule.after_backward(self._unit)


def unit_of(module: Module) -> Unit | None:
    """The unit that `fully_shard` has put on a module."""
    return vars(module).get(_ATTRIBUTE)


def units_of(backend: Backend, module: Module) -> Iterator[Unit]:
    """Every unit on a module and below, parents before children."""
    for _, each in backend.modules.named_modules(module):
        unit = unit_of(each)
        if unit is not None:
            yield unit


def _recorded_tensors(backend: Backend, tree: Any) -> Iterator[Tensor]:
    """Tensors of a nest of tuples, lists and mappings to which gradients will flow, each once."""
    seen: set[int] = set()
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if backend.tensors.is_tensor(value):
            if id(value) not in seen and backend.autograd.requires_grad(value):
                seen.add(id(value))
                yield value
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (tuple, list)):
            waiting.extend(value)
        elif hasattr(value, "__dataclass_fields__"):
            waiting.extend(vars(value).values())
