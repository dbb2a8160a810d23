"""All-reduces that begin when their reduce-scatters are done: the same bits as by Algorithm 1, and no rank is lost."""

import numpy as np
import pytest

BODIES = "tests.equivalence.early_bodies"
EVERY = ("", "layers.0", "layers.1", "layers.2")
CASES = {
    "all units": dict(early=EVERY),
    "some units": dict(early=("layers.1", "")),
    "a plan": dict(early=EVERY, through_plan=True),
    "shards are kept": dict(early=EVERY, kind="scatter"),
    "gradients are kept": dict(early=EVERY, kind="none"),
    "not the last backward": dict(early=EVERY, kind="deferred"),
}


@pytest.mark.parametrize("case", CASES)
def test_twenty_early_steps_have_the_bits_of_the_usual_ones(pool, case):
    assert pool("torch", 4).run(f"{BODIES}:side_by_side", 20, **CASES[case]) == [(True, True)] * 4


def test_on_mindspore_too(pool):
    assert pool("mindspore", 4).run(f"{BODIES}:side_by_side", 20, **CASES["some units"]) == [(True, True)] * 4


def test_the_hook_sees_the_same_sums(pool, backend_name):
    for shown in pool(backend_name, 4).run(f"{BODIES}:hooked"):
        early, usual = shown[: len(shown) // 2], shown[len(shown) // 2 :]
        assert len(early) == len(EVERY)
        for one, other in zip(early, usual):
            np.testing.assert_array_equal(one, other)


def test_a_backward_that_is_broken_off_leaves_nothing_on_its_way(pool):
    for same, under_way in pool("torch", 4).run(f"{BODIES}:broken_off"):
        assert same and under_way == 2


def test_what_is_behind_others_and_what_is_not_do_not_meet(pool, backend_name):
    for found in pool(backend_name, 4).run(f"{BODIES}:behind_others"):
        own, behind = found[:5], found[5:]
        assert all((each == 1 + 2 + 3 + 4).all() for each in own)
        for number, each in enumerate(behind):  # the sum of each rank's numbers, once more for every rank
            assert (each == 4 * (1 + 2 + 3 + 4 + 4 * number)).all()
