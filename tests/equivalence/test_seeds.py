"""Seeds of both frameworks: alike where ranks compute one model, otherwise where they have samples of their own."""

import numpy as np
import pytest

import hyper_parallel as hp
from hyper_parallel.core.execution.randomness import seed_for
from tests.equivalence import seed_bodies

SIZES = {"shard": 2, "tensor": 2}
SHARED = [True, False, True, False, False, True, False]
"""In each layer of `seed_bodies.dropped`: whether ranks of `tensor` have to drop the same."""


def test_ranks_of_one_model_get_one_seed_and_those_of_other_samples_others():
    mesh = hp.DeviceMesh.from_sizes({"replicate": 2, "shard": 2, "expert": 2, "context": 2, "tensor": 2})
    seeds = [seed_for(7, mesh, rank) for rank in mesh.ranks]
    for rank, seed in enumerate(seeds):
        assert seed == seeds[rank // 4 * 4] and 0 <= seed < 2**63
    assert len(set(seeds)) == 8 and seeds[0] == 7
    assert seed_for(8, mesh, 31) != seeds[31]


def test_manual_seed_seeds_the_frameworks_generators(pool, backend_name):
    first, second, third, fourth = pool(backend_name, 4).run(seed_bodies.seeded, SIZES)
    assert first == second and third == fourth and first != third
    assert first[0] == 11 and len(set(first[1])) == 3


def test_modules_switch_between_what_is_drawn_alike_and_what_is_not(pool, backend_name):
    body = {"torch": seed_bodies.torch_masks, "mindspore": seed_bodies.mindspore_masks}[backend_name]
    ranks = pool(backend_name, 4).run(body, SIZES)
    for one, other in ((0, 1), (2, 3)):
        alike = [bool(np.array_equal(*pair)) for pair in zip(ranks[one], ranks[other])]
        assert alike == 2 * SHARED
    everything = {mask.tobytes() for masks in ranks for mask in masks}
    assert len(everything) == 2 * (2 * 7 + 2 * 4)  # nothing is drawn twice: samples, and what is cut of them


def test_a_model_without_a_mesh_is_not_seeded_on_several_ranks(pool, backend_name):
    for told in pool(backend_name, 4).run(seed_bodies.refused):
        assert "or give the mesh: hyper_parallel.manual_seed(seed, plan.mesh)" in told


@pytest.mark.parametrize("seed", [-1, 2**64, "1"])
def test_a_seed_out_of_range_seeds_nothing(seed):
    before = hp.manual_seed(3).state_dict()
    with pytest.raises(hp.ConfigError, match="a seed"):
        hp.manual_seed(seed, hp.DeviceMesh((1,), ("shard",)))
    assert hp.manual_seed(3).state_dict() == before
