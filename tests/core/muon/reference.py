"""Newton-Schulz and what belongs to it as one writes it down: numpy, float64, one matrix after another."""

from __future__ import annotations

import numpy as np


def orthogonalized(batch: np.ndarray, settings) -> np.ndarray:
    """The matrices of a batch [k, m, n] through the polynomials of `settings`."""
    return np.stack([_one(matrix, settings) for matrix in batch]) if len(batch) else np.zeros(batch.shape)


def _one(matrix: np.ndarray, settings) -> np.ndarray:
    if matrix.shape[0] > matrix.shape[1]:
        return _one(matrix.T, settings).T
    x = matrix.astype(np.float64)
    x = x / (np.sqrt((x**2).sum()) + settings.eps)
    for a, b, c in settings.schedule:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def with_condition(rows: int, columns: int, condition: float, seed: int = 0) -> np.ndarray:
    """A matrix whose singular values fall evenly, in powers, from 1 to 1 / condition."""
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.standard_normal((size, min(rows, columns))))[0] for size in (rows, columns))
    return (left * np.geomspace(1, 1 / condition, min(rows, columns))) @ right.T


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    """Independent normal numbers: a gradient of full rank."""
    return np.random.default_rng(seed).standard_normal(shape)


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    """The norm of the difference over that of what is wanted."""
    size = np.linalg.norm(np.asarray(wanted, np.float64))
    return float(np.linalg.norm(np.asarray(found, np.float64) - wanted) / (size or 1.0))


class NumpyProducts:
    """`core.muon.iteration.Products` on numpy, which counts FLOPs and checks what it is given."""

    def __init__(self) -> None:
        self.flops = 0
        self.rooms = 0

    def room(self, like, rows, columns):
        self.rooms += 1
        return np.full((like.shape[0], rows, columns), np.nan)

    def gram(self, matrices, room):
        return self.product(matrices, matrices.swapaxes(1, 2), room)

    def product(self, left, right, room):
        assert not any(np.shares_memory(room, each) for each in (left, right)), "a product over its own argument"
        self.flops += 2 * room.size * left.shape[2]
        return np.matmul(left, right, out=room)

    def fused(self, added, beta, left, right, alpha, room):
        assert not np.shares_memory(room, added), "a product over what it is added to"
        room = self.product(left, right, room)
        room *= alpha
        room += beta * added
        return room

    def plus_identity(self, matrices, factor, room):
        np.copyto(room, matrices + factor * np.eye(matrices.shape[1]))
        return room
