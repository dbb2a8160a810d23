"""Random bits by global index: any box of a global tensor, without the rest of it.

Philox 4x64-10 turns a key (two 64-bit numbers) and a counter into a block of four 64-bit words. Here the key is the
seed and the number of the draw, and the counter is the place in the stream. So the word of an element depends on the
seed, the draw and the element's row-major global index, and on nothing else.

Two draws never overlap: each has a key of its own, and for one key each counter gives another block. The 32-bit and the
64-bit stream of a draw keep to different counters.
"""

from __future__ import annotations

from operator import index
from typing import Callable, Sequence

import numpy as np

from hyper_parallel.core.errors import ConfigError, LayoutError
from hyper_parallel.core.regions import Box, sizes_of

WORD_LIMIT = 2**64
"""Seeds and draw numbers are below this."""

_BLOCK = 1 << 15
"""Words made at a time: they and what is computed from them stay in a core's own cache."""

_CHEAP_GAP_BYTES = 2560
"""What lies between two runs is made and dropped up to here: as measured, making it costs 0.37 ns a byte and starting
anew about 1 us."""

Write = Callable[[np.ndarray, np.ndarray], object]
"""`write(bits, out)` turns words into values, elementwise: two arrays of one shape, not always contiguous."""


class Stream:
    """The 32-bit or the 64-bit words of one draw, in order, from any place.

    Args:
        seed, draw: whole numbers in [0, 2**64).
        width: bits of a word, 32 or 64. The 32-bit words are the halves of 64-bit ones, the lower half first.

    Raises:
        ConfigError: a seed or a draw number out of range.
    """

    def __init__(self, seed: int, draw: int, width: int):
        key = [word64(seed, "a seed"), word64(draw, "a draw number")]
        self.dtype = np.dtype(f"uint{width}")
        self._philox = np.random.Philox(key=np.array(key, np.uint64))
        # The last word of the counter keeps the two streams apart; the first one counts blocks of four 64-bit words.
        # Lists, because numpy takes a state of lists in half the time.
        self._counter = [0, 0, 0, width]
        self._state = {
            **self._philox.state,
            "state": {"counter": self._counter, "key": key},
            "buffer": [0] * 4,
        }
        self._per_block = 4 * 64 // width

    def words(self, start: int, count: int) -> np.ndarray:
        """Words `[start, start + count)`."""
        block, skipped = divmod(start, self._per_block)
        return self._blocks(block, skipped + count).view(self.dtype)[skipped : skipped + count]

    def _blocks(self, block: int, count: int) -> np.ndarray:
        """At least `count` words from the start of a block on, as 64-bit words."""
        self._counter[0] = block  # numpy counts up before it makes a block, so the first one has the counter 1
        self._philox.state = self._state
        return self._philox.random_raw(-(-count * self.dtype.itemsize // 8))

    def fill(self, out: np.ndarray, shape: Sequence[int], box: Box, write: Write) -> np.ndarray:
        """`out`, contiguous and of the shape of `box`, after `write(words, part of out)` for every part of it.

        Raises:
            LayoutError: `box` is no box of a tensor of `shape`.
        """
        _check_box(shape, box)
        if out.size:
            start, sizes, strides = _runs(shape, box)
            self._fill(out.reshape(sizes), start, strides, write)
        return out

    def _fill(self, out: np.ndarray, start: int, strides: Sequence[int], write: Write) -> None:
        """Fill in parts of about `_BLOCK` words made."""
        row = strides[0] if self._is_dense(out.shape, strides) else out[0].size
        if row > _BLOCK:
            for place in range(len(out)):
                self._fill(out[place], start + place * strides[0], strides[1:], write)
            return
        rows = _BLOCK // row
        for first in range(0, len(out), rows):
            part = out[first : first + rows]
            write(self._gather(part.shape, start + first * strides[0], strides), part)

    def _gather(self, sizes: Sequence[int], start: int, strides: Sequence[int]) -> np.ndarray:
        """The words at `start + i * strides[0] + j * strides[1] + ...`, an array of `sizes`."""
        if len(sizes) == 1:
            return self.words(start, sizes[0])
        if self._is_dense(sizes, strides):
            words = self.words(start, _span(sizes, strides))
            return np.ndarray(sizes, self.dtype, words, 0, [stride * self.dtype.itemsize for stride in strides])
        if len(sizes) == 2 and strides[0] % self._per_block == 0:
            return self._aligned_runs(*sizes, start, strides[0])
        bits = np.empty(sizes, self.dtype)
        for place in range(sizes[0]):
            bits[place] = self._gather(sizes[1:], start + place * strides[0], strides[1:])
        return bits

    def _aligned_runs(self, runs: int, length: int, start: int, stride: int) -> np.ndarray:
        """Runs of words, all from the same place in a block on: joined first and cut at once, because cutting each
        would cost as much as making some hundred words."""
        block, skipped = divmod(start, self._per_block)
        step = stride // self._per_block
        made = [self._blocks(block + run * step, skipped + length) for run in range(runs)]
        return np.concatenate(made).view(self.dtype).reshape(runs, -1)[:, skipped : skipped + length]

    def _is_dense(self, sizes: Sequence[int], strides: Sequence[int]) -> bool:
        """Tell whether to make the gaps too. Gaps never get smaller from an inner dim to an outer one."""
        return (strides[0] - _span(sizes[1:], strides[1:])) * self.dtype.itemsize <= _CHEAP_GAP_BYTES


def bits32(seed: int, draw: int, shape: Sequence[int], box: Box) -> np.ndarray:
    """The 32-bit words of a box of a global tensor, one for each element.

    Args:
        seed, draw: whole numbers in [0, 2**64).
        shape: the global shape.
        box: slices with start and stop, one for each dim of `shape`.

    Returns:
        uint32 array of the shape of the box.

    Raises:
        ConfigError: a seed or a draw number out of range.
        LayoutError: `box` is no box of a tensor of `shape`.
    """
    return _bits(Stream(seed, draw, 32), shape, box)


def bits64(seed: int, draw: int, shape: Sequence[int], box: Box) -> np.ndarray:
    """As `bits32`, with 64-bit words (uint64), which share nothing with the 32-bit words of the draw."""
    return _bits(Stream(seed, draw, 64), shape, box)


def word64(value: int, what: str) -> int:
    """`value` as a plain int in [0, 2**64); `ConfigError` names `what` if it is none."""
    try:
        number = -1 if isinstance(value, bool) else index(value)
    except TypeError:
        number = -1
    if 0 <= number < WORD_LIMIT:
        return number
    raise ConfigError(f"{what} is a whole number from 0 to 2**64 - 1, found {value!r}")


def _bits(stream: Stream, shape: Sequence[int], box: Box) -> np.ndarray:
    _check_box(shape, box)
    return stream.fill(np.empty(sizes_of(box), stream.dtype), shape, box, lambda bits, out: np.copyto(out, bits))


def _check_box(shape: Sequence[int], box: Box) -> None:
    bounds = [(part.start, part.stop, part.step or 1) for part in box]
    fits = len(box) == len(shape) and all(None not in each for each in bounds)
    if not fits or not all(0 <= low <= high <= size and step == 1 for (low, high, step), size in zip(bounds, shape)):
        raise LayoutError(
            f"a box of a tensor of shape {list(shape)} is one slice(start, stop) inside each of its dims, found {box}"
        )


def _runs(shape: Sequence[int], box: Box) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Start, sizes and strides of a box among the row-major elements, with as few dims as describe it. The last dim
    is a run of neighbours: the innermost dim that the box cuts, times what stands inside it."""
    start, step = 0, 1
    sizes, strides = [1], [1]
    for size, part in zip(reversed(shape), reversed(box)):
        count = part.stop - part.start
        start += part.start * step
        if step == sizes[-1] * strides[-1]:
            sizes[-1] *= count
        elif count > 1:
            sizes.append(count)
            strides.append(step)
        step *= size
    return start, tuple(reversed(sizes)), tuple(reversed(strides))


def _span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Number of words from the first to the last one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))
