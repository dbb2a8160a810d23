"""Production mode of both backends on real ranks: the decoder against Hugging Face's numbers and against itself."""

import numpy as np
import pytest

from tests.equivalence import decoder_bodies, production_bodies
from tests.equivalence.test_decoder import QWEN3, SIZES, random_case

MESHES = [{"tensor": 2}, {"shard": 2, "tensor": 2}, {"replicate": 2, "tensor": 2}, {"tensor": 4}]
VARIANTS = {
    "tied embeddings": {"tie_word_embeddings": True},
    "odd sizes": {"vocab_size": 37, "hidden_size": 23, "intermediate_size": 29},
    "fewer keys than ranks": {"num_heads": 8, "num_kv_heads": 2},
}


def ranks_of(sizes):
    return int(np.prod(list(sizes.values())))


def assert_step(results, loss, gradients, relative):
    """Losses of data-parallel ranks average to `loss`, and every rank has its part of every gradient, within `relative`
    of the largest element."""
    assert np.mean([found for found, *_ in results]) == pytest.approx(loss, rel=1e-6)
    norm = np.sqrt(sum(float((each.astype(np.float64) ** 2).sum()) for each in gradients.values()))
    for rank, (_, found, layouts, found_norm) in enumerate(results):
        assert found.keys() == gradients.keys()
        for name, whole in gradients.items():
            expected = layouts[name].shard(whole, rank)
            assert found[name].shape == expected.shape, name
            np.testing.assert_allclose(
                found[name], expected, rtol=0, atol=relative * np.abs(whole).max(), err_msg=f"rank {rank}: {name}"
            )
        assert found_norm == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_sharded_as_well_every_number_is_hugging_faces(pool, backend_name, sizes, sequence_parallel):
    weights = {name[2:]: QWEN3[name] for name in QWEN3 if name.startswith("p:")}
    gradients = {name[2:]: QWEN3[name] for name in QWEN3 if name.startswith("g:")}
    body = production_bodies.one_step
    results = pool(backend_name, ranks_of(sizes)).run(body, SIZES, weights, QWEN3["__ids"], sizes, sequence_parallel)
    # float32 sums of a few hundred terms in another order: a few units of 6e-8, as without a plan.
    assert_step(results, float(QWEN3["__loss"]), gradients, relative=5e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sizes", [{"shard": 2, "tensor": 2}, {"tensor": 4}], ids=str)
def test_every_shape_gives_the_numbers_of_one_device(pool, backend_name, sizes, variant):
    case = random_case(batch=4, **VARIANTS[variant])
    [(loss, gradients)] = pool(backend_name, 1).run(decoder_bodies.loss_and_gradients, *case)
    results = pool(backend_name, ranks_of(sizes)).run(production_bodies.one_step, *case, sizes, True)
    # The wide weights of these cases make intermediate values, and with them the rounding, some ten times larger.
    assert_step(results, loss, gradients, relative=5e-5)


def test_whole_parameters_are_found_and_restore_gives_back_the_model(pool, backend_name):
    case = random_case(tie_word_embeddings=True)
    assert all(pool(backend_name, 4).run(production_bodies.undone, *case, {"shard": 2, "tensor": 2}))


def test_mistakes_are_refused_by_every_rank_before_anything_is_changed(pool, backend_name):
    sizes, weights, _ = random_case()
    for rank, messages in enumerate(pool(backend_name, 2).run(production_bodies.refusals, sizes, weights)):
        assert "PlanError: this plan for Decoder does not fit the model" in messages["another model"]
        assert "lm_head.weight has shape (50, 32), planned was (96, 32)" in messages["another model"]
        one = "does not fit the model" if rank else "PlanError: parallelize: rank 1 refuses its plan, so no rank"
        assert one in messages["one rank"]
        assert "LayoutError: the mesh tensor=4 has 4 ranks, 0 to 3, but 2 have joined" in messages["mesh"]
        assert "ConfigError: parallelize: this plan is for the mesh context=2" in messages["context"]
        assert "PlanError" in messages["twice"] and "sharded already" in messages["twice"]


@pytest.mark.parametrize("idle", [False, True], ids=["busy", "idle"])
@pytest.mark.parametrize("sizes", [{"expert": 2, "tensor": 2}, {"expert": 4}, {"shard": 2, "expert": 2}], ids=str)
def test_tokens_travel_to_their_experts(pool, backend_name, sizes, idle):
    ids = np.random.default_rng(5).integers(0, 24, (4, 6))
    for errors in pool(backend_name, 4).run(production_bodies.step_of_experts, ids, sizes, idle):
        assert max(errors.values()) < 5e-6, errors  # float32, as above


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"shard": 2}], ids=str)
def test_inside_of_boundaries_runs_what_runs_without_a_plan(pool, backend_name, sizes):
    case = random_case(batch=2)
    for without, found in pool(backend_name, 2).run(production_bodies.calls_in_blocks, *case, sizes):
        assert len(found) == 4 and all(len(names) > 10 for names in found.values())
        assert found == without
