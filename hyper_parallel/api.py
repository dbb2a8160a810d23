"""The public functions: look at the model, pick its backend, call the core."""

from __future__ import annotations

import os
from typing import Any, Callable, ContextManager, Iterable, Mapping, Sequence

import numpy as np

from hyper_parallel import backends
from hyper_parallel.core.backend import Backend, Launch, Module, Parameter, Tensor
from hyper_parallel.core.equivalence import harness
from hyper_parallel.core.equivalence.report import GradientReport
from hyper_parallel.core.errors import ConfigError, HyperParallelError, PlanError
from hyper_parallel.core.execution import loss
from hyper_parallel.core.execution.apply import Execution, apply_plan, execution_of
from hyper_parallel.core.execution.apply import restore as restore_model
from hyper_parallel.core.execution.region_collectives import RegionCollectives, collectives_of
from hyper_parallel.core.fsdp import build, clip
from hyper_parallel.core.fsdp.controls import FullySharded, handle_of, register_forward_method
from hyper_parallel.core.fsdp.describe import describe as describe_units
from hyper_parallel.core.fsdp.policy import MixedPrecisionPolicy, OffloadPolicy, offload_of, precision_of
from hyper_parallel.core.fsdp.trace import StepTrace
from hyper_parallel.core.fsdp.trace import trace_step as trace_schedules
from hyper_parallel.core.fsdp.unit import units_of
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Shard
from hyper_parallel.core.plan.derive import derive
from hyper_parallel.core.plan.model import ModelDescription
from hyper_parallel.core.plan.model import describe as describe_model
from hyper_parallel.core.plan.plan import ShardingPlan
from hyper_parallel.core.topology import Topology
from hyper_parallel.core.topology_sources import find_topology, topology_of
from hyper_parallel.core.validation.simulate import Verdict, simulate


def initialize(
    backend: str,
    launch: Launch | None = None,
    topology: Topology | Mapping[Any, Any] | str | os.PathLike | None = None,
) -> Topology:
    """Join the ranks of this job with `backend` ("mindspore" or "torch"). Call it once, before anything else.

    `launch` says how; when it is not given the launcher's environment does (`torchrun`, `msrun`, a rank table), and
    without one this process is alone.

    `topology` says where ranks sit: a `Topology`, a mapping from ranks to the names of their supernodes
    (`{"0-7": "pod0", "8-15": "pod1"}`), or a file with one or with an Ascend rank table. When it is not given, the file
    that `HYPER_PARALLEL_TOPOLOGY` names in the environment says it, else the rank table in `RANK_TABLE_FILE`, the
    launcher, or the names of the machines; of the last two, machines count as supernodes of their own.

    Returns:
        Where ranks sit; its `source` tells how that is known.

    Raises:
        ConfigError: a topology that can't be read, does not name each rank once, or differs between ranks.
        BackendUnavailable: the framework is missing; the message says what to install.
        CommunicationError: a rank did not come in time.
    """
    from hyper_parallel.core.launch import launch_from_environment

    loaded = backends.load(backend)
    loaded.collectives.initialize(launch or launch_from_environment(backend))
    try:
        return find_topology(loaded, topology)
    except HyperParallelError:
        loaded.collectives.shutdown()
        raise


def plan(
    model: Module | ModelDescription,
    mesh: DeviceMesh,
    overrides: Mapping[str, Any] | str | os.PathLike | None = None,
) -> ShardingPlan:
    """Derive the sharding plan of a model on a mesh. Nothing is launched and the model is not changed.

    Where only `replicate` and `shard` have more than one rank, any model is planned: nothing has to be known of a
    parameter but its shape. Every other axis needs to know what each parameter does.

    Args:
        model: a `torch.nn.Module`, a `mindspore.nn.Cell`, or the description of one.
        mesh: the axes and their sizes; no rank has to be there.
        overrides: what to decide otherwise, as a mapping or a YAML file; docs/overrides.md describes it.

    Raises:
        PlanError: the model can't be planned on this mesh, or an override says what can't be; lists every violation
            with what to write.
        ConfigError: `mesh` is no mesh, or `model` is no model.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"plan: mesh must be a hyper_parallel.DeviceMesh, found {mesh!r}")
    if not isinstance(model, ModelDescription):
        backend = backends.of_model(model)
        if next(iter(units_of(backend, model)), None) is not None:
            raise PlanError("plan: the model is sharded already; plan it before, or restore it first")
        model = describe_model(model, backend)
    return derive(model, mesh, overrides)


MODES = ("production", "validate")


def parallelize(
    model: Module,
    plan: ShardingPlan,
    mode: str = "production",
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    allow_shard_across_supernodes: bool = False,
    early_all_reduce: bool = False,
) -> Module:
    """Apply a plan to the model that it was made for, in place, and return the model. Called by every rank.

    In production the model's own code runs on plain local tensors, and nothing but the plan's transitions is added. In
    validation the same happens to tensors that say how they lie: every operator is looked up in the rule table before
    it runs, and every boundary checks what comes, what goes on, and gradients in backward. docs/validation.md tells
    more. `restore` undoes either.

    Afterwards every parameter holds its local shard; build the optimizer from `model`'s parameters after this call.
    MindSpore fixes the shape of a parameter's gradient when the parameter is made, so there the parameters are new
    objects.

    All ranks must have started with equal values: shards are cut from what each rank holds. Validation compares them.

    Args:
        model: a `torch.nn.Module` or a `mindspore.nn.Cell`.
        plan: what `hyper_parallel.plan` has made of it.
        mode: "production" or "validate".
        mp_policy: the dtypes of all units, as in `fully_shard`.
        offload_policy: `CPUOffloadPolicy()` to keep shards and gradients on the host, likewise.
        allow_shard_across_supernodes: do not refuse a mesh whose `shard` axis crosses supernodes.
        early_all_reduce: when the all-reduces of all units begin, as in `fully_shard`.

    Raises:
        PlanError: the plan does not fit the model; lists every reason, and nothing is changed.
        ContractError: in validation, the plan contradicts itself, or ranks start with different values; likewise.
            Later, while the model runs: a tensor or a gradient lies otherwise than the plan says, an operator would be
            wrong on what it is given, or ranks that compute one model are given different things.
        ConfigError, LayoutError: the mesh has an axis that can't be run yet, the ranks are not joined, the mesh is not
            one of all ranks, or a policy is none; likewise.
    """
    if not isinstance(plan, ShardingPlan):
        raise ConfigError(f"parallelize: found {plan!r} for a plan; load a file with ShardingPlan.load(path)")
    if mode not in MODES:
        raise ConfigError(f'parallelize: mode is {mode!r}; write "production" or "validate"')
    precision, offload = precision_of(mp_policy), offload_of(offload_policy)
    backend = backends.of_model(model)
    policies = precision, offload, early_all_reduce
    apply_plan(backend, model, plan, mode == "validate", allow_shard_across_supernodes, *policies)
    return model


def validate(model: Module | Callable[[], Module], plan: ShardingPlan, tokens: tuple[int, int] = (1, 128)) -> Verdict:
    """Hold a plan against a model's code without devices: one step of single ranks, on tensors that have shapes only.

    Every operator is looked up in the rule table, and every boundary checked, as in `parallelize(mode="validate")`.
    What only values show is not seen: where a module's code needs them, such as which tokens go to which expert, its
    boundary is believed, and the verdict says so. In MindSpore, which runs no operator on shapes, tensors are zeros.

    Args:
        model: a model made without values, or a function that makes a PyTorch model and is called so that it has
            none. It is called with the tokens, and has to return its logits, or something that has them under `logits`.
        plan: what `hyper_parallel.plan` has made of it, on any mesh.
        tokens: sequences on each rank, and tokens of each sequence in all.

    Returns:
        What has been checked. That it returns says that the plan holds.

    Raises:
        ContractError: the plan does not hold; names the module, what was found and the line of the plan.
        PlanError: the plan does not fit the model; lists every reason.
        ConfigError: the model has values, or an argument is no argument.
    """
    if not isinstance(plan, ShardingPlan):
        raise ConfigError(f"validate: found {plan!r} for a plan; load a file with ShardingPlan.load(path)")
    try:
        backend = backends.of_model(model)
    except ConfigError:
        if not callable(model):
            raise
        backend = backends.load("torch")
        with backend.modules.without_values():
            model = model()
    return simulate(backend, model, plan, tokens)


def check_gradients(
    model_fn: Callable[[], Module],
    plan: ShardingPlan,
    batch: Mapping[str, Any],
    *,
    loss_fn: Callable[[Module, Mapping[str, Any]], Tensor] | None = None,
    tolerance: float | None = None,
) -> GradientReport:
    """Hold a plan against the model: one step in production, one in validation, one on a single device.

    The numbers of the single device, on the whole batch and as they are, are the measure. Production's gradients are
    those that an optimizer would get. Validation's are taken before production reduces anything, and put together here
    as validation has followed each parameter. docs/equivalence.md tells more.

    Where the ranks of the plan's mesh have joined, every rank calls it and gets the same report. A process alone runs
    all ranks itself, in PyTorch.

    Args:
        model_fn: makes the model, whole; called several times. All models get the first one's values. It must compute
            the same at each call: no dropout.
        plan: what `hyper_parallel.plan` has made of it.
        batch: the global batch: arrays or tensors of `[samples, ...]` by the names of the model's arguments. Samples
            have to divide evenly among the ranks that have samples of their own.
        loss_fn: from a model and the rank's part of the batch, as tensors, to a scalar, a mean over samples; take
            `hyper_parallel.cross_entropy` in it. By default the cross entropy of each next token, over
            `batch["labels"]` (shifted here, -100 counts nothing; not passed to the model), or the tokens themselves.
        tolerance: how far numbers may be off, relative to the largest of their tensor; by default 1e-10 in float64,
            1e-5 where the model computes in float32.

    Returns:
        A report: `ok`, `table()`, every parameter's errors in both modes, the first boundary that differs.

    Raises:
        ConfigError: a batch that can't be dealt out, or a mesh whose ranks can neither run here nor have joined. What
            is wrong with the plan is in the report.
    """
    if not isinstance(plan, ShardingPlan):
        raise ConfigError(f"check_gradients: found {plan!r} for a plan; load a file with ShardingPlan.load(path)")
    if tolerance is not None and not tolerance > 0:
        raise ConfigError(f"check_gradients: tolerance is {tolerance!r}; write a number above 0, such as 1e-5")
    return harness.check_gradients(backends.of_model(model_fn()), model_fn, plan, batch, loss_fn, tolerance)


def fully_shard(
    module: Module | list[Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[Parameter] | None = None,
    replicate_params: Iterable[Parameter] | None = None,
    dp_mesh_dims: Any = None,
    allow_shard_across_supernodes: bool = False,
    early_all_reduce: bool = False,
) -> Module | list[Module]:
    """Shard the parameters of a module fully, as PyTorch's `fully_shard` does, on either backend.

    The parameters below `module` that no inner unit holds become one unit: gathered before the module's forward,
    freed after it, gathered again in backward; gradients are reduce-scattered over the `shard` axis, all-reduced over
    `replicate`, and are the mean over both. Call it on inner modules first, on the model last, with equal values on
    every rank. The module then has the methods of `fully_sharded(module)`.

    A model without values (made under `torch.device("meta")`, or with MindSpore's delayed initialisation) gets shards
    without values: call PyTorch's `model.to_empty(device=...)` and initialise it, or `load_full_parameters`, before the
    first forward; build the optimizer afterwards.

    What a module computes from its parameters must leave it through its outputs (tensors, or tuples, lists, mappings
    and dataclasses of them): a tensor left on an attribute is not seen, and its backward would find the parameters
    freed. A parameter that a backward did not reach gets zeros when others of its unit were reached, since it may have
    been on another rank. A parameter that is read while its unit is not gathered is refused where that is seen: in a
    forward of the model, by its gradient, or by a guarded module (docs/fully_sharded.md). In PyTorch gradients are on
    `.grad` when `backward()` returns; `torch.autograd.grad` and `backward(inputs=...)` do not see the parameters.

    Args:
        module: a `torch.nn.Module` or `mindspore.nn.Cell`, changed in place and returned; or a list of them that become
            one unit, gathered before the first of them runs and freed after the last.
        mesh: axes `replicate` and `shard`; by default all ranks on `shard`. Each unit may have its own, all over the
            same ranks: those of the job, or a part of them that trains a model of its own.
        reshard_after_forward: free the full parameters between forward and backward. By default yes, except for the
            outermost unit and those that backward begins with, which are needed again at once; True frees these, too.
            A number, a divisor of the size of `shard`, keeps a part: neighbours, so many of them, gather from one
            another in backward.
        shard_placement_fn: for a parameter (whole), the `Shard(dim)` to use, or None for `Shard(0)`. A dim other than
            0 costs a copy for each gather and each reduce-scatter.
        mp_policy: the dtypes to compute and to reduce in; by default those of the parameters. A policy of PyTorch's
            FSDP2 will do as well.
        offload_policy: `CPUOffloadPolicy()` to keep shards and gradients on the host; likewise.
        ignored_params: parameters to leave as they are.
        replicate_params: parameters to keep whole on every rank; their gradients are all-reduced.
        dp_mesh_dims: `{"shard": names, "replicate": names}`, or an object with these attributes: the axes of `mesh` to
            take for each, one name or several that are joined.
        allow_shard_across_supernodes: do not refuse a mesh whose `shard` axis crosses supernodes, for a model that
            needs the memory of several: every gather and reduce-scatter then runs over slow links.
        early_all_reduce: begin this unit's all-reduce over `replicate` when its reduce-scatter is done, instead of when
            the unit before it has computed its gradients. The same gradients, earlier where the slow links are what a
            step waits for. On a CPU with PyTorch a thread of the program begins it, over connections of its own.

    Raises:
        ConfigError: a policy that is none, a number that does not divide the ranks of `shard`, a module that is a unit
            already or has an attribute by the name of a method of units, a parameter that another unit holds, or that
            is kept in a named tuple beside the registry.
        LayoutError: a mesh without this rank or not in ascending order, or a dim that a parameter does not have.
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise ConfigError("fully_shard: the list of modules is empty")
    backend = [backends.of_model(each) for each in modules][0]
    build.fully_shard(
        backend,
        modules,
        mesh,
        reshard_after_forward,
        shard_placement_fn,
        ignored_params or (),
        replicate_params or (),
        dp_mesh_dims,
        mp_policy,
        offload_policy,
        allow_shard_across_supernodes,
        early_all_reduce,
    )
    return module


def fully_sharded(module: Module) -> FullySharded:
    """The handle of the unit on a module: PyTorch's methods of an `FSDPModule`, on either backend.

    The module has the same methods as attributes, where the model's code may look for them.

    Raises:
        ConfigError: the module is no unit.
    """
    return handle_of(module)


def register_fsdp_forward_method(module: Module, method_name: str) -> None:
    """Let a method of a unit's module be one of its forwards, as PyTorch's function of this name does: the unit is
    gathered before it and freed after it, its inputs and outputs are cast and followed into backward. What the method
    calls is part of it, the module itself included. Every rank makes the same calls. `restore` takes it back.

    A module that is no unit stays as it is, so that code can run without sharding.

    Raises:
        ConfigError: there is no such method, or a plan has cut the module for several ranks that compute it together.
    """
    register_forward_method(module, method_name)


def describe(model: Module) -> str:
    """What `fully_shard` or `parallelize` has made of a model, in words.

    For each unit its parameters and how they are cut, the ranks and the tier of its collectives, and the buffers that
    its gradients are reduced in: what lies where, and the padding. Then a step, event by event, in the order of the
    schedule: what is started, waited for and freed when. Units stand in the order of the last forward, or before one in
    that of the model's definition.

    Raises:
        ConfigError: nothing in the model is sharded.
    """
    backend = backends.of_model(model)
    units = list(units_of(backend, model))
    if not units:
        raise ConfigError(f"describe: no part of this {type(model).__name__} is sharded; call fully_shard first")
    return describe_units(units, topology_of(backend))


def trace_step(model: Module) -> ContextManager[StepTrace]:
    """Note when the schedule of a sharded model does what.

        with hyper_parallel.trace_step(model) as trace:
            loss(model(tokens)).backward()
        trace.save("step.json")

    The file opens in https://ui.perfetto.dev. It has a row for the step's thread and one for each kind of collective,
    named after its axis, and its tier where the topology is known. What is on a collective's row lasts from when it was
    issued until it had been waited for. Each rank writes its own file.

    While PyTorch's profiler runs its record shows the same names without a trace, and so does MindSpore's on Ascend
    (`mstx=True`). Nothing is noted, and nothing costs time, otherwise.

    Raises:
        ConfigError: nothing in the model is sharded.
    """
    backend = backends.of_model(model)
    schedules = list({id(unit.schedule): unit.schedule for unit in units_of(backend, model)}.values())
    return trace_schedules(backend, model, schedules)


def restore(model: Module) -> Module:
    """Undo `parallelize` and `fully_shard` below `model`: whole parameters, no hooks, no gradients.

    Called by every rank.
    """
    restore_model(backends.of_model(model), model)
    return model


def collectives(module: Module) -> RegionCollectives:
    """The other ranks, for the forward of a module of an opaque region: `hyper_parallel.collectives(self)`.

    Its functions are differentiable and take plain local tensors and the name of a mesh axis. They do nothing where
    nobody has parallelized the model or the axis has one rank, so the same code runs on one device. docs/regions.md
    tells more.

    Args:
        module: registered in the model when it is parallelized; one that is not is taken for a model of its own, on one
            device.

    Raises:
        ConfigError: `module` is no module.
    """
    return collectives_of(backends.of_model(module), module)


def layout_of(parameter: Parameter) -> Layout | None:
    """The layout of a parameter at rest; None when HyperParallel has not sharded it."""
    return build.layout_of(parameter)


def trainable_parameters(model: Module) -> list[tuple[str, Parameter]]:
    """Name and parameter of everything that asks for a gradient, in definition order, tied parameters once."""
    backend = backends.of_model(model)
    found: dict[int, tuple[str, Parameter]] = {}
    for use in backend.modules.parameter_uses(model):
        if backend.modules.is_trainable(use.parameter):
            found.setdefault(id(use.parameter), (use.name, use.parameter))
    return list(found.values())


def full_parameters(model: Module) -> dict[str, np.ndarray]:
    """Every parameter, whole, as numpy on every rank, by its first name. Called by every rank."""
    return build.full_parameters(backends.of_model(model), model)


def load_full_parameters(model: Module, values: Mapping[str, np.ndarray]) -> None:
    """Overwrite every parameter from whole values: the mirror of `full_parameters`. Each rank takes its own part, and
    nothing is sent. A parameter without values, as `fully_shard` leaves those of a model that has none, gets memory.

    Args:
        model: the model, sharded or not.
        values: numpy arrays of the whole shapes by name; a tied parameter needs one of its names.

    Raises:
        ConfigError: lists missing names, unknown names and wrong shapes; then nothing is changed.
    """
    build.load_full_parameters(backends.of_model(model), model, values)


def value_and_grad(
    function: Callable[..., Tensor], parameters: Sequence[Parameter]
) -> Callable[..., tuple[Tensor, list[Tensor | None]]]:
    """`function`, returning its value and the gradients of `parameters`, on either backend.

    Gradients of sharded parameters are the local shards of the mean over all ranks. Those of a backward that only
    accumulates (`set_requires_gradient_sync(False)` and its like) are None; the one that reduces returns the whole sum.
    """
    if not parameters:
        raise ConfigError("value_and_grad: there is no parameter to take a gradient of")
    return backends.of_tensor(parameters[0]).autograd.value_and_grad(function, parameters)


def cross_entropy(
    logits: Tensor, targets: Tensor, model: Module, *, reduction: str = "mean", ignore_index: int = -100
) -> Tensor:
    """The cross entropy of what `model` gives, whether or not its plan cuts the vocabulary over ranks.

    A rank that holds a part of the vocabulary gets the loss of the whole: no rank gathers the logits, the ranks
    exchange a few numbers for each token, and backward exchanges nothing. The loss is the same on every tensor rank,
    and logits get the gradient that they would have on one device. All tensor ranks call together, with equal targets.

    Args:
        logits: `[..., V]`, floating, as the output head of `model` returns them on this rank: all entries of the
            vocabulary, or this rank's part. Computed in float32 at least.
        targets: `[...]`, whole numbers: ids of the whole vocabulary, whatever part the rank holds.
        model: the model that gave the logits, parallelized or not, or a module around it.
        reduction: "sum" over the tokens that count, or their "mean", which is NaN (with a gradient of zeros) when no
            token counts.
        ignore_index: tokens with this target count nothing.

    Returns:
        A scalar, of float64 for float64 logits, else of float32.

    Raises:
        ConfigError: a wrong dtype or argument, a target that is no entry of the vocabulary, or several parallelized
            models in `model`; nothing is sent then.
        LayoutError: shapes that do not fit each other, or the part of the vocabulary that the plan gives this rank.
        ContractError: the plan hands logits on in a layout that has no loss.
    """
    backend = backends.of_model(model)
    execution = execution_of(model) or _execution_inside(backend, model)
    if execution is None:
        return loss.whole_cross_entropy(backend, logits, targets, reduction, ignore_index)
    return loss.planned_cross_entropy(execution.backend, execution.plan, logits, targets, reduction, ignore_index)


def _execution_inside(backend: Backend, model: Module) -> Execution | None:
    """The plan that is carried out on the one module inside of `model` that has been parallelized, if one has."""
    found = {name: execution_of(module) for name, module in backend.modules.named_modules(model)}
    executions = {id(each): each for each in found.values() if each is not None}
    if len(executions) > 1:
        names = [name for name, each in found.items() if each is not None]
        raise ConfigError(f"cross_entropy: `model` holds several parallelized models, {names}; pass one of them")
    return next(iter(executions.values()), None)


def clip_grad_norm_(model: Module, gradients: Sequence[Tensor | None], max_norm: float) -> float:
    """Scale gradients in place so that their global 2-norm is at most `max_norm`. Called by every rank.

    Every element of the model counts once, however it is sharded or replicated.

    Args:
        model: the model, parallelized or not.
        gradients: one for each of `trainable_parameters(model)`, in order; None counts as zero.
        max_norm: `float("inf")` only measures.

    Returns:
        The norm before scaling, the same on every rank.
    """
    backend = backends.of_model(model)
    parameters = [parameter for _, parameter in trainable_parameters(model)]
    return clip.clip_grad_norm_(backend, model, parameters, gradients, max_norm)
