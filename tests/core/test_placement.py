"""Placements are values with a text form that parses back."""

import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel import LayoutError, Partial, Replicate, Shard
from hyper_parallel.core.placement import REDUCTIONS, RaggedShard, StridedShard, parse_placement
from tests.core.strategies import cases

PLACEMENTS = st.one_of(
    st.just(Replicate()),
    st.builds(Partial, st.sampled_from(REDUCTIONS)),
    st.builds(Shard, st.integers(-9, 9)),
    st.builds(StridedShard, st.integers(-9, 9), st.integers(1, 99)),
    st.builds(
        RaggedShard,
        st.lists(st.integers(-3, 9), min_size=1, max_size=3),
        st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any),
    ),
)


@cases("text")
@given(PLACEMENTS, st.lists(st.sampled_from(["", " ", "  ", "\t"]), min_size=3, max_size=3))
def test_the_text_form_parses_back_however_it_is_spaced(placement, blanks):
    text = str(placement)
    assert parse_placement(text) == placement
    before, inside, after = blanks
    spaced = re.sub(r"[,(\[]", rf"\g<0>{inside}", text)
    spaced = re.sub(r"[,)\]]", rf"{inside}\g<0>", spaced)
    assert parse_placement(before + spaced + after) == placement


def test_text_forms_are_short():
    assert [str(each) for each in (Replicate(), Shard(-1), StridedShard(0, 4), Partial(), Partial("max"))] == [
        "replicate",
        "shard(-1)",
        "strided_shard(0, 4)",
        "partial",
        "partial(max)",
    ]
    assert str(RaggedShard((0, 1), (2, 0, 1))) == "ragged_shard([0, 1], [2, 0, 1])"


def test_a_sum_may_be_named():
    assert parse_placement("partial(sum)") == Partial()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "shard",
        "shard()",
        "shard(x)",
        "shard(1.0)",
        "shard(0, 2)",
        "Shard(0)",
        "shard (0)",
        "replicate()",
        "strided_shard(0)",
        "partial()",
        "ragged_shard([0])",
        "ragged_shard(0, [1])",
        "replicate, shard(0)",
        None,
        3,
    ],
)
def test_other_text_is_refused_with_the_forms_there_are(text):
    with pytest.raises(LayoutError, match=r"is no placement; write replicate, shard\(DIM\), strided_shard"):
        parse_placement(text)


@pytest.mark.parametrize(
    "text, message",
    [
        ("partial(mean)", "'mean' can't be pending on a partial value; write one of sum, avg, max, min"),
        ("strided_shard(0, 0)", r"split factor of a strided shard is 0; the least is 1, which is shard\(0\)"),
        ("ragged_shard([], [1])", "names no dim; write at least the first one"),
        (
            "ragged_shard([0], [])",
            r"local units of a ragged shard are \[\]; they are not negative, and one is positive",
        ),
        ("ragged_shard([0], [0, 0])", r"local units of a ragged shard are \[0, 0\]"),
        ("ragged_shard([0], [2, -1])", r"local units of a ragged shard are \[2, -1\]"),
        ("ragged_shard([0], [1 2])", r"\[1 2\] is no list of whole numbers"),
        ("ragged_shard([0,], [1])", r"is no list of whole numbers"),
    ],
)
def test_text_of_a_placement_that_can_not_be_says_why(text, message):
    with pytest.raises(LayoutError, match=message):
        parse_placement(text)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Shard("0"), "the dim of a shard is a whole number, found '0'"),
        (lambda: Shard(True), "the dim of a shard is a whole number, found True"),
        (lambda: Shard(0.0), "the dim of a shard is a whole number, found 0.0"),
        (lambda: StridedShard(0, 2.0), "the split factor of a strided shard is a whole number, found 2.0"),
        (lambda: RaggedShard((0,), 3), "the local units of a ragged shard are a list of whole numbers, found 3"),
        (lambda: RaggedShard((0.5,), (1,)), "a dim of a ragged shard is a whole number, found 0.5"),
        (lambda: Partial(None), "None can't be pending on a partial value"),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused(make, message):
    with pytest.raises(LayoutError, match=re.escape(message)):
        make()


@given(PLACEMENTS, PLACEMENTS)
def test_placements_are_values(one, other):
    copy = pickle.loads(pickle.dumps(one))
    assert copy == one and hash(copy) == hash(one)
    assert (one == other) == (str(one) == str(other))
    with pytest.raises(AttributeError):
        one.dim = 5


def test_a_ragged_shard_of_one_dim_takes_a_number_and_lists():
    assert RaggedShard(0, [1, 2]) == RaggedShard((0,), (1, 2))
