"""Whether ranks that should hold the same really do."""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from typing import Callable, Sequence

import numpy as np

from hyper_parallel.core.backend import Backend, Tensor
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.peers import gathered, group_along

_PERIOD = 4093

TOLERANCE = {"float64": 1e-4, "float32": 1e-4}
"""How far what ranks measure of one tensor may lie apart, relative to its norm. They run the same operators on the same
numbers, so that only the order in which a device adds can differ, and that changes the last digits. The measures are
exchanged in float32. What lacks a sum over ranks is off by as much as it is."""

HALF_TOLERANCE = 2e-2
"""The same in half precision, whose last digit is about 1/256 or 1/2048."""


class Agreement:
    """Compares measures of a tensor over the ranks of an axis. All of them compare together, in one order.

    Where there is nothing to compare with, as in a simulation, `is_real` is false and nothing happens.
    """

    def __init__(self, backend: Backend, mesh: DeviceMesh, is_real: bool):
        self._backend = backend
        self._mesh = mesh
        self.is_real = is_real

    def check(self, tensor: Tensor, axes: Sequence[str], fail: Callable[[str], Exception]) -> None:
        """Raise what `fail` makes of the problem where the ranks along one of the axes hold different values. Whole
        numbers have to be equal, others nearly so."""
        if not axes or not self.is_real:
            return
        backend = self._backend
        dtype, shape = backend.tensors.dtype_name(tensor), tuple(map(int, tensor.shape))
        with backend.autograd.no_grad():
            array = backend.tensors.to_numpy(backend.interception.plain(tensor))
        is_whole = "float" not in dtype
        own = np.concatenate([_parts_of_digest(array) if is_whole else measure(array), _sizes(shape)])
        for axis in axes:
            group = group_along(backend.collectives, self._mesh, [axis])
            everyone = gathered(backend, own.astype(np.float32), group).astype(np.float64)
            problem = _problem(everyone, 0.0 if is_whole else tolerance_of(dtype), shape)
            if problem:
                raise fail(f"it has to be the same on every rank of {axis}, but {problem}")

    def check_bytes(self, own: bytes, axis: str, fail: Callable[[int, int], Exception]) -> None:
        """Raise what `fail` makes of two ranks where the ranks along an axis hold other bytes. All hold as many."""
        if not self.is_real:
            return
        backend = self._backend
        group = group_along(backend.collectives, self._mesh, [axis])
        everyone = gathered(backend, np.frombuffer(own, np.uint8).astype(np.float32), group)
        apart = (everyone != everyone[:1]).any(axis=1)
        if apart.any():
            raise fail(0, int(apart.argmax()))


def _problem(everyone: np.ndarray, tolerance: float, shape: tuple[int, ...]) -> str:
    """How what ranks have told of one tensor differs, row by row; "" where it does not."""
    measures, sizes = everyone[:, :_MEASURES], everyone[:, _MEASURES:]
    reshaped = (sizes != sizes[0]).any(1)
    if reshaped.any():
        other = int(np.argmax(reshaped))
        shapes = [list(map(int, row[1 : 1 + int(row[0])])) for row in (sizes[0], sizes[other])]
        return f"ranks 0 and {other} of the axis hold tensors of the shapes {shapes[0]} and {shapes[1]}"
    scale = max(float(np.nanmax(measures[:, 0])), 1e-30) if not np.isnan(measures[:, 0]).all() else 1.0
    apart = ~np.isclose(measures, measures[:1], rtol=0.0, atol=tolerance * scale, equal_nan=True)
    if not apart.any():
        return ""
    other = int(np.argwhere(apart)[0][0])
    told = f"ranks 0 and {other} of the axis hold others"
    if not tolerance:
        return f"{told}: whole numbers of the shape {list(shape)}"
    return (
        f"{told}: their norms are {measures[0, 0]:.6g} and {measures[other, 0]:.6g}, and weighted sums "
        f"{measures[0, 1]:.6g} and {measures[other, 1]:.6g}"
    )


_MEASURES = 3
_DIMS = 6
"""Dims of which the sizes are told."""


def _sizes(shape: tuple[int, ...]) -> np.ndarray:
    """The number of dims and their sizes, in the same room for every shape."""
    told = shape[:_DIMS]
    return np.array([len(told), *told, *[0] * (_DIMS - len(told))], np.float64)


def _parts_of_digest(array: np.ndarray) -> np.ndarray:
    """A digest as numbers that float32 holds exactly."""
    digest = sha256(array.tobytes()).digest()
    return np.array([int.from_bytes(digest[3 * part : 3 * part + 3], "big") for part in range(_MEASURES)], np.float64)


def tolerance_of(dtype: str) -> float:
    """How far measures of tensors of a floating dtype may lie apart, relative to their norm."""
    return TOLERANCE.get(dtype, HALF_TOLERANCE)


def measure(array: np.ndarray) -> np.ndarray:
    """The norm of an array and weighted sums of its elements, which depend on their order."""
    flat = array.astype(np.float64).ravel()
    rows = -(-max(flat.size, 1) // _PERIOD)
    padded = np.zeros(rows * _PERIOD)
    padded[: flat.size] = flat
    folded = padded.reshape(rows, _PERIOD)
    across, down = _weights(_PERIOD), _weights(rows)
    return np.array([np.linalg.norm(flat), folded.sum(0) @ across, down @ (folded @ across)])


@lru_cache(maxsize=64)
def _weights(count: int) -> np.ndarray:
    """Numbers between -1 and 1 that don't repeat."""
    return np.cos(np.arange(count) + 0.5)
