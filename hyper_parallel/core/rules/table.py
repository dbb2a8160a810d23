"""The rule table: what follows for the results of an operator from how its arguments lie.

A rule is a function of a `View`, which is a call along one mesh axis, and gives the state of each tensor that the
operator returns. It looks at values only. What it means for gradients is the same for all operators and stands here,
in `_with_gradients`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Callable, Hashable, NamedTuple, Sequence

from hyper_parallel.core.errors import ConfigError, LayoutError
from hyper_parallel.core.rules.call import Call, Operand, View
from hyper_parallel.core.rules.state import State, without_gradient

Function = Callable[[View], "State | Sequence[State]"]


class RuleError(LayoutError):
    """An operator would be wrong on these states.

    `reason` says what is wrong, `legal` what would be right, `axis` along which mesh axis ("" where it is no matter
    of one).
    """

    def __init__(self, reason: str, legal: str, axis: str = "") -> None:
        self.reason, self.legal, self.axis = reason, legal, axis
        super().__init__(f"{f'axis {axis!r}: ' if axis else ''}{reason}; legal: {legal}")


class UnknownOperator(RuleError):
    """No rule is known for an operator."""


@dataclass(frozen=True)
class Rule:
    """One line of the table.

    `parameters` are the names of positional arguments in order, as `bind` reads them. `silent` are tensors that no
    gradient flows to, since only their shape or dtype is used. `constant` are the places of results that take no part
    in autograd whatever the arguments do; None where all of them do so.
    """

    parameters: str
    function: Function
    silent: tuple[str, ...] = ()
    constant: tuple[int, ...] | None = ()

    def is_constant(self, place: int) -> bool:
        """Tell whether the result at `place` takes no part in autograd."""
        return self.constant is None or place in self.constant


_RULES: dict[Hashable, Rule] = {}


def rule(
    names: str, parameters: str, silent: tuple[str, ...] = (), constant: tuple[int, ...] | None = ()
) -> Callable[[Function], Function]:
    """Make the decorated function the rule of the operators `names`, separated by spaces; see `Rule`."""

    def register(function: Function) -> Function:
        for name in names.split():
            _RULES[name] = Rule(parameters, function, silent, constant)
        return function

    return register


def register_rule(
    operator: Hashable, like: str | None = None, rule: Function | None = None, arguments: str | None = None
) -> None:
    """Give an operator a rule: that of an operator of the table, or a function.

    Args:
        operator: the framework's function, or its name where the framework goes by names.
        like: the canonical name of an operator that treats its arguments alike, such as "pointwise", "linear" or
            "softmax"; docs/rules.md lists them.
        rule: a function of a `View` instead, which gives the `State` of each tensor that the operator returns, or
            raises `RuleError`.
        arguments: the names of its positional arguments in order, separated by spaces, where they are not those of
            `like`.

    Raises:
        ConfigError: neither or both of `like` and `rule` are given, or there is no operator `like`.
    """
    if (like is None) == (rule is None):
        raise ConfigError(f"register_rule({operator!r}): give either like= or rule=, found {like!r} and {rule!r}")
    if like is not None and like not in _RULES:
        raise ConfigError(f"register_rule({operator!r}): there is no operator {like!r}; docs/rules.md lists them")
    base = _RULES[like] if like is not None else Rule("", rule)
    _RULES[operator] = replace(base, parameters=base.parameters if arguments is None else arguments)
    infer.cache_clear()


def parameters_of(operator: Hashable) -> str | None:
    """The names of an operator's positional arguments, or None where it has no rule."""
    found = _find(operator)
    return None if found is None else found.parameters


class Operator(NamedTuple):
    """What a framework's function is: a canonical name, and the canonical names of its positional arguments in order,
    as `bind` reads them."""

    op: str
    parameters: str


def known_as(op: str, parameters: str | None = None) -> Operator:
    """A function that goes by a canonical name; its arguments are those of the rule where `parameters` is None."""
    return Operator(op, parameters if parameters is not None else parameters_of(op) or "")


def flows(operator: Hashable, place: int) -> bool:
    """Tell whether a gradient flows through the result at `place` of an operator that has a rule."""
    found = _find(operator)
    return found is not None and not found.is_constant(place)


def operators() -> tuple[Hashable, ...]:
    """All that have a rule, without those that follow by writing in place."""
    return tuple(_RULES)


@lru_cache(maxsize=1 << 16)
def infer(call: Call) -> tuple[tuple[State, ...], ...]:
    """The states of each tensor that the call returns: for each one state per axis of the call.

    Of an operator that writes in place the first result is its target; where the target was all zero or repeated
    itself, its state may have changed.

    Raises:
        RuleError: the operator would be wrong; UnknownOperator: it has no rule.
    """
    found = _find(call.op)
    if found is None:
        raise UnknownOperator(
            f"the operator {call.op} has no rule",
            f'one that is known, or hyper_parallel.register_rule({call.op!r}, like="pointwise") with what it is like',
        )
    by_axis = []
    for place, axis in enumerate(call.axes):
        try:
            by_axis.append(_infer_along(found, View(call, place)))
        except RuleError as error:
            raise type(error)(error.reason, error.legal, axis) from None
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise UnknownOperator(
                f"{call.op} is called in a form that its rule does not know ({type(error).__name__}: {error})",
                "another form of the call, or hyper_parallel.register_rule with a rule that knows it",
                axis,
            ) from error
    return tuple(zip(*by_axis))


def _find(operator: Hashable) -> Rule | None:
    """The rule of an operator. `add_` writes in place what `add` gives."""
    found = _RULES.get(operator)
    if found is None and isinstance(operator, str) and _writes(operator):
        found = _RULES.get(operator[:-1])
    return found


def _writes(operator: Hashable) -> bool:
    return isinstance(operator, str) and operator.endswith("_") and not operator.endswith("__")


def _infer_along(found: Rule, view: View) -> tuple[State, ...]:
    result = found.function(view)
    states = (result,) if isinstance(result, State) else tuple(result)
    states = _with_gradients(found, view, states)
    if _writes(view.op):
        _check_target(view, states[0])
    return states


def _with_gradients(found: Rule, view: View, states: tuple[State, ...]) -> tuple[State, ...]:
    """The states with what is known of gradients.

    Where a result is whole, every rank works out all of the gradients of its inputs. Where it is cut, a pending sum or
    a copy, each rank sees only a part of what a replicated input is used for, so that its gradient must be pending.
    """
    parts = [each for each in view.operands if each.takes_part and each.name.split("[")[0] not in found.silent]
    flowing = [state for place, state in enumerate(states) if not found.is_constant(place)]
    pending = any(each.state.pending for each in parts)
    partly = pending or not all(each.state.is_replicate for each in parts) or not all(s.is_replicate for s in flowing)
    whole = [each for each in parts if each.state.is_replicate and not each.state.pending]
    if flowing and partly and whole:
        raise _lost_gradient(whole[0], parts, flowing)
    return tuple(
        replace(state, pending=True)
        if pending and state.is_replicate and not found.is_constant(place)
        else without_gradient(state)
        for place, state in enumerate(states)
    )


def _lost_gradient(whole: Operand, parts: Sequence[Operand], flowing: Sequence[State]) -> RuleError:
    other = next((each for each in parts if not each.state.is_replicate or each.state.pending), None)
    cause = f"{other.name} is {other.state}" if other else f"the result is {flowing[0]}"
    return RuleError(
        f"{whole.name} is replicate with the whole gradient on every rank, but {cause}: each rank would compute a part "
        f"of the gradient of {whole.name}, and nothing sums it up",
        f"{whole.name} as replicate with a partial gradient, which somebody reduces",
    )


def _check_target(view: View, result: State) -> None:
    """What is written in place must lie as its target does, unless the target may be read either way."""
    target = view.operands[0]
    if result.placement == target.state.placement:
        return
    if result.cut is not None and target.repeats(result.cut):
        return
    if result.is_partial and target.state.zero:
        return
    raise RuleError(
        f"{view.op} writes what is {result} into {target.name}, which is {target.state}",
        f"a target that is {result}, or a new tensor in its place",
    )
