"""Ranks that issue the same, ranks that don't, and what it costs to know: threads as ranks, tokens as collectives."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.core.errors import CommunicationError, ConfigError
from hyper_parallel.core.fsdp.common_order import CommonOrder

LIMIT_S = 20.0


class Meeting:
    """Where the ranks of a world exchange values; a rank that waits alone breaks it for all."""

    def __init__(self, ranks):
        self.barrier = threading.Barrier(ranks, timeout=LIMIT_S)
        self.values = [None] * ranks

    def exchange(self, rank, value):
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


class Rank:
    """One rank: announcements and collectives are meetings of all, which must be of one kind."""

    def __init__(self, number, meeting):
        self.number, self.meeting = number, meeting
        self.ranks = tuple(range(meeting.barrier.parties))
        self.order = CommonOrder(self, lambda token: f"{token[0]} {token[1]}", self.collective)

    def exchange(self, value):
        return [each for _, each in self.meet("announcement", value)]

    def exchange_texts(self, text):
        return [each for _, each in self.meet("text", text)]

    def collective(self, token):
        assert len(set(self.meet("collective", token))) == 1, "data of two units are mixed"

    def meet(self, kind, value):
        found = self.meeting.exchange(self.number, (kind, value))
        assert {each for each, _ in found} == {kind}, "one rank announces while another sends"
        return found

    def run(self, units, situation="train"):
        """A pass over units: gather each, then the end."""
        for unit in units:
            token = ("gather", unit, ())
            self.order.step(token, lambda: situation)
            self.collective(token)
        self.order.end()


def world(passes):
    """Run `passes[rank]`, a list of (units, situation) each; returns what each rank raised in each pass, or None."""
    meeting = Meeting(len(passes))
    ranks = [Rank(number, meeting) for number in range(len(passes))]
    raised, failures = [[] for _ in ranks], []

    def one(rank):
        try:
            for units, situation in passes[rank.number]:
                try:
                    rank.run(units, situation)
                    raised[rank.number].append(None)
                except ConfigError as error:
                    raised[rank.number].append(str(error))
        except BaseException as error:
            failures.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    return raised, ranks


def alike(units, situation="train", times=1):
    return [(units, situation)] * times


def test_what_has_gone_alike_twice_is_announced_at_its_beginning_and_end_only():
    everyone = [alike((1, 2, 3, 4), times=3)] * 2
    raised, ranks = world(everyone)
    assert raised == [[None] * 3] * 2
    assert ranks[0].order.announced == 5 + 5 + 2


@pytest.mark.parametrize("before", [0, 1, 2, 5])
def test_a_rank_that_skips_a_unit_stops_all_ranks_with_the_same_words(before):
    good = alike((1, 2, 3), times=before)
    raised, _ = world([good + alike((1, 2, 3)), good + alike((1, 3)), good + alike((1, 2, 3))])
    assert [each[:-1] for each in raised] == [[None] * before] * 3
    (message,) = {each[-1] for each in raised}
    if before < 2:
        assert "ranks 0, 2 are about to gather 2; rank 1 is about to gather 3" in message
    else:
        assert "ranks 0, 2 are going on as in the last passes" in message
        assert (
            "rank 1 is no longer going on as in the last passes: the next was to gather 2, and it had to gather 3"
            in message
        )
    assert "No gradient has been handed over" in message


@pytest.mark.parametrize(
    ("units", "words"),
    [
        ((1, 2), "the next was to gather 3, and it had to stop"),
        ((1, 2, 3, 4), "the next was to stop, and it had to gather 4"),
        ((1, 3, 2), "the next was to gather 2, and it had to gather 3"),
        ((2, 3), "rank 1 is about to begin a pass and gather 2, with train"),
    ],
)
def test_the_words_say_what_a_rank_did_instead(units, words):
    good = alike((1, 2, 3), times=3)
    raised, _ = world([good + alike((1, 2, 3)), good + alike(units)])
    assert raised[0][-1] == raised[1][-1] and words in raised[0][-1]


def test_a_rank_that_evaluates_while_another_trains_stops_both():
    raised, _ = world([alike((1, 2), times=4), [*alike((1, 2), times=3), ((1, 2), "evaluate")]])
    assert raised[0][-1] == raised[1][-1]
    assert (
        "begin a pass and gather 1, with train; rank 1 is about to begin a pass and gather 1, with evaluate"
        in raised[0][-1]
    )


def test_all_ranks_may_change_their_order_together():
    steps = [((1, 2, 3), "train")] * 3 + [((1, 3), "train"), ((1, 2, 3), "train")] * 5
    raised, _ = world([steps] * 3)
    assert raised == [[None] * len(steps)] * 3


def test_training_and_evaluation_are_followed_each_in_its_own_order():
    steps = [((1, 2, 3), "train"), ((1, 2), "evaluate")] * 4
    raised, ranks = world([steps] * 2)
    assert raised == [[None] * 8] * 2
    assert ranks[1].order.announced == 2 * (4 + 3) + 2 * (2 + 2)


def test_after_an_error_all_ranks_can_go_on():
    good = alike((1, 2, 3), times=3)
    raised, _ = world([good + alike((1, 2, 3)) + good, good + alike((1, 3)) + good])
    assert [each is None for each in raised[0]] == [True] * 3 + [False] + [True] * 3
    assert raised[0] == raised[1]


class Silent:
    """Peers of which one does not answer."""

    ranks = (0, 1)

    def exchange(self, value):
        raise CommunicationError("all_gather: no answer from rank 1")


def test_a_rank_that_does_not_answer_is_told_with_what_this_one_was_about_to_do():
    order = CommonOrder(Silent(), lambda token: f"{token[0]} layers.{token[1]}", lambda token: None)
    with pytest.raises(
        CommunicationError, match=r"gather layers.3, with train, and has waited .* no answer from rank 1"
    ):
        order.step(("gather", 3, ()), lambda: "train")


units = st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple)
steps = st.lists(st.tuples(units, st.sampled_from(["train", "evaluate"])), min_size=1, max_size=3)


@settings(deadline=None, max_examples=60)
@given(steps, st.integers(1, 4), st.integers(2, 3), st.data())
def test_whatever_ranks_do_all_raise_or_none_and_nothing_is_mixed(plan, times, count, data):
    common = plan * times
    passes = [list(common) for _ in range(count)]
    if data.draw(st.booleans()):
        rank, place = data.draw(st.integers(0, count - 1)), data.draw(st.integers(0, len(common) - 1))
        passes[rank][place] = data.draw(steps)[0]
    raised, _ = world(passes)
    for place in range(len(common)):
        said = {each[place] for each in raised}
        assert len(said) == 1
        differs = len({each[place] for each in passes}) > 1
        assert (said != {None}) == differs
