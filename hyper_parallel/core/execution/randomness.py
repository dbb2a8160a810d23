"""What the ranks that compute one model draw: the same, or each for itself.

Where a tensor is the same on every rank, or a pending sum, all of them have to drop the same of it. Where it is cut,
each holds other elements, and drops of them what it draws for itself; else one mask would serve them all. Between the
two the framework's default generators are seeded, and set back, around modules (`domains.py` says which).

**The seed tells.** One that is put here has 63 bits: 31 of a number that all ranks of the model share, and 32 of a hash
of this number and of the rank's places along the axes over which ranks draw for themselves. So whoever meets the
generators, a checkpoint that computes a part of a module again included, reads off where they stand. The shared number
is drawn off the generators where a module is entered, so that a checkpoint, which sets them back, gives it again;
inside of another such module it follows from that one's number and the name. A module that another one calls twice
therefore drops the same both times, where the outer one works on a part of the sequence.
"""

from __future__ import annotations

import hashlib
from itertools import combinations
from typing import Any, Iterable, Sequence

import numpy as np

from hyper_parallel.core.backend import Backend, Module
from hyper_parallel.core.mesh import BATCH_AXES, DeviceMesh

SHARED = ("context", "tensor")
"""Axes along which ranks compute one model, outermost first."""

Axes = tuple[str, ...]


class Randomness:
    """The default generators of one rank of a model on a mesh."""

    def __init__(self, backend: Backend, mesh: DeviceMesh, rank: int):
        self.generators = backend.randomness
        self.axes: Axes = tuple(axis for axis in SHARED if mesh.axis_size(axis) > 1)
        self._places = mesh.coordinates(rank)
        counts = range(len(self.axes) + 1)
        self._choices = [chosen for count in counts for chosen in combinations(self.axes, count)]
        self._aside: list[tuple[str, tuple[np.ndarray, ...]]] = []

    def apart(self) -> Axes:
        """The axes along which ranks draw for themselves at this moment."""
        found = self._read()
        return () if found is None else found[1]

    def fingerprint(self) -> bytes:
        """32 bytes that differ where generators would draw other numbers."""
        digest = hashlib.blake2b(digest_size=32)
        for state in self.generators.states():
            digest.update(state.tobytes())
        return digest.digest()

    def begin(self) -> None:
        """The model begins. What an exception has left behind is put right."""
        if self._aside:
            self.settle()

    def settle(self) -> None:
        """Set the generators back to what they were before a module that was not left."""
        if self._aside and self._read() is not None:
            self.generators.restore(self._aside[0][1])
        self._aside.clear()

    def enter(self, name: str, axes: Axes) -> None:
        """Inside of the module `name` ranks draw for themselves along `axes`."""
        found = self._read()
        if found is None:
            self._aside.clear()  # nothing is being entered from, so these were never left: a recompute ends early
        number = self.generators.draw() if found is None else _number(f"{found[0]} in {name}") >> 1
        self._aside.append((name, self.generators.states()))
        self._seed(number, axes)

    def go_on(self, name: str, axes: Axes) -> None:
        """The rest of what was entered is for `axes`, from the module `name` on; nothing outside of what was."""
        found = self._read()
        if found is not None and found[1] != axes:
            self._seed(_number(f"{found[0]} from {name} on") >> 1, axes)

    def leave(self, name: str) -> None:
        """The module is left: the generators go on where they were."""
        if any(name == entered for entered, _ in self._aside):
            entered = ""
            while entered != name:
                entered, states = self._aside.pop()
            self.generators.restore(states)

    def _read(self) -> tuple[int, Axes] | None:
        """The shared number and the axes that a seed tells; None where it is the user's."""
        number, tail = divmod(self.generators.last_seed(), 1 << 32)
        return next(((number, axes) for axes in self._choices if self._tail(number, axes) == tail), None)

    def _seed(self, number: int, axes: Axes) -> None:
        self.generators.seed(number << 32 | self._tail(number, axes))

    def _tail(self, number: int, axes: Axes) -> int:
        return _number(f"{number} at {[(axis, self._places[axis]) for axis in axes]}")


class Switch:
    """What happens around a module inside of which draws are for other axes, while one of `droppers` is training."""

    def __init__(self, randomness: Randomness, name: str, axes: Axes, droppers: Sequence[Module]):
        self.name, self.axes = name, axes
        self._randomness, self._droppers = randomness, droppers

    def enter(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The module begins."""
        if is_training(self._droppers):
            self._randomness.enter(self.name, self.axes)
        return args, kwargs

    def go_on(self, args: tuple, kwargs: dict) -> None:
        """Where the module stands inside of one that has been entered: the rest of that one is for these axes."""
        if is_training(self._droppers):
            self._randomness.go_on(self.name, self.axes)

    def leave(self, output: Any) -> Any:
        """It ends."""
        if is_training(self._droppers):
            self._randomness.leave(self.name)
        return output


def is_training(modules: Iterable[Module]) -> bool:
    """Tell whether one of the modules is training."""
    return any(module.training for module in modules)


def seed_for(seed: int, mesh: DeviceMesh, rank: int) -> int:
    """The seed of a rank: the same on all ranks that compute one model, another one for other samples and for other
    stages of a pipeline; `seed` itself on the first ranks."""
    places = [(axis, mesh.coordinates(rank).get(axis, 0)) for axis in ("pipeline", *BATCH_AXES)]
    if not any(place for _, place in places):
        return seed
    return (_number(f"{seed} for {places}") << 32 | _number(f"{places} of {seed}")) >> 1


def _number(text: str) -> int:
    """32 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
