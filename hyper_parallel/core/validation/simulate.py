"""Validation without devices: one rank of a mesh, on tensors that have shapes only.

Every rank runs the same operators on tensors that lie alike, so one rank tells what all would meet. Local shapes differ
where sizes do not divide evenly, and modules are told other things on the first and the last rank, so these are run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Callable

import numpy as np

from hyper_parallel.core.backend import Backend, Module, Tensor
from hyper_parallel.core.errors import ConfigError, ContractError, HyperParallelError
from hyper_parallel.core.execution import checks
from hyper_parallel.core.execution.apply import find_adaptations
from hyper_parallel.core.execution.facts import Facts
from hyper_parallel.core.execution.loss import planned_cross_entropy
from hyper_parallel.core.plan.contracts import SEQUENCE
from hyper_parallel.core.plan.plan import ParameterPlan, ShardingPlan
from hyper_parallel.core.regions import chunk_bounds
from hyper_parallel.core.rules.state import WHOLE, cut
from hyper_parallel.core.validation.follow import Following
from hyper_parallel.core.validation.one_rank import OneRankCollectives
from hyper_parallel.core.validation.watch import Track

DEPENDS_ON_VALUES = ("experts", "moe")
"""Kinds of modules whose code may ask which tokens go to which expert."""


@dataclass(frozen=True)
class Verdict:
    """What a simulation has seen; that there is one says that the plan holds.

    `ranks` have been run; `boundaries` counts those that were checked, `operators` the calls that were looked up.
    `trusted` are modules of which their boundaries have been believed: opaque regions, and code that asks for values.
    `skipped` says what of backward was not run, "" where all of it was.
    """

    model_class: str
    ranks: tuple[int, ...]
    boundaries: int
    operators: int
    trusted: tuple[str, ...]
    skipped: str
    training: bool
    seconds: float

    def __str__(self) -> str:
        ranks = " and ".join(map(str, self.ranks))
        lines = [
            f"{self.model_class}: the plan holds: {self.boundaries} boundaries checked, {self.operators:,} operators "
            f"looked up, on rank{'s' if len(self.ranks) > 1 else ''} {ranks}, in {self.seconds:.1f} s"
        ]
        if self.trusted:
            more = [f"and {len(self.trusted) - 3} more"] if len(self.trusted) > 3 else []
            shown = ", ".join([*self.trusted[:3], *more])
            lines.append(f"believed as their boundaries say, being opaque or not to be run on shapes: {shown}")
        if not self.training:
            lines.append("in evaluation mode: dropout was not drawn")
        if self.skipped:
            lines.append(f"backward: {self.skipped}")
        return "\n".join(lines)


def simulate(backend: Backend, model: Module, plan: ShardingPlan, tokens: tuple[int, int]) -> Verdict:
    """Run one step of a model without values, forward and backward, as single ranks would.

    Args:
        backend: the model's.
        model: made inside `backend.modules.without_values()`; it is as before afterwards.
        plan: what is to be validated.
        tokens: sequences on each rank, and tokens of each sequence in all.

    Raises:
        PlanError: the plan does not fit the model.
        ContractError: it does not hold.
        ConfigError: `tokens` are none, or the model has values.
    """
    _check_without_values(backend, model)
    if len(tokens) != 2 or not all(isinstance(each, int) and each > 0 for each in tokens):
        raise ConfigError(f"validate: tokens are {tokens!r}; write two whole numbers from 1 up, sequences and tokens")
    begun = time.perf_counter()
    mesh = plan.mesh
    ranks = tuple(dict.fromkeys((mesh.ranks[0], mesh.ranks[-1])))
    runs = [_Run(backend, model, plan, rank, tokens) for rank in ranks]
    for run in runs:
        run.step()
    return Verdict(
        plan.model_class,
        ranks,
        max(len(run.following.watch.boundaries) for run in runs),
        sum(run.following.watch.operators for run in runs),
        tuple(dict.fromkeys(name for run in runs for name in run.trusted)),
        next((run.skipped for run in runs if run.skipped), ""),
        bool(model.training),
        time.perf_counter() - begun,
    )


def _check_without_values(backend: Backend, model: Module) -> None:
    if backend.tensors.has_values(backend.tensors.without_values((1,), "float32")):
        return  # there are no others
    for use in backend.modules.parameter_uses(model):
        if backend.tensors.has_values(use.parameter):
            raise ConfigError(
                f"validate: {use.name} has values, but only shapes are run here; pass a function that makes the model, "
                'or use parallelize(model, plan, mode="validate") on joined ranks'
            )


class _Run:
    """One rank's step."""

    def __init__(self, backend: Backend, model: Module, plan: ShardingPlan, rank: int, tokens: tuple[int, int]):
        backend = replace(backend, collectives=OneRankCollectives(rank, max(plan.mesh.ranks) + 1))
        self._facts = Facts(backend, model, plan)
        self._tokens = tokens
        checks.refuse(list(checks.violations(self._facts)), plan)
        self._found = find_adaptations(self._facts)
        self._found.regions.clear()  # what they send depends on values
        self.following = Following(self._facts, self._found, is_real=False)
        self.trusted = [each.module for each in plan.boundaries if each.region == "opaque"]
        self._leaves: list[Tensor] = []
        self.skipped = ""

    def step(self) -> None:
        """Forward, the loss, backward; the model is left as it was."""
        for parameter in self._facts.plan.parameters:
            self._show(parameter)
        for boundary in self._facts.plan.boundaries:
            if boundary.kind in DEPENDS_ON_VALUES or boundary.region == "opaque":
                self._trust_if_needed(boundary.module)
        self._found.apply()
        hooks = self.following.hooks(self._found) + self.following.domains.attach() + self.following.paths()
        states = self._facts.backend.randomness.states()
        try:
            self._forward_and_backward()
        finally:
            self._facts.backend.randomness.restore(states)
            for hook in hooks:
                hook.remove()
            self._found.undo()

    def _show(self, parameter: ParameterPlan) -> None:
        """Let modules see the local part of a parameter: its shape."""
        backend, uses = self._facts.backend, self._facts.uses[parameter.name]
        local = backend.tensors.without_values(self._facts.local_shape(parameter), parameter.dtype)
        if parameter.trainable:
            local = backend.autograd.as_leaf(local, local)
            self._leaves.append(local)
        shown = self.following.shown(parameter)(local)
        for use in uses:
            self._found.show(use.owner, use.attribute, shown)

    def _trust_if_needed(self, name: str) -> None:
        """Where a module's code asks for values, such as which tokens go to an expert, its output has the shape of what
        it takes in, and its boundary says the rest."""
        module = self._facts.modules[name]
        attribute = _name_of_forward(module)
        self._found.show(module, attribute, _Trusting(self, name, getattr(module, attribute)))

    def _forward_and_backward(self) -> None:
        facts, watch = self._facts, self.following.watch
        sequences, length = self._tokens
        if "context" in watch.axes:
            place = facts.plan.mesh.coordinates(facts.rank)["context"]
            start, stop = chunk_bounds(length, facts.plan.mesh.axis_size("context"), place)
            length = stop - start
        ids, extra = self._arguments((sequences, length))
        reached: list[str] = []

        def loss() -> Tensor:
            logits = _logits(facts.backend, facts.model(ids, **extra))
            value = planned_cross_entropy(facts.backend, facts.plan, logits, ids)
            reached.append("backward")
            return value

        try:
            facts.backend.autograd.value_and_grad(loss, self._leaves)()
        except HyperParallelError:
            raise
        except Exception as error:
            if reached and isinstance(error, NotImplementedError):
                self.skipped = f"not run on shapes alone: {error}"
                return
            raise ContractError(
                f"{watch.module or facts.plan.model_class}: the model's code fails on tensors of local shapes: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _arguments(self, shape: tuple[int, int]) -> tuple[Tensor, dict[str, Any]]:
        """Tokens, and what else the model's code can be told, as Hugging Face's models have it.

        Keys and values are not kept. With a mask, of ones, nobody looks for the ends of packed sequences, which are
        values. Positions are told where ranks hold parts of a sequence, since a model would count from 0 on each.
        """
        tensors, watch, model = self._facts.backend.tensors, self.following.watch, self._facts.model
        states = tuple(cut(SEQUENCE) if axis == "context" else WHOLE for axis in watch.axes)

        def numbers() -> Tensor:
            made = tensors.without_values(shape, "int64")
            if "context" not in watch.axes:
                return made
            return self._facts.backend.interception.follow(made, Track(watch, states, "", False))

        extra = {"use_cache": False, "attention_mask": tensors.from_numpy(np.ones(shape, np.int64))}
        if "context" in watch.axes:
            extra["position_ids"] = numbers()
        known = signature(getattr(model, _name_of_forward(model))).parameters
        return numbers(), {name: value for name, value in extra.items() if name in known}


def _logits(backend: Backend, output: Any) -> Tensor:
    """The logits among what a model returns."""
    named = getattr(output, "logits", None)
    first = named if named is not None else output[0] if isinstance(output, (tuple, list)) else output
    if not backend.tensors.is_tensor(first):
        raise ConfigError(f"validate: the model returns {type(output).__name__}, in which no tensor of logits is found")
    return first


def _name_of_forward(module: Module) -> str:
    """What frameworks call a module's own code."""
    return "forward" if hasattr(module, "forward") else "construct"


class _Trusting:
    """A module's forward, or, where that can't run on shapes, its input's shape."""

    def __init__(self, run: _Run, name: str, forward: Callable[..., Any]):
        self._run = run
        self._name = name
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._forward(*args, **kwargs)
        except Exception as error:
            if isinstance(error, HyperParallelError) and error.__cause__ is None:
                raise  # what is refused here; what the framework refuses has its error as cause
            self._run.trusted.append(self._name)
            return self._run.following.trusted(self._name, args, kwargs)
