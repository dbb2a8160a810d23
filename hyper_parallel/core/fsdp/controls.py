"""What the user of a sharded module can ask of its unit, by the names of PyTorch's `FSDPModule`."""

from __future__ import annotations

from functools import update_wrapper
from typing import Any, Callable, Iterable, Sequence

from hyper_parallel.core.backend import Module, Tensor
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.fsdp.unit import Unit, check_reshard_after_forward, unit_of, units_of
from hyper_parallel.core.mesh import MODEL_AXES


class FullySharded:
    """The handle of a unit. `fully_sharded(module)` returns it, and its methods are also attributes of the module.

    They mean what they mean in PyTorch, on both backends. Every rank makes the same calls, between a backward and the
    next forward. With `recurse` a call is for the units on all modules below as well.
    """

    def __init__(self, unit: Unit):
        self._unit = unit

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. Where it does not, each rank adds up the full gradients of its own
        samples, and the next backward that reduces takes them along: nothing is sent meanwhile, and a rank holds
        gradients of the size of the whole parameters. Until then no gradient is handed over."""
        for unit in self._units(recurse):
            unit.requires_gradient_sync = unit.requires_all_reduce = _flag(requires_gradient_sync)
            if not requires_gradient_sync:
                unit.serve_all()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces over `replicate`. Where it does not, gradients are reduced over `shard` only, and
        each rank adds up its shards: the next backward that reduces takes them along in its one all-reduce. Until then
        no gradient is handed over. Without ranks along `replicate` this changes nothing."""
        for unit in self._units(recurse):
            unit.requires_all_reduce = _flag(requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether backward ends with the settlement. If not, what has been issued goes on, and the gradients are handed
        over at the end of a later backward. For all units of the model."""
        self._unit.settings.is_last_backward = _flag(is_last_backward)

    def set_reshard_after_forward(self, reshard_after_forward: bool | int, recurse: bool = True) -> None:
        """As the argument of `fully_shard`. With False full parameters stay after an evaluation, too; call `reshard()`
        before anything but a backward changes the shards."""
        if reshard_after_forward is None:
            raise ConfigError("set_reshard_after_forward: write True, False or a number of ranks, found None")
        units = self._units(recurse)
        for unit in units:
            check_reshard_after_forward(reshard_after_forward, unit.shard_group.size)
        for unit in units:
            unit.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether full parameters are freed in backward. With False they stay for the next micro-batch; the shards must
        not change before they have been freed, by a forward, `reshard()` or a later backward."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = _flag(reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[Module]) -> None:
        """The modules, units themselves, whose gathers to start as soon as this one's parameters are there in forward.
        Without any, those that came next in the last forward."""
        self._unit.forward_prefetch = _units_on(modules, "set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: Sequence[Module]) -> None:
        """The same in backward. Without any, those that came before in forward."""
        self._unit.backward_prefetch = _units_on(modules, "set_modules_to_backward_prefetch")

    def set_prefetch_depth(self, forward: int = 1, backward: int = 1) -> None:
        """How many units ahead to gather, by the order of the last forward, where no modules are given; 0 for none. For
        all units of the model. Not in PyTorch. Each takes the memory of one unit's full parameters."""
        for depth in (forward, backward):
            if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
                raise ConfigError(f"set_prefetch_depth: write whole numbers from 0 on, found {depth!r}")
        self._unit.settings.forward_prefetch_depth = forward
        self._unit.settings.backward_prefetch_depth = backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What to divide the sum of all ranks' gradients by, instead of the number of ranks with samples of their own.
        For this unit."""
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            raise ConfigError(f"set_gradient_divide_factor: write a number above 0, found {factor!r}")
        self._unit.gradient_divide_factor = float(factor)
        self._unit.serve_all()

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None] | None) -> None:
        """A function that is called with each reduced buffer of this unit, 1-D, before its gradients are handed over,
        and may change it in place: with the result of the all-reduce over `replicate`, or where there is none with that
        of the reduce-scatter. Buffers come in the order in which backward has completed them, at the settlement, so the
        hook may communicate. None takes it away. PyTorch's `stream` is not offered: nothing runs beside the hook."""
        if hook is not None and not callable(hook):
            raise ConfigError(f"set_all_reduce_hook: write a function of one tensor, found {hook!r}")
        self._unit.all_reduce_hook = hook
        self._unit.serve_all()

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers this unit's parameters. False only where it reads none of them, as that of an
        embedding."""
        self._unit.unshard_in_backward = _flag(unshard_in_backward)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters now, and let its modules see them.

        Returns:
            With `async_op` a handle at once, whose `wait()` returns when they are there. The module's forward waits
            too, so `wait()` is for reading them before it.
        """
        handle = UnshardHandle(self._unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's full parameters now. On the outermost unit, after an exception in the forward: let the code
        around the model see shards again where it has met what stands for them in a forward."""
        self._unit.gathers.free(self._unit)
        self._unit.forward_ended()

    def _units(self, recurse: bool) -> list[Unit]:
        if not recurse:
            return [self._unit]
        below = (unit for module in self._unit.modules for unit in units_of(self._unit.backend, module))
        return list(dict.fromkeys(below))


class UnshardHandle:
    """A gather that `unshard` has started."""

    def __init__(self, unit: Unit):
        if unit.is_detached:
            raise ConfigError("unshard: the model was restored since this unit was made, and its parameters are whole")
        self._unit: Unit | None = unit
        unit.gathers.fetch_anew(unit)
        unit.gathers.keep(unit)

    def wait(self) -> None:
        """Return when the full parameters may be read; harmless when done twice, or after `restore`."""
        unit, self._unit = self._unit, None
        if unit is not None and not unit.is_detached:
            unit.gathers.have(unit)
            unit.show()


METHODS = tuple(name for name in vars(FullySharded) if not name.startswith("_"))


def handle_of(module: Module) -> FullySharded:
    """The handle of the unit that `fully_shard` has put on a module.

    Raises:
        ConfigError: there is none.
    """
    unit = unit_of(module)
    if unit is None:
        raise ConfigError(f"{type(module).__name__} is no unit; call fully_shard on it, or take a module that is one")
    return FullySharded(unit)


def check_names(modules: Iterable[Module]) -> None:
    """Refuse modules that have an attribute by the name of a method of the handle."""
    for module in modules:
        taken = [name for name in METHODS if hasattr(module, name)]
        if taken:
            raise ConfigError(
                f"fully_shard: {type(module).__name__} has an attribute {taken[0]!r} already, the name under which "
                "units are asked for the same; rename it, or put the module into one that fully_shard is called on"
            )


def add_methods(unit: Unit) -> None:
    """Make the methods of the handle attributes of the unit's modules, without touching their classes."""
    handle = FullySharded(unit)
    for module in unit.modules:
        vars(module).update({name: getattr(handle, name) for name in METHODS})


def remove_methods(unit: Unit) -> None:
    """Take them away, and forwards that were made of other methods."""
    for module in unit.modules:
        for name in METHODS:
            vars(module).pop(name, None)
        for name, value in list(vars(module).items()):
            if isinstance(value, ForwardMethod):
                del vars(module)[name]
                vars(module).update(value.before)


class ForwardMethod:
    """A method of a unit's module that runs as its forward does."""

    def __init__(self, unit: Unit, module: Module, name: str):
        self._unit, self._module, self._method = unit, module, getattr(module, name)
        self.before = {name: vars(module)[name]} if name in vars(module) else {}
        """What it takes the place of in the module's own dictionary."""
        update_wrapper(self, self._method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = self._unit
        if unit.runs_method:
            return self._method(*args, **kwargs)
        args, kwargs = unit.casts.enter(args, kwargs)
        unit.enter(self._module, args, kwargs)
        unit.runs_method = True
        try:
            output = self._method(*args, **kwargs)
        finally:
            unit.runs_method = False
        unit.leave(self._module, output)
        return unit.casts.leave(output)


def register_forward_method(module: Module, name: str) -> None:
    """See `hyper_parallel.register_fsdp_forward_method`."""
    unit, method = unit_of(module), getattr(module, name, None)
    if not callable(method):
        raise ConfigError(f"register_fsdp_forward_method: {type(module).__name__} has no method {name!r}")
    if unit is None or isinstance(method, ForwardMethod):
        return
    cut = [axis for axis in MODEL_AXES if unit.mesh.axis_size(axis) > 1]
    if cut:
        raise ConfigError(
            f"register_fsdp_forward_method: {type(module).__name__} is cut along {cut[0]!r}, and what its plan says of "
            f"inputs and outputs holds for its forward, not for {name}; call the modules inside of it, or its forward"
        )
    vars(module)[name] = ForwardMethod(unit, module, name)


def _flag(value: bool) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"write True or False, found {value!r}")
    return value


def _units_on(modules: Sequence[Module], name: str) -> list[Unit]:
    if not isinstance(modules, (list, tuple)):
        raise ConfigError(f"{name}: write a list of modules, found {type(modules).__name__}")
    units = [unit_of(module) for module in modules]
    if None in units:
        other = type(modules[units.index(None)]).__name__
        raise ConfigError(f"{name}: {other} is no unit; call fully_shard on it, or list the module that is one")
    return list(dict.fromkeys(units))
