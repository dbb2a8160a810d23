"""Functions of the model's code that bring a backward of their own.

No operator tells what such a backward does, so it is followed like forward code: the gradients of its results go in as
these lie, its operators are looked up, and what comes out must lie as the gradients of its arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence

from hyper_parallel.core.backend import Tensor
from hyper_parallel.core.rules.state import gradient_of
from hyper_parallel.core.validation.contracts import differs
from hyper_parallel.core.validation.messages import own_backward_error, untracked_error

if TYPE_CHECKING:
    from hyper_parallel.core.validation.watch import Track, Watch


class OwnBackward:
    """The backward of one call of a function `name`, or a hook on one tensor's gradient, met while `module` ran."""

    def __init__(self, watch: Watch, name: str, is_hook: bool = False):
        self.watch = watch
        self.module = watch.module
        self.which = f"the gradient hook {name}" if is_hook else f"the backward of {name}"
        self._function = "" if is_hook else name

    @property
    def instead(self) -> str:
        """What to write where it can't be followed."""
        return self.watch.vouching(self.module, self._function)

    def refuse(self, result: Tensor) -> None:
        """Raise `ContractError`: the framework gives no way to follow it."""
        raise untracked_error(self.module, self.which, result.shape, None, self._function, self.instead)

    def enter(self, results: Sequence[Track | None]) -> list[Track | None]:
        """How the gradients of results lie that lie so themselves; None for what is not followed."""
        return [None if track is None else track.of_gradient() for track in results]

    def leave(self, gradients: Sequence[Tensor | None], arguments: Sequence[Track | None]) -> None:
        """Look at the gradients that backward has given, by the tensors among the arguments; None stands for zeros.

        Raises:
            ContractError: one lies otherwise than its argument asks for, or nobody knows how.
        """
        for place, (gradient, argument) in enumerate(zip(gradients, arguments)):
            if gradient is not None:
                self.check(f"tensor {place} among its arguments", gradient, argument)

    def check(self, what: str, gradient: Tensor, argument: Track | None) -> None:
        """Look at the gradient that backward has given of one tensor."""
        track, interception = self.watch.track_of(gradient), self.watch.backend.interception
        if argument is None:
            raise self._error(f"{what} takes part in autograd, and the plan does not follow it", gradient)
        if track is None:
            if interception.is_zero(gradient):
                return
            raise self._error(f"the gradient of {what} comes of no operator that was followed", gradient)
        for axis, found, state in zip(self.watch.axes, track.states, argument.states):
            wanted = gradient_of(state)
            if differs(found, wanted, takes_part=False):
                problem = f"over {axis} the gradient of {what} is {found}, and has to be {wanted}"
                raise self._error(problem, gradient, argument.origin)

    def _error(self, problem: str, gradient: Tensor, origin: str = "") -> Exception:
        found = self.watch.found(gradient, "gradient")
        return own_backward_error(self.module, self.which, problem, found, origin, self.instead)
