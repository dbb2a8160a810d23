"""`fully_shard` as PyTorch users meet it: `.backward()`, `.grad`, stock optimizers, checkpointing, FSDP2 beside it."""

import pytest

BODIES = "tests.torch.fsdp_bodies"
BOUND = 1e-11  # float64 sums in another order


@pytest.mark.parametrize("sizes", [{"shard": 3}, {"replicate": 2, "shard": 2}], ids=str)
def test_training_equals_pytorch_fsdp2(pool, sizes):
    ranks = 3 if len(sizes) == 1 else 4
    assert max(pool("torch", ranks).run(f"{BODIES}:beside_fsdp2", sizes)) < BOUND


def test_gradients_accumulate_on_grad(pool):
    assert max(pool("torch", 2).run(f"{BODIES}:accumulated")) < BOUND


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("block_is_unit", [True, False])
def test_checkpointed_blocks_give_the_same_gradients(pool, reentrant, block_is_unit):
    assert max(pool("torch", 2).run(f"{BODIES}:recomputed", reentrant, block_is_unit)) < BOUND


def test_a_graph_that_is_kept_can_run_backward_twice(pool):
    assert pool("torch", 2).run(f"{BODIES}:kept_graph") == [True, True]


def test_an_optimizer_made_before_sharding_trains_the_shards(pool):
    assert pool("torch", 2).run(f"{BODIES}:optimizer_made_before") == [True, True]


def test_a_model_without_values_is_refused(pool):
    for message in pool("torch", 2).run(f"{BODIES}:without_values"):
        assert "0.weight has no values" in message and "load it before sharding" in message
