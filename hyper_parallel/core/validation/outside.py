"""What comes to a model from outside: the same on every rank that computes one model, or an error on all of them.

Tokens of another sample have the right shape and dtype, and each rank's part of a computation goes on with them: the
sum over the ranks is of nothing that any model computes. So they are compared before anything is made of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from inspect import Parameter, signature
from typing import Any, Iterator, Mapping, NamedTuple, Sequence

import numpy as np

from hyper_parallel.core.backend import Backend, Group, Module
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.peers import gathered, group_along
from hyper_parallel.core.validation.agreement import measure, tolerance_of
from hyper_parallel.core.validation.messages import outside_error, place

TOGETHER = ("shard", "expert", "context", "tensor")
"""Axes whose ranks run every forward together, so that what one of them refuses all of them have to hear of."""

PARTS = ("context",)
"""Axes whose ranks are given parts, not the same."""

_EXTREME = 1e18
"""From here on a number hides something, as masks do, and is compared exactly: it would drown all others in a norm."""

_SHOWN = 1 << 20
"""Elements of which the first that differs is looked for."""


class Leaf(NamedTuple):
    """One value as it is compared: exactly where `kind` and `digest` are concerned, and, where it has them, within a
    `tolerance` the `measures` of its numbers. `array` is the value itself."""

    kind: str
    digest: bytes
    measures: np.ndarray | None
    tolerance: float
    array: np.ndarray | None


@dataclass(frozen=True)
class Outside:
    """Compares what ranks are given. All of them compare together, and send as much whatever they hold.

    `axes` are those along which ranks compute one model. Where there is nobody to compare with, as in a simulation,
    `is_real` is false and nothing happens. `model` is what the model itself is called.
    """

    backend: Backend
    mesh: DeviceMesh
    axes: tuple[str, ...]
    is_real: bool
    model: str

    def check(self, module: str, values: Mapping[str, Any], together: bool = True, legal: str = "") -> None:
        """Raise `ContractError`, on every rank, where ranks that compute one model hold others of `values`.

        Args:
            module: the module that is given them.
            values: by what they are called: tensors, numbers, nests of both. Whole numbers and numbers of Python are
                compared exactly, others as `Agreement` does. What else there is, and what is followed already, has to
                be there on every rank, and is not looked at.
            together: every rank along `TOGETHER` calls, so that all of them are told.
            legal: what would be right, where it is not for a data loader to give it.
        """
        if not self._compared:
            return
        group, where = self._groups[together], place(module or self.model)
        leaves = dict(sorted(self._leaves(values), key=lambda each: each[0]))
        records = {name: (leaf.kind, leaf.digest) for name, leaf in leaves.items()}
        measured = {name: leaf for name, leaf in leaves.items() if leaf.measures is not None}
        digest = np.frombuffer(sha256(repr(records).encode()).digest(), np.int64)
        everyone = gathered(self.backend, np.append(digest, len(measured)), group)
        for axis, first, other in self._pairs(group):
            if (everyone[first] != everyone[other]).any():
                told = self._told(leaves, records, group, first, other)
                raise outside_error(where, *told, axis, self.mesh, legal)
        if everyone[:, -1].any():
            # Ranks with samples of their own may have been given other things, and fewer.
            problems = self.backend.collectives.gather_objects(self._apart(measured), group)
            for problem in filter(None, problems):
                raise outside_error(where, *problem, self.mesh, legal)

    def _apart(self, measured: Mapping[str, Leaf]) -> tuple[str, str, str] | None:
        """The first numbers that ranks which compute one model measure differently, how, and along which axis."""
        group = self._groups[False]
        if not measured:
            return None
        own = np.concatenate([leaf.measures for leaf in measured.values()]).astype(np.float32)
        everyone = gathered(self.backend, own, group).astype(np.float64).reshape(group.size, len(measured), -1)
        for axis, first, other in self._pairs(group):
            for (name, leaf), one, two in zip(measured.items(), everyone[first], everyone[other]):
                if not np.allclose(one, two, rtol=0.0, atol=leaf.tolerance * max(one[0], two[0]) + 1e-30):
                    ranks = f"ranks {group.ranks[first]} and {group.ranks[other]}"
                    how = f"{ranks} have norms of {one[0]:.6g} and {two[0]:.6g}, and weighted sums of {one[1]:.6g} and "
                    return f"{name} {leaf.kind}", f"{how}{two[1]:.6g}", axis
        return None

    @cached_property
    def _compared(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.axes if axis not in PARTS) if self.is_real else ()

    @cached_property
    def _groups(self) -> dict[bool, Group]:
        """The ranks that compare: those along all axes that run together, or those that compute one model."""
        axes = {True: [axis for axis in TOGETHER if axis in self.mesh.names], False: list(self._compared)}
        return {together: group_along(self.backend.collectives, self.mesh, each) for together, each in axes.items()}

    def _pairs(self, group: Group) -> Iterator[tuple[str, int, int]]:
        """Places in a group of ranks that have to hold the same: of those along one axis the first, and each other."""
        for axis in self._compared:
            for rank in group.ranks:
                first, *others = self.mesh.group_of(rank, [axis])
                if rank == first:
                    yield from ((axis, group.ranks.index(first), group.ranks.index(other)) for other in others)

    def _leaves(self, values: Mapping[str, Any]) -> Iterator[tuple[str, Leaf]]:
        for name, value in values.items():
            yield from self._below(name, value)

    def _below(self, name: str, value: Any) -> Iterator[tuple[str, Leaf]]:
        if isinstance(value, Mapping):
            for key, each in value.items():
                yield from self._below(f"{name}[{key!r}]", each)
        elif isinstance(value, (tuple, list)):
            for number, each in enumerate(value):
                yield from self._below(f"{name}[{number}]", each)
        else:
            yield name, self._leaf(value)

    def _leaf(self, value: Any) -> Leaf:
        tensors = self.backend.tensors
        if isinstance(value, (bool, int, float, complex)):
            return Leaf(repr(value), b"", None, 0.0, None)
        if not tensors.is_tensor(value) or self.backend.interception.track_of(value) is not None:
            return Leaf(type(value).__name__, b"", None, 0.0, None)
        dtype = tensors.dtype_name(value)
        kind = f"{dtype} {list(map(int, value.shape))}"
        if not tensors.has_values(value):
            return Leaf(kind, b"", None, 0.0, None)
        array = tensors.to_numpy(value)
        if "float" not in dtype:
            return Leaf(kind, sha256(array.tobytes()).digest(), None, 0.0, array)
        hides = ~(np.abs(array) < _EXTREME)
        pattern = np.where(np.isnan(array), 2, np.sign(array))[hides].astype(np.int8)
        digest = sha256(hides.tobytes() + pattern.tobytes()).digest()
        return Leaf(kind, digest, measure(np.where(hides, 0, array)), tolerance_of(dtype), array)

    def _told(
        self, leaves: Mapping[str, Leaf], own: Mapping[str, tuple], group: Group, first: int, other: int
    ) -> tuple[str, str]:
        """What two ranks have that differs, and how. Called by the whole group, which finds the same."""
        collectives = self.backend.collectives
        everyone = collectives.gather_objects(dict(own), group)
        one, two = everyone[first], everyone[other]
        name = next(each for each in [*one, *two] if one.get(each) != two.get(each))
        ranks = group.ranks[first], group.ranks[other]
        if name not in one or name not in two:
            has, lacks = ranks if name in one else ranks[::-1]
            return name, f"rank {has} was given it and rank {lacks} was not"
        (kind, _), (other_kind, _) = one[name], two[name]
        if kind != other_kind:
            return name, f"it is {kind} on rank {ranks[0]} and {other_kind} on rank {ranks[1]}"
        array = leaves[name].array if name in leaves and group.index in (first, other) else None
        arrays = collectives.gather_objects(array if array is not None and array.size <= _SHOWN else None, group)
        return f"{name} {kind}", _first_difference(arrays[first], arrays[other], ranks)


def _first_difference(one: np.ndarray | None, other: np.ndarray | None, ranks: Sequence[int]) -> str:
    if one is None or other is None:
        return f"ranks {ranks[0]} and {ranks[1]} hold others"
    differ = ~((one == other) | ((one != one) & (other != other)))
    at = tuple(int(index) for index in np.argwhere(differ)[0])
    return f"at {list(at)} rank {ranks[0]} has {one[at]} and rank {ranks[1]} has {other[at]}"


CHOICES = "the same choice of experts on these ranks, each of which adds its part of what the chosen experts give"
"""What would be right where ranks have chosen different experts."""


class WholeNumbers:
    """Looks at the whole numbers that a module takes in, such as tokens or choices of experts, and changes nothing."""

    def __init__(self, outside: Outside, name: str, module: Module, legal: str = ""):
        self._outside = outside
        self._name = name
        self._module = module
        self._legal = legal

    def __call__(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments. Raises `ContractError` where other ranks that share the model have other numbers."""
        if self._outside.is_real:
            numbers = named_arguments(self._module, args, kwargs)
            plain = {name: self._whole_number(value) for name, value in numbers.items()}
            given = {name: value for name, value in plain.items() if value is not None}
            self._outside.check(self._name, given, together=False, legal=self._legal)
        return args, kwargs

    def _whole_number(self, value: Any) -> Any:
        """A tensor of whole numbers that is the same on every rank, as a plain one; None for anything else."""
        backend = self._outside.backend
        if not backend.tensors.is_tensor(value) or "float" in backend.tensors.dtype_name(value):
            return None
        track = backend.interception.track_of(value)
        if track is None:
            return value
        return backend.interception.plain(value) if all(each.is_replicate for each in track.states) else None


def named_arguments(module: Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a module by their names."""
    try:
        parameters = signature(module.forward if hasattr(module, "forward") else module.construct).parameters.values()
    except (TypeError, ValueError):  # code that is not Python's has none
        parameters = ()
    names = [each.name for each in parameters if each.kind in _POSITIONAL]
    names += [f"argument {number}" for number in range(len(names), len(args))]
    return dict(zip(names, args)) | dict(kwargs)


_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
