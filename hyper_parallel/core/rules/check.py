"""A numerical check of the rules: run an operator on each rank's part and hold it against the whole.

A *program* is a function of tensors that is written for local shapes, as a model's code is. For every combination of
states of its arguments it is run by every rank on its part, values and gradients. Where the rules allow it, the parts,
put together as the rules say, have to make the whole. Where they refuse it, no state of the result may do so.
No process is started: ranks run one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import (
    Any,
    Callable,
    Container,
    ContextManager,
    Hashable,
    Iterable,
    Iterator,
    NamedTuple,
    Protocol,
    Sequence,
)

import numpy as np

from hyper_parallel.core.backend import Backend, Tensor
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.rules.call import Argument, call_of
from hyper_parallel.core.rules.state import COPIED, PARTIAL, WHOLE, State, cut, gradient_of
from hyper_parallel.core.rules.table import RuleError, flows, infer

AXIS = "tensor"
TOLERANCES = {"float64": 1e-9, "float32": 2e-5}
"""Of the largest element: sums of a few dozen terms, in another order, and what follows from them."""

ERRORS = (RuntimeError, ValueError, TypeError, IndexError)
"""What frameworks raise for shapes that don't fit."""

Program = Callable[..., "Tensor | Sequence[Tensor]"]


class Tracing(Protocol):
    """How a framework's calls are seen, and how something is remembered of its tensors."""

    def intercepting(self, handler: Callable[[Any, tuple, dict], Any]) -> ContextManager[None]:
        """Inside, `handler(function, args, kwargs)` is called in place of every operator on followed tensors, and its
        result is what the program gets."""

    def canonical(self, function: Any, args: tuple, kwargs: dict) -> tuple[Hashable, dict[str, Any]] | None:
        """As in the backend's `operators`."""

    def run(self, function: Any, args: tuple, kwargs: dict) -> Any:
        """The result of the call itself."""

    def follow(self, tensor: Tensor, fact: Any) -> Tensor:
        """A tensor like this one, of which `fact` is remembered."""

    def fact(self, tensor: Tensor) -> Any:
        """What is remembered of a tensor, or None."""


@dataclass(frozen=True)
class Framework:
    """What runs programs: a backend, and how its calls are seen."""

    backend: Backend
    tracing: Tracing


@dataclass(frozen=True)
class Finding:
    """What the check found for one combination of states.

    `results` are the states that the rules give, or None with the `refusal`. `verdict` is "right", "wrong" (allowed,
    but the whole does not come out), or "too strict" (refused, but with `found` as states of the results it does).
    """

    states: tuple[State, ...]
    results: tuple[State, ...] | None
    refusal: RuleError | None
    verdict: str
    found: tuple[State, ...] | None = None


def combinations(arrays: Sequence[np.ndarray], ranks: int) -> Iterator[tuple[State, ...]]:
    """Every combination of states in which the arrays can lie on that many ranks."""
    return product(*(possible_states(array, ranks) for array in arrays))


def possible_states(array: np.ndarray, ranks: int) -> list[State]:
    """The states in which an array can lie: only floating point has gradients and sums."""
    states = [WHOLE]
    if array.dtype.kind == "f":
        states += [COPIED, PARTIAL]
    for dim, size in enumerate(array.shape):
        states += [cut(dim, blocks) for blocks in (1, 2) if size and not size % (blocks * ranks)]
    return states


def check(
    framework: Framework,
    program: Program,
    draws: Sequence[Sequence[np.ndarray]],
    ranks: int,
    states: Iterable[tuple[State, ...]] | None = None,
    constants: Container[int] = (),
) -> Iterator[Finding]:
    """Hold the rules against numbers for each combination of states, by default for all of them.

    Floating-point arrays ask for a gradient, except those at the places `constants`. `draws` are several choices of the
    arrays: of two numbers that are equal by chance one may stand for the other, so a refusal is too strict only where
    it is so for all of them.
    """
    asks = [array.dtype.kind == "f" and place not in constants for place, array in enumerate(draws[0])]
    program = _Program(framework, program, asks)
    wholes = [_Whole(program, arrays) for arrays in draws]
    for combination in combinations(draws[0], ranks) if states is None else states:
        if any(state.pending and not ask for state, ask in zip(combination, asks)):
            continue
        for whole in wholes:
            finding = _check_one(program, whole, combination, ranks)
            if finding.verdict != "too strict":
                break
        yield finding


def _check_one(program: _Program, whole: _Whole, states: tuple[State, ...], ranks: int) -> Finding:
    held = list(zip(whole.arrays, states))
    parts = [[_part(array, state, rank, ranks) for array, state in held] for rank in range(ranks)]
    try:
        inferred = {program.inferred(part, states, ranks) for part in parts}
    except ERRORS:  # the framework refuses these shapes itself
        return Finding(states, None, None, "right")
    except RuleError as error:
        found = whole.any_states(parts, states)
        return Finding(states, None, error, "right" if found is None else "too strict", found)
    results = next(iter(inferred))
    right = len(inferred) == 1 and whole.is_made_by(parts, states, results)
    return Finding(states, results, None, "right" if right else "wrong")


class _Whole:
    """What one device gets, and whether ranks get the same."""

    def __init__(self, program: _Program, arrays: Sequence[np.ndarray]) -> None:
        self.program, self.arrays = program, arrays
        self.outputs = program.run(arrays)
        generator = np.random.default_rng(1)
        self.weights = [
            generator.standard_normal(each.shape) if each.dtype.kind == "f" else None for each in self.outputs
        ]
        self.gradients = program.gradients(arrays, self.weights)

    def is_made_by(self, parts: list[list[np.ndarray]], states: tuple[State, ...], results: tuple[State, ...]) -> bool:
        """Tell whether the ranks' values and gradients make those of one device."""
        values = [self.program.run(part) for part in parts]
        fits = all(self._fits([each[place] for each in values], place, state) for place, state in enumerate(results))
        return fits and self._gradients_fit(parts, states, results)

    def any_states(self, parts: list[list[np.ndarray]], states: tuple[State, ...]) -> tuple[State, ...] | None:
        """States of the results with which they do, if there are any."""
        try:
            values = [self.program.run(part) for part in parts]
        except ERRORS:
            return None
        if any(len(each) != len(self.outputs) for each in values):
            return None
        choices = []
        for place, whole in enumerate(self.outputs):
            local = [each[place] for each in values]
            choices.append([state for state in possible_states(whole, len(parts)) if self._fits(local, place, state)])
        return next((each for each in product(*choices) if self._gradients_fit(parts, states, each)), None)

    def _fits(self, values: list[np.ndarray], place: int, state: State) -> bool:
        return _makes(values, self.outputs[place], state)

    def _gradients_fit(self, parts: list, states: tuple[State, ...], results: tuple[State, ...]) -> bool:
        found = []
        for rank, part in enumerate(parts):
            weights = [
                None if weight is None else _part(weight, gradient_of(state), rank, len(parts))
                for weight, state in zip(self.weights, results)
            ]
            found.append(self.program.gradients(part, weights))
        return all(
            whole is None or _makes([each[place] for each in found], whole, gradient_of(state))
            for place, (whole, state) in enumerate(zip(self.gradients, states))
        )


def _layout(shape: Sequence[int], state: State, ranks: int) -> Layout:
    return Layout(DeviceMesh((ranks,), (AXIS,)), [state.placement], tuple(shape))


def _part(array: np.ndarray, state: State, rank: int, ranks: int) -> np.ndarray:
    """What a rank holds. Of a pending sum these are random numbers that sum up to the array."""
    if not state.is_partial:
        return np.ascontiguousarray(_layout(array.shape, state, ranks).shard(array, rank))
    parts = np.random.default_rng(array.size).standard_normal((ranks - 1, *array.shape)).astype(array.dtype)
    return parts[rank] if rank < ranks - 1 else array - parts.sum(0)


def _makes(values: list[np.ndarray], whole: np.ndarray, state: State) -> bool:
    """Tell whether the ranks' values, put together, are the whole."""
    if state.is_partial:
        made = [sum(values)] if all(each.shape == whole.shape for each in values) else []
    elif state.is_replicate:
        made = values
    else:
        layout = _layout(whole.shape, state, len(values))
        fits = all(value.shape == layout.local_shape(rank) for rank, value in enumerate(values))
        made = [layout.assemble(values)] if fits else []
    return bool(made) and all(_close(each, whole) for each in made)


def _close(found: np.ndarray, whole: np.ndarray) -> bool:
    """Relative to the largest element: what is cut wrongly or counted twice differs by as much as it is."""
    if found.shape != whole.shape:
        return False
    if whole.dtype.kind != "f":
        return bool((found == whole).all())
    finite = np.isfinite(whole)
    largest = TOLERANCES[whole.dtype.name] * max(np.abs(whole[finite]).max(initial=0.0), 1.0)
    return bool((finite == np.isfinite(found)).all() and np.abs(found - whole)[finite].max(initial=0.0) <= largest)


@dataclass(frozen=True)
class _Program:
    """A program on a framework, from arrays to arrays. `asks` says which arguments ask for a gradient."""

    framework: Framework
    function: Program
    asks: Sequence[bool]

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The results."""
        tensors = self.framework.backend.tensors
        with self.framework.backend.autograd.no_grad():
            return [tensors.to_numpy(each) for each in _listed(self.function(*map(tensors.from_numpy, arrays)))]

    def inferred(self, arrays: Sequence[np.ndarray], states: tuple[State, ...], ranks: int) -> tuple[State, ...]:
        """The states of the results, as the rules follow them through all operators of the program."""
        backend, tracing = self.framework.backend, self.framework.tracing
        facts = [_Fact(state, ask) for state, ask in zip(states, self.asks)]
        with backend.autograd.no_grad(), tracing.intercepting(_Follower(self.framework, ranks)):
            made = map(backend.tensors.from_numpy, arrays)
            outputs = _listed(self.function(*(tracing.follow(each, fact) for each, fact in zip(made, facts))))
            return tuple((tracing.fact(each) or _Fact()).state for each in outputs)

    def gradients(self, arrays: Sequence[np.ndarray], weights: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
        """The gradients of the sum of the results times `weights`; zeros where none flows, None where none is asked."""
        inputs = self._inputs(arrays)
        leaves = [each for each, ask in zip(inputs, self.asks) if ask]
        if not leaves or all(weight is None for weight in weights):
            return [None] * len(arrays)
        objective = self._objective(inputs, leaves, weights)
        found = self.framework.backend.autograd.value_and_grad(objective, leaves)()[1]
        by_place = iter([self.framework.backend.tensors.to_numpy(each) for each in found])
        return [next(by_place) if ask else None for ask in self.asks]

    def _inputs(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        tensors, autograd = self.framework.backend.tensors, self.framework.backend.autograd
        made = map(tensors.from_numpy, arrays)
        return [autograd.as_leaf(each, each) if ask else each for each, ask in zip(made, self.asks)]

    def _objective(self, inputs: list, leaves: list, weights: Sequence[np.ndarray | None]) -> Callable[[], Tensor]:
        tensors = self.framework.backend.tensors

        def objective() -> Tensor:
            weighted = [pair for pair in zip(_listed(self.function(*inputs)), weights) if pair[1] is not None]
            terms = [(out * tensors.from_numpy(weight, tensors.dtype_name(out))).sum() for out, weight in weighted]
            # Each input adds nothing, so that there is something to differentiate where nothing else flows.
            return sum(terms) + sum((each * 0.0).sum() for each in leaves)

        return objective


def _listed(outputs: Any) -> list:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


class _Fact(NamedTuple):
    """What is remembered of a tensor: its state, and whether a gradient flows to it."""

    state: State = WHOLE
    takes_part: bool = False


class _Follower:
    """Follows the states of tensors from operator to operator: infers, runs, remembers."""

    def __init__(self, framework: Framework, ranks: int) -> None:
        self.tensors, self.tracing, self.ranks = framework.backend.tensors, framework.tracing, ranks

    def __call__(self, function: Any, args: tuple, kwargs: dict) -> Any:
        named = self.tracing.canonical(function, args, kwargs)
        if named is None:
            return self.tracing.run(function, args, kwargs)
        call = call_of(*named, (AXIS,), (self.ranks,), self._describe)
        arguments = [each for each in _leaves(call.arguments) if isinstance(each, Argument)]
        states = infer(call) if arguments else ()
        takes_part = any(each.takes_part for each in arguments)
        result = self.tracing.run(function, args, kwargs)
        facts = [_Fact(state, takes_part and flows(call.op, place)) for place, (state,) in enumerate(states)]
        if isinstance(call.op, str) and call.op.endswith("_"):
            target = next(iter(named[1].values()))
            return self.tracing.follow(target, facts[0]) if facts else target
        return self._remembered(result, iter(facts))

    def _remembered(self, result: Any, facts: Iterator[_Fact]) -> Any:
        if isinstance(result, (tuple, list)):
            return tuple(self._remembered(each, facts) for each in result)
        fact = next(facts, None) if self.tensors.is_tensor(result) else None
        return result if fact is None else self.tracing.follow(result, fact)

    def _describe(self, value: Any) -> Argument | None:
        if not self.tensors.is_tensor(value):
            return None
        fact = self.tracing.fact(value) or _Fact()
        return Argument(tuple(value.shape), self.tensors.dtype_name(value), fact.takes_part, (fact.state,))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple) and not isinstance(value, Argument):
        for each in value:
            yield from _leaves(each)
    else:
        yield value
