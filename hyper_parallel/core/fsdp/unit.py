"""A unit: the parameters of a module that are gathered and freed together, and the hooks that report its life."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, Iterator, Mapping, Sequence

from hyper_parallel.core.backend import Backend, Group, Module, Tensor
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.fsdp.parameter import ShardedParameter
from hyper_parallel.core.fsdp.runtime import BackendRuntime, UnitReduction
from hyper_parallel.core.fsdp.schedule import Schedule

_ATTRIBUTE = "_hyper_parallel_unit"
NO_COPY = (
    "a sharded model can't be copied or pickled, this process holds only a part of it; "
    "copy before sharding, restore first, or keep hyper_parallel.full_parameters(model)"
)


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
        reshard_after_forward: bool | None,
    ):
        self.backend = backend
        self.name = name
        self.module = module
        self.parameters = list(parameters)
        self._served = [each for each in parameters if each.is_served]
        self.shard_group = shard_group
        self.needs_reduction = any(each.is_reduced for each in self.parameters)
        self.reshard_after_forward = reshard_after_forward is not False
        self._asked_to_reshard = reshard_after_forward
        self._schedule: Schedule | None = None
        self._below: list[Unit] | None = None  # all units of the tree, on the root only
        self._calls: list[_Call | None] = []  # running forwards, innermost last; None where nothing is recorded
        self._attached: tuple[list[ShardedParameter], list[Tensor]] | None = None
        self._detached = False
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
        self._detached = True
        self.hide()
        for hook in self._hooks:
            hook.remove()
        vars(self.module).pop(_ATTRIBUTE, None)

    def __deepcopy__(self, memo: dict) -> Unit:
        raise ConfigError(NO_COPY)

    def __reduce__(self) -> tuple:
        raise ConfigError(NO_COPY)

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
        recording = bool(self._served) and self.backend.autograd.grad_enabled()
        self._calls.append(_Call(self, (args, kwargs)) if recording else None)
        self.show()

    def _leave(self, output: Any) -> None:
        if not self._calls:
            raise ConfigError(
                f"{type(self.module).__name__} calls itself, which the module of the outermost unit must not do; "
                "make a module around it the outermost"
            )
        call = self._calls.pop()
        watched = call is None or call.watch_outputs(output)
        self.schedule.after_forward(self, recording=call is not None, watched=watched)

    def show(self) -> None:
        """Let modules see the full parameters until they are freed; recorded ones come out of one autograd node.

        In backward too, where nothing is recorded but a recompute inside the unit may run its modules again.
        """
        parameters, tensors = self._recorded()
        seen = dict(zip(map(id, parameters), tensors))
        for each in self._served:
            tensor = seen[id(each)] if id(each) in seen else each.full()
            if each.shown is not None:
                tensor = each.shown(tensor)
            for use in each.uses:
                if self.backend.modules.registered(use.owner, use.attribute) is not each.parameter:
                    raise ConfigError(
                        f"the parameter {use.name} was replaced after it had been sharded; "
                        "copy values into it instead, or restore the model first"
                    )
                # Python looks an attribute up here before it asks the module for its registered parameter.
                vars(use.owner)[use.attribute] = tensor

    def hide(self) -> None:
        """Let modules see the shards again."""
        for parameter in self._served:
            for use in parameter.uses:
                vars(use.owner).pop(use.attribute, None)

    def _recorded(self) -> tuple[list[ShardedParameter], list[Tensor]]:
        """What is trainable now, with a history.

        One node serves all calls until it has run, so a unit is reduced once. A checkpoint that computes its calls
        again one after the other, each with a backward of its own, runs it once for each.
        """
        autograd = self.backend.autograd
        if autograd.grad_enabled():
            return self._attach()
        if not autograd.in_backward():
            return [], []
        with autograd.enable_grad():
            return self._attach()

    def _attach(self) -> tuple[list[ShardedParameter], list[Tensor]]:
        trainable = [each for each in self._served if self.backend.modules.is_trainable(each.parameter)]
        if not trainable:
            return [], []
        if self._attached is None or self._attached[0] != trainable:

            def reduce(gradients: list[Tensor | None]) -> list[Tensor]:
                return self._reduce(trainable, gradients)

            fulls = [each.full() for each in trainable]
            parameters = [each.parameter for each in trainable]
            self._attached = trainable, self.backend.autograd.attach(parameters, fulls, reduce)
        return self._attached

    def _reduce(self, parameters: list[ShardedParameter], gradients: list[Tensor | None]) -> list[Tensor]:
        self.check_attached()
        self._attached = None
        reduction = UnitReduction(self, parameters, gradients)
        self.schedule.gradients_ready(reduction)
        return reduction.shards

    def check_attached(self) -> None:
        """Refuse to go on with a graph from before `restore`."""
        if self._detached:
            raise ConfigError(
                f"the model was restored between the forward and the backward of {self.name or 'its outermost unit'}; "
                "run the forward again"
            )


class _Call:
    """One recorded call of a unit's module, from its inputs to the gradients of its inputs.

    A graph that is kept can be run backward again, so what is counted belongs to one backward pass.
    """

    def __init__(self, unit: Unit, inputs: Any):
        self._unit = unit
        self._backward: int | None = None  # the pass in which an output was reached
        watched = [each for each in _tensors_in(unit.backend, inputs) if unit.backend.autograd.requires_grad(each)]
        self._inputs = self._missing = len(watched)
        for tensor in watched:
            unit.backend.autograd.on_gradient(tensor, self._input_done)

    def watch_outputs(self, outputs: Any) -> bool:
        """Hear of the first gradient that reaches an output; False when there is no tensor to watch."""
        tensors = list(_tensors_in(self._unit.backend, outputs))
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
            self._unit.show()

    def _input_done(self) -> None:
        self._missing -= 1
        if self._missing == 0 and self._backward == self._unit.schedule.backward_number:
            self._unit.schedule.after_backward(self._unit)


def unit_of(module: Module) -> Unit | None:
    """The unit that `fully_shard` has put on a module."""
    return vars(module).get(_ATTRIBUTE)


def units_of(backend: Backend, module: Module) -> Iterator[Unit]:
    """Every unit on a module and below once, parents before children."""
    seen: set[int] = set()
    for _, each in backend.modules.named_modules(module):
        unit = unit_of(each)
        if unit is not None and id(unit) not in seen:
            seen.add(id(unit))
            yield unit


def _tensors_in(backend: Backend, tree: Any) -> Iterator[Tensor]:
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
