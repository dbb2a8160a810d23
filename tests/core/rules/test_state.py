"""States: what they say, what they refuse, how they are told."""

import pytest

from hyper_parallel import LayoutError, Partial, RaggedShard, Shard, StridedShard
from hyper_parallel.core.rules.state import COPIED, PARTIAL, WHOLE, State, constant, cut, repeated_dims


def test_a_state_tells_what_is_cut_and_in_how_many_blocks():
    assert (cut(1).cut, cut(1).blocks) == (1, 1)
    assert (cut(0, 3).cut, cut(0, 3).blocks) == (0, 3)
    assert WHOLE.cut is COPIED.cut is PARTIAL.cut is None


def test_one_block_is_a_plain_shard():
    assert cut(1, 1) == State(StridedShard(1, 1)) == State(Shard(1))
    assert cut(0, 3).at(2) == cut(2, 3)


def test_states_that_differ_in_the_gradient_only_are_two():
    assert WHOLE != COPIED
    assert len({WHOLE, COPIED, State(), State(pending=True)}) == 2


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (WHOLE, "replicate"),
        (COPIED, "replicate, its gradient partial"),
        (PARTIAL, "partial"),
        (cut(1), "shard(1)"),
        (cut(0, 2), "strided_shard(0, 2)"),
    ],
)
def test_a_state_is_told_as_a_plan_writes_it(state, told):
    assert str(state) == told


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"placement": Partial("max")}, "replicate, shard, strided_shard or partial, found partial(max)"),
        ({"placement": RaggedShard((0,), (1, 2))}, "found ragged_shard([0], [1, 2])"),
        ({"placement": Shard(-1)}, "counts from the front, found shard(-1)"),
        ({"placement": Shard(0), "pending": True}, "only a replicated tensor is pending"),
        ({"placement": Partial(), "same": (0,)}, "only a replicated tensor is pending, the same along a dim"),
        ({"unit": 4}, "belongs to a cut dim, found 4 on replicate"),
        ({"placement": Shard(0), "unit": 0}, "at least 1"),
    ],
)
def test_a_state_that_contradicts_itself_is_refused(fields, message):
    with pytest.raises(LayoutError) as error:
        State(**fields)
    assert message in str(error.value)


def test_what_is_one_value_everywhere_repeats_itself_along_all_dims():
    assert constant(3, zero=True) == State(same=(0, 1, 2), zero=True)
    assert repeated_dims((2, 3, 1), (0, 1, 0)) == (0,)
