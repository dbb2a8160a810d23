"""`fully_shard` as MindSpore users meet it: `value_and_grad`, stock optimizers, recompute."""

BODIES = "tests.mindspore.fsdp_bodies"
BOUND = 1e-11  # float64 sums in another order


def test_the_frameworks_own_value_and_grad_returns_finished_shards(pool):
    assert max(pool("mindspore", 2).run(f"{BODIES}:framework_value_and_grad")) < BOUND


def test_the_frameworks_own_optimizer_trains_the_shards(pool):
    # float32, and AdamW divides by the root of what it has accumulated
    assert max(pool("mindspore", 2).run(f"{BODIES}:stock_optimizer")) < 1e-5


def test_recomputed_blocks_that_are_units_give_the_same_gradients(pool):
    assert max(pool("mindspore", 2).run(f"{BODIES}:recomputed")) < BOUND


def test_a_recompute_gathers_nothing_twice_and_nothing_for_nothing(pool):
    for (without, with_recompute), unused in pool("mindspore", 2).run(f"{BODIES}:gathered_under_recompute"):
        assert without == with_recompute > 0
        assert unused == 0


def test_a_step_without_gradients_leaves_the_next_one_right(pool):
    assert max(pool("mindspore", 2).run(f"{BODIES}:result_thrown_away")) < BOUND


def test_the_end_of_backward_is_found_without_the_engines_private_queue(pool):
    for error, message in pool("mindspore", 2).run(f"{BODIES}:without_the_private_queue"):
        assert error < BOUND
        assert "does not tell when a backward ends; take gradients with hyper_parallel.value_and_grad" in message


def test_the_frameworks_own_value_and_grad_returns_zeros_until_the_sum_is_reduced(pool):
    assert max(pool("mindspore", 2).run(f"{BODIES}:framework_accumulation")) < BOUND
