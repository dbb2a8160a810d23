"""The loss of followed logits: they must lie as the plan's head hands them on, and the loss is whole."""

from __future__ import annotations

from typing import Callable

from hyper_parallel.core.backend import Tensor
from hyper_parallel.core.rules.state import PARTIAL, WHOLE, State, cut
from hyper_parallel.core.validation.contracts import differs
from hyper_parallel.core.validation.messages import loss_error
from hyper_parallel.core.validation.watch import Track


def followed_loss(
    track: Track, logits: Tensor, targets: Tensor, is_cut: bool, compute: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The loss that `compute` gives for plain logits and targets, followed.

    `is_cut` says that the vocabulary, the last dim, is cut over `tensor`. Over `context` each rank's loss is that of
    its own tokens.

    Raises:
        ContractError: the logits lie otherwise.
    """
    watch, vocabulary = track.watch, len(logits.shape) - 1
    wanted = {"tensor": cut(vocabulary) if is_cut else WHOLE}
    takes_part, states = watch.takes_part(logits, track), []
    for axis, state in zip(watch.axes, track.states):
        expected = wanted.get(axis, _on_tokens(state))
        if differs(state, expected, takes_part):
            raise loss_error(watch.module, watch.found(logits, "logits"), axis, expected)
        states.append(PARTIAL if axis not in wanted and state.cut is not None else WHOLE)
    _check_targets(track, targets)
    plain = watch.backend.interception.plain
    loss = compute(plain(logits), plain(targets))
    return watch.backend.interception.follow(loss, Track(watch, tuple(states), track.origin, track.live))


def check_same_targets(track: Track, targets: Tensor, ignore_index: int) -> None:
    """Raise `ContractError` on all ranks that share the model of these logits where they have different targets. Before
    any of them looks at its own: what one rank finds wrong with them the others would wait for."""
    watch = track.watch
    if watch.outside is not None:
        values = {"targets": watch.backend.interception.plain(targets), "ignore_index": ignore_index}
        watch.outside.check(watch.module or "cross_entropy", values, together=False)


def _on_tokens(state: State) -> State:
    return WHOLE if state.is_replicate else state


def _check_targets(track: Track, targets: Tensor) -> None:
    own = track.watch.track_of(targets)
    for axis, state in zip(track.watch.axes, own.states if own else ()):
        if axis == "tensor" and not state.is_replicate:
            raise loss_error(track.watch.module, track.watch.found(targets, "targets"), axis, WHOLE)
