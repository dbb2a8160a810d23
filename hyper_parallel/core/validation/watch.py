"""What follows a model while it runs: how its tensors lie, which module runs, what a plan's line has said.

A followed tensor carries a `Track`. When an operator meets one, the backend describes the call, `Watch.infer` looks up
or works out how the results lie, and the operator runs on the plain local tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Callable, Iterable, Mapping, Sequence

from hyper_parallel.core.backend import Backend, Tensor
from hyper_parallel.core.execution.facts import is_in
from hyper_parallel.core.rules.call import Argument, Call, apart, call_of
from hyper_parallel.core.rules.random import draws
from hyper_parallel.core.rules.state import WHOLE, State, gradient_of, without_gradient
from hyper_parallel.core.rules.table import RuleError, infer
from hyper_parallel.core.validation.agreement import Agreement
from hyper_parallel.core.validation.backward import OwnBackward
from hyper_parallel.core.validation.draws import Draws
from hyper_parallel.core.validation.messages import (
    PARAMETER,
    Found,
    framework_error,
    operator_error,
    start_error,
    untracked_error,
    values_error,
    vouching,
)
from hyper_parallel.core.validation.outside import Outside

REFUSALS = (RuntimeError, ValueError, TypeError, IndexError)
"""What frameworks raise for tensors that an operator can't take. Others mean something else: PyTorch's checkpoints end
what they compute again by an exception."""


class Track:
    """What a followed tensor carries.

    `states` has one state for each of the watch's axes. `origin` is the line of the plan that the tensor comes from.
    `live` says that a gradient would flow to it if operations were recorded; it tells constants from what a checkpoint
    computes without recording.
    """

    __slots__ = ("watch", "states", "origin", "live")

    def __init__(self, watch: Watch, states: tuple[State, ...], origin: str, live: bool):
        self.watch = watch
        self.states = states
        self.origin = origin
        self.live = live

    def of_gradient(self) -> Track:
        """What the gradient of the tensor carries."""
        return Track(self.watch, tuple(map(gradient_of, self.states)), self.origin, live=False)

    def __deepcopy__(self, memo: dict) -> Track:
        return self

    def __str__(self) -> str:
        return ", ".join(f"{axis}: {state}" for axis, state in zip(self.watch.axes, self.states))


@dataclass
class Watch:
    """The validation of one model on one rank.

    `axes` are the mesh axes that are followed, with `sizes` ranks each: those along which one model is computed by
    several ranks. Along the others each rank works on samples of its own. `tables` are the modules that look tokens up
    in a part of a vocabulary; `name_of` tells the name of a parameter. `agreement` and `outside` compare with the other
    ranks, where there are any.
    """

    backend: Backend
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    running: list[str] = field(default_factory=list)
    tables: frozenset[str] = frozenset()
    name_of: Callable[[Tensor], str | None] = lambda tensor: None
    agreement: Agreement | None = None
    outside: Outside | None = None
    draws: Draws | None = None
    """What looks after random numbers; None where nothing tells how ranks draw."""
    boundary_modules: frozenset[str] = frozenset()
    """The modules at which boundaries are."""
    operators: int = 0
    """How many calls of operators have been followed."""
    dtypes: set[str] = field(default_factory=set)
    """Those of the numbers that have taken part in autograd."""
    boundaries: set[str] = field(default_factory=set)
    """The boundaries that have been checked."""

    @property
    def whole(self) -> tuple[State, ...]:
        """The states of what is the same on every rank."""
        return (WHOLE,) * len(self.axes)

    @property
    def module(self) -> str:
        """The module that is running, "" outside of the model."""
        return self.running[-1] if self.running else ""

    def infer(self, op: str, arguments: Mapping[str, Any], within: OwnBackward | None = None) -> list[Track]:
        """How each tensor lies that an operator returns.

        Args:
            op: its canonical name.
            arguments: its arguments by canonical name, tensors as they are.
            within: the backward of the model's code in which it runs, if there is one.

        Raises:
            ContractError: the operator would be wrong, or has no rule.
        """
        self.operators += 1
        seen: list[tuple[Argument, Tensor]] = []
        call = self._call(op, arguments, seen)
        live = any(argument.takes_part for argument, _ in seen)
        try:
            states = infer(call)
        except RuleError as error:
            states = self._second_look(op, arguments, call)
            if states is None:
                raise self._operator_error(op, error, self._found(call, seen), within) from None
            live = live and self.backend.autograd.grad_enabled()
        if self.draws is not None and draws(op, arguments):
            self.draws.check(self.module, op, self._alike(call, states))
        origin = self._origin(seen, states)
        return [Track(self, each, origin, live) for each in states]

    def explain(self, op: str, arguments: Mapping[str, Any], error: Exception) -> None:
        """Raise `ContractError` for what a framework raised in an operator, since local tensors don't have the shapes
        that the code counts on. On tensors without values it may be their values that are missed, so nothing is said.
        """
        seen: list[tuple[Argument, Tensor]] = []
        call = self._call(op, arguments, seen)
        if all(self.backend.tensors.has_values(tensor) for _, tensor in seen):
            raise framework_error(self.module, op, error, self._found(call, seen)) from error

    def check_start(self, tensor: Tensor, gradient: Tensor | None) -> None:
        """Raise `ContractError` unless backward may start from `tensor` with `gradient` on every rank, with ones where
        it is None: it must lie as the gradient of the tensor does, and be the same on every rank where both are."""
        own, given = self.track_of(tensor), None if gradient is None else self.track_of(gradient)
        for place, axis in enumerate(self.axes):
            lies = WHOLE if given is None else given.states[place]
            wanted = own.states[place]
            if lies.cut != wanted.cut or lies.blocks != wanted.blocks or lies.is_partial != wanted.pending:
                raise start_error(self.module, self.found(tensor, "tensor"), axis)
        if self.agreement is not None:
            copies = [axis for axis, state in zip(self.axes, own.states) if state.is_replicate]
            fail = partial(values_error, self.module, "tensor that backward starts from", line=own.origin)
            self.agreement.check(tensor, copies, fail)

    def written_below(self, base: Track, shape: tuple[int, ...], track: Track, view: tuple[int, ...]) -> Track:
        """What a tensor carries of which a view, of another shape perhaps, was written in place."""
        states = (_written_below(old, shape, new, view) for old, new in zip(base.states, track.states))
        return Track(self, tuple(states), track.origin, base.live or track.live)

    def track_of(self, tensor: Tensor) -> Track | None:
        """What a tensor carries, if it is followed."""
        return self.backend.interception.track_of(tensor)

    def found(self, tensor: Tensor, name: str = "") -> Found:
        """A tensor as messages show it."""
        track = self.track_of(tensor)
        states = track.states if track else self.whole
        lies = {axis: str(state) for axis, state in zip(self.axes, states)}
        return Found(name, tuple(tensor.shape), lies, track.origin if track else "")

    def takes_part(self, tensor: Tensor, track: Track) -> bool:
        """Tell whether a gradient flows to a followed tensor, or would if operations were recorded. What comes out of a
        function with a backward of its own is looked at there."""
        autograd = self.backend.autograd
        self.backend.interception.follow_backward(tensor, partial(OwnBackward, self))
        return autograd.takes_part(tensor) if autograd.grad_enabled() else track.live

    def _call(
        self, op: str, arguments: Mapping[str, Any], seen: list[tuple[Argument, Tensor]], look: bool = False
    ) -> Call:
        """The call as the rules see it; `seen` receives every tensor. With `look` what is not followed is searched for
        dims along which it repeats itself."""
        tensors = self.backend.tensors

        def describe(value: Any) -> Argument | None:
            if not tensors.is_tensor(value):
                return None
            track = self.track_of(value)
            if track is not None:
                part, states = self.takes_part(value, track), track.states
            else:
                self.check_no_part(op, value)
                part, states = False, self._repeated(value) if look else self.whole
            dtype = tensors.dtype_name(value)
            if part and "float" in dtype:
                self.dtypes.add(dtype)
            argument = Argument(tuple(value.shape), dtype, part, states)
            seen.append((argument, value))
            return argument

        declared = frozenset({"vocabulary"}) if not self.tables.isdisjoint(self.running) else frozenset()
        if self.draws is not None and draws(op, arguments):
            declared |= {apart(axis) for axis in self.draws.apart()}
        return call_of(op, arguments, self.axes, self.sizes, describe, declared)

    def _alike(self, call: Call, states: Sequence[tuple[State, ...]]) -> list[str]:
        """The axes along which what is drawn for is the same on every rank, or a pending sum."""
        return [axis for axis, state in zip(call.axes, states[0] if states else ()) if state.cut is None]

    def _second_look(self, op: str, arguments: Mapping[str, Any], call: Call) -> tuple[tuple[State, ...], ...] | None:
        """The states where more is known of what is not followed, or where no gradient will flow; None where the
        operator is wrong all the same."""
        calls = [self._call(op, arguments, [], look=True)]
        if not self.backend.autograd.grad_enabled():
            calls += [_without_gradients(each) for each in (call, *calls)]
        for each in calls:
            try:
                return infer(each)
            except RuleError:
                continue
        return None

    def _repeated(self, tensor: Tensor) -> tuple[State, ...]:
        """What the model's code makes is the same on every rank. Along dims where it repeats itself it may be read as
        cut, and zeros as a pending sum: it may have been made for this rank's part."""
        interception = self.backend.interception
        return (State(same=interception.repeated_dims(tensor), zero=interception.is_zero(tensor)),) * len(self.axes)

    def check_no_part(self, what: str, tensor: Tensor) -> None:
        """Raise `ContractError` where a tensor that is not followed takes part in autograd: nobody would know how its
        gradient lies. `what` is where it is used."""
        autograd = self.backend.autograd
        if self.axes and autograd.grad_enabled() and autograd.takes_part(tensor):
            function = self.backend.interception.own_backward(tensor)
            instead = self.vouching(self.module, function)
            raise untracked_error(self.module, what, tensor.shape, self.name_of(tensor), function, instead)

    def vouching(self, module: str, function: str) -> str:
        """What to write where nobody can follow a function, "" for a hook, that `module` calls."""
        around = max((each for each in self.boundary_modules if is_in(module, each)), key=len, default="")
        return vouching(around, self.backend.interception.way_to_rule(function) if function else "")

    def _operator_error(self, op: str, error: RuleError, found: list[Found], within: OwnBackward | None) -> Exception:
        if within is None:
            return operator_error(self.module, op, error, found)
        return operator_error(within.module, op, error, found, within.which, within.instead)

    def _found(self, call: Call, seen: Sequence[tuple[Argument, Tensor]]) -> list[Found]:
        """The tensors of a call by the names of its arguments."""
        by_identity = {id(argument): tensor for argument, tensor in seen}
        return [self.found(by_identity[id(each)], name) for name, each in _named(call.arguments)]

    def _origin(self, seen: Sequence[tuple[Argument, Tensor]], states: Sequence[tuple[State, ...]]) -> str:
        """The line that results are said to come from: that of what makes them a part or a pending sum, a parameter
        before an activation. Where they are neither, that of the first activation, or else of the first parameter."""
        tracks = [track for _, tensor in seen if (track := self.track_of(tensor)) is not None]
        for place, state in enumerate(states[0] if states else ()):
            if not state.is_replicate:
                pending = [each for each in tracks if state.is_partial and each.states[place].is_partial]
                makers = pending or [each for each in tracks if not each.states[place].is_replicate]
                if makers:
                    return _first(makers, lambda line: line.startswith(PARAMETER))
        return _first(tracks, lambda line: not line.startswith(PARAMETER))


def _first(tracks: Sequence[Track], wanted: Callable[[str], bool]) -> str:
    """The first line that is wanted, or else the first one."""
    origins = [each.origin for each in tracks]
    return next((each for each in origins if wanted(each)), origins[0] if origins else "")


def _without_gradients(call: Call) -> Call:
    """The call of tensors of the same values that take no part in autograd."""

    def constant(value: Any) -> Any:
        if isinstance(value, Argument):
            states = tuple(without_gradient(each) for each in value.states)
            return value._replace(takes_part=False, states=states)
        return tuple(map(constant, value)) if type(value) is tuple else value

    return call._replace(arguments=tuple((name, constant(value)) for name, value in call.arguments))


def _named(arguments: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Argument]]:
    for name, value in arguments:
        if isinstance(value, Argument):
            yield name, value
        elif type(value) is tuple:
            yield from _named((f"{name}[{place}]", each) for place, each in enumerate(value))


def _written_below(old: State, shape: tuple[int, ...], new: State, view: tuple[int, ...]) -> State:
    """The state of a tensor after a part of it, a view, was written. What has one value everywhere can be read as any
    part, and becomes what is written; nothing else changes but that it has no longer one value."""
    if not old.is_replicate:
        return old
    if new.is_replicate:
        return replace(old, same=(), zero=False, pending=old.pending or new.pending)
    if new.is_partial:
        return new
    alike = len(shape) == len(view) and shape[new.cut] == view[new.cut]
    return new if alike and new.cut in old.same else replace(old, same=(), zero=False)
