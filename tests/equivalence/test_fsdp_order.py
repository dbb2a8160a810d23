"""Ranks of a sharded model that do different things: all of them are told, none waits for ever, no data are mixed."""

import pytest

BODIES = "tests.equivalence.order_bodies"
BOUND = 1e-11  # float64 sums in another order

AT_FIRST = {
    "skips": "rank 0 is about to gather layers.1; rank 1 is about to gather layers.2",
    "repeats": "rank 0 is about to gather layers.2; rank 1 is about to gather layers.1",
    "evaluates": "rank 1 is about to begin a pass and gather the outermost unit, with nothing recorded",
    "gathers": "rank 1 is about to begin a pass and gather a Block that no forward of its model has come to yet",
    "settings": "accumulation 'none' and reshard_after_forward True in layers.0, layers.1, layers.2",
    "another loss": "rank 0 is about to gather layers.2; rank 1 is about to reduce-scatter the outermost unit",
}
LATER = AT_FIRST | {  # what is fetched ahead comes first; layers.2 stays for backward where all has gone as before
    "skips": "the next was to reduce-scatter layers.2, and it had to gather layers.2",
    "repeats": "the next was to reduce-scatter layers.2, and it had to gather layers.2",
    "gathers": "rank 1 is about to begin a pass and gather layers.1",
    "another loss": "the next was to reduce-scatter layers.2, and it had to reduce-scatter the outermost unit",
}


EVERYWHERE = [("torch", case) for case in AT_FIRST] + [("mindspore", "skips"), ("mindspore", "another loss")]


@pytest.mark.parametrize("good", [0, 4])
@pytest.mark.parametrize(("backend", "case"), EVERYWHERE)
def test_a_rank_that_does_something_else_stops_all_with_the_units_by_name(pool, backend, case, good):
    results = pool(backend, 2).run(f"{BODIES}:diverging", {"shard": 2}, case, good)
    (message,) = {message for message, _, _ in results}
    assert "the ranks of a sharded model do different things: rank 0 is" in message
    assert (LATER if good else AT_FIRST)[case] in message
    for _, given, error in results:
        assert not given
        assert error < BOUND, "the next steps are right"


def test_on_two_axes_every_rank_is_told(pool, backend_name):
    results = pool(backend_name, 4).run(f"{BODIES}:diverging", {"replicate": 2, "shard": 2}, "skips", 4)
    (message,) = {message for message, _, _ in results}
    assert "rank 3 is no longer going on as in the last passes" in message and LATER["skips"] in message
    assert not any(given for _, given, _ in results) and max(error for _, _, error in results) < BOUND


@pytest.mark.parametrize("case", ["skips", "another loss"])
def test_with_early_all_reduces_too(pool, case):
    sizes = {"replicate": 2, "shard": 2}
    results = pool("torch", 4).run(f"{BODIES}:diverging", sizes, case, 4, early_all_reduce=True)
    (message,) = {message for message, _, _ in results}
    assert "rank 3 is no longer going on as in the last passes" in message and LATER[case] in message
    assert not any(given for _, given, _ in results) and max(error for _, _, error in results) < BOUND


def test_all_ranks_may_run_other_modules_evaluate_and_break_off_together(pool, backend_name):
    assert max(pool(backend_name, 2).run(f"{BODIES}:changing_together")) < BOUND


def test_once_a_step_has_gone_alike_twice_two_exchanges_are_left(pool, backend_name):
    for counts, units in pool(backend_name, 2).run(f"{BODIES}:announcements"):
        # in the first step backward gathers what it finds gathered in all others
        assert min(counts[:3]) > 2 * units
        assert counts[3:6] == [2] * 3
        assert counts[6:] == [units + 1, units + 1, 2, 2]


def test_a_collective_that_fails_names_the_unit_that_it_was_for(pool):
    for message in pool("torch", 2).run(f"{BODIES}:broken_collective"):
        assert message == "the gather of layers.1 has failed: all_gather over the ranks 0, 1 has timed out"
