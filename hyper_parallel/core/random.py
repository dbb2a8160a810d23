"""Random values on any layout: the same for an element wherever it lies.

Every function takes the next draw number of a generator and gives what one rank holds. `core/philox.py` says where
the bits come from. From there to the value, only operations that IEEE 754 rounds correctly are used (no `log`, no
`cos`): an element is the same bits on every machine, whatever stands beside it in memory.

Dtypes are "float16", "bfloat16", "float32" and "float64". numpy has no bfloat16, so that comes as float32 arrays of
numbers that bfloat16 holds; a cast to it is exact.
"""

from __future__ import annotations

import math
from typing import Mapping, NamedTuple

import numpy as np

from hyper_parallel.core.errors import ConfigError, LayoutError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.philox import WORD_LIMIT, Stream, Write, word64
from hyper_parallel.core.placement import Partial
from hyper_parallel.core.regions import Box, sizes_of


class Generator:
    """A seed and the number of the next draw: all the state that there is.

    Ranks that make the same calls in the same order draw alike. A rank takes part in every draw, also where it holds
    nothing of the tensor.

    Args:
        seed: a whole number in [0, 2**64).

    Raises:
        ConfigError: the seed is out of range.
    """

    def __init__(self, seed: int = 0):
        self.manual_seed(seed)

    def manual_seed(self, seed: int) -> None:
        """Start again with `seed`, at draw 0."""
        self.load_state_dict({"seed": seed, "draw": 0})

    def take(self) -> int:
        """The next draw number, which no later draw gets."""
        if self.draw >= WORD_LIMIT:
            raise ConfigError(f"the generator of seed {self.seed} has made its last draw; go on with another seed")
        self.draw += 1
        return self.draw - 1

    def state_dict(self) -> dict[str, int]:
        """`{"seed": ..., "draw": ...}`, from which `load_state_dict` goes on."""
        return {"seed": self.seed, "draw": self.draw}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from what `state_dict` gave.

        Raises:
            ConfigError: other keys, or a number out of range; then nothing is changed.
        """
        if not isinstance(state, Mapping) or set(state) != {"seed", "draw"}:
            raise ConfigError(f'the state of a generator is {{"seed": ..., "draw": ...}}, found {state!r}')
        seed, draw = word64(state["seed"], "a seed"), word64(state["draw"], "a draw number")
        self.seed, self.draw = seed, draw

    def __repr__(self) -> str:
        return f"Generator(seed={self.seed}, draw={self.draw})"


default_generator = Generator()
"""Where no generator is given. One for the process and both backends, so that both draw alike; seed 0 at the start."""


def manual_seed(seed: int) -> Generator:
    """Start the default generator again with `seed`, a whole number in [0, 2**64); the same on every rank."""
    default_generator.manual_seed(seed)
    return default_generator


def uniform(
    layout: Layout,
    rank: int,
    generator: Generator = default_generator,
    dtype: str = "float32",
    low: float = 0.0,
    high: float = 1.0,
) -> np.ndarray:
    """What `rank` holds of a tensor of numbers spread evenly over `[low, high)`.

    The value is `low + (high - low) * u`, where `u` is a multiple of `2**-b` in [0, 1) and `b` the bits that the dtype
    holds: 8 (bfloat16), 11, 24 or 53. It is computed in the dtype, for half precision in float32. What leaves the range
    by rounding becomes the first or the last number of the dtype in it. All are `low` where `high` is equal to it.

    Returns:
        array of `layout.local_shape(rank)`.

    Raises:
        ConfigError: another dtype, `low` above `high`, or no number of the dtype between them.
        LayoutError: the layout is partial along an axis.
    """
    kind = _kind(dtype)
    write = _uniform(kind, low, high, *_bounds(low, high, kind, dtype))
    return _draw(layout, rank, generator, 64 if dtype == "float64" else 32, kind.store, write)


def normal(
    layout: Layout,
    rank: int,
    generator: Generator = default_generator,
    dtype: str = "float32",
    mean: float = 0.0,
    std: float = 1.0,
) -> np.ndarray:
    """What `rank` holds of a tensor of normal numbers: `mean + std * z`, rounded to the dtype.

    Each `z` comes from 64 bits by the method of Box and Muller, so none is beyond 6.67. It is computed in float32, for
    float64 in float64.

    Returns:
        array of `layout.local_shape(rank)`.

    Raises:
        ConfigError: another dtype, a negative `std`, or numbers beyond what the dtype holds.
        LayoutError: the layout is partial along an axis.
    """
    kind = _kind(dtype)
    mean, std = _number(mean, "the mean"), _number(std, "the standard deviation")
    if std < 0:
        raise ConfigError(f"the standard deviation is {std}; it is not negative")
    if not abs(mean) + 7 * std <= kind.largest:
        raise ConfigError(f"mean {mean} and standard deviation {std} give numbers beyond the largest {dtype}")
    return _draw(layout, rank, generator, 64, kind.store, _normal(kind, mean, std))


def bernoulli(
    layout: Layout, rank: int, generator: Generator = default_generator, p: float = 0.5, dtype: str = "bool"
) -> np.ndarray:
    """What `rank` holds of a tensor that is 1 (or True) with probability `p`, else 0.

    `p` is rounded to a multiple of `2**-32`; 0 and 1 are exact.

    Returns:
        array of `layout.local_shape(rank)`; of bool, or of a dtype that `uniform` gives.

    Raises:
        ConfigError: another dtype, or `p` outside [0, 1].
        LayoutError: the layout is partial along an axis.
    """
    store = np.bool_ if dtype == "bool" else _kind(dtype).store
    return _draw(layout, rank, generator, 32, store, _choice(np.less, _threshold(p), store(1)))


def dropout_mask(
    layout: Layout, rank: int, generator: Generator = default_generator, p: float = 0.5, dtype: str = "float32"
) -> np.ndarray:
    """What `rank` holds of the mask that drops elements with probability `p`: 0 where `bernoulli(p)` of the same draw
    is 1, else `1 / (1 - p)`. All zeros for `p = 1`.

    Returns:
        array of `layout.local_shape(rank)`.

    Raises:
        ConfigError: another dtype, `p` outside [0, 1], or `1 / (1 - p)` beyond the largest number of the dtype.
        LayoutError: the layout is partial along an axis.
    """
    kind, threshold = _kind(dtype), _threshold(p)
    scale = 0.0 if threshold == _ALWAYS else 1 / (1 - p)
    if scale > kind.largest:
        raise ConfigError(f"dropout with p = {p} multiplies what it keeps by {scale}, beyond the largest {dtype}")
    value = _rounded(np.array([scale], kind.compute), kind).astype(kind.store)[0]
    return _draw(layout, rank, generator, 32, kind.store, _choice(np.greater_equal, threshold, value))


class _Kind(NamedTuple):
    """A dtype: the numpy types that hold it and that it is computed in, bits of its mantissa, exponent of its least
    positive number."""

    store: type
    compute: type
    bits: int
    least: int

    @property
    def largest(self) -> float:
        """The largest number."""
        return _at_most(float(np.finfo(self.store).max), self)


_KINDS = {
    "float16": _Kind(np.float16, np.float32, 11, -24),
    "bfloat16": _Kind(np.float32, np.float32, 8, -133),
    "float32": _Kind(np.float32, np.float32, 24, -149),
    "float64": _Kind(np.float64, np.float64, 53, -1074),
}

_ALWAYS = 1 << 32
"""The threshold that is above every 32-bit word."""


def _draw(layout: Layout, rank: int, generator: Generator, width: int, store: type, write: Write) -> np.ndarray:
    """The values of a rank for the next draw. All else is checked before, so that what is refused takes no number."""
    for axis, size, placement in zip(layout.mesh.names, layout.mesh.shape, layout.placements):
        if isinstance(placement, Partial) and size > 1:
            raise LayoutError(
                f"axis {axis!r}: a random value can't be pending as {placement} in {layout}; "
                "draw with replicate or shard there, and redistribute afterwards"
            )
    layout.mesh.place(rank)  # refuses a rank that is not of the mesh
    stream = Stream(generator.seed, generator.take(), width)

    def make(box: Box) -> np.ndarray:
        return stream.fill(np.empty(sizes_of(box), store), layout.shape, box, write)

    return layout.fill(rank, make)


def _kind(dtype: str) -> _Kind:
    if not isinstance(dtype, str) or dtype not in _KINDS:
        raise ConfigError(f"random numbers come as {', '.join(_KINDS)}, found {dtype!r}; draw one of them and cast it")
    return _KINDS[dtype]


def _number(value: float, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} is a number, found {value!r}") from error
    if not math.isfinite(number):
        raise ConfigError(f"{what} is a finite number, found {value!r}")
    return number


def _threshold(p: float) -> int:
    """How many of the 2**32 words count as a success."""
    if not 0 <= _number(p, "the probability p") <= 1:
        raise ConfigError(f"the probability p is from 0 to 1, found {p!r}")
    return round(p * _ALWAYS)


def _at_most(value: float, kind: _Kind) -> float:
    """The largest number of a dtype that is not above `value`."""
    step = math.ldexp(1.0, max(math.frexp(value)[1] - kind.bits, kind.least))
    return math.floor(value / step) * step


def _bounds(low: float, high: float, kind: _Kind, dtype: str) -> tuple[float, float]:
    """The first and the last number of a dtype in `[low, high)`."""
    low, high = _number(low, "low"), _number(high, "high")
    if low > high:
        raise ConfigError(f"uniform numbers in [{low}, {high}): low is above high")
    if not max(-low, high, high - low) <= kind.largest:
        raise ConfigError(f"uniform numbers in [{low}, {high}): the range is beyond the largest {dtype}")
    first = -_at_most(-low, kind)
    last = first if low == high else _at_most(math.nextafter(high, -math.inf), kind)
    if first > last or first != low == high:
        raise ConfigError(f"uniform numbers in [{low}, {high}): no {dtype} number lies there")
    return first, last


def _rounded(values: np.ndarray, kind: _Kind) -> np.ndarray:
    """float32 values, in place, rounded to numbers of bfloat16 (ties to even) if that is the dtype."""
    if kind.bits == 8:
        bits = values.view(np.uint32)
        bits += ((bits >> 16) & 1) + np.uint32(0x7FFF)
        bits &= np.uint32(0xFFFF0000)
    return values


def _choice(compare: np.ufunc, threshold: int, value: np.generic) -> Write:
    """Writes `value` for words that compare to the threshold, else 0."""
    code = value.view(f"u{value.itemsize}")  # as bits, because products of float16 are slow

    def write(bits: np.ndarray, out: np.ndarray) -> None:
        # Every word is below _ALWAYS, which is no word itself.
        chosen = compare(bits, np.uint32(threshold)) if threshold < _ALWAYS else compare(0, 1)
        np.multiply(chosen, code, out=out.view(code.dtype))

    return write


def _uniform(kind: _Kind, low: float, high: float, first: float, last: float) -> Write:
    """Writes uniform numbers, made from the highest bits of each word."""
    dtype = kind.compute
    step = dtype(2.0**-kind.bits)
    start, width = dtype(low), dtype(high) - dtype(low)

    def write(bits: np.ndarray, out: np.ndarray) -> None:
        values = (bits >> bits.dtype.type(bits.itemsize * 8 - kind.bits)).astype(dtype)
        values *= step
        values *= width
        values += start
        np.maximum(values, dtype(first), out=values)
        np.minimum(values, dtype(last), out=values)
        out[...] = _rounded(values, kind)

    return write


def _normal(kind: _Kind, mean: float, std: float) -> Write:
    """Writes normal numbers."""
    dtype = kind.compute
    std, mean = dtype(std), dtype(mean)

    def write(bits: np.ndarray, out: np.ndarray) -> None:
        values = _radius((bits >> np.uint64(32)).astype(dtype))
        values *= _wave(bits.astype(np.uint32).view(np.int32).astype(dtype))
        values *= std
        values += mean
        out[...] = _rounded(values, kind)

    return write


# Box and Muller: with u and v uniform, sqrt(-2 log u) cos(2 pi v) is normal. The cosine of an angle anywhere on the
# circle is distributed as the sine of an angle within a quarter turn to either side, which one short series gives.

_LOG_2 = 0.6931471805599453
_QUARTER_TURN = 1.5707963267948966


def _log_series(terms: int) -> list[float]:
    """Coefficients in `t**2` of `-2 log(x) / t`, where `t = (x - 1) / (x + 1)`."""
    return [-4 / (2 * term + 1) for term in range(terms)]


def _sine_series(terms: int) -> list[float]:
    """Coefficients in `v**2` of `sin(pi / 2 * v) / v`."""
    series = [_QUARTER_TURN]
    for term in range(1, terms):
        series.append(-series[-1] * _QUARTER_TURN * _QUARTER_TURN / (2 * term * (2 * term + 1)))
    return series


class _Form(NamedTuple):
    """A floating dtype's bits, and series that are exact to its precision where they are used."""

    integer: type
    mantissa: int
    root_half: int
    log: list[float]
    sine: list[float]


_FORMS = {
    np.dtype("float32"): _Form(np.int32, 23, 0x3F3504F3, _log_series(5), _sine_series(7)),
    np.dtype("float64"): _Form(np.int64, 52, 0x3FE6A09E667F3BCD, _log_series(10), _sine_series(11)),
}


def _radius(words: np.ndarray) -> np.ndarray:
    """`sqrt(-2 log u)` of `u = (word + 1) / 2**32`, for 32-bit words as float32 or float64, which are overwritten."""
    form = _FORMS[words.dtype]
    words += 1
    words *= 2.0**-32
    bits = words.view(form.integer)
    exponent = (bits - form.root_half) >> form.mantissa
    bits -= exponent << form.mantissa  # now u is words * 2**exponent, with words from sqrt(1/2) to sqrt(2)
    ratio = (words - 1) / (words + 1)  # log(words) is twice the area tangent of it
    values = _polynomial(ratio * ratio, form.log)
    values *= ratio
    values += exponent.astype(words.dtype) * (-2 * _LOG_2)
    return np.sqrt(values, out=values)


def _wave(words: np.ndarray) -> np.ndarray:
    """`sin(pi / 2 * v)` of `v = (word + 1/2) / 2**31`, for signed 32-bit words as float32 or float64, overwritten."""
    words *= 2.0**-31
    words += 2.0**-32
    values = _polynomial(words * words, _FORMS[words.dtype].sine)
    values *= words
    return values


def _polynomial(x: np.ndarray, coefficients: list[float]) -> np.ndarray:
    """`coefficients[0] + coefficients[1] * x + ...`"""
    values = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        values += coefficient
        values *= x
    values += coefficients[0]
    return values
