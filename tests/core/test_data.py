"""Text as bytes: windows that lose nothing, a split that shares nothing, batches that no layout of ranks changes."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.errors import ConfigError
from hyper_parallel.train.data import IGNORE, Batch, Corpus, Sampler, Windows, read_corpus

texts = st.lists(st.binary(min_size=2, max_size=40), min_size=1, max_size=8).map(tuple)


def pairs(batch: Batch) -> list[tuple[int, int]]:
    """Every (input, target) that counts, in order."""
    counts = batch.targets != IGNORE
    return list(zip(batch.inputs[counts].tolist(), batch.targets[counts].tolist(), strict=True))


@given(texts, st.integers(1, 12))
def test_windows_hold_every_byte_and_the_one_that_follows_it_exactly_once(texts: tuple[bytes, ...], length: int):
    windows = Windows(Corpus(texts, ()), length)
    expected = [pair for text in texts for pair in zip(text, text[1:], strict=False)]
    batch = windows.batch(range(len(windows)))
    assert batch.inputs.shape == (len(windows), length) and batch.inputs.dtype == np.int32
    assert pairs(batch) == expected
    assert batch.valid_tokens == len(expected)


def test_a_row_of_padding_counts_nothing():
    assert Windows(Corpus((b"some text",), ()), 4).batch([-1, 0]).valid_tokens == 4


@pytest.fixture
def sampler() -> Sampler:
    corpus = Corpus(tuple(bytes([number]) * (5 + 7 * number) for number in range(1, 20)), ())
    return Sampler(Windows(corpus, 8), held_out_fraction=0.25, batch_size=12, seed=5)


def test_the_parts_of_all_ranks_and_micro_batches_make_up_the_global_batch(sampler: Sampler):
    batch = sampler.training_batch(3)
    for ranks, size in ((1, 12), (2, 3), (3, 4), (4, 1)):
        pieces = [micro for rank in range(ranks) for micro in batch.part(rank, ranks).split(size)]
        assert {len(piece) for piece in pieces} == {size}
        np.testing.assert_array_equal(np.concatenate([piece.inputs for piece in pieces]), batch.inputs)
        np.testing.assert_array_equal(np.concatenate([piece.targets for piece in pieces]), batch.targets)
        assert sum(piece.valid_tokens for piece in pieces) == batch.valid_tokens


def windows_of(sampler: Sampler, steps: range) -> list[bytes]:
    return [row.tobytes() for step in steps for row in sampler.training_batch(step).inputs]


def test_a_step_depends_on_the_seed_and_the_step_alone(sampler: Sampler):
    again = Sampler(sampler._windows, 0.25, 12, seed=5)
    other = Sampler(sampler._windows, 0.25, 12, seed=6)
    later = windows_of(sampler, range(4, 6))
    assert windows_of(again, range(4, 6)) == later, "also when the steps before were never drawn"
    assert windows_of(other, range(4, 6)) != later


def test_each_pass_sees_every_training_window_once():
    corpus = Corpus((bytes(range(241)),), ())
    sampler = Sampler(Windows(corpus, 8), held_out_fraction=0.2, batch_size=6, seed=0)
    assert sampler.training_windows == 24
    first, second = windows_of(sampler, range(0, 4)), windows_of(sampler, range(4, 8))
    assert len(set(first)) == 24
    assert set(first) == set(second) and first != second, "in a new order"


def test_training_and_held_out_text_share_nothing():
    corpus = Corpus(tuple(np.random.default_rng(number).bytes(100) for number in range(10)), ())
    sampler = Sampler(Windows(corpus, 10), held_out_fraction=0.3, batch_size=7, seed=0)
    trained = set(windows_of(sampler, range(10)))
    held_out = {row.tobytes() for batch in sampler.held_out_batches(10) for row in batch.inputs if row.any()}
    assert len(trained) == sampler.training_windows == 70 and len(held_out) == sampler.held_out_windows == 30
    assert not trained & held_out


def test_held_out_batches_are_whole_however_little_text_there_is(sampler: Sampler):
    # 46 windows are held out: four batches of 12, the last with two rows of padding.
    batches = list(sampler.held_out_batches(count=100))
    assert [len(batch) for batch in batches] == [12] * len(batches)
    rows = sum(int((batch.targets != IGNORE).any(axis=1).sum()) for batch in batches)
    assert rows == sampler.held_out_windows


def test_fewer_held_out_batches_are_spread_evenly():
    corpus = Corpus((bytes(range(201)),), ())
    sampler = Sampler(Windows(corpus, 1), held_out_fraction=0.5, batch_size=10, seed=0)
    (batch,) = sampler.held_out_batches(1)
    assert batch.inputs[:, 0].tolist() == list(range(100, 200, 10))


def test_too_little_text_is_an_error():
    with pytest.raises(ConfigError, match="the text fills 1 window"):
        Sampler(Windows(Corpus((b"short",), ()), 8), held_out_fraction=0.1, batch_size=1, seed=0)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_directories_are_searched_for_the_extensions_and_named_files_are_always_taken(tmp_path: Path):
    write(tmp_path, {"a/one.py": "one", "a/b/two.py": "two", "a/three.bin": "three", "four.bin": "four"})
    corpus = read_corpus([tmp_path / "a", tmp_path / "four.bin"], [".py"])
    assert sorted(corpus.texts) == [b"four", b"one", b"two"]


def test_a_corpus_is_the_same_wherever_its_directory_lies(tmp_path: Path):
    files = {f"{number}.txt": f"text {number}" for number in range(20)}
    write(tmp_path / "here", files)
    write(tmp_path / "there", dict(reversed(files.items())))
    here, there = (read_corpus([tmp_path / place], [".txt"]) for place in ("here", "there"))
    assert here.texts == there.texts and here.digest() == there.digest()


def test_a_file_that_can_not_be_read_is_left_out_and_listed(tmp_path: Path):
    write(tmp_path, {"good.txt": "good"})
    # A link to nowhere can't be read by anybody, not even by root.
    os.symlink(tmp_path / "nowhere", tmp_path / "bad.txt")
    corpus = read_corpus([tmp_path], [".txt"])
    assert corpus.texts == (b"good",) and corpus.unreadable == ("0/bad.txt",)


def test_no_text_at_all_is_an_error_that_names_the_place(tmp_path: Path):
    write(tmp_path, {"empty.txt": "", "other.c": "int x;"})
    with pytest.raises(ConfigError, match=f"no text in {tmp_path}: found 1 empty and 0 unreadable files"):
        read_corpus([tmp_path], [".txt"])


def test_the_default_is_the_standard_library_without_its_tests():
    corpus = read_corpus([], [".py"])
    assert corpus.total_bytes > 5_000_000
    assert any(b"class JSONEncoder" in text for text in corpus.texts)
    # Some distributions leave the tests out altogether.
    test = Path(sysconfig.get_path("stdlib"), "test", "test_abc.py")
    assert not test.exists() or test.read_bytes() not in corpus.texts
