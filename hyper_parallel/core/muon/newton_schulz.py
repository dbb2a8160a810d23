"""How a matrix is orthogonalized: the settings of a Newton-Schulz iteration, what they cost, and its form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Iterable, Sequence

from hyper_parallel.core.errors import ConfigError

Triple = tuple[float, float, float]

_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
_SAFETY = 1.05  # as if singular values were 5 % larger: rounding in half precision must not lift one above 1

COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    "legacy": ((3.4445, -4.7750, 2.0315),),
    "asym5": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": tuple((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS),
}
"""The polynomials `a s + b s^3 + c s^5` that singular values go through, by name. Five steps bring those from 0.01 to 1
of a matrix's norm into [0.68, 1.14], [0.97, 1.04] and [0.84, 1.13]."""

DTYPES = ("bfloat16", "float16", "float32")
METHODS = ("auto", "direct", "gram")


@dataclass(frozen=True)
class NewtonSchulz:
    """Settings of one orthogonalization: `X = u / (norm(u) + eps)`, then `X = a X + (b A + c A^2) X`, `A = X X^T`.

    A matrix that is taller than wide is transposed first. The norm is Frobenius's. "gram" computes the same through the
    powers of `A` alone and multiplies with `X` at the end of some steps only: fewer FLOPs for matrices more than about
    1.5 times as long as wide, and larger rounding errors, which bfloat16 does not bear.

    Args:
        coefficients: "legacy" (the quintic of the first Muon), "asym5", "polar_express", or (a, b, c) for each step.
        steps: how often. The last triple is repeated where there are fewer; a name has its first `steps` used.
        dtype: what is computed in: "bfloat16", "float16" or "float32".
        eps: added to the norm, so that a matrix of zeros stays one.
        method: "direct", "gram", or "auto": gram where it takes fewer FLOPs and `dtype` bears it.

    Raises:
        ConfigError: an unknown name or value, more given triples than steps, or "gram" in bfloat16.
    """

    coefficients: str | tuple[Triple, ...] = "legacy"
    steps: int = 5
    dtype: str = "bfloat16"
    eps: float = 1e-7
    method: str = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ConfigError(f"Newton-Schulz: steps is {self.steps!r}: write a whole number from 1 on")
        object.__setattr__(self, "coefficients", _checked(self.coefficients, self.steps))
        if self.dtype not in DTYPES:
            raise ConfigError(f"Newton-Schulz: dtype is {self.dtype!r}: write one of {', '.join(DTYPES)}")
        if not _is_number(self.eps) or self.eps <= 0:
            raise ConfigError(f"Newton-Schulz: eps is {self.eps!r}: write a number above 0, as 1e-7")
        if self.method not in METHODS:
            raise ConfigError(f"Newton-Schulz: method is {self.method!r}: write one of {', '.join(METHODS)}")
        if self.method == "gram" and self.dtype == "bfloat16":
            raise ConfigError(
                'Newton-Schulz: method "gram" in bfloat16 loses the small singular values (errors of 0.2 and more): '
                'write dtype="float16" or "float32", or method="direct"'
            )

    @property
    def schedule(self) -> tuple[Triple, ...]:
        """(a, b, c) of each of the steps."""
        given = COEFFICIENTS.get(self.coefficients, self.coefficients)
        return tuple(given[min(step, len(given) - 1)] for step in range(self.steps))

    @property
    def segments(self) -> tuple[tuple[Triple, ...], ...]:
        """The steps of "gram" between which it multiplies with the matrix and begins anew: two, then three at a time.
        Rounding errors grow fastest while singular values are smallest."""
        steps = self.schedule
        starts = [0, *range(2, len(steps), 3)]
        return tuple(steps[start:stop] for start, stop in zip(starts, [*starts[1:], len(steps)]))

    @property
    def wire_dtype(self) -> str:
        """What matrices come and go in: `dtype`, but for float16, whose range gradients leave at both ends; they are
        cast to it when they have a norm of 1."""
        return "float32" if self.dtype == "float16" else self.dtype

    def method_for(self, rows: int, columns: int) -> str:
        """ "direct" or "gram": how a matrix of this shape is computed."""
        if self.method != "auto":
            return self.method
        if self.dtype == "bfloat16":
            return "direct"
        short, long = sorted((rows, columns))
        return "gram" if _gram_flops(self.segments, short, long) < _direct_flops(self.steps, short, long) else "direct"

    def flops(self, rows: int, columns: int) -> int:
        """Multiplications and additions for one matrix of this shape."""
        short, long = sorted((rows, columns))
        if self.method_for(rows, columns) == "gram":
            return _gram_flops(self.segments, short, long)
        return _direct_flops(self.steps, short, long)


def _direct_flops(steps: int, short: int, long: int) -> int:
    return steps * (4 * short**2 * long + 2 * short**3)


def _gram_flops(segments: Iterable[Sequence[Triple]], short: int, long: int) -> int:
    """Each step squares A; all but the first of a segment also multiply what it gathers, and all but the last A."""
    return sum(4 * short**2 * long + (8 * len(segment) - 6) * short**3 for segment in segments)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _checked(given: str | Iterable, steps: int) -> str | tuple[Triple, ...]:
    """Coefficients as they are kept; a single (a, b, c) is one triple."""
    names = ", ".join(f'"{name}"' for name in COEFFICIENTS)
    wanted = f"write {names}, or a list of (a, b, c), one for each step"
    if isinstance(given, str):
        if given not in COEFFICIENTS:
            raise ConfigError(f"Newton-Schulz: coefficients {given!r} are unknown: {wanted}")
        return given
    try:
        given = list(given)
        triples = [tuple(given)] if all(map(_is_number, given)) else [tuple(each) for each in given]
    except TypeError:
        raise ConfigError(f"Newton-Schulz: coefficients are {given!r}: {wanted}") from None
    if not triples or any(len(each) != 3 or not all(map(_is_number, each)) for each in triples):
        raise ConfigError(f"Newton-Schulz: coefficients are {given!r}: {wanted}")
    if len(triples) > steps:
        raise ConfigError(
            f"Newton-Schulz: {len(triples)} triples of coefficients are given for {steps} steps: "
            f"write steps={len(triples)}, or leave out triples"
        )
    return tuple((float(a), float(b), float(c)) for a, b, c in triples)
