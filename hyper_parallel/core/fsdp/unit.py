"""A unit: the parameters of a module that are gathered and freed together, and the hooks that report its life."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Iterable, Iterator, Sequence

from hyper_parallel.core.backend import NO_COPY, Backend, Group, Module, Tensor
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.fsdp.accumulation import Kept
from hyper_parallel.core.fsdp.call import Call
from hyper_parallel.core.fsdp.casting import Casts
from hyper_parallel.core.fsdp.gathers import Gathers
from hyper_parallel.core.fsdp.ordered import OrderedRuntime
from hyper_parallel.core.fsdp.parameter import ShardedParameter, ranks_with_samples
from hyper_parallel.core.fsdp.policy import MixedPrecisionPolicy
from hyper_parallel.core.fsdp.reduction import Arranged, UnitReduction, arrange
from hyper_parallel.core.fsdp.runtime import BackendRuntime
from hyper_parallel.core.fsdp.schedule import Schedule, Settings
from hyper_parallel.core.fsdp.sight import Sight, guards
from hyper_parallel.core.fsdp.trace import show_in_profiler
from hyper_parallel.core.mesh import DeviceMesh

_ATTRIBUTE = "_hyper_parallel_unit"


class Unit:
    """Made by `fully_shard`; lives on its modules until `restore`.

    Its schedule is shared with all units below the same root. The root is the unit whose module is run first with no
    unit above it; it adopts the others at its first forward. A unit of several modules is gathered before the first of
    them and freed after the last; to autograd they are one call.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        modules: Sequence[Module],
        parameters: Sequence[ShardedParameter],
        mesh: DeviceMesh,
        reshard_after_forward: bool | int | None,
        precision: MixedPrecisionPolicy,
    ):
        self.backend = backend
        self.name = name
        self.modules = list(modules)
        self._is_single = len(self.modules) == 1
        self.parameters = list(parameters)
        self.served = [each for each in parameters if each.is_served]
        """The parameters whose gradients it takes, and which it shows."""
        self.mesh = mesh
        self.shard_group: Group = backend.collectives.groups(mesh.groups(("shard",)))
        self.part_group: Group | None = None
        """The ranks that gather again after a forward that has kept a part; None where everything is kept or freed."""
        self.needs_reduction = any(each.is_reduced for each in self.parameters)
        self._is_gathered = any(each.is_gathered for each in self.parameters)
        self._is_summed = any(each.sum_group.size > 1 for each in self.parameters)
        self.early_all_reduce = any(each.early_all_reduce for each in self.parameters)
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.forward_prefetch: list[Unit] = []
        self.backward_prefetch: list[Unit] = []
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.gradient_divide_factor: float | None = None
        self.all_reduce_hook: Callable[[Tensor], None] | None = None
        self.kept = Kept(backend.tensors)
        self._arranged: dict[tuple[ShardedParameter, ...], list[Arranged]] = {}
        self.settings = Settings()
        """Those of the tree, once a root has adopted the unit."""
        self._schedule: Schedule | None = None
        self.has_root = False
        self._below: list[Unit] | None = None  # all units of the tree, on the root only
        self._calls: list[Call | None] = []  # running forwards, innermost last; None where nothing is recorded
        self._still_to_run: list[Module] = []  # of several modules, those that this pass has not come to
        self._call_of_pass: Call | None = None
        self._attached: tuple[list[ShardedParameter], list[Tensor]] | None = None
        self.is_detached = False
        self.casts = Casts(backend, precision)
        self.runs_method = False
        """A method runs that `register_fsdp_forward_method` has made a forward."""
        self.reshard_after_forward: bool | int | None = None
        self._is_asked_to_reshard = False
        self.set_reshard_after_forward(reshard_after_forward)
        self.sight = Sight(self)
        self._hooks = []
        for module in self.modules:
            self._hooks.append(backend.modules.before_forward(module, partial(self.enter, module)))
            self._hooks.append(backend.modules.after_forward(module, partial(self.leave, module)))
            self._hooks += self.casts.around(module)
            vars(module)[_ATTRIBUTE] = self
        below = (each for module in self.modules for each in units_of(backend, module))
        self._hooks += guards(self, has_inner_units=any(each is not self for each in below))
        self.sight.watch(self.trainable())

    @property
    def schedule(self) -> Schedule:
        """The schedule of the tree; a unit that no root has adopted becomes a root."""
        if not self.has_root:
            self._become_root()
        return self._schedule

    @property
    def gathers(self) -> Gathers:
        """What gathers and frees this unit; until a root adopts it, on its own."""
        if self._schedule is None:
            self._schedule = self._new_schedule([self])
        return self._schedule.gathers

    @property
    def stays_for_backward(self) -> bool:
        """See `schedule.ScheduledUnit`. What nothing is gathered of is not followed in backward."""
        return not self._is_asked_to_reshard and bool(self.served)

    @property
    def accumulation(self) -> str:
        """What becomes of gradients now: see `schedule.Reduction.kind`."""
        if not self.requires_gradient_sync:
            return "none"
        return "all" if self.requires_all_reduce or not self._is_summed else "scatter"

    def trainable(self) -> list[ShardedParameter]:
        """The parameters whose gradients the unit takes, as they are now."""
        return [each for each in self.served if self.backend.modules.is_trainable(each.parameter)]

    def arranged(self, parameters: Sequence[ShardedParameter]) -> list[Arranged]:
        """The buffers in which some of its parameters are reduced."""
        key = tuple(parameters)
        if key not in self._arranged:
            exact = self.backend.collectives.scatters_uneven()
            self._arranged[key] = arrange(self.backend.tensors, key, exact)
        return self._arranged[key]

    def serve_all(self) -> None:
        """Take the gradients of all parameters, also of those that autograd could be left alone with."""
        self.served = self.parameters

    def make_usable(self) -> None:
        """Look for values that have come since, and take over dtypes that the model has been cast to.

        Raises:
            ConfigError: there are no values; or gradients that are on their way or kept have the dtype before, or all.
        """
        for each in self.parameters:
            each.require_values(self.full_name(each))
        cast = [each for each in self.parameters if each.was_cast()]
        if cast and not self.backend.autograd.follows_casts():
            raise self._cast_error(cast[0], "which gradients of this framework do not follow; cast it before")
        if cast and (self.kept or self.backend.autograd.in_backward()):
            raise self._cast_error(cast[0], "while gradients of it are on their way or kept; cast it between two steps")
        for each in cast:
            each.follow_cast()
        if cast:
            self._arranged.clear()
            self._attached = None

    def _cast_error(self, parameter: ShardedParameter, why: str) -> ConfigError:
        dtype = self.backend.tensors.dtype_name(parameter.parameter)
        return ConfigError(
            f"the parameter {self.full_name(parameter)} has been cast from {parameter.spec.dtype} to {dtype} since "
            f"fully_shard, {why}, or ask for another dtype to compute in with mp_policy"
        )

    def set_reshard_after_forward(self, asked: bool | int | None) -> None:
        """See `hyper_parallel.fully_shard`; None is for the root to decide. Called by every rank."""
        check_reshard_after_forward(asked, self.shard_group.size)
        self._free()  # what is kept now may be of another size
        size = self.shard_group.size
        self.part_group = None
        self._is_asked_to_reshard = asked is not None
        if asked is None or isinstance(asked, bool):
            self.reshard_after_forward = asked
            return
        self.reshard_after_forward = {1: False, size: True}.get(asked, asked)
        if 1 < asked < size:
            groups = self.mesh.groups(("shard",))
            parts = [group[start : start + asked] for group in groups for start in range(0, size, asked)]
            self.part_group = self.backend.collectives.groups(parts)

    @property
    def called(self) -> str:
        """Its modules, for messages."""
        kinds = ", ".join(self.backend.modules.class_name(module) for module in self.modules)
        return f"{kinds} {self.name}" if self.name else kinds

    def full_name(self, parameter: ShardedParameter) -> str:
        """The name of a parameter in the model, as far as the unit knows its own."""
        name = parameter.uses[0].name
        return name if not self.name or name.startswith(f"{self.name}.") else f"{self.name}.{name}"

    def forward_ended(self) -> None:
        """The forward of the tree has ended, if this unit is its root: code around the model may see shards."""
        for unit in self._below or ():
            unit.sight.forward_ends()

    def is_gathered(self) -> bool:
        """Tell whether the full parameters are in memory."""
        return self.gathers.is_readable(self)

    def _free(self) -> None:
        if self._schedule is not None:
            self._schedule.gathers.free(self)

    def detach(self) -> None:
        """Take the hooks away; the parameters stay as they are."""
        self.is_detached = True
        self._attached = None  # its node and the unit hold each other where Python sees no cycle
        self._free()
        self.sight.end()
        for hook in self._hooks:
            hook.remove()
        for module in self.modules:
            vars(module).pop(_ATTRIBUTE, None)

    def __deepcopy__(self, memo: dict) -> Unit:
        raise ConfigError(NO_COPY)

    def __reduce__(self) -> tuple:
        raise ConfigError(NO_COPY)

    def reset(self, broken: bool) -> None:
        """Forget calls that never came to an end because of an exception, and with `broken` the graph they were in."""
        self._calls.clear()
        self._still_to_run = []
        if broken:
            self._attached = None

    def _become_root(self) -> None:
        if not self._is_single:
            kinds = ", ".join(type(module).__name__ for module in self.modules)
            raise ConfigError(
                f"the unit of several modules ({kinds}) is run with no unit above it; call fully_shard on the module "
                "that holds them, too, and run that one"
            )
        self._below = _checked_tree(self.backend, self.modules[0])
        schedule = self._new_schedule(self._below)
        for unit in self._below:
            if unit._schedule is not None:
                schedule.adopt(unit._schedule)
            unit._schedule, unit.has_root, unit.settings = schedule, True, self.settings
            if unit is not self:
                unit._below = None
                if unit.reshard_after_forward is None:
                    unit.reshard_after_forward = True

    def _new_schedule(self, units: Sequence[Unit]) -> Schedule:
        runtime = BackendRuntime(self.backend, units)
        if ranks_with_samples(self.mesh) > 1:  # ranks with the same samples meet in every boundary anyway
            runtime = OrderedRuntime(self.backend, runtime, units, self.mesh.ranks)
        return Schedule(runtime, self.settings)

    def enter(self, module: Module, args: tuple, kwargs: dict) -> None:
        """The forward of one of its modules begins."""
        if self.runs_method:  # which is one call of the unit, whatever it calls
            return
        schedule = self.schedule
        if self._below is not None and not self.backend.autograd.in_backward():
            show_in_profiler(self.backend, schedule)
            broken = schedule.before_root_forward(self.backend.autograd.grad_enabled())
            for unit in self._below:
                unit.reset(broken)
                unit.sight.forward_begins()
        if self._is_single or not self._still_to_run:
            self._still_to_run, self._call_of_pass = list(self.modules), None
            schedule.before_forward(self)
        else:
            schedule.gathers.have(self)
        recording = bool(self.served) and self.backend.autograd.grad_enabled()
        if recording and self._call_of_pass is None:
            # Where nothing is gathered there is no memory to give back when the inputs are reached.
            self._call_of_pass = Call(self, (args, kwargs) if self._is_gathered else ())
        self._calls.append(self._call_of_pass if recording else None)
        self.show()

    def leave(self, module: Module, output: Any) -> None:
        """It has come to its end."""
        if self.runs_method:
            return
        if not self._calls:
            raise ConfigError(
                f"{type(module).__name__} calls itself, which the module of the outermost unit must not do; "
                "make a module around it the outermost"
            )
        call = self._calls.pop()
        watched = call is None or call.watch_outputs(output)
        self._still_to_run = [each for each in self._still_to_run if each is not module]
        if self._is_single or not self._still_to_run or not watched:
            self._finish_pass(call is not None, watched)
        if self._below is not None and not self.backend.autograd.in_backward():
            for unit in self._below:
                if unit._still_to_run:
                    unit._finish_pass(unit._call_of_pass is not None, watched=True)
            self.schedule.after_root_forward(self.backend.autograd.grad_enabled())
            self.forward_ended()

    def _finish_pass(self, recording: bool, watched: bool) -> None:
        self._still_to_run = []
        self.schedule.after_forward(self, recording, watched)

    def show(self) -> None:
        """Let modules see the full parameters until they are freed; recorded ones come out of one autograd node.

        In backward too, where nothing is recorded but a recompute inside the unit may run its modules again.
        """
        parameters, tensors = self._recorded()
        seen = dict(zip(map(id, parameters), tensors))
        self.sight.show(
            [(each, seen[id(each)] if id(each) in seen else each.as_shown(each.full())) for each in self.served]
        )

    def _recorded(self) -> tuple[list[ShardedParameter], list[Tensor]]:
        """What is trainable now, as it is shown, with a history.

        One node serves all calls until it has run, so a unit is reduced once. A checkpoint that computes its calls
        again one after the other, each with a backward of its own, runs it once for each. What is shown of its tensors
        is made with them, so that it has a history where nothing is recorded, as in backward.
        """
        autograd = self.backend.autograd
        if autograd.grad_enabled():
            return self._attach()
        if not autograd.in_backward():
            return [], []
        with autograd.enable_grad():
            return self._attach()

    def _attach(self) -> tuple[list[ShardedParameter], list[Tensor]]:
        trainable = self.trainable()
        if not trainable:
            return [], []
        if self._attached is None or self._attached[0] != trainable:

            def reduce(gradients: list[Tensor | None]) -> Iterable[Tensor]:
                return self._reduce(trainable, gradients)

            self.sight.watch(trainable)
            fulls = [each.full() for each in trainable]
            tensors = self.backend.autograd.attach([each.parameter for each in trainable], fulls, reduce)
            self._attached = trainable, [each.as_shown(tensor) for each, tensor in zip(trainable, tensors)]
        return self._attached

    def _reduce(self, parameters: list[ShardedParameter], gradients: list[Tensor | None]) -> Iterable[Tensor]:
        self.check_attached()
        self._attached = None
        reduction = UnitReduction(self, parameters, gradients)
        self.schedule.gradients_ready(reduction)
        return reduction.returned()

    def check_attached(self) -> None:
        """Refuse to go on with a graph from before `restore`."""
        if self.is_detached:
            raise ConfigError(
                f"the model was restored between the forward and the backward of {self.name or 'its outermost unit'}; "
                "run the forward again"
            )


def check_reshard_after_forward(asked: bool | int | None, size: int) -> None:
    """Refuse what `set_reshard_after_forward` can't do with `size` ranks along `shard`."""
    if asked is None or isinstance(asked, bool):
        return
    if not isinstance(asked, int) or asked < 1 or size % asked:
        raise ConfigError(
            f"reshard_after_forward is {asked!r}; write True, False or a divisor of the {size} ranks along 'shard', "
            "the number of ranks that hold a copy together after forward"
        )


def _checked_tree(backend: Backend, root: Module) -> list[Unit]:
    """All units of a tree, named after their modules; refuses those that other ranks share."""
    units = list(units_of(backend, root))
    everyone = set(units[0].mesh.ranks)
    for path, module in backend.modules.named_modules(root):
        unit = unit_of(module)
        if unit is None:
            continue
        unit.name = unit.name or path
        if set(unit.mesh.ranks) != everyone:
            raise ConfigError(
                f"the unit {path} is sharded over the ranks {sorted(unit.mesh.ranks)}, its outermost unit over "
                f"{sorted(everyone)}; give every unit of a model a mesh of the same ranks"
            )
    return units


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
