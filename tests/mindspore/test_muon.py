"""`hyper_parallel.Muon` as a `mindspore.experimental.optim.Optimizer`: what MindSpore's users do with one."""

BODIES = "tests.mindspore.muon_bodies"


def test_it_is_mindspores_optimizer_and_its_schedulers_set_both_rates(pool):
    [(is_optimizer, rates, moved)] = pool("mindspore", 1).run(f"{BODIES}:scheduled")
    assert is_optimizer
    assert rates == [[0.5, 0.25], [0.0, 0.0], [0.5, 0.25]]
    assert moved == [True, False, True], "a rate of zero moves nothing, also in what is compiled"


def test_adamw_is_mindspores_and_a_missing_gradient_leaves_all_as_it_is(pool):
    [found] = pool("mindspore", 1).run(f"{BODIES}:beside_adamw")
    assert found == {"adamw": True, "kept value": True, "kept moment": True, "kept momentum": True}


def test_state_is_saved_and_loaded(pool):
    [found] = pool("mindspore", 1).run(f"{BODIES}:saved")
    assert found == {"values": True, "rate": 0.5, "masters": True}


def test_what_is_wrong_is_told(pool):
    [told] = pool("mindspore", 1).run(f"{BODIES}:refusals")
    assert "no operators for lists" in told["foreach"]
    assert "4 gradients for 5 parameters" in told["too few"]
    assert "not finite" in told["not finite"]
    assert "full_state()" in told["a copy"] and "new optimizer" in told["a group"]
    assert "groups 0 and 1" in told["two groups"] and "updates matrices" in told["a vector"]
