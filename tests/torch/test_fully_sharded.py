"""`fully_shard` as PyTorch users meet it: `.backward()`, `.grad`, stock optimizers, checkpointing, FSDP2 beside it."""

import pytest

BODIES = "tests.torch.fsdp_bodies"
BOUND = 1e-11  # float64 sums in another order


@pytest.mark.parametrize("sizes", [{"shard": 3}, {"replicate": 2, "shard": 2}], ids=str)
def test_training_equals_pytorch_fsdp2(pool, sizes):
    ranks = 3 if len(sizes) == 1 else 4
    assert max(pool("torch", ranks).run(f"{BODIES}:beside_fsdp2", sizes)) < BOUND


@pytest.mark.parametrize("sizes", [{"shard": 2}, {"replicate": 2, "shard": 2}], ids=str)
@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"param_dtype": "bfloat16"},
        {"param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": "float32"},
        {"param_dtype": "float16", "reduce_dtype": "float32"},
        {"reduce_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_twenty_steps_in_any_precision_are_pytorch_fsdp2s_bit_for_bit(pool, policy, sizes):
    """Sums of two are the same in any order, and those of two by two are taken in the same."""
    ranks = 4 if len(sizes) == 2 else 2
    for same in pool("torch", ranks).run(f"{BODIES}:half_precision_beside_fsdp2", policy, sizes, 20):
        assert len(same) > 200 and all(same)


@pytest.mark.parametrize("until_last", ["set_requires_gradient_sync", "set_requires_all_reduce"])
@pytest.mark.parametrize(
    "policy", [{"param_dtype": "bfloat16", "reduce_dtype": "float32"}, {"reduce_dtype": "bfloat16"}]
)
def test_half_precision_accumulates_as_in_pytorch_fsdp2(pool, policy, until_last):
    sizes = {"replicate": 2, "shard": 2}
    arguments = policy, sizes, 5, until_last
    for same in pool("torch", 4).run(f"{BODIES}:half_precision_beside_fsdp2", *arguments):
        assert len(same) > 50 and all(same)


def test_nothing_is_copied_around_collectives_where_fsdp2_packs_and_unpacks(pool):
    for ours, measured, expected in pool("torch", 2).run(f"{BODIES}:copies_beside_fsdp2"):
        assert ours == 0
        assert measured == expected and all(expected.values())


def test_gradients_accumulate_on_grad(pool):
    assert max(pool("torch", 2).run(f"{BODIES}:accumulated")) < BOUND


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("block_is_unit", [True, False])
def test_checkpointed_blocks_give_the_same_gradients(pool, reentrant, block_is_unit):
    assert max(pool("torch", 2).run(f"{BODIES}:recomputed", reentrant, block_is_unit)) < BOUND


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_are_cast_alike_when_they_are_computed_again(pool, reentrant):
    assert pool("torch", 2).run(f"{BODIES}:recomputed_in_half_precision", reentrant) == [True, True]


@pytest.mark.parametrize("kind", ["inside", "inside reentrant", "around", "around reentrant"])
def test_a_recompute_gathers_nothing_twice_and_nothing_for_nothing(pool, kind):
    for (without, with_recompute), unused in pool("torch", 2).run(f"{BODIES}:gathered_under_recompute", kind):
        assert without == with_recompute > 0
        assert unused == 0


def test_a_graph_that_is_kept_can_run_backward_twice(pool):
    assert pool("torch", 2).run(f"{BODIES}:kept_graph") == [True, True]


def test_an_optimizer_made_before_sharding_trains_the_shards(pool):
    assert pool("torch", 2).run(f"{BODIES}:optimizer_made_before") == [True, True]


@pytest.mark.parametrize("kind", ["tensor", "object", "slots", "list", "view"])
def test_a_unit_may_be_fed_a_leaf_and_may_return_anything(pool, kind):
    assert max(pool("torch", 2).run(f"{BODIES}:leaf_input", kind)) < BOUND


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_backward_that_raises_leaves_a_working_model(pool, ranks):
    assert max(pool("torch", ranks).run(f"{BODIES}:broken_backwards", 10)) < BOUND


def test_hooks_of_the_user_see_whole_weights_and_reduced_gradients(pool):
    assert pool("torch", 2).run(f"{BODIES}:hooks_of_the_user") == [[(7, 3), (4, 3)], [(7, 3), (3, 3)]]


def test_what_a_sharded_model_can_not_do_is_refused(pool):
    expected = {
        "copy": "can't be copied or pickled",
        "pickle": "can't be copied or pickled",
        "create_graph": "leave create_graph=True out",
        "restore": "restored between the forward and the backward",
        "assign": "was replaced after it had been sharded",
        "again": "is sharded already",
        "fields": "keeps the parameter weight in the Weights 'kept'",
    }
    for messages in pool("torch", 2).run(f"{BODIES}:misuse"):
        assert set(messages) == set(expected)
        for case, text in expected.items():
            assert text in messages[case]
