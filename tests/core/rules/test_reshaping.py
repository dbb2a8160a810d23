"""Where a cut stands in another shape."""

import pytest

from hyper_parallel.core.rules.state import COPIED, PARTIAL, State, cut
from hyper_parallel.core.rules.table import RuleError
from tests.core.rules.calls import T, state

B, S, D = 2, 3, 8  # samples, tokens, features of a head

CARRIED = {
    # Features into heads and back.
    "heads": ((B, S, 4 * D), cut(2), (B, S, -1, D), cut(2)),
    "heads by number": ((B, S, 4 * D), cut(2), (B, S, 4, D), cut(2)),
    "one head": ((B, S, D), cut(2), (B, S, -1, D), cut(2)),
    "one head by number": ((B, S, D), cut(2), (B, S, 1, D), cut(2)),
    "groups of heads": ((B, S, 12 * D), cut(2), (B, S, -1, 3, D), cut(2)),
    "packed projections": ((B, S, 3 * 4 * D), cut(2, 3), (B, S, 3, 4, D), cut(3)),
    "packed projections of one head": ((B, S, 3 * D), cut(2, 3), (B, S, 3, -1, D), cut(3)),
    "packed projections as heads": ((B, S, 3 * 4 * D), cut(2, 3), (B, S, -1, D), cut(2, 3)),
    "heads merged": ((B, S, 4, D), cut(2), (B, S, -1), cut(2)),
    "one head merged": ((B, S, 1, D), cut(2), (B, S, D), cut(2)),
    "one head of features that stay": ((B, S, 1, D), cut(2), (B, S, 1, -1, 4), cut(2)),
    "one head merged, with a -1": ((B, S, 1, D), cut(2), (B, S, -1), cut(2)),
    # Tokens.
    "tokens merged": ((B, S, D), cut(1), (-1, D), cut(0, B)),
    "tokens split again": ((B * S, D), cut(0, B), (B, S, D), cut(1)),
    "tokens with cut features merged": ((B, S, D), cut(2), (-1, D), cut(1)),
    "tokens of cut samples merged": ((B, S, D), cut(0), (-1, D), cut(0)),
    "one token merged": ((B, 1, D), cut(1), (-1, D), cut(0, B)),
    "cut features of samples of one token": ((B, D), cut(1), (B, 1, D), cut(2)),
    "one token split again": ((B, D), cut(0, B), (B, 1, D), cut(1)),
    "all merged": ((B, S, D), cut(2), (-1,), cut(0, B * S)),
    # Heads beside samples, and keys repeated.
    "heads merged with samples": ((B, 4, S, D), cut(1), (-1, S, D), cut(0, B)),
    "one head merged with samples, a -1 for tokens": ((B, 1, S, D), cut(1), (B, -1, D), cut(0, B)),
    "one head merged with samples": ((B, 1, S, D), cut(1), (B, S, D), cut(0, B)),
    "heads split from samples": ((B * 4, S, S), cut(0, B), (B, 4, S, S), cut(1)),
    "one head split from samples": ((B, S, S), cut(0, B), (B, 1, S, S), cut(1)),
    "heads merged with samples behind tokens, joined": ((S, B * 4, D), cut(1, B), (S, B, 4 * D), cut(2)),
    "the same with a -1": ((S, B * 4, D), cut(1, B), (S, B, -1), cut(2)),
    "keys repeated": ((B, 2, 3, S, D), cut(1), (B, 6, S, D), cut(1)),
    "one key repeated": ((B, 1, 3, S, D), cut(1), (B, 3, S, D), cut(1)),
    "heads grouped by one key": ((B, 2, S, D), cut(1), (B, 1, -1, D), cut(1)),
    "heads grouped by one key, one token": ((B, 2, 1, D), cut(1), (B, 1, -1, D), cut(1)),
    "heads grouped by one key, one token, by number": ((B, 2, 1, D), cut(1), (B, 1, 2, D), cut(1)),
    "heads of one sample grouped by one key, one token": ((1, 2, 1, D), cut(1), (1, 1, -1, D), cut(1)),
    "heads in groups": ((B, 4, S, D), cut(1), (B, 2, 2, S, D), cut(1)),
    "heads in the group of one key": ((B, 2, S, D), cut(1), (B, 1, 2, S, D), cut(1)),
    "heads in the group of one key, a -1": ((B, 2, S, D), cut(1), (B, 1, -1, S, D), cut(1)),
    "heads in the group of one key, one token": ((B, 2, 1, D), cut(1), (B, 1, 2, 1, D), cut(1)),
    "heads behind tokens in the group of one key": ((B, S, 2, D), cut(2), (B, S, 1, 2, D), cut(2)),
    "one key behind tokens": ((B, S, 1, D), cut(2), (B, S, 1, 1, D), cut(2)),
    "the group of one key taken away": ((B, 1, 2, S, D), cut(1), (B, 2, S, D), cut(1)),
    "the group of one key behind tokens merged": ((B, S, 1, 2, D), cut(2), (B, S, 2 * D), cut(2)),
    "one head split from samples, one token": ((B, 1, D), cut(0, B), (B, 1, 1, D), cut(1)),
    # Dims of one element, and parts of a sum.
    "a dim put in": ((B, S, D), cut(1), (B, 1, S, D), cut(2)),
    "a dim taken away": ((B, 1, S, D), cut(2), (B, S, D), cut(1)),
    "numbers of heads": ((4,), cut(0), (1, -1, 1, 1), cut(1)),
    "numbers of one head each": ((1,), cut(0), (1, -1, 1), cut(1)),
    "a pending sum": ((B, S, D), PARTIAL, (-1, D), PARTIAL),
    "a copy": ((B, S, D), COPIED, (-1, D), COPIED),
    "no tokens": ((0, 4 * D), cut(1), (0, 4, D), cut(1)),
}


@pytest.mark.parametrize("name", CARRIED)
def test_a_cut_is_carried_into_another_shape(name):
    shape, before, new, after = CARRIED[name]
    assert state("reshape", input=T(*shape, state=before), shape=new) == after


def test_a_unit_tells_one_head_from_a_dim_of_one_element():
    features = T(B, S, D, state=cut(2, unit=D))
    assert state("reshape", input=features, shape=(B, S, 1, D)) == cut(2)
    assert state("reshape", input=T(B * S, D, state=cut(1, unit=D)), shape=(B, S, D)) == cut(2, unit=D)
    assert state("reshape", input=T(B, S, 4 * D, state=cut(2, unit=D)), shape=(B, S, -1, D)) == cut(2)


def test_a_unit_stays_together_whatever_stands_around_it():
    features = T(B, S, 4 * D, state=cut(2, unit=D))
    assert state("reshape", input=features, shape=(B, S, 2, 2, D)) == cut(2)
    assert state("reshape", input=features, shape=(B, S, 4, 2, D // 2)) == cut(2)
    assert state("reshape", input=features, shape=(B * S, 4 * D)) == cut(1, unit=D)


@pytest.mark.parametrize(("size", "does"), [(D // 2, "splits it into"), (2 * D, "joins them to")])
def test_a_unit_that_is_split_or_joined_is_another_number_of_heads(size, does):
    features = T(B, S, 4 * D, state=cut(2, unit=D))
    with pytest.raises(RuleError, match=rf"in units of {D}, and the shape .* {does} parts of {size};"):
        state("reshape", input=features, shape=(B, S, 4 * D // size, size))


def test_repeated_heads_are_joined_and_split_again():
    keys = T(B, S, 2, D, state=cut(2))
    repeated = state("repeat_interleave", input=keys, repeats=3, dim=2)
    joined = state("reshape", input=T(B, S, 6, D, state=repeated), shape=(B, S, 6 * D))
    assert state("reshape", input=T(B, S, 6 * D, state=joined), shape=(B, S, -1, D)) == cut(2)


def test_what_repeats_itself_does_so_in_another_shape():
    heads = T(B, 1, 4, S, D, state=State(same=(2,)), grad=False)
    assert state("reshape", input=heads, shape=(B, 4, S, D)).same == (1,)
    assert state("reshape", input=heads, shape=(B, 2, 2, S, D)).same == (1, 2)
    assert state("reshape", input=heads, shape=(B, 4 * S, D)).same == ()
