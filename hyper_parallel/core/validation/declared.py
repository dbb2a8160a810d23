"""What production does around modules by itself, declared: it is no operator of the model, and rank by rank another."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.backend import Tensor
from hyper_parallel.core.execution.adaptations import Adaptations
from hyper_parallel.core.execution.boundary import Change, ChangeArguments
from hyper_parallel.core.execution.heads import SLOPES, OwnHead, OwnSlopes
from hyper_parallel.core.execution.vocabulary import OwnRows
from hyper_parallel.core.rules.state import COPIED, State, cut
from hyper_parallel.core.validation.contracts import differs
from hyper_parallel.core.validation.messages import boundary_error
from hyper_parallel.core.validation.watch import Track, Watch


def tables(found: Adaptations) -> frozenset[str]:
    """The modules that look tokens up in a part of a vocabulary."""
    return frozenset(
        name
        for name, changes in found.arguments.items()
        if any(isinstance(getattr(change, "__self__", None), OwnRows) for change in changes)
    )


def declared_change(watch: Watch, change: Change, module: str) -> Change:
    """A change of a tensor, which says how its result lies."""
    return _Picked(watch, change, module) if isinstance(change, OwnHead) else change


def declared_arguments(watch: Watch, change: ChangeArguments) -> ChangeArguments:
    """A change of arguments, which says how its results lie."""
    return _Dealt(watch, change) if isinstance(change, OwnSlopes) else change


class _Picked:
    """Of key/value heads that every rank has all of, each goes on with one: together they hold parts of as many heads
    as there are ranks. Each computes a part of the gradient of all of them."""

    def __init__(self, watch: Watch, change: OwnHead, module: str):
        self._watch = watch
        self._change = change
        self._module = module

    def __call__(self, tensor: Tensor) -> Tensor:
        watch = self._watch
        track = watch.track_of(tensor)
        states = watch.whole if track is None else track.states
        takes_part = track is not None and watch.takes_part(tensor, track)
        for axis, found in zip(watch.axes, states):
            if axis == "tensor" and differs(found, COPIED, takes_part):
                raise boundary_error(
                    self._module,
                    "output",
                    f"it is {found} over tensor, and each rank goes on with one of its heads",
                    watch.found(tensor),
                    f"a tensor that is {COPIED} over tensor, of which somebody sums up the gradient",
                    "",
                )
        features = len(tensor.shape) - 1
        own = self._change(watch.backend.interception.plain(tensor))
        return _followed(watch, own, track, states, cut(features, unit=self._change.size))


class _Dealt:
    """Of something for each head a rank takes that of its own."""

    def __init__(self, watch: Watch, change: OwnSlopes):
        self._watch = watch
        self._change = change

    def __call__(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        before = kwargs
        args, kwargs = self._change(args, kwargs)
        changed: dict[str, Any] = {key: kwargs[key] for key in SLOPES if kwargs.get(key) is not before.get(key)}
        for key, value in changed.items():
            track = self._watch.track_of(before[key])
            states = self._watch.whole if track is None else track.states
            dim, blocks = self._change.dim_of_heads(key, before[key])
            plain = self._watch.backend.interception.plain(value)
            changed[key] = _followed(self._watch, plain, track, states, cut(dim, blocks))
        return args, {**kwargs, **changed}


def _followed(watch: Watch, plain: Tensor, track: Track | None, states: tuple[State, ...], on_tensor: State) -> Tensor:
    """A tensor that lies as before along all axes but `tensor`."""
    changed = tuple(on_tensor if axis == "tensor" else state for axis, state in zip(watch.axes, states))
    origin, live = ("", False) if track is None else (track.origin, track.live)
    return watch.backend.interception.follow(plain, Track(watch, changed, origin, live))
