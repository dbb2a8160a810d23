"""Models that are sharded before they have values, and whole values that shards are loaded from."""

import pytest

BODIES = "tests.equivalence.values_bodies"


@pytest.mark.parametrize("reshard", [True, False])
def test_a_model_sharded_without_values_trains_as_one_sharded_with_them(pool, backend_name, reshard):
    found = pool(backend_name, 2).run(f"{BODIES}:without_values", False, reshard_after_forward=reshard)
    assert found == [0, 0], "shards that were made later have room for the gather, too"


def test_what_to_empty_has_made_is_filled_and_kept(pool):
    assert pool("torch", 2).run(f"{BODIES}:without_values", True) == [0, 0]


def test_shards_may_be_initialised_by_hand(pool):
    for found in pool("torch", 2).run(f"{BODIES}:initialised_by_hand"):
        assert len(found) == 4 and all(values == [0.5] for values in found.values())


def test_what_to_empty_has_untied_is_tied_again(pool):
    assert pool("torch", 2).run(f"{BODIES}:tied") == [(False, True)] * 2


def test_values_that_are_missing_or_wrong_are_told_by_name(pool, backend_name):
    for found in pool(backend_name, 2).run(f"{BODIES}:refusals"):
        # the outermost unit is gathered first
        for case, name in (("forward", "1.weight"), ("full", "0.weight")):
            assert f"the parameter {name} has no values yet" in found[case]
            assert "hyper_parallel.load_full_parameters(model, values)" in found[case]
        assert "0.weight is missing" in found["missing"]
        assert "0.weight has shape (2, 5), the model needs (3, 5)" in found["shape"]


def test_new_values_may_be_loaded_at_any_time(pool, backend_name):
    assert pool(backend_name, 2).run(f"{BODIES}:loaded_while_it_trains") == [(True, True)] * 2


def test_what_stays_for_a_backward_that_never_comes_is_seen_by_nothing_else(pool, backend_name):
    for seen in pool(backend_name, 2).run(f"{BODIES}:changed_after_a_forward"):
        assert seen == {"called": True, "gathered": True, "next forward": True}
