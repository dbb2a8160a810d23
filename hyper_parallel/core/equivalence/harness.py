"""Hold a plan against the model that it is for: one step in production, in validation and on one device."""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np

from hyper_parallel.core.backend import Backend, Module
from hyper_parallel.core.equivalence.batch import Batch, LossFunction
from hyper_parallel.core.equivalence.compare import Boundaries, production_errors, scale_of, validation_errors
from hyper_parallel.core.equivalence.report import GradientReport, ParameterErrors
from hyper_parallel.core.equivalence.steps import (
    Followed,
    Reference,
    Setting,
    in_production,
    in_validation,
    made,
    one_device,
    planned_for,
)
from hyper_parallel.core.errors import ConfigError, HyperParallelError
from hyper_parallel.core.execution.inprocess import InProcessWorld
from hyper_parallel.core.plan.plan import ShardingPlan

HIGHEST = "float64"

BOUNDS = {"float64": 1e-10, "float32": 1e-5}
"""How far a number may be off, relative to the largest element. Ranks add in another order than one device, which moves
the last digits: sums of some thousand terms lose a few hundred units of 1e-16 in float64, of 6e-8 in float32, and
models of some layers ten times that. What is cut wrongly, or counted twice, is off by some tenths."""

HALF = 5e-2
"""In half precision, whose unit is 4e-3 or 5e-4."""


class Outcome(NamedTuple):
    """What the ranks of a mode gave, or how the first of them failed."""

    steps: list | None
    problem: str = ""


def check_gradients(
    backend: Backend,
    make: Callable[[], Module],
    plan: ShardingPlan,
    batch: Mapping[str, Any],
    loss_fn: LossFunction | None = None,
    tolerance: float | None = None,
) -> GradientReport:
    """See `hyper_parallel.check_gradients`."""
    setting = Setting(make, Batch(backend, batch), loss_fn)
    setting.batch.rows(plan.mesh, plan.mesh.ranks[0])
    check_ranks(backend, plan)
    return against(backend, setting, plan, highest_reference(backend, setting, plan), tolerance)


def highest_reference(backend: Backend, setting: Setting, plan: ShardingPlan) -> Reference:
    """One device in float64, or, where the framework can't run the model so, in the dtype in which it is made."""
    try:
        return one_device(backend, setting, plan.boundaries, HIGHEST)
    except HyperParallelError:
        raise
    except Exception:  # frameworks raise all sorts of errors for a kernel that they lack; as it is made, it must run
        return one_device(backend, setting, plan.boundaries, None)


def check_ranks(backend: Backend, plan: ShardingPlan) -> None:
    """Raise `ConfigError` unless the ranks of the mesh have joined, or can all run in this process."""
    joined = backend.collectives.world_size()
    if joined not in (1, plan.mesh.size):
        raise ConfigError(
            f"check_gradients: {joined} ranks have joined and the mesh {plan.mesh} has {plan.mesh.size}; start as "
            "many, or one process alone, in which all of them run"
        )
    if not _have_joined(backend, plan) and not backend.autograd.runs_in_threads():
        raise ConfigError(
            f"check_gradients: {backend.name} does not run several ranks in one process; start {plan.mesh.size} "
            "processes with a launcher, and call hyper_parallel.initialize() in each"
        )


def _have_joined(backend: Backend, plan: ShardingPlan) -> bool:
    return backend.collectives.is_initialized() and backend.collectives.world_size() == plan.mesh.size


def against(
    backend: Backend, setting: Setting, plan: ShardingPlan, reference: Reference, tolerance: float | None = None
) -> GradientReport:
    """Hold a plan against a reference that is there already."""
    plan = planned_for(plan, reference)
    production = _run(backend, setting, plan, reference, in_production)
    validation = _run(backend, setting, plan, reference, in_validation)
    bound, why = _bound(reference, validation.steps or ())
    if tolerance is not None:
        bound, why = tolerance, "as asked for"
    parameters = _parameters(plan, production, validation, reference)
    first_value, first_gradient = None, None
    if production.steps is not None:
        seen = Boundaries(plan, setting.batch, production.steps, reference.step)
        first_value, first_gradient = seen.first_value(bound), seen.first_gradient(bound)
    return GradientReport(
        model_class=plan.model_class,
        mesh=str(plan.mesh),
        dtype=reference.dtype,
        bound=bound,
        why=why,
        losses=_losses(reference, production, validation),
        parameters=parameters,
        first_value=first_value,
        first_gradient=first_gradient,
        refused=validation.problem,
        failed=production.problem,
    )


def _run(
    backend: Backend, setting: Setting, plan: ShardingPlan, reference: Reference, step: Callable[..., Any]
) -> Outcome:
    """One mode on all ranks: those that have joined, each in a process of its own, or all in this one."""

    def body(own: Backend, model: Module) -> Any:
        return step(own, model, setting, plan, reference)

    if _have_joined(backend, plan):
        return _on_joined(backend, body, made(backend, setting, reference))
    models = [made(backend, setting, reference) for _ in plan.mesh.ranks]
    world = InProcessWorld(backend, plan.mesh.size)
    try:
        return Outcome(world.run(lambda own: body(own, models[own.collectives.rank()])))
    except Exception as error:
        return Outcome(None, _told(error))


def _on_joined(backend: Backend, body: Callable[[Backend, Module], Any], model: Module) -> Outcome:
    try:
        own = Outcome([body(backend, model)])
    except Exception as error:
        own = Outcome(None, _told(error))
    everyone = backend.collectives.gather_objects(tuple(own))
    problem = next((problem for _, problem in everyone if problem), "")
    return Outcome(None, problem) if problem else Outcome([steps[0] for steps, _ in everyone])


def _told(error: Exception) -> str:
    """The frameworks' own errors are told too: local shapes that don't fit are seen by them first."""
    return f"{type(error).__name__}: {error}"


def _bound(reference: Reference, steps: Sequence[Followed]) -> tuple[float, str]:
    """What numbers may be off, and why that much."""
    seen = [each.dtypes for each in steps if each.dtypes is not None]
    dtypes = reference.dtypes.union(*seen)
    narrow = sorted(each for each in dtypes if each not in BOUNDS)
    if narrow:
        return HALF, f"computed in {narrow[0]}"
    if "float32" in dtypes:
        inside = "float32" not in reference.dtypes
        return BOUNDS["float32"], "the model computes in float32 inside" if inside else "computed in float32"
    if steps and not seen:
        return BOUNDS["float32"], "no operator is followed here, so it may compute in float32 inside"
    return BOUNDS["float64"], "computed in float64"


def _losses(reference: Reference, production: Outcome, validation: Outcome) -> dict[str, float]:
    modes = (("production", production), ("validation", validation))
    ran = {name: mode.steps for name, mode in modes if mode.steps is not None}
    return {"one device": reference.step.loss} | {
        name: float(np.mean([each.loss for each in steps])) for name, steps in ran.items()
    }


def _parameters(
    plan: ShardingPlan, production: Outcome, validation: Outcome, reference: Reference
) -> tuple[ParameterErrors, ...]:
    expected = reference.step
    in_one = {} if production.steps is None else production_errors(plan, production.steps, expected)
    in_other = {} if validation.steps is None else validation_errors(plan, validation.steps, expected)
    return tuple(
        ParameterErrors(name, scale_of([gradient]), in_one.get(name), in_other.get(name))
        for name, gradient in expected.gradients.items()
    )
