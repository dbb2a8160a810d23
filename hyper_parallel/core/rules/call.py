"""One call of an operator, as the rules see it: values that compare and hash, tensors described instead of held."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Callable, Iterator, Mapping, NamedTuple

from hyper_parallel.core.rules.state import State


class Argument(NamedTuple):
    """A tensor among the arguments of a call.

    `shape` is that of the local tensor, `takes_part` says that a gradient flows to it, `states` has one state for each
    axis of the call.
    """

    shape: tuple[int, ...]
    dtype: str
    takes_part: bool
    states: tuple[State, ...]


@dataclass(frozen=True)
class Slice:
    """`slice(start, stop, step)`, which does not hash everywhere."""

    start: int | None
    stop: int | None
    step: int | None


@dataclass(frozen=True)
class Flag:
    """True or False as an index, which is no 1 or 0: it adds a dim."""

    value: bool


class Call(NamedTuple):
    """One call: the key under which what follows from it is kept.

    `op` is the canonical name. `arguments` are pairs of a canonical name and a value: numbers, strings, None, tuples of
    such values, `Slice`, `Flag`, and `Argument` in place of tensors; what else a framework hands over, such as a dtype,
    stays as it is. `axes` are the mesh axes that are followed, of `sizes` ranks each. `declared` says what the boundary
    around the call vouches for: "vocabulary" where an embedding's ids have been shifted to the rows that this rank
    holds, and the rows of other ranks are zeroed afterwards; "apart over tensor" where each rank of that axis draws
    random numbers for itself.
    """

    op: str
    arguments: tuple[tuple[str, Any], ...]
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    declared: frozenset[str] = frozenset()


class Operand(NamedTuple):
    """A tensor argument along one axis."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    takes_part: bool
    state: State

    @property
    def dims(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def repeats(self, dim: int) -> bool:
        """Tell whether the tensor may be read as cut along `dim`: what is there is the same everywhere."""
        return self.state.is_replicate and (self.shape[dim] == 1 or self.state.zero or dim in self.state.same)


def apart(axis: str) -> str:
    """What is declared where each rank of an axis draws random numbers for itself."""
    return f"apart over {axis}"


class View:
    """A call along one axis, as a rule reads it: `view["dim"]`, `view.get("keepdim", False)`, `view.operands`.

    `apart` says that ranks of the axis draw random numbers each for itself.
    """

    def __init__(self, call: Call, axis: int) -> None:
        self.op = call.op
        self.ranks = call.sizes[axis]
        self.declared = call.declared
        self.apart = apart(call.axes[axis]) in call.declared
        self.values: dict[str, Any] = {name: _project(value, name, axis) for name, value in call.arguments}
        self.operands: tuple[Operand, ...] = tuple(_operands(self.values.values()))

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an argument; the default where it was not given."""
        return self.values.get(name, default)


Describe = Callable[[Any], "Argument | None"]
"""What a framework's tensor looks like to the rules; None for what is no tensor."""


def call_of(
    op: str,
    arguments: Mapping[str, Any],
    axes: tuple[str, ...],
    sizes: tuple[int, ...],
    describe: Describe,
    declared: frozenset[str] = frozenset(),
) -> Call:
    """The call of `op` with a framework's own arguments, by canonical name."""
    frozen = [
        (name, freeze(value, describe) if name != "index" else _freeze_index(value, describe))
        for name, value in arguments.items()
    ]
    return Call(op, tuple(frozen), axes, sizes, declared)


_ATOMS = frozenset((int, float, str, complex, bool, type(None), Argument))


def freeze(value: Any, describe: Describe) -> Any:
    """`value` with tensors replaced by what `describe` makes of them, and the rest so that it hashes."""
    if type(value) in _ATOMS:
        return value
    if isinstance(value, (tuple, list)):
        return tuple(freeze(each, describe) for each in value)
    if (described := describe(value)) is not None:
        return described
    if isinstance(value, slice):
        return Slice(*(freeze(each, describe) for each in (value.start, value.stop, value.step)))
    if isinstance(value, Mapping):
        return tuple((key, freeze(each, describe)) for key, each in value.items())
    return value


def _freeze_index(value: Any, describe: Describe) -> Any:
    """`freeze` for what stands in the brackets of an index: a tuple, in which True and False are flags; or a tensor of
    places."""
    if not isinstance(value, tuple) and (described := describe(value)) is not None:
        return described
    entries = value if isinstance(value, tuple) else (value,)
    return tuple(Flag(each) if isinstance(each, bool) else freeze(each, describe) for each in entries)


def _project(value: Any, name: str, axis: int) -> Any:
    if isinstance(value, Argument):
        return Operand(name, value.shape, value.dtype, value.takes_part, value.states[axis])
    if type(value) is tuple:
        return tuple(_project(each, f"{name}[{place}]", axis) for place, each in enumerate(value))
    return value


def _operands(values: Any) -> Iterator[Operand]:
    for value in values:
        if isinstance(value, Operand):
            yield value
        elif type(value) is tuple:
            yield from _operands(value)


def bind(parameters: str, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, by canonical name.

    `parameters` are the names of positional arguments in order. `name|other` is `name`, which a framework's keyword
    calls `other`. `*name` takes all that are left: as one tuple, whether they came one by one or as one sequence. What
    has no name gets one by its place.
    """
    names, starred, keywords = _parsed(parameters)
    if starred is not None and len(args) > starred:
        rest, args = args[starred:], args[:starred]
        given = dict(zip(names, args))
        given[names[starred]] = tuple(rest[0]) if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    else:
        given = dict(zip(names, args))
        for place in range(len(names), len(args)):
            given[f"argument {place}"] = args[place]
    for name, value in kwargs.items():
        given[keywords.get(name, name)] = value
    return given


@cache
def _parsed(parameters: str) -> tuple[tuple[str, ...], int | None, dict[str, str]]:
    """The names, the place of the one with a star, and the names of keywords that go by another one."""
    written = parameters.split()
    names = tuple(each.lstrip("*").split("|")[0] for each in written)
    starred = next((place for place, each in enumerate(written) if each.startswith("*")), None)
    keywords = {"axis": "dim", "keepdims": "keepdim"}
    for name, each in zip(names, written):
        keywords |= dict.fromkeys(each.split("|")[1:], name)
    return names, starred, keywords
