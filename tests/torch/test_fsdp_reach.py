"""Weights of another unit in a forward of PyTorch, and a backward in the midst of a forward."""

BODIES = "tests.torch.reach_bodies"


def test_a_gradient_may_be_taken_in_a_forward(pool):
    for error, held in pool("torch", 2).run(f"{BODIES}:backward_in_a_forward"):
        assert error < 1e-12, "float64 sums in another order"
        assert held == 0


def test_a_weight_may_be_asked_for_its_dtype_and_device_in_every_way(pool):
    for told, messages in pool("torch", 2).run(f"{BODIES}:asked"):
        assert told == dict.fromkeys(told, True)
        for name, message in messages.items():
            assert f"{name}" in message.split(" is given the parameter last.weight of Linear last")[0], message


def test_a_restored_model_is_not_kept_by_a_graph_that_never_ran_backward(pool):
    assert pool("torch", 2).run(f"{BODIES}:let_go_of") == [True, True]
