"""Text as bytes, cut into windows, split into training and held-out parts, and dealt to ranks. numpy only.

What a step trains on depends on the seed and the step, never on the number of ranks, on micro-batches or on the
backend.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Sequence

import numpy as np

from hyper_parallel.core.errors import ConfigError

VOCABULARY = 256
IGNORE = -100

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True)
class Batch:
    """`inputs` int32 [B, T]; `targets` int32 [B, T], the byte that follows each input, or IGNORE after a file's end."""

    inputs: np.ndarray
    targets: np.ndarray

    @property
    def valid_tokens(self) -> int:
        """Number of targets that count."""
        return int((self.targets != IGNORE).sum())

    def __getitem__(self, rows: slice) -> Batch:
        return Batch(self.inputs[rows], self.targets[rows])

    def __len__(self) -> int:
        return len(self.inputs)

    def part(self, rank: int, ranks: int) -> Batch:
        """The rank's own contiguous rows; the number of rows must be a multiple of `ranks`."""
        share = len(self) // ranks
        return self[rank * share : (rank + 1) * share]

    def split(self, size: int) -> Iterator[Batch]:
        """Consecutive micro-batches of `size` rows."""
        return (self[start : start + size] for start in range(0, len(self), size))


@dataclass(frozen=True)
class Corpus:
    """Files as bytes, in an order that depends on their names alone."""

    texts: tuple[bytes, ...]
    unreadable: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all texts."""
        return sum(map(len, self.texts))

    def digest(self) -> str:
        """A hexadecimal fingerprint of the contents; equal on two machines when they read the same text."""
        sha = hashlib.sha256()
        for text in self.texts:
            sha.update(len(text).to_bytes(8, "little") + text)
        return sha.hexdigest()


def read_corpus(paths: Sequence[Path], extensions: Sequence[str]) -> Corpus:
    """Read files, and directories recursively; no paths: the source of the running Python's standard library.

    Files that can't be read are left out and listed. Raises `ConfigError` when no text is left.
    """
    texts, unreadable = {}, []
    for name, path in _library_files() if not paths else _named_files(paths, extensions):
        try:
            texts[name] = path.read_bytes()
        except OSError:
            unreadable.append(name)
    # A digest's order mixes the files, so that the held-out part resembles the rest.
    order = sorted(texts, key=lambda name: hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest())
    kept = tuple(texts[name] for name in order if len(texts[name]) >= 2)
    if not kept:
        where = ", ".join(map(str, paths)) or "the standard library"
        raise ConfigError(
            f"data.path: no text in {where}: found {len(texts)} empty and {len(unreadable)} unreadable files with "
            f"an ending among {', '.join(extensions)}; choose another path, or more data.extensions"
        )
    return Corpus(kept, tuple(unreadable))


def _library_files() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    for name, path in _below(root, (".py",)):
        if _NOT_LIBRARY.isdisjoint(Path(name).parts):
            yield name, path


def _named_files(paths: Sequence[Path], extensions: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for index, path in enumerate(paths):
        if path.is_dir():
            yield from ((f"{index}/{name}", file) for name, file in _below(path, extensions))
        else:
            yield f"{index}/{path.name}", path


def _below(root: Path, extensions: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Files below a directory by name relative to it, so that a moved directory gives the same corpus."""
    for folder, _, names in os.walk(root):
        for path in (Path(folder, name) for name in names):
            if path.suffix in extensions:
                yield path.relative_to(root).as_posix(), path


class Windows:
    """Consecutive windows of `length` inputs over every text of a corpus; the last one of a text is padded.

    Every byte but the first of each text is a target exactly once.
    """

    def __init__(self, corpus: Corpus, length: int):
        counts = [(len(text) - 2) // length + 1 for text in corpus.texts]
        self._texts = [np.frombuffer(text, np.uint8) for text in corpus.texts]
        self._ends = np.cumsum(counts)
        self._length = length

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, indices: Sequence[int]) -> Batch:
        """The windows of those indices, in that order; a negative index is a row of padding."""
        inputs = np.zeros((len(indices), self._length), np.int32)
        targets = np.full((len(indices), self._length), IGNORE, np.int32)
        for row, index in enumerate(indices):
            if index >= 0:
                piece = self._piece(int(index))
                inputs[row, : len(piece) - 1] = piece[:-1]
                targets[row, : len(piece) - 1] = piece[1:]
        return Batch(inputs, targets)

    def _piece(self, index: int) -> np.ndarray:
        text = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[text - 1]) if text else 0
        start = (index - first) * self._length
        return self._texts[text][start : start + self._length + 1]


class Sampler:
    """Training batches by step, and the fixed held-out batches.

    The last `held_out_fraction` of the windows, at least one, is held out. Training windows are dealt in a new random
    order in each pass over them; `seed` and the pass decide it. Raises `ConfigError` when the text is too short.
    """

    def __init__(self, windows: Windows, held_out_fraction: float, batch_size: int, seed: int):
        held_out = max(1, round(len(windows) * held_out_fraction))
        self.training_windows = len(windows) - held_out
        self.held_out_windows = held_out
        if self.training_windows < 1:
            raise ConfigError(
                f"data.path: the text fills {len(windows)} window(s) of data.sequence_length, and {held_out} of them "
                "are held out; give more text, shorter sequences, or a smaller data.held_out_fraction"
            )
        self._windows, self._batch_size, self._seed = windows, batch_size, seed
        self._order: tuple[int, np.ndarray] | None = None

    def training_batch(self, step: int) -> Batch:
        """The global batch of the step, counted from 0; the same for every rank."""
        positions = range(step * self._batch_size, (step + 1) * self._batch_size)
        return self._windows.batch([self._window_at(position) for position in positions])

    def held_out_batches(self, count: int) -> Iterator[Batch]:
        """At most `count` global batches spread evenly over the held-out windows; the last one is padded."""
        wanted = min(count * self._batch_size, self.held_out_windows)
        chosen = self.training_windows + np.arange(wanted) * self.held_out_windows // wanted
        padded = np.full(-(-wanted // self._batch_size) * self._batch_size, -1)
        padded[:wanted] = chosen
        return (self._windows.batch(rows) for rows in padded.reshape(-1, self._batch_size))

    def _window_at(self, position: int) -> int:
        pass_number, place = divmod(position, self.training_windows)
        if self._order is None or self._order[0] != pass_number:
            generator = np.random.Generator(np.random.Philox(key=[self._seed, pass_number]))
            self._order = pass_number, generator.permutation(self.training_windows)
        return int(self._order[1][place])
