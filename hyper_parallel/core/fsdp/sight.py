"""What modules see of a unit's parameters, and what is said where they would take a part for the whole."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Iterable, Iterator, NoReturn

from hyper_parallel.core.backend import HookHandle, ParameterUse, Tensor
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.fsdp.parameter import ShardedParameter

if TYPE_CHECKING:
    from hyper_parallel.core.fsdp.unit import Unit


class Sight:
    """One unit's parameters as the modules that hold them find them.

    Full tensors while the unit shows them, shards otherwise. But while a forward runs above the unit, the code of
    another module that reads such an attribute takes it for whole: there is a stand-in then, which can be asked what it
    is and refuses to be computed with.
    """

    def __init__(self, unit: Unit):
        self._unit = unit
        self._modules = unit.backend.modules
        self._forward_runs = False
        self._away: list[ShardedParameter] = []  # of which there are stand-ins in the forward that runs
        self._stand_ins: dict[ShardedParameter, Tensor] = {}
        self._watched: dict[ShardedParameter, tuple[HookHandle, Tensor]] = {}

    def show(self, tensors: Iterable[tuple[ShardedParameter, Tensor]]) -> None:
        """Let modules see the full parameters.

        Raises:
            ConfigError: a module holds something else by now.
        """
        for parameter, tensor in tensors:
            for use in parameter.uses:
                if self._modules.registered(use.owner, use.attribute) is not parameter.parameter:
                    raise ConfigError(
                        f"the parameter {use.name} was replaced after it had been sharded; "
                        "copy values into it instead, or restore the model first"
                    )
                # Python looks an attribute up here before it asks the module for its registered parameter.
                vars(use.owner)[use.attribute] = tensor
            for place in parameter.lists:
                place.put(tensor)

    def hide(self) -> None:
        """Let modules see no full parameters any more."""
        for parameter in self._unit.served:
            for use in parameter.uses:
                vars(use.owner).pop(use.attribute, None)
            for place in parameter.lists:
                place.put(parameter.parameter)
        if self._forward_runs:
            self._put_stand_ins()

    def forward_begins(self) -> None:
        """The outermost forward around the unit is entered."""
        self._forward_runs = True
        recording = self._unit.backend.autograd.grad_enabled()
        self._away = [
            each for each in self._unit.served if each.is_gathered or (recording and self._loses_gradient(each))
        ]
        self._put_stand_ins()

    def forward_ends(self) -> None:
        """It is left; or it was broken off."""
        self._forward_runs = False
        for parameter in self._away:
            stand_in = self._stand_ins[parameter]
            for use in parameter.uses:
                if vars(use.owner).get(use.attribute) is stand_in:
                    del vars(use.owner)[use.attribute]
            for place in parameter.lists:
                if place.get() is stand_in:
                    place.put(parameter.parameter)

    def _loses_gradient(self, parameter: ShardedParameter) -> bool:
        """Tell whether a gradient would stay on this rank that has come past the unit."""
        return parameter.is_reduced and self._modules.is_trainable(parameter.parameter)

    def _put_stand_ins(self) -> None:
        for parameter in self._away:
            stand_in = self._stand_ins.get(parameter)
            if stand_in is None or stand_in.stands_for is not parameter.parameter:
                stand_in = self._new_stand_in(parameter)
            for use in parameter.uses:
                vars(use.owner).setdefault(use.attribute, stand_in)  # unless it is shown
            for place in parameter.lists:
                if place.get() is parameter.parameter:
                    place.put(stand_in)

    def _new_stand_in(self, parameter: ShardedParameter) -> Tensor:
        refuse = partial(self._refuse_use, parameter)
        self._stand_ins[parameter] = stand_in = self._modules.stand_in(parameter.parameter, refuse)
        return stand_in

    def watch(self, parameters: Iterable[ShardedParameter]) -> None:
        """Hear of gradients that come to trainable shards past the unit."""
        for parameter in parameters:
            _, shard = self._watched.get(parameter, (None, None))
            if shard is not parameter.parameter and parameter.needs_unit:
                shard, refuse = parameter.parameter, partial(self._refuse_gradient, parameter)
                self._watched[parameter] = self._unit.backend.autograd.watch_leaf(shard, refuse), shard

    def end(self) -> None:
        """Leave modules with their registered parameters, and no hooks."""
        self._forward_runs = False
        self.hide()
        for handle, _ in self._watched.values():
            handle.remove()

    def check_call(self, use: ParameterUse, parameter: ShardedParameter, args: tuple, kwargs: dict) -> None:
        """A module runs that holds a parameter: it has to be there. A stand-in speaks for itself."""
        if use.attribute not in vars(use.owner):
            recording = self._unit.backend.autograd.grad_enabled()
            if parameter.is_gathered or (recording and self._loses_gradient(parameter)):
                self._refuse_call(parameter)

    def _refuse_call(self, parameter: ShardedParameter) -> NoReturn:
        raise ConfigError(
            f"{self._holder(parameter)} is called by itself. It would compute {_harm(parameter)}, of "
            f"{self._placed(parameter)} Call it in the forward of that module, or in a method that "
            "register_fsdp_forward_method(module, name) makes one of its forwards; or call fully_shard on what is "
            "called by itself, before the module around it"
        )

    def _refuse_use(self, parameter: ShardedParameter, operator: str) -> NoReturn:
        raise ConfigError(
            f"{operator} is given {self._placed(parameter)} Code that reads it elsewhere would compute "
            f"{_harm(parameter)}. {_WAYS} Where an exception has ended the forward, reshard() of the outermost unit "
            "lets the shards be seen again"
        )

    def _refuse_gradient(self, parameter: ShardedParameter) -> NoReturn:
        raise ConfigError(
            f"a gradient has come to {self._placed(parameter)} Elsewhere something was computed {_harm(parameter)}. "
            f"{_WAYS} A penalty on the parameters is the optimizer's weight_decay, or is added to .grad after backward"
        )

    def _holder(self, parameter: ShardedParameter) -> str:
        use = parameter.uses[0]
        path = self._unit.full_name(parameter).rpartition(".")[0]
        return " ".join(filter(None, (self._modules.class_name(use.owner), path)))

    def _placed(self, parameter: ShardedParameter) -> str:
        return (
            f"the parameter {self._unit.full_name(parameter)} of {self._holder(parameter)}, which belongs to the unit "
            f"of {self._unit.called}: that gathers it, and sums up its gradient, in its own forward only."
        )


_WAYS = (
    "Make a unit of the module that reads it, and none of the one that holds it; or have the latter called, not read "
    "from; or call unshard() of its unit before the reading, and reshard() after the backward."
)


def _harm(parameter: ShardedParameter) -> str:
    spec = parameter.spec
    if spec.is_whole:
        return "with its own copy, and leave this rank with a gradient of its own"
    return f"with this rank's part, {list(spec.local_shape)} of {list(spec.shape)}"


def guards(unit: Unit, has_inner_units: bool) -> Iterator[HookHandle]:
    """Hooks on modules that may be called without the unit that their parameters belong to, where nothing else would
    fail. A part of a weight gives fewer features, which the next module refuses; a part of an embedding knows fewer
    ids, and no shape tells. What lies around inner units is called by itself most, so all of it is guarded.
    """
    modules, own = unit.backend.modules, {id(each) for each in unit.modules}
    guarded: dict[int, tuple[ParameterUse, ShardedParameter]] = {}
    for parameter in sorted(unit.parameters, key=lambda each: not each.is_gathered):
        for use in parameter.uses if parameter.needs_unit else ():
            if (has_inner_units or "Embedding" in modules.class_name(use.owner)) and id(use.owner) not in own:
                guarded.setdefault(id(use.owner), (use, parameter))
    for use, parameter in guarded.values():
        yield modules.before_forward(use.owner, partial(unit.sight.check_call, use, parameter))
