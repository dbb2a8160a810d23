"""`fully_shard` on both backends: against one device in float64, every rank checked."""

import pytest

from tests.equivalence.toy import ToyConfig

MESHES = [{"shard": 1}, {"shard": 2}, {"replicate": 2}, {"shard": 3}, {"replicate": 2, "shard": 2}, {"shard": 4}]
BODIES = "tests.equivalence.fsdp_bodies"

# float64 sums of a few hundred terms in another order; three steps.
BOUND = 1e-11


def size(sizes):
    product = 1
    for each in sizes.values():
        product *= each
    return product


def check(results):
    for rank, errors in enumerate(results):
        for what, error in errors.items():
            assert error < BOUND, f"rank {rank}: {what} is off by {error:.1e}"


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_mesh_gives_the_gradients_of_one_device(pool, backend_name, sizes):
    check(pool(backend_name, size(sizes)).run(f"{BODIES}:train", sizes))


CASES = {
    "a block called twice": ToyConfig(calls=(0, 1, 0, 0)),
    "tied weights": ToyConfig(tied=True),
    "an unused parameter": ToyConfig(use_extra=False),
    "an unused block": ToyConfig(calls=(1,)),
    "frozen parameters": ToyConfig(frozen=("up", "embed")),
    "a frozen block": ToyConfig(frozen=("layers.1",)),
    "a frozen model but for the last parameter": ToyConfig(frozen=("embed", "layers", "extra", "head")),
    "fewer rows than ranks": ToyConfig(inputs=1, width=2, hidden=3),
    "even rows": ToyConfig(inputs=4, width=4, hidden=8),
}


@pytest.mark.parametrize("case", CASES)
def test_awkward_models_give_the_gradients_of_one_device(pool, backend_name, case):
    check(pool(backend_name, 3).run(f"{BODIES}:train", {"shard": 3}, CASES[case]))


@pytest.mark.parametrize("case", ["a block called twice", "tied weights", "frozen parameters"])
def test_awkward_models_on_two_axes(pool, backend_name, case):
    check(pool(backend_name, 4).run(f"{BODIES}:train", {"replicate": 2, "shard": 2}, CASES[case], through_plan=True))


@pytest.mark.parametrize("options", [{"reshard_after_forward": False}, {"wrap_blocks": False}], ids=str)
def test_options_change_memory_and_not_the_gradients(pool, backend_name, options):
    check(pool(backend_name, 2).run(f"{BODIES}:train", {"shard": 2}, **options))


def test_another_dim_may_be_sharded(pool, backend_name):
    check(pool(backend_name, 3).run(f"{BODIES}:train_on_the_last_dim"))


def test_evaluation_without_gradients_sees_the_newest_parameters(pool, backend_name):
    assert pool(backend_name, 2).run(f"{BODIES}:evaluate_then_train") == [True, True]


@pytest.mark.parametrize("reshard", [True, False])
def test_no_full_parameter_stays_beyond_what_reshard_after_forward_says(pool, backend_name, reshard):
    for seen in pool(backend_name, 2).run(f"{BODIES}:memory_through_a_step", reshard):
        assert seen["blocks after forward"] == (0 if reshard else 3 * seen["one block whole"])
        assert seen["root after forward"] == seen["root whole"] > 0
        assert seen["all after step"] == 0


def test_restore_gives_the_model_back(pool, backend_name):
    assert pool(backend_name, 2).run(f"{BODIES}:restored") == [True, True]


@pytest.mark.parametrize("sizes", [{"shard": 3}, {"replicate": 2, "shard": 2}], ids=str)
@pytest.mark.parametrize("max_norm", [1e-3, float("inf")])
def test_the_norm_counts_every_element_once(pool, backend_name, sizes, max_norm):
    for norm, wanted, error in pool(backend_name, size(sizes)).run(f"{BODIES}:clipped_norm", sizes, max_norm):
        # partial sums of squares travel in float32
        assert norm == pytest.approx(wanted, rel=1e-6)
        assert error < 1e-6


def test_a_forward_that_raises_leaves_a_working_model(pool, backend_name):
    assert pool(backend_name, 2).run(f"{BODIES}:after_an_exception") == [True, True]


def test_two_forwards_before_one_backward_add_up(pool, backend_name):
    assert max(pool(backend_name, 2).run(f"{BODIES}:forward_twice_before_backward")) < BOUND


def test_wrong_calls_are_refused_with_a_reason(pool, backend_name):
    for messages in pool(backend_name, 2).run(f"{BODIES}:refusals"):
        assert "mp_policy is not offered yet" in messages["policy"]
        assert "offload_policy is not offered yet" in messages["offload"]
        assert "reshard_after_forward is 2" in messages["number"]
        assert 'DeviceMesh((2,), ("shard",))' in messages["mesh"]
        assert "the ranks 0 to 2, but this is rank" in messages["size"]
        assert "this mesh tensor=2 has 'tensor'" in messages["axis"]
        assert "is a unit already" in messages["twice"]
        assert "is tied to one that an inner unit holds" in messages["tied"]
        assert "takes one module" in messages["list"]
        assert "found 'rows' for embed" in messages["placement"]
        assert (
            "made for another model" in messages["plan"]
            and "embed has shape (5, 3), planned was (5, 4)" in messages["plan"]
        )
