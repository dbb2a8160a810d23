"""Dropout in production and validation: what ranks share they drop alike, and of what they have parts each its own."""

from __future__ import annotations

import pytest

from tests.torch import dropout_bodies

FAMILIES = list(dropout_bodies.DROPPING)

CUT = {
    ("gpt2", False): [False, True, False, False, True, False, False],
    ("gpt2", True): [False, True, False, False, True, False, False],
    ("opt", False): [True, False, False, True, False, False],
    ("opt", True): [True, True, True, True, True, True],
    ("bloom", False): [True, False, False, True, False, False],
    ("bloom", True): [True, True, True, True, True, True],
    ("llama", False): [True, True],
    ("llama", True): [True, True],
}
"""Of two layers, whether ranks draw for a part each, dropout by dropout: embeddings (GPT-2), probabilities of attention
(heads are cut), what attention gives and what the feed-forward gives. GPT-2 drops of these while they are pending sums,
the others behind their reduction, which with sequence parallelism leaves each rank a part of the tokens."""


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_one_device_that_drops_what_the_ranks_do(pool, family, sequence_parallel):
    sizes = {"shard": 2, "tensor": 2}
    for error, masks, same_samples in pool("torch", 4).run(dropout_bodies.one_step, family, sizes, sequence_parallel):
        assert error < 1e-12  # float64's rounding in sums of a few hundred terms
        assert [cut for cut, _ in masks] == CUT[family, sequence_parallel]
        assert all(alike != cut for cut, alike in masks)
        assert not same_samples


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_validation_drops_what_production_does(pool, sequence_parallel):
    sizes = {"shard": 2, "tensor": 2}
    for same, changed, goes_on in pool("torch", 4).run(dropout_bodies.both_modes, "gpt2", sizes, sequence_parallel):
        assert same and changed and goes_on


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_a_checkpoint_computes_again_drops_the_same(pool, sequence_parallel):
    for same in pool("torch", 2).run(dropout_bodies.checkpointed, "gpt2", sequence_parallel):
        assert same == dict.fromkeys(same, True) and len(same) == 4


def test_ranks_that_are_seeded_otherwise_are_told_so(pool):
    for told in pool("torch", 2).run(dropout_bodies.unequal, "gpt2", False):
        assert told.startswith(
            "transformer.drop: dropout over tensor: it draws for what is the same on every rank, or a part of one sum, "
            "but ranks 0 and 1 of the axis would draw other numbers: their random generators stand otherwise"
        )
        assert "hyper_parallel.manual_seed(seed, model) on every rank" in told


def test_an_exception_leaves_the_generators_to_be_put_right(pool):
    for found in pool("torch", 2).run(dropout_bodies.interrupted):
        assert found == [(True, True), (True, True)]
