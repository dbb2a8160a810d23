"""The engine of `hyper_parallel.Muon`: one step, without a framework. The backends make it their own optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Mapping

from hyper_parallel.core.backend import Backend, Parameter, Tensor
from hyper_parallel.core.errors import ConfigError, HyperParallelError
from hyper_parallel.core.muon import full_state, state
from hyper_parallel.core.muon.attention import AttentionClip
from hyper_parallel.core.muon.checks import Agreement, agree_on
from hyper_parallel.core.muon.elementwise import HALF, ElementWisePart
from hyper_parallel.core.muon.groups import Request
from hyper_parallel.core.muon.lane import Lane, Part
from hyper_parallel.core.muon.options import MUON, check_free_options, planned_values, settings_of
from hyper_parallel.core.muon.parameters import MuonParameter, MuonPolicy
from hyper_parallel.core.muon.plan import MuonPlan, make_plan
from hyper_parallel.core.muon.qk_clip import QKClip
from hyper_parallel.core.muon.second_moments import Run
from hyper_parallel.core.muon.state import ADAMW_MOMENTS, MASTER, MOMENTUM, SECOND, Groups
from hyper_parallel.core.muon.step import Step
from hyper_parallel.core.muon.storage import Stored
from hyper_parallel.core.topology import Topology

DTYPES = ("bfloat16", "float16", "float32", "float64")
"""Of parameters that Muon updates."""


@dataclass(frozen=True)
class Settings:
    """What holds for all groups."""

    topology: Topology | None = None
    policy: MuonPolicy = field(default_factory=MuonPolicy)
    master_dtype: str | None = None
    check_finite: bool = True
    foreach: bool | None = None
    qk_clip: QKClip | None = None


class MuonEngine:
    """State and step of an optimizer whose groups are matrices for Muon, and all else for AdamW.

    Made by all ranks that share parameters, with equal arguments. `groups` are what the framework's optimizer starts
    with; what its groups say at a step is given to that step.

    Raises:
        ConfigError, LayoutError: what the request or the plan has wrong, on all of these ranks.
    """

    def __init__(self, backend: Backend, request: Request, settings: Settings):
        self.backend = backend
        self.settings = settings
        self.groups = [
            {
                "params": [each.parameter for each in group.members],
                "param_names": [each.name for each in group.members],
                "algorithm": group.algorithm,
                **group.options,
            }
            for group in request.groups
        ]
        self.members = [each for group in request.groups for each in group.members]
        self._parameters_of = [tuple(each.parameter for each in group.members) for group in request.groups]
        self.group_of = [number for number, group in enumerate(request.groups) for _ in group.members]
        self.planned = [planned_values(group.algorithm, group.options) for group in request.groups]
        plans, self.attention, self.fingerprint = self._agreed(request)
        self.lanes = [Lane(self, plan) for plan in plans]
        """The plan of what ranks share, and that of what this rank has to itself, of which others know nothing."""
        self.elementwise = ElementWisePart(backend, request, settings.master_dtype, settings.foreach)
        self.started = False
        """Whether the float32 copies have been taken."""
        near = [group for lane in self.lanes for group in lane.replicas.values()]
        self._agreement = Agreement(backend, self.members, near, settings.check_finite)

    # What others of this room ask

    @property
    def parameters(self) -> list[Parameter]:
        """All parameters, in the order of groups: gradients come in this order."""
        return [each.parameter for each in self.members]

    def options(self, groups: Groups, member: int) -> Mapping[str, Any]:
        """What the group of a parameter says now."""
        return groups[self.group_of[member]]

    def parts(self) -> list[Part]:
        """All that this rank keeps of Muon's parameters."""
        return [part for lane in self.lanes for part in lane.parts]

    def second_moments(self) -> list[Run]:
        """All that this rank keeps of second moments, in the order of plan and batches."""
        return [run for lane in self.lanes for run in lane.second_moments.all_runs()]

    def state_dtype(self, member: int) -> str:
        """What the state of a parameter is kept in: its own dtype, or that of its float32 copy."""
        dtype = self.backend.tensors.dtype_name(self.members[member].parameter)
        return self.settings.master_dtype or dtype if dtype in HALF else dtype

    def keeps_master(self, member: int) -> bool:
        """Tell whether there is a float32 copy of a parameter."""
        return self.state_dtype(member) != self.backend.tensors.dtype_name(self.members[member].parameter)

    def master_of(self, member: int) -> Tensor | None:
        """What this rank has of that copy, if it has all that it has of the parameter."""
        if member in self.elementwise.members:
            return self.elementwise.master(member)
        return next((part.master for part in self.parts() if part.member == member and part.is_whole), None)

    def shapes_of(self, member: int, found: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """What a full state has to hold of a parameter, given what it does hold."""
        shape = self.members[member].layout.shape
        copy = {MASTER} & set(found)
        if member in self.elementwise.members:
            return dict.fromkeys([*(ADAMW_MOMENTS if set(found) - copy else ()), *copy], shape)
        for lane in self.lanes:
            if member in lane.member_of:
                index = lane.member_of.index(member)
                second = {SECOND: lane.second_moments.shape(index)} if lane.rule_of(index) is not None else {}
                return dict.fromkeys([MOMENTUM, *copy], shape) | second
        return {}

    def local(self, value: Any) -> Any:
        """This rank's part of a tensor; anything else as it is."""
        return self.backend.optimizer.local(value) if self.backend.tensors.is_tensor(value) else value

    # What the framework's optimizer asks

    def states(self) -> list[dict[str, Any]]:
        """What this rank keeps of each parameter, by name. These are the dicts that steps go on with."""
        states: list[dict[str, Any]] = [{} for _ in self.members]
        for part in self.parts():
            states[part.member] = part.state
        for member in self.elementwise.members:
            states[member] = self.elementwise.state(member)
        return states

    def describe(self) -> str:
        """The plan, in words."""
        parts = [lane.plan for lane in self.lanes] + ([] if self.attention is None else [self.attention])
        return "\n".join(each.describe() for each in parts)

    def observe_attention(self, maxima: Mapping[str, Any]) -> None:
        """Take the largest attention logits of a micro-batch, `{attention module: [heads]}`, for the next step.

        Raises:
            ConfigError: the optimizer was made without `qk_clip`, or the model has no such attention.
        """
        if self.attention is None:
            raise ConfigError("Muon: maxima of attention are of no use without qk_clip=QKClip()")
        self.attention.observe(maxima)

    def step(self, gradients: list[Tensor | None], groups: Groups) -> None:
        """One step of all parameters, with the gradients of `parameters` and the options that `groups` have now.

        Raises:
            GradientError: a gradient is not finite, is missing on some ranks, or has another shape; on all ranks.
            LayoutError: a parameter lies otherwise than when the optimizer was made.
            ConfigError: an option that is fixed has been changed, or maxima of attention are not finite. Nothing is
                changed then.
        """
        local, nowhere = self._agreement.gradients(gradients, self._changed_option(groups))
        largest = None if self.attention is None else self.attention.exchange()
        whole = [None if number in nowhere else each for number, each in enumerate(gradients)]
        with self.backend.autograd.no_grad():
            self.start()
            self.elementwise.step(whole, groups)
            for lane in self.lanes:
                step = Step(lane, local, nowhere, groups)
                for number, update in lane.replay.updates(step.inputs, step.compute, step.shards, step.skipped):
                    step.apply(number, update)
                step.finish()
            if largest is not None:
                self.attention.apply(self, largest)

    def start(self) -> None:
        """Take the float32 copies that are not there yet: when training begins, for until then parameters may be
        loaded."""
        if self.started:
            return
        self.started = True
        tensors = self.backend.tensors
        for part in self.parts():
            if part.master is None and self.keeps_master(part.member):
                master = tensors.empty(part.kept.local_shape, self.settings.master_dtype)
                shard = self.local(self.members[part.member].parameter)
                tensors.copy_(master, part.of(self.backend, shard))
                part.keep_master(master)
        self.elementwise.start()

    def resume(self, with_masters: bool) -> None:
        """Go on after state has been loaded, with float32 copies or without."""
        self.started = False
        if with_masters:
            self.start()

    def state_dict(self, groups: Groups) -> dict[str, Any]:
        """See `core.muon.state`."""
        return state.state_dict(self, groups)

    def load_state_dict(self, saved: Mapping[str, Any], groups: Groups) -> None:
        """See `core.muon.state`."""
        state.load_state_dict(self, saved, groups)

    def full_state(self, groups: Groups) -> dict[str, Any]:
        """See `core.muon.full_state`."""
        return full_state.full_state(self, groups)

    def load_full_state(self, values: Mapping[str, Any], groups: Groups) -> None:
        """See `core.muon.full_state`."""
        full_state.load_full_state(self, values, groups)

    # How it is made

    def _agreed(self, request: Request) -> tuple[list[MuonPlan], AttentionClip | None, str]:
        """The plans, the same on all ranks that share parameters, and a digest of all that is fixed with them."""
        plans, attention, error, fingerprint = [], None, None, ""
        try:
            shared, own = self._make_plans(request)
            plans = [plan for plan in (shared, own) if plan.parameters]
            if self.settings.qk_clip is not None:
                attention = AttentionClip(self.backend, request, self.settings.qk_clip, self.members)
            fingerprint = self._made_of(shared, request)
        except HyperParallelError as found:
            error = found
        ranks = {rank for each in self.members for rank in each.layout.mesh.ranks}
        agree_on(self.backend, sorted(ranks), error, fingerprint)
        return plans, attention, fingerprint

    def _make_plans(self, request: Request) -> list[MuonPlan]:
        """Of what several ranks share, and of what this rank has to itself."""
        parameters, counted = [], 0
        for group in request.groups:
            for member, each in enumerate(group.members, counted):
                if group.algorithm == MUON and 0 not in each.layout.shape:
                    dtype = self._checked_dtype(each)
                    settings, view = settings_of(group.options), request.views[each.name]
                    made = MuonParameter(each.name, each.layout, view, dtype, settings, self.state_dtype(member))
                    parameters.append(made)
            counted += len(group.members)
        topology = self.settings.topology or Topology.single_machine(self.backend.collectives.world_size())
        shared = [each for each in parameters if each.layout.mesh.size > 1]
        own = [each for each in parameters if each.layout.mesh.size == 1]
        return [make_plan(each, topology, self.settings.policy) for each in (shared, own)]

    def _checked_dtype(self, each: Stored) -> str:
        """The dtype of a parameter that Muon can update, where it lies."""
        tensors, local = self.backend.tensors, self.local(each.parameter)
        dtype = tensors.dtype_name(each.parameter)
        if dtype not in DTYPES:
            raise ConfigError(f"Muon: {each.name} is of {dtype}; Muon updates parameters of {', '.join(DTYPES)}")
        if tensors.to_device(local) is not local:
            raise ConfigError(
                f"Muon: {each.name} lies in the host's memory, and matrices are orthogonalized on the device; shard "
                "the model without CPUOffloadPolicy, or send its matrices to AdamW with routes"
            )
        return dtype

    def _made_of(self, plan: MuonPlan, request: Request) -> str:
        """A digest of the shared plan and of all that is fixed beside it."""
        groups = [(group["algorithm"], group["param_names"]) for group in self.groups]
        layouts = [(each.layout.shape, str(each.layout) if each.layout.mesh.size > 1 else "") for each in self.members]
        views = [request.views.get(each.name) for each in self.members]  # of parameters outside of the shared plan too
        numbers = {view: number for number, view in enumerate(dict.fromkeys(views))}
        matrices = [repr(view) for view in numbers], [numbers[view] for view in views]
        fixed = (plan.fingerprint, groups, layouts, matrices, self.planned, self.settings.master_dtype)
        return sha256(repr(fixed).encode()).hexdigest()

    def _changed_option(self, groups: Groups) -> ConfigError | None:
        """An error where somebody has changed what is fixed with the plan, or options to what they can't be."""
        found = [[id(each) for each in group["params"]] for group in groups]
        if found != [[id(each) for each in group] for group in self._parameters_of]:
            return ConfigError(
                "Muon: the parameters of param_groups are not those that the optimizer was made with, in their order; "
                "what is updated is planned with: make a new optimizer and give it full_state() of this"
            )
        for number, (group, planned) in enumerate(zip(groups, self.planned, strict=True)):
            for name, value in planned.items():
                if group[name] != value:
                    return ConfigError(
                        f"Muon: group {number} had {name}={value!r} when the optimizer was made, and has now "
                        f"{group[name]!r}; it is planned with: make a new optimizer and give it full_state() of this"
                    )
            try:
                check_free_options(group, f"Muon: group {number}")
            except ConfigError as error:
                return error
        return None
