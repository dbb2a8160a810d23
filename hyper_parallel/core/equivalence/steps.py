"""One step: on one device, in production, in validation. What each gives, as data on the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from hyper_parallel.core.backend import Backend, Module, Parameter, Tensor
from hyper_parallel.core.equivalence.batch import Batch, LossFunction, causal_loss, data_ranks
from hyper_parallel.core.equivalence.record import Key, Recorder, Seen
from hyper_parallel.core.execution.apply import apply_plan, execution_of
from hyper_parallel.core.fsdp.parameter import ShardedParameter
from hyper_parallel.core.fsdp.unit import units_of
from hyper_parallel.core.placement import Placement, Replicate
from hyper_parallel.core.plan.contracts import BoundaryPlan
from hyper_parallel.core.plan.plan import ShardingPlan
from hyper_parallel.core.rules.state import State


@dataclass
class Step:
    """One step of one rank: its loss, the gradients it has of each parameter (None where none came), what was seen at
    boundaries."""

    loss: float
    gradients: dict[str, np.ndarray | None]
    seen: dict[Key, Seen] = field(default_factory=dict)


@dataclass(frozen=True)
class Raw:
    """The gradient that autograd gave of what modules see of a parameter, before anything was reduced.

    `lies` says for each followed axis how the parameter was followed, and whether the ranks' gradients are to be summed
    up; axes that are not followed are not named.
    """

    gradient: np.ndarray | None
    lies: Mapping[str, tuple[Placement, bool]]


@dataclass(frozen=True)
class Followed:
    """A step in validation: the raw gradient of each parameter, and the dtypes in which operators took part; None where
    nothing was followed, since every rank runs a model of its own."""

    loss: float
    raw: dict[str, Raw]
    dtypes: frozenset[str] | None


@dataclass(frozen=True)
class Reference:
    """The step on one device, the model's values, and the dtype of its parameters, which was `asked` for, or is that of
    most of them where they are as the model is made; `dtypes` are all of theirs."""

    step: Step
    values: dict[str, np.ndarray]
    buffers: dict[str, np.ndarray]
    dtype: str
    dtypes: frozenset[str]
    asked: bool


@dataclass(frozen=True)
class Setting:
    """What is common to all steps: `make` gives a model of its own at each call."""

    make: Callable[[], Module]
    batch: Batch
    loss: LossFunction | None = None

    def loss_on(self, backend: Backend, parts: int, rows: slice) -> LossFunction:
        """The loss of a rank that has some samples, where `parts` ranks have others."""
        return self.loss or causal_loss(backend, self.batch, parts, rows)


def one_device(
    backend: Backend, setting: Setting, boundaries: tuple[BoundaryPlan, ...], dtype: str | None
) -> Reference:
    """The step on this process's device, with the whole batch. In `dtype`, or as the model is made if it is None."""
    model = setting.make()
    if dtype is not None:
        backend.modules.convert(model, dtype)
    uses = backend.modules.parameter_uses(model)
    counted = Counter(backend.tensors.dtype_name(use.parameter) for use in uses)
    dtypes = [name for name, _ in counted.most_common() if "float" in name]
    ran_in = dtypes[0]
    values = {use.name: backend.tensors.to_numpy(use.parameter) for use in uses}
    buffers = {use.name: backend.tensors.to_numpy(use.buffer) for use in backend.modules.buffers(model)}
    recorder = Recorder(backend, model)
    recorder.watch_inputs(boundaries)
    recorder.watch_outputs(boundaries)
    rows = slice(0, setting.batch.samples)
    values_of_batch = setting.batch.part(backend, rows, ran_in)
    loss_of = setting.loss_on(backend, 1, rows)
    parameters = _trainable(backend, model)
    loss, gradients = _value_and_gradients(backend, parameters, lambda: loss_of(model, values_of_batch))
    return Reference(
        Step(loss, gradients, recorder.records), values, buffers, ran_in, frozenset(dtypes), dtype is not None
    )


def in_production(backend: Backend, model: Module, setting: Setting, plan: ShardingPlan, reference: Reference) -> Step:
    """The step of this rank in production: gradients as an optimizer gets them."""
    recorder = Recorder(backend, model)
    recorder.watch_inputs(plan.boundaries)
    apply_plan(backend, model, plan)
    recorder.watch_outputs(plan.boundaries)
    loss, gradients = _one_step(backend, model, setting, plan, reference)
    return Step(loss, gradients, recorder.records)


def in_validation(
    backend: Backend, model: Module, setting: Setting, plan: ShardingPlan, reference: Reference
) -> Followed:
    """The step of this rank in validation: gradients as they are before any reduction of production."""
    apply_plan(backend, model, plan, validate=True)
    raw: dict[str, Raw] = {}
    for unit in units_of(backend, model):
        for each in unit.parameters:
            _observe(backend, each, raw)
    loss, _ = _one_step(backend, model, setting, plan, reference)
    watch = execution_of(model).following.watch
    return Followed(loss, raw, frozenset(watch.dtypes) if watch.axes else None)


def _one_step(
    backend: Backend, model: Module, setting: Setting, plan: ShardingPlan, reference: Reference
) -> tuple[float, dict[str, np.ndarray | None]]:
    rows = setting.batch.rows(plan.mesh, backend.collectives.rank())
    values = setting.batch.part(backend, rows, reference.dtype)
    loss_of = setting.loss_on(backend, data_ranks(plan.mesh), rows)
    parameters = _trainable(backend, model)
    return _value_and_gradients(backend, parameters, lambda: loss_of(model, values))


def made(backend: Backend, setting: Setting, reference: Reference) -> Module:
    """A model of its own with the values of the one device's."""
    model = setting.make()
    if reference.asked:
        backend.modules.convert(model, reference.dtype)
    backend.modules.load_parameters(model, reference.values)
    tensors = backend.tensors
    for use in backend.modules.buffers(model):
        if not tensors.repeats_elements(use.buffer):  # such as positions, which `model_fn` makes anew
            dtype = tensors.dtype_name(use.buffer)
            tensors.copy_(use.buffer, tensors.from_numpy(reference.buffers[use.name], dtype))
    return model


def planned_for(plan: ShardingPlan, reference: Reference) -> ShardingPlan:
    """The same plan for the model in the dtype of the reference."""
    if not reference.asked:
        return plan
    dtype = reference.dtype
    parameters = (replace(each, dtype=dtype) if "float" in each.dtype else each for each in plan.parameters)
    return replace(plan, parameters=tuple(parameters))


def _observe(backend: Backend, parameter: ShardedParameter, raw: dict[str, Raw]) -> None:
    """Write the gradient down that reaches a parameter from what modules see of it."""
    name, show = parameter.uses[0].name, parameter.shown
    interception = backend.interception

    def shown(tensor: Tensor) -> Tensor:
        seen = tensor if show is None else show(tensor)
        lies = _lies(interception.track_of(seen))
        raw.setdefault(name, Raw(None, lies))
        if backend.autograd.takes_part(tensor):

            def returned(gradient: Tensor | None) -> None:
                if gradient is not None:  # None came where others of the unit were reached, and this one was not
                    raw[name] = Raw(backend.tensors.to_numpy(gradient), lies)

            interception.watch_gradient(tensor, returned)
        return seen

    parameter.shown = shown


def _lies(track: Any) -> dict[str, tuple[Placement, bool]]:
    """How a followed parameter lies, and whether its gradient is a sum over the ranks; nothing where an opaque region
    has not followed it."""
    return {} if track is None else {axis: _lie(state) for axis, state in zip(track.watch.axes, track.states)}


def _lie(state: State) -> tuple[Placement, bool]:
    cut = state.cut is not None
    return (state.placement if cut else Replicate()), state.pending or state.is_partial


def _trainable(backend: Backend, model: Module) -> dict[str, Parameter]:
    """Parameters that ask for a gradient, by their first name."""
    found: dict[int, tuple[str, Parameter]] = {}
    for use in backend.modules.parameter_uses(model):
        if backend.modules.is_trainable(use.parameter):
            found.setdefault(id(use.parameter), (use.name, use.parameter))
    return dict(found.values())


def _value_and_gradients(
    backend: Backend, parameters: Mapping[str, Parameter], function: Callable[[], Tensor]
) -> tuple[float, dict[str, np.ndarray | None]]:
    value, found = backend.autograd.value_and_grad(function, list(parameters.values()))()
    gradients = (None if each is None else backend.tensors.to_numpy(each) for each in found)
    return float(backend.tensors.to_numpy(backend.interception.plain(value))), dict(zip(parameters, gradients))


def sum_of(arrays: Sequence[np.ndarray | None], shape: Sequence[int]) -> np.ndarray:
    """The sum of arrays of a shape; None counts as zeros."""
    return sum((each for each in arrays if each is not None), np.zeros(shape))
