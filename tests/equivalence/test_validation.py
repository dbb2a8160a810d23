"""Validation on real ranks, of both backends: what production computes, and an error where a plan is broken."""

import math

import pytest

from tests.equivalence import validation_bodies
from tests.equivalence.test_decoder import random_case

BOUNDARIES = {False: 11, True: 13}
"""Of the decoder's two layers, with sequence parallelism the edges of the blocks too."""


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"shard": 2, "tensor": 2}], ids=str)
def test_validation_computes_what_production_does(pool, backend_name, sizes, sequence_parallel):
    ranks = 1
    for size in sizes.values():
        ranks *= size
    case = random_case(batch=4, tie_word_embeddings=False)
    for same, operators, boundaries in pool(backend_name, ranks).run(
        validation_bodies.both_modes, *case, sizes, sequence_parallel
    ):
        assert same
        assert operators > 100
        assert len(boundaries) == BOUNDARIES[sequence_parallel]


def test_a_plan_that_is_broken_in_one_place_stops_there(pool, backend_name):
    for told in pool(backend_name, 2).run(validation_bodies.broken, *random_case(batch=2), False):
        assert told.pop("nothing") == "holds"
        for name, (module, what, line) in EXPECTED.items():
            message = told.pop(name)
            assert message.startswith(f"{module}: "), message
            assert what in message and f"plan: {line}" in message, message
        assert not told


DIFFERENT = {
    "a token": (
        "Decoder: ",
        "int64 [2, 11]: it has to be the same on every rank of tensor, but at [1, 2] rank {even} has",
    ),
    "a length": ("Decoder: ", "but it is int64 [2, 11] on rank {even} and int64 [2, 10] on rank {odd}"),
    "a dtype": ("Decoder: ", "but it is int64 [2, 11] on rank {even} and int32 [2, 11] on rank {odd}"),
    "targets": (
        "cross_entropy: targets",
        "int64 [2, 10]: it has to be the same on every rank of tensor, but at [1, 1]",
    ),
    "the length of targets": ("cross_entropy: targets", "but it is int64 [2, 10] on rank"),
    "a parameter": ("parallelize: ranks start", "rank 0 hold: model.layers.1.input_layernorm.weight (rank {odd})\n"),
    "heads": (
        "model.layers.0.self_attn: reshape over tensor",
        "units of 8, and the shape [2, 11, 4, 4] splits it into",
    ),
}
"""What ranks differ in, or their code has wrong; how the message of every rank begins, and what is in it."""


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"shard": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_do_not_compute_one_model_all_stop(pool, backend_name, name, sizes):
    config, weights, ids = random_case(batch=2)
    odd = math.prod(sizes.values()) - 1
    for told in pool(backend_name, odd + 1).run(validation_bodies.different, config, weights, ids, sizes, name):
        start, what = DIFFERENT[name]
        assert told.startswith(start) and what.format(odd=odd, even=odd - 1) in told, told


EXPECTED = {
    "a weight cut along its inputs": (
        "model.layers.0.self_attn.q_proj",
        "is shard(1)",
        "parameter model.layers.0.self_attn.q_proj.weight: placements: {tensor: shard(1)}, pending: []",
    ),
    "a pending gradient that is whole": (
        "model.norm",
        "each rank would compute a part of the gradient",
        "parameter model.norm.weight: placements: {}, pending: [tensor]",
    ),
    "a boundary that is missing": (
        "model.layers.0.self_attn.q_proj",
        "each rank would compute a part of the gradient",
        "boundary model.layers.0.input_layernorm, output hidden: after: {tensor: replicate}, gradient: "
        "{tensor: replicate}",
    ),
    "a table without its boundary": (
        "model.embed_tokens",
        "this rank holds a part of",
        "parameter model.embed_tokens.weight: placements: {tensor: shard(0)}, pending: []",
    ),
    "a gradient that nobody sums up": (
        "model.layers.0.self_attn.q_proj",
        "each rank would compute a part of the gradient",
        "boundary model.layers.0.self_attn, input hidden: after: {tensor: replicate}, gradient: {tensor: replicate}",
    ),
    "a sum that is taken for whole": (
        "model.layers.0.self_attn",
        "the output 'hidden': it is partial over tensor, the plan says replicate",
        "boundary model.layers.0.self_attn, output hidden: before: {tensor: replicate}, gradient: {tensor: replicate}",
    ),
}
"""The module, what is said, and the line of the plan."""
