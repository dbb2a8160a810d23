"""Apply a sharding plan to the model that it was made for: exactly what it says, or not at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Mapping

from hyper_parallel.core.backend import NO_COPY, Backend, HookHandle, Module
from hyper_parallel.core.errors import ConfigError, HyperParallelError
from hyper_parallel.core.execution import checks
from hyper_parallel.core.execution.adaptations import Adaptations
from hyper_parallel.core.execution.around import Maker
from hyper_parallel.core.execution.biases import find_biases
from hyper_parallel.core.execution.causal_loss import find_losses
from hyper_parallel.core.execution.domains import Domains
from hyper_parallel.core.execution.experts import find_dispatches
from hyper_parallel.core.execution.facts import Facts
from hyper_parallel.core.execution.heads import find_heads
from hyper_parallel.core.execution.randomness import Randomness
from hyper_parallel.core.execution.region_collectives import find_collectives
from hyper_parallel.core.execution.vocabulary import find_embeddings
from hyper_parallel.core.fsdp import build
from hyper_parallel.core.fsdp.controls import check_names
from hyper_parallel.core.fsdp.parameter import Holding
from hyper_parallel.core.fsdp.policy import MixedPrecisionPolicy, OffloadPolicy, offload_of, precision_of
from hyper_parallel.core.mesh import MODEL_AXES
from hyper_parallel.core.placement import Shard
from hyper_parallel.core.plan.fully_sharded import ROOT
from hyper_parallel.core.plan.plan import ParameterPlan, ShardingPlan
from hyper_parallel.core.topology_sources import check_shard_axis, topology_of
from hyper_parallel.core.validation.follow import Following
from hyper_parallel.core.validation.start import check_same_start

_ATTRIBUTE = "_hyper_parallel_execution"


class Execution:
    """A plan that is being carried out; lives on the model from `parallelize` to `restore`."""

    def __init__(
        self,
        facts: Facts,
        adaptations: Adaptations,
        hooks: list[HookHandle],
        randomness: Randomness,
        following: Following | None = None,
    ):
        self.backend = facts.backend
        self.plan = facts.plan
        self.following = following
        self._model = facts.model
        self._adaptations = adaptations
        self._hooks = hooks
        self._randomness = randomness
        vars(self._model)[_ATTRIBUTE] = self

    def undo(self) -> None:
        """Take the hooks away and let modules find what they found before, and the framework its generators."""
        for hook in self._hooks:
            hook.remove()
        self._adaptations.undo()
        self._randomness.settle()
        vars(self._model).pop(_ATTRIBUTE, None)

    def __deepcopy__(self, memo: dict) -> Execution:
        raise ConfigError(NO_COPY)

    def __reduce__(self) -> tuple:
        raise ConfigError(NO_COPY)


def execution_of(model: Module) -> Execution | None:
    """What `parallelize` has put on a model; None where it has not been."""
    return vars(model).get(_ATTRIBUTE)


def apply_plan(
    backend: Backend,
    model: Module,
    plan: ShardingPlan,
    validate: bool = False,
    allow_shard_across_supernodes: bool = False,
    precision: MixedPrecisionPolicy | None = None,
    offload: OffloadPolicy | None = None,
    early_all_reduce: bool = False,
) -> None:
    """Cut the parameters, hook the boundaries, make the units that a plan names. Called by every rank.

    With `validate` modules see tensors that are followed, and boundaries check them; all else is the same. The policies
    and `early_all_reduce` hold for all units.

    Raises:
        ContractError: with `validate`, what the plan says of a parameter contradicts itself, or ranks start with
            different values; nothing is changed, on any rank.
        PlanError: the plan does not fit the model, lists every reason; or another rank has found something wrong.
            Nothing is changed, on any rank.
        ConfigError: the mesh has an axis that can be planned and not yet run, the ranks are not joined, a parameter has
            no values; likewise.
        LayoutError: the mesh does not hold all ranks; likewise.
    """
    error, facts, following, adaptations = None, None, None, None
    try:
        checks.check_axes(plan.mesh)
        build.check_ranks(backend, plan.mesh)
        check_shard_axis(topology_of(backend), plan.mesh, allow_shard_across_supernodes, "parallelize")
        facts = Facts(backend, model, plan)
        checks.refuse(list(checks.violations(facts)), plan)
        build.check_have_values(backend, list(facts.uses.values()))
        build.check_parameters(backend, model, list(facts.uses.values()))
        check_names(facts.modules[unit.name] for unit in plan.units)
        adaptations = find_adaptations(facts)
        following = Following(facts, adaptations) if validate else None
    except HyperParallelError as found:
        error = found
    checks.agree(backend, plan, error)
    if validate:
        check_same_start(backend, model)
    held = dict(precision=precision_of(precision), offload=offload_of(offload), early_all_reduce=early_all_reduce)
    _carry_out(facts, adaptations, following, held)


def find_adaptations(facts: Facts) -> Adaptations:
    """What modules have to be told on this rank. Changes nothing.

    Raises:
        PlanError: something that a module would have to be told can't be; lists all of it.
    """
    adaptations = Adaptations()
    for find in (find_heads, find_embeddings, find_biases, find_losses, find_dispatches, find_collectives):
        find(facts, adaptations)
    checks.refuse(adaptations.problems, facts.plan)
    return adaptations


def restore(backend: Backend, model: Module) -> None:
    """Undo `apply_plan` and `fully_shard` below `model`. Called by every rank."""
    build.restore(backend, model)
    for _, module in list(backend.modules.named_modules(model)):
        execution = execution_of(module)
        if execution is not None:
            execution.undo()


def _carry_out(
    facts: Facts,
    adaptations: Adaptations,
    following: Following | None,
    how: Mapping[str, Any],
) -> None:
    """Change the model; `how` are fields of every `Holding`."""
    backend, plan = facts.backend, facts.plan
    held = {each.name: _holding(facts, adaptations, each) for each in plan.parameters}
    held = {name: replace(each, **how) for name, each in held.items()}
    if following is not None:
        held = {each.name: replace(held[each.name], shown=following.shown(each)) for each in plan.parameters}
    adaptations.apply()
    hooks = (following or Maker(facts)).hooks(adaptations)
    domains = following.domains if following is not None else Domains(facts)
    hooks += domains.attach()
    for unit in plan.units:
        members = [held[each.name] for each in plan.members(unit.name)]
        module = facts.modules[unit.name]
        usual = unit.reshard_after_forward is not (unit.name == ROOT)
        reshard = None if usual else unit.reshard_after_forward
        build.make_unit(backend, unit.name, [module], members, plan.mesh, reshard, how["precision"])
    if following is not None:
        hooks += following.paths()
    Execution(facts, adaptations, hooks, domains.randomness, following)


def _holding(facts: Facts, adaptations: Adaptations, parameter: ParameterPlan) -> Holding:
    """A parameter cut along the model's axes, and how a unit is to hold the part: cut further over `shard`."""
    backend, mesh, uses = facts.backend, facts.plan.mesh, facts.uses[parameter.name]
    layout = facts.along_model(parameter)
    if layout.placements != layout.with_placements({}).placements:
        uses = build.cut(backend, uses, layout)
    placement = parameter.placements.get("shard")
    spec = build.spec_of(backend, uses[0], placement and Shard(placement.dim), mesh)
    pending = tuple(axis for axis in parameter.pending if axis in MODEL_AXES)
    share = adaptations.shares.get(parameter.name)
    return Holding(uses, spec, facts.plan.layout(parameter.name), pending, share)
