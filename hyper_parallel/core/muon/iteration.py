"""The Newton-Schulz iteration, written once: which products are made, in which order, and where they are put."""

from __future__ import annotations

from typing import Any, Protocol

from hyper_parallel.core.errors import ConfigError, LayoutError
from hyper_parallel.core.muon.newton_schulz import NewtonSchulz

Tensor = Any


class Products(Protocol):
    """Products of batches of matrices as a framework has them. Each result is rounded once and put into `room`, which
    is none of the arguments; or, where a framework writes to new memory only, a `room` is None and results are new."""

    def room(self, like: Tensor, rows: int, columns: int) -> Tensor | None:
        """Memory for matrices [k, rows, columns], contents undefined, as many and of the dtype of `like`."""

    def gram(self, matrices: Tensor, room: Tensor | None) -> Tensor:
        """`matrices` times their transposes: [k, m, m] from [k, m, n]."""

    def product(self, left: Tensor, right: Tensor, room: Tensor | None) -> Tensor:
        """`left @ right`."""

    def fused(
        self, added: Tensor, beta: float, left: Tensor, right: Tensor, alpha: float, room: Tensor | None
    ) -> Tensor:
        """`beta * added + alpha * left @ right`. Rounded once: with a rounding for each term, gram forms in half
        precision are garbage."""

    def plus_identity(self, matrices: Tensor, factor: float, room: Tensor | None) -> Tensor:
        """Square `matrices` plus `factor` on their diagonals."""


def matrix_batch(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The three sizes of a batch [k, m, n]; raises `LayoutError` where there are others."""
    if len(shape) != 3:
        raise LayoutError(f"matrices come as a batch [k, m, n], not in the shape {list(shape)}")
    return tuple(shape)


def check_form(form: str) -> None:
    """Raise `ConfigError` for a form of momentum that there is not."""
    if form not in ("ema", "heavy_ball"):
        raise ConfigError(f'momentum has no form {form!r}: write "ema" or "heavy_ball"')


def check_update(place: int, update: tuple[int, ...], parameter: tuple[int, ...]) -> None:
    """Raise `LayoutError` unless an update has the shape of its parameter, the one at `place` of a list."""
    if update != parameter:
        raise LayoutError(f"update {place} has the shape {list(update)}, its parameter {list(parameter)}")


def iterate(products: Products, matrices: Tensor, settings: NewtonSchulz) -> Tensor:
    """The steps of `settings` on a batch [k, m, n] of matrices that are no taller than wide, each of a norm of at most
    1. `matrices` is overwritten; the result may lie in its memory."""
    if settings.method_for(*matrices.shape[1:]) == "gram":
        return _through_gram(products, matrices, settings)
    return _direct(products, matrices, settings)


def _direct(products: Products, x: Tensor, settings: NewtonSchulz) -> Tensor:
    rows, columns = x.shape[1:]
    spare = products.room(x, rows, columns)
    gram, polynomial = (products.room(x, rows, rows) for _ in range(2))
    for a, b, c in settings.schedule:
        gram = products.gram(x, gram)
        polynomial = products.fused(gram, b, gram, gram, c, polynomial)
        x, spare = products.fused(x, a, polynomial, x, 1.0, spare), x
    return x


def _through_gram(products: Products, x: Tensor, settings: NewtonSchulz) -> Tensor:
    """A step turns `x` into `(a + z) x`, `z = b gram + c gram^2`, and so `gram` into `(a + z) gram (a + z)`. `factor`
    gathers the factors of a segment. All of these are polynomials of one matrix, so their order is free."""
    rows, columns = x.shape[1:]
    spare = products.room(x, rows, columns)
    gram, z, factor, half = (products.room(x, rows, rows) for _ in range(4))
    for segment in settings.segments:
        gram = products.gram(x, gram)
        for place, (a, b, c) in enumerate(segment):
            z = products.fused(gram, b, gram, gram, c, z)
            if place == 0:
                factor = products.plus_identity(z, a, factor)
            else:
                factor, half = products.fused(factor, a, factor, z, 1.0, half), factor
            if place < len(segment) - 1:
                half = products.fused(gram, a, gram, z, 1.0, half)
                gram = products.fused(half, a, z, half, 1.0, gram)
        x, spare = products.product(factor, x, spare), x
    return x
