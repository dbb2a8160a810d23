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
    "a block in two places": ToyConfig(shared=True),
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


@pytest.mark.parametrize("case", ["a block called twice", "a block in two places", "tied weights", "frozen parameters"])
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
        assert "write a hyper_parallel.MixedPrecisionPolicy" in messages["policy"]
        assert "write a hyper_parallel.CPUOffloadPolicy" in messages["offload"]
        assert "reshard_after_forward is 3; write True, False or a divisor of the 2 ranks" in messages["number"]
        assert 'DeviceMesh((2,), ("shard",))' in messages["mesh"]
        assert "has 3 ranks, 0 to 2, but 2 have joined" in messages["size"]
        assert "this mesh tensor=2 has 'tensor'" in messages["axis"]
        assert "is a unit already" in messages["twice"]
        assert "the parameter embed is held by another unit already" in messages["tied"]
        assert "found builtins.str, expected a torch.nn.Module" in messages["list"]
        assert "replicate_params holds parameters, found 'embed'" in messages["replicate"]
        assert "dp_mesh_dims names 'context' for 'shard'; the mesh shard=2 has no such axis" in messages["dims"]
        assert "dp_mesh_dims names no axis" in messages["no dims"]
        assert "dp_mesh_dims names 'shard' twice" in messages["dim twice"]
        assert "does not say what the axis 'tensor'" in messages["dim left"]
        assert "found 'rows' for embed" in messages["placement"]
        assert "does not fit the model" in messages["plan"]
        assert "embed has shape (5, 3), planned was (5, 4)" in messages["plan"]


def test_what_is_trainable_may_change_between_steps(pool, backend_name):
    assert max(max(errors) for errors in pool(backend_name, 2).run(f"{BODIES}:freeze_and_unfreeze")) < BOUND


def test_a_first_use_without_gradients_inside_a_recorded_step_spoils_nothing(pool, backend_name):
    assert max(pool(backend_name, 2).run(f"{BODIES}:teacher_pass_first")) < BOUND


def test_full_parameters_and_restore_give_the_newest_values_while_a_unit_is_gathered(pool, backend_name):
    assert max(max(errors) for errors in pool(backend_name, 2).run(f"{BODIES}:update_while_gathered")) < BOUND


def test_a_dropped_model_is_freed(pool, backend_name):
    assert pool(backend_name, 1).run(f"{BODIES}:dropped_model_is_alive") == [False]


def test_a_plan_is_applied_as_it_says_or_not_at_all(pool, backend_name):
    for rank, messages in enumerate(pool(backend_name, 2).run(f"{BODIES}:edited_plans")):
        assert messages.pop("dim 1") == f"applied: (7, {2 - rank})"
        expected = {
            "dim 5": "layers.0.up: placements: axis 'shard': shard(5) names dim 5",
            "partial": "parameters: layers.0.up: placements: shard: a parameter is no partial value",
            "axis": "layers.0.up: placements: a placement names the axis 'tensor'",
            "dtype": "layers.0.up has dtype float64, planned was float32",
            "frozen": "layers.0.up has trainable True, planned was False",
            "moved": "layers.0.up belongs to the unit 'layers.1'",
            "no root": "parameters: embed: unit: found ''",
            "root first": "the unit 'layers.0' comes after ''",
            "twice": "units: 'layers.1' stands twice; leave one out",
            "missing": "layers.0.up is in the model only",
            "sharded": "the model is sharded already",
        }
        assert set(messages) == set(expected)
        for case, text in expected.items():
            assert text in messages[case] and messages[case].startswith("PlanError"), messages[case]


def test_a_mesh_without_this_rank_or_out_of_order_is_refused_on_every_rank(pool, backend_name):
    for rank, (part, permuted) in enumerate(pool(backend_name, 4).run(f"{BODIES}:odd_meshes")):
        assert f"but 4 have joined, and this is rank {rank}" in part
        assert "has the ranks [1, 0] along 'shard'" in permuted
