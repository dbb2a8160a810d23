"""What can be asked of units, on both backends: accumulation, prefetch, gathering by hand, meshes."""

import pytest

BODIES = "tests.equivalence.control_bodies"
BOUND = 1e-11  # float64 sums in another order

BACKENDS = ("torch", "mindspore")
HSDP, FSDP = {"replicate": 2, "shard": 2}, {"shard": 2}


def ranks_of(sizes):
    return 4 if len(sizes) == 2 else 2


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [*((FSDP, kind) for kind in ("none", "scatter", "deferred", "kept")), (HSDP, "scatter"), (HSDP, "deferred")],
    ids=str,
)
def test_micro_batches_add_up_and_are_handed_over_when_they_are_reduced(pool, backend_name, sizes, kind):
    waits = kind in ("none", "deferred") or (kind == "scatter" and sizes == HSDP)
    for error, times in pool(backend_name, ranks_of(sizes)).run(f"{BODIES}:accumulated", sizes, kind):
        assert error < BOUND
        assert times == ([1, 1] if waits else [3, 3])


def test_what_only_an_earlier_micro_batch_reached_is_reduced_with_the_last(pool, backend_name):
    assert max(pool(backend_name, 2).run(f"{BODIES}:unreached_at_last")) < BOUND


@pytest.mark.parametrize(
    ("sizes", "kind", "names"),
    [(FSDP, "none", "layers.1.up"), (FSDP, "none", "layers.1."), (HSDP, "scatter", "layers.1.up")],
    ids=["a part of a unit", "a unit", "shards"],
)
def test_what_is_frozen_since_is_reduced_with_the_last(pool, backend_name, sizes, kind, names):
    for error, keeps in pool(backend_name, ranks_of(sizes)).run(f"{BODIES}:frozen_since", sizes, kind, names):
        assert error < BOUND and not keeps


@pytest.mark.parametrize("setting", [(0, 0), (3, 2), "lists"], ids=str)
def test_prefetch_changes_no_gradient(pool, backend_name, setting):
    for error, unused in pool(backend_name, 2).run(f"{BODIES}:prefetched", setting):
        assert error < BOUND
        assert unused == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_part_stays_for_a_smaller_group(pool, backend_name, ranks):
    for error, sizes in pool(backend_name, 4).run(f"{BODIES}:shrunk", ranks):
        assert error < BOUND
        wanted = sizes["whole"] / ranks
        assert wanted <= sizes["held"] <= 1.4 * wanted, "odd rows are padded"


def test_several_modules_are_one_unit(pool, backend_name):
    for error, units in pool(backend_name, 2).run(f"{BODIES}:grouped"):
        assert error < BOUND
        assert units == 2


def test_some_parameters_stay_whole(pool, backend_name):
    assert max(pool(backend_name, 2).run(f"{BODIES}:replicated")) < BOUND


def test_a_unit_is_gathered_and_freed_by_hand(pool, backend_name):
    for rank, seen in enumerate(pool(backend_name, 2).run(f"{BODIES}:unsharded_by_hand")):
        part = (4 - rank, 3)
        for shapes, error, left in seen:
            assert shapes == [part, part, (7, 3), part]
            assert error < BOUND and left == 0


def test_what_is_restored_is_not_unsharded_any_more(pool, backend_name):
    for shape, error, message in pool(backend_name, 2).run(f"{BODIES}:restored_while_unsharding"):
        assert shape == (7, 3) and error == 0
        assert "the model was restored" in message


@pytest.mark.parametrize("sizes", [FSDP, HSDP], ids=str)
def test_a_model_may_be_cast_between_steps(pool, sizes):
    for same, message in pool("torch", ranks_of(sizes)).run(f"{BODIES}:cast_since", sizes):
        assert len(same) > 10 and all(same)
        assert "has been cast from float32 to float64 since fully_shard, while gradients of it are" in message


def test_a_model_whose_gradients_do_not_follow_says_so(pool):
    for message in pool("mindspore", 2).run(f"{BODIES}:cast_refused"):
        assert "has been cast from float64 to float32 since fully_shard, which gradients of this framework" in message


def test_gradients_are_divided_and_handled_as_the_user_says(pool, backend_name):
    assert max(pool(backend_name, 4).run(f"{BODIES}:factor_and_hook", HSDP)) < BOUND


def test_methods_come_and_go_and_wrong_calls_say_what_to_write(pool, backend_name):
    expected = {
        "no unit": "Head is no unit; call fully_shard on it",
        "flag": "write True or False, found 1",
        "number": "reshard_after_forward is 3; write True, False or a divisor of the 2 ranks",
        "prefetch": "set_modules_to_forward_prefetch: Head is no unit",
        "one": "write a list of modules, found Block",
        "depth": "write whole numbers from 0 on, found -1",
        "factor": "write a number above 0, found 0",
        "hook": "write a function of one tensor, found 'sum'",
        "name": "Block has an attribute 'reshard' already",
        "name in a plan": "Block has an attribute 'reshard' already",
        "group": "the unit of several modules (Block, Head) is run with no unit above it",
        "empty": "the list of modules is empty",
    }
    for messages in pool(backend_name, 2).run(f"{BODIES}:names_and_refusals"):
        assert set(messages) == set(expected)
        for case, text in expected.items():
            assert text in messages[case]


def test_both_backends_train_alike_for_twenty_steps(pool):
    torch, mindspore = (pool(name, 4).run(f"{BODIES}:trained", HSDP) for name in BACKENDS)
    for (losses, parameters), (other_losses, other_parameters) in zip(torch, mindspore):
        assert losses == pytest.approx(other_losses, rel=BOUND)
        assert losses[-1] < losses[0]
        for name, value in parameters.items():
            assert abs(value - other_parameters[name]).max() < BOUND * abs(value).max()


def test_units_have_meshes_of_their_own_and_axes_any_name(pool, backend_name):
    assert max(pool(backend_name, 4).run(f"{BODIES}:named_dims")) < BOUND


def test_a_part_of_the_job_trains_a_model_of_its_own(pool, backend_name):
    for error, message in pool(backend_name, 4).run(f"{BODIES}:half_of_the_job"):
        assert error < BOUND
        assert "the unit layers.0 is sharded over the ranks" in message and "over [0, 1, 2, 3]" in message
