"""The schedule, driven by a recording runtime: order of events, waits, and what is gathered when."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.core.fsdp.order import Order
from hyper_parallel.core.fsdp.schedule import Settings
from tests.core.recording import Call, Engine, FakeReduction, FakeUnit, Interrupted


def flat(engine_settings=None, layers="12", **root):
    """An engine, and one call of a root with a layer after the other; no gradient leaves the first one's input."""
    units = {name: FakeUnit(name) for name in sorted(set(layers))}
    root = FakeUnit("root", **{"reshard_after_forward": None, **root})
    return Engine(engine_settings), Call(root, [Call(units[name]) for name in layers])


def story(engine, without=("wait gather",)):
    """The events so far, without some; they are forgotten then."""
    found = [event for event in engine.events if not event.startswith(without)]
    engine.events.clear()
    return found


NO_PREFETCH = Settings(forward_prefetch_depth=0, backward_prefetch_depth=0)
ALGORITHM_1 = [
    "gather 2", "issue RS 2", "free 2",
    "gather 1", "wait RS 2", "issue RS 1", "issue AR 2", "free 1",
    "wait RS 1", "issue RS root", "issue AR 1", "free root",
    "wait RS root", "issue AR root",
    "wait AR 2", "settle 2", "wait AR 1", "settle 1", "wait AR root", "settle root",
]  # fmt: skip


def test_one_step_of_two_layers_reads_like_algorithm_1():
    engine, model = flat(NO_PREFETCH)
    engine.forward(model)
    assert story(engine) == ["gather root", "gather 1", "free 1", "gather 2", "free 2"]
    engine.backward(model)
    assert story(engine) == ALGORITHM_1


def test_early_all_reduces_are_issued_behind_their_reduce_scatters_and_all_else_is_the_same():
    engine, model = flat(NO_PREFETCH)
    for call in model.all():
        call.unit.early_all_reduce = True
    engine.forward(model)
    engine.events.clear()
    engine.backward(model)
    found = story(engine)
    assert found[:4] == ["gather 2", "issue RS 2", "issue AR 2", "free 2"]
    assert found[4:9] == ["gather 1", "wait RS 2", "issue RS 1", "issue AR 1", "free 1"]
    assert found[9:13] == ["wait RS 1", "issue RS root", "issue AR root", "free root"]
    assert found[13:] == ["wait RS root", *ALGORITHM_1[-6:]]
    assert sorted(found) == sorted(ALGORITHM_1)


def test_backward_fetches_the_layer_before_while_a_layer_computes():
    engine, model = flat(layers="123")
    engine.forward(model)
    assert story(engine) == ["gather root", "gather 1", "free 1", "gather 2", "free 2", "gather 3", "free 3"]
    engine.backward(model)
    found = [event for event in story(engine, without=()) if "gather" in event or "free" in event]
    assert found == [
        "gather 3", "gather 2", "wait gather 3",  # the root's backward fetches 3, that of 3 fetches 2
        "free 3", "gather 1", "wait gather 2",
        "free 2", "wait gather 1", "free 1", "free root",
    ]  # fmt: skip


def test_forward_fetches_what_came_next_in_the_last_forward():
    engine, model = flat(layers="123")
    engine.forward(model, recording=False)
    engine.events.clear()
    engine.forward(model, recording=False)
    assert story(engine, without=()) == [
        "gather root", "gather 1", "wait gather root",  # what comes next is under way while a gather is waited for
        "gather 2", "wait gather 1", "free 1",
        "gather 3", "wait gather 2", "free 2",
        "wait gather 3", "free 3", "free root",
    ]  # fmt: skip


def test_what_backward_would_gather_at_its_very_beginning_is_not_freed_after_forward():
    engine, model = flat(layers="123")
    engine.forward(model)
    engine.backward(model)
    engine.events.clear()
    engine.forward(model)
    kept = ["gather root", "gather 1", "gather 2", "free 1", "gather 3", "retain 2", "retain 3"]
    assert story(engine) == kept
    engine.backward(model)
    found = [event for event in story(engine) if "gather" in event or "free" in event]
    assert found == ["free 3", "gather 1", "free 2", "free 1", "free root"]


@pytest.mark.parametrize(("depth", "stay"), [(0, "4"), (1, "34"), (2, "234"), (9, "1234")])
def test_as_many_stay_for_backward_as_it_fetches_at_its_beginning(depth, stay):
    engine, model = flat(Settings(1, depth), layers="1234")
    for _ in range(2):
        engine.forward(model)
    assert engine.runtime.gathered == {"root", *stay}
    assert engine.runtime.most <= 2 + max(depth, 1)


def test_nothing_stays_where_no_backward_is_to_come():
    engine, model = flat(layers="123")
    engine.forward(model)
    engine.forward(model, recording=False)
    assert not engine.runtime.buffers


def test_a_unit_that_will_be_recomputed_stays_as_well_though_nothing_is_recorded_inside():
    engine, model = flat(layers="12")
    for _ in range(2):
        engine.events.clear()
        engine.schedule.before_root_forward(True)
        engine.schedule.before_forward(model.unit)
        for call in model.calls:
            engine.schedule.before_forward(call.unit)
            engine.schedule.after_forward(call.unit, recording=False)
        engine.schedule.after_forward(model.unit, recording=True)
        engine.schedule.after_root_forward(True)
    assert story(engine)[-2:] == ["retain 1", "retain 2"]
    engine.runtime.backward = True
    engine.schedule.before_forward(model.calls[1].unit)
    assert story(engine) == []


def test_of_units_that_say_what_to_fetch_in_backward_the_first_one_alone_stays():
    engine, model = flat(layers="1234")
    model.calls[-1].unit.backward_prefetch = [model.calls[0].unit]
    for _ in range(2):
        engine.forward(model)
    assert engine.runtime.gathered == {"root", "4"}


def test_a_unit_that_is_not_gathered_for_backward_does_not_stay_for_it():
    engine, model = flat(layers="123")
    model.calls[-1].unit.unshard_in_backward = False
    for _ in range(2):
        engine.forward(model)
    assert engine.runtime.gathered == {"root", "2"}


def test_what_stays_for_backward_is_freed_when_forward_goes_on_longer_than_the_last_one():
    engine, model = flat(layers="12345")
    *calls, fourth, fifth = model.calls
    model.calls[:] = calls
    engine.forward(model)
    model.calls[:] = [*calls, fourth, fifth]
    engine.events.clear()
    engine.forward(model)
    found = story(engine)
    assert found[found.index("retain 3") + 1 :] == [
        "free 2",
        "free 3",
        "gather 4",
        "free 4",
        "gather 5",
        "free 5",
    ]
    engine.backward(model)
    assert not engine.runtime.buffers


def test_a_unit_that_stays_for_backward_and_is_called_once_more_is_there():
    engine, model = flat(layers="12")
    engine.forward(model)
    model.calls.append(model.calls[-1])
    engine.events.clear()
    engine.forward(model)
    assert [event for event in story(engine) if event.endswith(" 2")] == ["gather 2", "retain 2", "free 2"]
    engine.backward(model)
    assert not engine.runtime.buffers


def test_an_evaluation_that_goes_another_way_leaves_steps_as_they_are():
    engine, model = flat(layers="123")
    steps = []
    for _ in range(3):
        engine.forward(model)
        engine.backward(model)
        steps.append(story(engine))
        engine.forward(Call(model.unit, model.calls[:1]), recording=False)
        engine.events.clear()
    assert steps[1] == steps[2] and "retain 3" in steps[1]


def ended_forward(engine_settings=None):
    """A model whose second forward has retained its layer 2; no backward has come."""
    engine, model = flat(engine_settings, layers="12")
    for _ in range(2):
        engine.forward(model)
    assert story(engine)[-1] == "retain 2"
    return engine, model, model.calls[-1]


def test_a_unit_that_stays_for_backward_and_is_called_by_itself_is_gathered_anew():
    engine, model, last = ended_forward()
    engine.schedule.before_forward(last.unit)
    engine.schedule.after_forward(last.unit, recording=True)
    assert story(engine) == ["free 2", "gather 2", "free 2"]
    engine.backward(model)
    assert not engine.runtime.buffers


def test_a_unit_that_stays_for_backward_and_is_gathered_by_hand_is_gathered_anew_and_kept():
    engine, model = flat(layers="12")
    engine.forward(model)
    three = FakeUnit("3")
    engine.events.clear()
    engine.schedule.before_root_forward(True)
    for call in model.all():
        engine.schedule.before_forward(call.unit)
        if call.unit is not model.unit:
            engine.schedule.after_forward(call.unit, recording=True)
    engine.schedule.gathers.fetch_anew(call.unit)
    engine.schedule.gathers.keep(call.unit)
    assert story(engine)[-3:] == ["retain 2", "free 2", "gather 2"]
    engine.schedule.before_forward(three)
    assert story(engine) == ["free 1", "gather 3"], "1 was to stay for a backward that will begin with 3"


def test_what_was_kept_for_the_next_forward_stays_for_its_backward_alone():
    engine, model, last = ended_forward()
    engine.schedule.gathers.fetch_anew(last.unit)
    engine.schedule.gathers.keep(last.unit)
    engine.forward(model)
    assert [event for event in story(engine) if event.endswith(" 2")] == ["free 2", "gather 2", "retain 2"]
    engine.forward(model)
    assert [event for event in story(engine) if event.endswith(" 2")] == ["free 2", "gather 2", "retain 2"]


def test_where_forward_goes_another_way_than_the_last_one_nothing_is_held_that_was_to_stay():
    engine, model = flat(layers="1234")
    engine.forward(model)
    model.calls[-1] = model.calls[0]
    engine.events.clear()
    engine.forward(model)
    found = story(engine)
    assert found[found.index("retain 3") :] == [
        "retain 3",
        "free 3",
        "gather 1",
        "gather 2",
        "free 1",
        "free 4",
        "free 2",
    ]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_no_more_units_are_whole_than_the_root_one_layer_and_those_ahead(depth):
    engine, model = flat(Settings(depth, depth), layers="123456")
    for _ in range(2):
        engine.forward(model)
        engine.backward(model)
    assert engine.runtime.most == 2 + depth


def test_what_a_unit_lists_is_fetched_instead_of_what_comes_next():
    engine, model = flat(layers="1234")
    one, two, three, four = (call.unit for call in model.calls)
    model.unit.forward_prefetch, one.forward_prefetch, two.forward_prefetch = [one, two], [three], [four]
    four.backward_prefetch = [three, two]
    engine.forward(model)
    gathers = [event for event in story(engine) if event.startswith("gather")]
    assert gathers == ["gather root", "gather 1", "gather 2", "gather 3", "gather 4"]
    assert engine.runtime.most == 4  # the root, 2, and 3 and 4 ahead
    engine.backward(model)
    gathers = [event for event in story(engine) if event.startswith("gather")]
    assert gathers == ["gather 4", "gather 3", "gather 2", "gather 1"]


def test_what_was_fetched_for_nothing_is_freed_at_the_end_of_forward_and_counted():
    engine, model = flat(layers="123")
    engine.forward(model, recording=False)
    engine.events.clear()
    model.calls.pop()
    engine.forward(model, recording=False)
    assert story(engine, without=())[-4:] == ["free 2", "free root", "wait gather 3", "free 3"]
    assert engine.schedule.gathers.unused == 1


def test_a_mistaken_fetch_in_backward_is_freed_at_the_settlement_and_counted():
    engine, model = flat(layers="12")
    engine.forward(model)
    two = model.calls.pop()
    engine.backward(model)
    assert not engine.runtime.buffers
    assert engine.schedule.gathers.unused == 1 and f"free {two.unit.name}" in engine.events


def test_a_layer_that_needs_no_parameters_in_backward_is_not_gathered_for_it():
    engine, model = flat(layers="12")
    model.calls[0].unit.unshard_in_backward = False
    engine.forward(model)
    engine.events.clear()
    engine.runtime.backward = True
    engine.schedule.before_backward(model.unit)
    for call in reversed(model.calls):
        engine.schedule.before_backward(call.unit)
        engine.schedule.gradients_ready(FakeReduction(call.unit))
        engine.schedule.after_backward(call.unit)
    engine.finish()
    assert [event for event in story(engine) if event.startswith("gather")] == ["gather 2"]


def test_a_part_is_kept_for_a_smaller_group_and_given_back_after_backward():
    engine, model = flat(NO_PREFETCH, layers="1")
    model.calls[0].unit.reshard_after_forward = 2
    engine.forward(model)
    engine.backward(model)
    found = [event for event in story(engine) if event.endswith(" 1") and ("gather" in event or "free" in event)]
    assert found == ["gather 1", "gather 1", "free 1"]
    engine.forward(model)
    engine.forward(model)  # no backward has come: the part is out of date
    assert story(engine).count("free 1") == 1
    engine.forward(model, recording=False)
    assert "shrink 1" not in story(engine)


# Random programs: units that are nested, shared, repeated and recomputed, called in steps that differ.


@st.composite
def programs(draw):
    """Units, some with settings of their own, and a few programs over them, one for each step."""
    reshards = st.sampled_from([True, True, False, 2])
    units = [FakeUnit(name, draw(reshards)) for name in "abcde"]
    for unit in units:
        unit.forward_prefetch = draw(st.lists(st.sampled_from(units), max_size=2, unique=True))
        unit.backward_prefetch = draw(st.lists(st.sampled_from(units), max_size=2, unique=True))
        unit.reshard_after_backward = draw(st.booleans()) or draw(st.booleans())
        unit.early_all_reduce = draw(st.booleans())

    def call(unit, depth):
        below = [each for each in units if each is not unit] if depth else []
        chosen = draw(st.lists(st.sampled_from(below), max_size=3)) if below else []
        checkpoint = draw(st.sampled_from(["", "", "inside", "around"]))
        return Call(unit, [call(each, depth - 1) for each in chosen], checkpoint, draw(st.booleans()))

    root = FakeUnit("root", draw(st.sampled_from([None, True, False])), early_all_reduce=draw(st.booleans()))

    def program():
        return Call(root, [call(draw(st.sampled_from(units)), 2) for _ in range(draw(st.integers(1, 4)))])

    return [program() for _ in range(draw(st.integers(1, 3)))]


depths = st.builds(Settings, st.integers(0, 3), st.integers(0, 3))


def reduced_once(engine, root):
    """Every unit of a step went through every event once, and nothing waited for the slow tier too early."""
    for unit in {each.unit for each in root.all()}:
        for event in ("issue RS", "wait RS", "issue AR", "wait AR", "settle"):
            assert engine.events.count(f"{event} {unit.name}") == 1
    waits = [index for index, event in enumerate(engine.events) if event.startswith("wait AR")]
    issues = [index for index, event in enumerate(engine.events) if event.startswith("issue")]
    assert min(waits) > max(issues), "nothing waits for the slow tier before the settlement"


def nothing_is_left(engine):
    """What holds memory after a backward is what was asked to."""
    assert all(not unit.reshard_after_backward for unit in engine.runtime.buffers)
    assert "coming" not in engine.runtime.buffers.values()


@settings(deadline=None, max_examples=40)
@given(programs(), depths, st.integers(1, 2))
def test_whatever_is_called_however_often_every_unit_is_reduced_once_and_freed(steps, asked, times):
    engine = Engine(asked)
    for root in steps * times:
        engine.events.clear()
        engine.forward(root)
        engine.backward(root)
        reduced_once(engine, root)
        nothing_is_left(engine)


@settings(deadline=None, max_examples=40)
@given(programs(), depths)
def test_evaluations_between_steps_change_nothing(steps, asked):
    engine = Engine(asked)
    for root in steps:
        engine.forward(steps[0], recording=False)
        engine.forward(root)
        engine.events.clear()
        engine.backward(root)
        reduced_once(engine, root)
        engine.forward(steps[-1], recording=False)
        engine.forward(steps[-1], recording=False)


@settings(deadline=None, max_examples=40)
@given(programs(), depths, st.integers(0, 25))
def test_after_an_exception_anywhere_the_next_step_starts_afresh(steps, asked, fuse):
    engine = Engine(asked)
    engine.fuse = fuse
    try:
        engine.forward(steps[0])
        engine.backward(steps[0])
    except Interrupted:
        engine.interrupt()
    engine.fuse = None
    engine.forward(steps[-1])
    in_flight = sum((event.startswith("issue R")) - event.startswith("wait R") for event in engine.events)
    in_flight += sum((event.startswith("issue A")) - event.startswith("wait A") for event in engine.events)
    assert in_flight == 0, "ranks communicate in step again"
    engine.events.clear()
    engine.backward(steps[-1])
    reduced_once(engine, steps[-1])
    nothing_is_left(engine)


def test_what_raises_while_gradients_are_handed_over_leaves_nothing_gathered_and_nothing_in_flight():
    """As a user's hook may."""
    engine, model = flat(layers="12")
    engine.forward(model)
    settle = engine.runtime.settle

    def refuse(reduction):
        engine.runtime.settle = settle
        raise Interrupted

    engine.runtime.settle = refuse
    with pytest.raises(Interrupted):
        engine.backward(model)
    engine.interrupt()
    assert not engine.runtime.buffers
    engine.forward(model)
    assert sum(event.startswith("issue AR") - event.startswith("wait AR") for event in engine.events) == 0
    engine.events.clear()
    engine.backward(model)
    reduced_once(engine, model)


@settings(deadline=None, max_examples=40)
@given(programs(), depths, st.sampled_from(["none", "scatter"]), st.booleans())
def test_accumulation_uses_the_slow_tier_once_and_hands_over_once(steps, asked, kind, last_only):
    engine = Engine(asked)
    root = steps[0]
    for _ in range(2):
        engine.forward(root)
        engine.backward(root, kind)
    assert not [event for event in engine.events if event.startswith(("issue AR", "settle"))]
    assert ("issue RS root" in engine.events) == (kind == "scatter")
    engine.events.clear()
    engine.forward(root)
    engine.backward(root)
    reduced_once(engine, root)
    assert not engine.runtime.kept, "all that was kept is in the sum"


@settings(deadline=None, max_examples=40)
@given(programs(), depths)
def test_a_backward_that_is_not_the_last_settles_nothing_and_loses_nothing(steps, asked):
    engine = Engine(asked)
    root = steps[0]
    engine.schedule.settings.is_last_backward = False
    engine.forward(root)
    engine.backward(root)
    assert not [event for event in engine.events if event.startswith(("wait AR", "settle"))]
    nothing_is_left(engine)
    engine.schedule.settings.is_last_backward = True
    engine.forward(root)
    engine.backward(root)
    for unit in {each.unit for each in root.all()}:
        assert engine.events.count(f"settle {unit.name}") == 2


@given(st.lists(st.sampled_from("abc")), st.lists(st.sampled_from("abcd"), max_size=5), st.integers(0, 3))
def test_an_order_tells_what_came_next_and_nothing_of_what_it_does_not_know(known, asked, count):
    order = Order(known)
    for each in asked:
        following = order.after(each, count)
        if each not in known:
            assert following == []
        else:
            places = [place for place, other in enumerate(known) if other == each]
            assert following in [known[place + 1 : place + 1 + count] for place in places]
    if known:
        again = Order(known)
        assert [again.after(each, 1) for each in known] == [known[place + 1 : place + 2] for place in range(len(known))]


# Single rules.


def test_a_unit_that_a_last_backward_does_not_come_to_is_reduced_with_what_it_keeps():
    engine, model = flat(layers="12")
    engine.forward(model)
    engine.backward(model, "none")
    engine.events.clear()
    model.calls.pop()
    engine.forward(model)
    engine.backward(model)
    assert engine.events.count("settle 2") == engine.events.count("issue AR 2") == 1
    assert not engine.runtime.kept


def test_without_recording_everything_is_freed_after_use():
    engine, model = flat(layers="1")
    engine.forward(model, recording=False)
    assert story(engine) == ["gather root", "gather 1", "free 1", "free root"]


def test_a_unit_that_is_told_to_stay_stays_over_evaluations():
    engine, model = flat(layers="1", reshard_after_forward=False)
    for _ in range(3):
        engine.forward(model, recording=False)
    assert story(engine).count("gather root") == 1
    engine.schedule.gathers.free(model.unit)
    assert story(engine) == ["free root"]


def test_parameters_that_stay_after_backward_are_not_gathered_for_the_next_micro_batch():
    engine, model = flat(layers="1")
    for unit in (model.unit, model.calls[0].unit):
        unit.reshard_after_backward = unit.reshard_after_forward = False
    for _ in range(2):
        engine.forward(model)
        engine.backward(model)
    assert [event for event in story(engine) if event.startswith("gather")] == ["gather root", "gather 1"]


def test_what_needs_no_reduction_is_settled_at_once():
    engine, model = flat(layers="1", needs_reduction=False)
    model.calls[0].unit.needs_reduction = False
    engine.forward(model)
    engine.events.clear()
    engine.backward(model)
    assert story(engine) == ["gather 1", "settle 1", "free 1", "settle root", "free root"]


def test_a_recompute_gathers_once_fetches_nothing_ahead_and_keeps_the_parameters_for_the_backward_that_follows():
    engine, model = flat(layers="1234")
    engine.forward(model)
    engine.forward(model)
    engine.events.clear()
    engine.runtime.backward = True
    two = model.calls[1].unit
    engine.schedule.before_forward(two)
    engine.schedule.after_forward(two, True)
    assert story(engine) == ["gather 2"]
    engine.schedule.before_backward(two)
    engine.schedule.after_backward(two)
    assert story(engine) == ["gather 1", "free 2"]


def test_a_recompute_that_stops_early_does_not_keep_the_parameters_beyond_their_backward():
    engine, model = flat(layers="1")
    engine.forward(model)
    engine.events.clear()
    engine.runtime.backward = True
    one = model.calls[0].unit
    engine.schedule.before_forward(one)
    engine.schedule.before_backward(one)
    engine.schedule.after_backward(one)
    assert story(engine) == ["gather 1", "free 1"]


def test_a_node_that_runs_twice_in_one_backward_gets_finished_values_each_time():
    engine, model = flat(layers="1")
    engine.forward(model)
    engine.events.clear()
    engine.runtime.backward = True
    engine.schedule.gradients_ready(FakeReduction(model.calls[0].unit))
    engine.schedule.gradients_ready(FakeReduction(model.calls[0].unit))
    assert engine.events == ["issue RS 1", "wait RS 1", "issue AR 1", "wait AR 1", "settle 1"] * 2


def test_a_module_called_inside_itself_stays_gathered_until_the_outer_call_ends():
    engine, model = flat(layers="1")
    unit = model.calls[0].unit
    engine.schedule.before_forward(unit)
    engine.schedule.before_forward(unit)
    engine.schedule.after_forward(unit, True)
    assert engine.schedule.gathers.is_readable(unit)
    engine.schedule.after_forward(unit, True)
    assert not engine.schedule.gathers.is_readable(unit)


def test_a_module_whose_outputs_can_not_be_watched_stays_gathered_until_the_settlement():
    engine, model = flat(layers="1")
    unit = model.calls[0].unit
    engine.schedule.before_root_forward(True)
    engine.schedule.before_forward(unit)
    engine.schedule.after_forward(unit, recording=True, watched=False)
    assert engine.schedule.gathers.is_readable(unit)
    engine.schedule.end_of_backward()
    assert not engine.schedule.gathers.is_readable(unit)


def test_a_schedule_goes_on_with_what_a_unit_has_gathered_on_its_own():
    engine, model = flat(layers="1")
    other = Engine()
    other.runtime = other.schedule.runtime = engine.runtime
    unit = model.calls[0].unit
    other.schedule.gathers.fetch(unit)
    other.schedule.gathers.keep(unit)
    engine.schedule.adopt(other.schedule)
    engine.forward(model)
    assert story(engine) == ["gather 1", "gather root", "free 1"]
