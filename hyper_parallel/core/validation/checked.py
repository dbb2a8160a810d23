"""Boundaries that look: how a tensor comes, how it goes on, and how gradients come back."""

from __future__ import annotations

from functools import partial
from typing import Any

from hyper_parallel.core.backend import Interception, Tensor
from hyper_parallel.core.execution.boundary import Boundary
from hyper_parallel.core.execution.crossing import Crossing
from hyper_parallel.core.plan.contracts import Contract
from hyper_parallel.core.rules.state import State
from hyper_parallel.core.validation.agreement import Agreement
from hyper_parallel.core.validation.contracts import contract_states, differs, written
from hyper_parallel.core.validation.messages import boundary_error, values_error
from hyper_parallel.core.validation.watch import Track, Watch


class Rows:
    """How many samples there are in tensors of `[samples * tokens, features]`: as in the latest one of
    `[samples, tokens, features]` with as many rows."""

    def __init__(self) -> None:
        self._samples: dict[int, int] = {}

    def samples(self, shape: tuple[int, ...]) -> int:
        """Samples in a tensor of this shape; 1 where nothing tells."""
        if len(shape) == 3:
            self._samples[shape[0] * shape[1]] = shape[0]
        return shape[0] if len(shape) > 2 else self._samples.get(shape[0], 1)


class CheckedCrossing:
    """A contract, held on both sides; in between the very crossing of production, where it does anything.

    `module` and `side` ("input" or "output") say where. `vouched` is true for what an opaque region hands on: nobody
    has followed it, and the contract's word is taken.
    """

    def __init__(
        self,
        watch: Watch,
        contract: Contract,
        crossing: Crossing | None,
        rows: Rows,
        agreement: Agreement,
        module: str,
        side: str,
        vouched: bool = False,
    ):
        self.is_trivial = crossing is None
        self._watch = watch
        self._contract = contract
        self._crossing = crossing
        self._rows = rows
        self._agreement = agreement
        self._module = module
        self._side = f"{side} {contract.name!r}"
        self._vouched = vouched
        line = f"boundary {module}, {side} {contract.name}"
        self._line_before = f"{line}: before: {written(contract.before)}, {self._gradient_before()}"
        self._line_after = f"{line}: after: {written(contract.after)}, gradient: {written(contract.gradient)}"

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor on the other side, followed as the contract says.

        Raises:
            ContractError: it lies otherwise than the contract says; in backward, its gradient does.
        """
        watch, interception = self._watch, self._watch.backend.interception
        watch.boundaries.add(self._module)
        before = self._states(self._contract.before, self._contract.source_gradient, tensor)
        if self._vouched:
            takes_part = watch.backend.autograd.takes_part(tensor)
            tensor = interception.follow(tensor, Track(watch, before, self._line_before, takes_part))
        self._check(tensor, before)
        self._look_at(tensor, before, "before", self._line_before)
        track = watch.track_of(tensor)
        if self._crossing is None:
            if track is not None:
                track.origin = self._line_after
            return tensor
        crossed = self._crossing(interception.plain(tensor))
        after = self._states(self._contract.after, self._contract.gradient, crossed)
        crossed = interception.follow(crossed, Track(watch, after, self._line_after, track is not None and track.live))
        self._look_at(crossed, after, "after", self._line_after)
        return crossed

    def _gradient_before(self) -> str:
        name = "gradient" if self._contract.gradient_before is None else "gradient_before"
        return f"{name}: {written(self._contract.source_gradient)}"

    def _states(self, side: Any, gradient: Any, tensor: Tensor) -> tuple[State, ...]:
        shape = tuple(tensor.shape)
        return contract_states(side, gradient, self._watch.axes, len(shape), self._rows.samples(shape))

    def _check(self, tensor: Tensor, expected: tuple[State, ...]) -> None:
        track = self._watch.track_of(tensor)
        if track is None:
            self._watch.check_no_part(f"the {self._side}", tensor)
        states = self._watch.whole if track is None else track.states
        takes_part = track is not None and self._watch.takes_part(tensor, track)
        for axis, found, wanted in zip(self._watch.axes, states, expected):
            if differs(found, wanted, takes_part):
                raise boundary_error(
                    self._module,
                    self._side,
                    f"it is {found} over {axis}, the plan says {wanted}",
                    self._watch.found(tensor),
                    f"a tensor that is {wanted} over {axis}, or a contract that says {found}",
                    self._line_before,
                )

    def _look_at(self, tensor: Tensor, states: tuple[State, ...], end: str, line: str) -> None:
        """Compare what is said to be the same on every rank: the values now, the gradient in backward."""
        where, axes = f"{self._side}, {end} the transition", self._watch.axes
        copies = [axis for axis, state in zip(axes, states) if state.is_replicate]
        self._agreement.check(tensor, copies, partial(self._fail, where, line))
        if not self._watch.backend.autograd.takes_part(tensor):
            return
        shape = tuple(tensor.shape)
        whole = [axis for axis, state in zip(axes, states) if state.cut is None and not state.pending]
        fail = partial(self._fail, f"gradient of the {where}", line)

        def returned(gradient: Tensor) -> None:
            if tuple(gradient.shape) != shape:
                raise fail(f"it has the shape {list(gradient.shape)}, the tensor has {list(shape)}")
            self._agreement.check(gradient, whole, fail)

        self._watch.backend.interception.watch_gradient(tensor, returned)

    def _fail(self, what: str, line: str, problem: str) -> Exception:
        return values_error(self._module, what, problem, line)


class CheckedBoundary(Boundary):
    """A boundary of a region. What is `opaque` runs on plain tensors, and is trusted."""

    def __init__(self, watch: Watch, name: str, module: Any, opaque: bool):
        super().__init__(watch.backend, name, module)
        self._interception = watch.backend.interception
        self._opaque = opaque

    def bring_in(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """See `Boundary.bring_in`."""
        args, kwargs = super().bring_in(args, kwargs)
        return _plain(self._interception, (args, kwargs)) if self._opaque else (args, kwargs)


def _plain(interception: Interception, value: Any) -> Any:
    """A nest of tuples, lists and dictionaries with plain tensors in place of followed ones."""
    if interception.track_of(value) is not None:
        return interception.plain(value)
    if isinstance(value, (tuple, list)):
        items = [_plain(interception, each) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is dict:
        return {key: _plain(interception, each) for key, each in value.items()}
    return value
