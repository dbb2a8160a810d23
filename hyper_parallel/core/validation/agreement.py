"""Whether ranks that should hold the same really do."""

from __future__ import annotations

from functools import lru_cache
from typing import Callable, Sequence

import numpy as np

from hyper_parallel.core.backend import Backend, Tensor
from hyper_parallel.core.mesh import DeviceMesh

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
        """Raise what `fail` makes of the problem where the ranks along one of the axes hold different values."""
        if not axes or not self.is_real or "float" not in self._backend.tensors.dtype_name(tensor):
            return
        own = self._measure(tensor)
        tolerance = TOLERANCE.get(self._backend.tensors.dtype_name(tensor), HALF_TOLERANCE)
        for axis in axes:
            everyone = self._gathered(own, axis)
            scale = max(float(np.nanmax(everyone[:, 0])), 1e-30) if not np.isnan(everyone[:, 0]).all() else 1.0
            apart = ~np.isclose(everyone, everyone[:1], rtol=0.0, atol=tolerance * scale, equal_nan=True)
            if apart.any():
                other = int(np.argwhere(apart)[0][0])
                raise fail(
                    f"it has to be the same on every rank of {axis}, but ranks 0 and {other} of the axis hold others: "
                    f"their norms are {everyone[0, 0]:.6g} and {everyone[other, 0]:.6g}, and weighted sums "
                    f"{everyone[0, 1]:.6g} and {everyone[other, 1]:.6g}"
                )

    def _measure(self, tensor: Tensor) -> np.ndarray:
        """The norm of a tensor and weighted sums of its elements, which depend on their order."""
        with self._backend.autograd.no_grad():
            flat = self._backend.tensors.to_numpy(self._backend.interception.plain(tensor)).astype(np.float64).ravel()
        rows = -(-max(flat.size, 1) // _PERIOD)
        padded = np.zeros(rows * _PERIOD)
        padded[: flat.size] = flat
        folded = padded.reshape(rows, _PERIOD)
        across, down = _weights(_PERIOD), _weights(rows)
        return np.array([np.linalg.norm(flat), folded.sum(0) @ across, down @ (folded @ across)])

    def _gathered(self, own: np.ndarray, axis: str) -> np.ndarray:
        collectives, tensors = self._backend.collectives, self._backend.tensors
        group = collectives.groups([self._mesh.group_of(collectives.rank(), [axis])])
        sent = tensors.from_numpy(own.astype(np.float32))
        received = tensors.buffer(sent, group.size * own.size)
        collectives.all_gather(received, sent, group)
        return tensors.to_numpy(received).astype(np.float64).reshape(group.size, own.size)


@lru_cache(maxsize=64)
def _weights(count: int) -> np.ndarray:
    """Numbers between -1 and 1 that don't repeat."""
    return np.cos(np.arange(count) + 0.5)
