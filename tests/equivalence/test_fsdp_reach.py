"""A unit's parameters are whole inside of its forward only; elsewhere they are refused, not computed with."""

BODIES = "tests.equivalence.reach_bodies"
BOUND = 1e-11  # float64 sums in another order


def test_what_another_module_reads_in_a_forward_is_refused(pool, backend_name):
    for messages, is_parameter_again, facts_are_told, error in pool(backend_name, 2).run(f"{BODIES}:read_in_a_forward"):
        for message in messages:
            assert "is given the parameter layers.0.down of Block layers.0" in message
            assert "[2, 7] of [3, 7]" in message or "[1, 7] of [3, 7]" in message
            assert "unshard()" in message
        assert is_parameter_again and facts_are_told
        assert error < BOUND


def test_what_is_gathered_by_hand_may_be_read(pool, backend_name):
    for error, held in pool(backend_name, 2).run(f"{BODIES}:read_when_gathered"):
        assert error < BOUND and held == 0


def test_a_module_that_is_called_without_its_unit_is_refused(pool, backend_name):
    for (head, head_again, embedding), shapes in pool(backend_name, 2).run(f"{BODIES}:called_by_itself"):
        for message in (head, head_again):
            assert "Head head is called by itself. It would compute with this rank's part" in message
            assert "of the parameter head.weight of Head head, which belongs to the unit of Toy" in message
        assert "Embedding 0 is called by itself. It would compute with this rank's part, [3, 4] of [6, 4]" in embedding
        assert shapes == [(1, 3, 4)] * 3


def test_a_gradient_that_comes_past_the_unit_is_refused(pool, backend_name):
    for messages, error in pool(backend_name, 2).run(f"{BODIES}:gradient_past_the_unit"):
        for message in messages:
            assert "a gradient has come to the parameter layers.0.down of Block layers.0" in message
            assert "weight_decay" in message
        assert error < BOUND


def test_weights_that_a_module_keeps_in_a_list_are_shown_there_too(pool, backend_name):
    for error, is_what_it_was in pool(backend_name, 2).run(f"{BODIES}:weights_in_lists"):
        assert error < 1e-5, "float32 sums in another order"
        assert is_what_it_was


def test_other_methods_may_be_forwards_of_a_unit(pool, backend_name):
    for error, shapes, messages, (restored, whole) in pool(backend_name, 2).run(f"{BODIES}:other_forwards"):
        assert error < BOUND
        assert shapes == {(5, 3)}
        assert messages == ["register_fsdp_forward_method: Toy has no method 'generate'"]
        assert restored == whole
