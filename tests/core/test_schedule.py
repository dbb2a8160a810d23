"""The schedule, driven by a recording runtime: order of events, waits, and what is gathered when."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.core.fsdp.schedule import Schedule


@dataclass(eq=False)
class FakeUnit:
    name: str
    reshard_after_forward: bool = True
    needs_reduction: bool = True


@dataclass(eq=False)
class FakeReduction:
    unit: FakeUnit
    state: str = "new"


@dataclass
class Recorder:
    """A runtime that writes down what it is told, and refuses what makes no sense."""

    events: list = field(default_factory=list)
    gathering: set = field(default_factory=set)
    gathered: set = field(default_factory=set)
    backward: bool = False
    callbacks: list = field(default_factory=list)

    def issue_gather(self, unit):
        assert unit.name not in self.gathering | self.gathered
        self.gathering.add(unit.name)
        self.events.append(f"gather {unit.name}")

    def wait_gather(self, unit):
        self.gathering.remove(unit.name)
        self.gathered.add(unit.name)

    def free(self, unit):
        self.gathered.remove(unit.name)
        self.events.append(f"free {unit.name}")

    def _step(self, reduction, before, after, event):
        assert reduction.state == before, f"{event} {reduction.unit.name}"
        reduction.state = after
        self.events.append(f"{event} {reduction.unit.name}")

    def issue_reduce_scatter(self, reduction):
        self._step(reduction, "new", "scattering", "issue RS")

    def wait_reduce_scatter(self, reduction):
        self._step(reduction, "scattering", "scattered", "wait RS")

    def issue_all_reduce(self, reduction):
        self._step(reduction, "scattered", "reducing", "issue AR")

    def wait_all_reduce(self, reduction):
        self._step(reduction, "reducing", "reduced", "wait AR")

    def settle(self, reduction):
        before = "reduced" if reduction.unit.needs_reduction else "new"
        self._step(reduction, before, "settled", "settle")

    def in_backward(self):
        return self.backward

    def call_at_end_of_backward(self, callback):
        self.callbacks.append(callback)


class Model:
    """A root with blocks that are called in a given order, as the engine would run them."""

    def __init__(self, blocks, reshard_root=False, reductions=True):
        self.runtime = Recorder()
        self.schedule = Schedule(self.runtime)
        self.root = FakeUnit("root", reshard_root)
        self.blocks = {name: FakeUnit(name, needs_reduction=reductions) for name in blocks}
        self.root.needs_reduction = reductions

    def forward(self, calls, recording=True):
        self.schedule.before_root_forward()
        self.schedule.before_forward(self.root)
        for name in calls:
            self.schedule.before_forward(self.blocks[name])
            assert {name, "root"} <= self.runtime.gathered
            self.schedule.after_forward(self.blocks[name], recording)
        self.schedule.after_forward(self.root, recording)

    def backward(self, calls, input_gradients=True):
        """Every block is reduced when its first call (the last in backward) is through."""
        self.runtime.backward = True
        self.schedule.before_backward(self.root)
        for index in reversed(range(len(calls))):
            unit = self.blocks[calls[index]]
            self.schedule.before_backward(unit)
            assert {unit.name, "root"} <= self.runtime.gathered
            if calls.index(unit.name) == index:
                self.schedule.gradients_ready(FakeReduction(unit))
            if input_gradients:
                self.schedule.after_backward(unit)
        self.schedule.gradients_ready(FakeReduction(self.root))
        (callback,) = self.runtime.callbacks
        callback()
        self.runtime.callbacks.clear()
        self.runtime.backward = False

    @property
    def events(self):
        return self.runtime.events


def test_one_step_of_two_layers_reads_like_algorithm_1():
    model = Model(["1", "2"])
    model.forward(["1", "2"])
    assert model.events == ["gather root", "gather 1", "free 1", "gather 2", "free 2"]
    model.events.clear()
    model.backward(["1", "2"])
    assert model.events == [
        "gather 2", "issue RS 2", "free 2",
        "gather 1", "wait RS 2", "issue RS 1", "issue AR 2", "free 1",
        "wait RS 1", "issue RS root", "issue AR 1",
        "wait RS root", "issue AR root",
        "wait AR 2", "settle 2", "wait AR 1", "settle 1", "wait AR root", "settle root",
        "free root",
    ]  # fmt: skip


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=8), st.booleans(), st.booleans(), st.integers(1, 3))
def test_whatever_is_called_however_often_every_unit_is_reduced_once_and_freed(calls, reshard_root, inputs, steps):
    model = Model(sorted(set(calls)), reshard_root)
    for _ in range(steps):
        model.events.clear()
        model.forward(calls)
        model.backward(calls, inputs)
        assert not model.runtime.gathered
        for name in ["root", *set(calls)]:
            for event in ("issue RS", "wait RS", "issue AR", "wait AR", "settle"):
                assert model.events.count(f"{event} {name}") == 1
        waits = [index for index, event in enumerate(model.events) if event.startswith("wait AR")]
        issues = [index for index, event in enumerate(model.events) if event.startswith("issue")]
        assert min(waits) > max(issues), "nothing waits for the slow tier before the settlement"


def test_without_recording_everything_is_freed_after_use():
    model = Model(["1"])
    model.forward(["1"], recording=False)
    assert model.events == ["gather root", "gather 1", "free 1", "free root"]


def test_what_needs_no_reduction_is_settled_at_once():
    model = Model(["1"], reductions=False)
    model.forward(["1"])
    model.events.clear()
    model.backward(["1"])
    assert model.events == ["gather 1", "settle 1", "free 1", "settle root", "free root"]


def test_a_recompute_gathers_once_and_keeps_the_parameters_for_the_backward_that_follows():
    model = Model(["1"])
    model.forward(["1"])
    model.events.clear()
    model.runtime.backward = True
    model.schedule.before_forward(model.blocks["1"])
    model.schedule.after_forward(model.blocks["1"], True)
    model.schedule.before_backward(model.blocks["1"])
    model.schedule.after_backward(model.blocks["1"])
    assert model.events == ["gather 1", "free 1"]


def test_a_node_that_runs_twice_in_one_backward_gets_finished_values_each_time():
    model = Model(["1"])
    model.forward(["1"])
    model.events.clear()
    model.runtime.backward = True
    model.schedule.gradients_ready(FakeReduction(model.blocks["1"]))
    model.schedule.gradients_ready(FakeReduction(model.blocks["1"]))
    assert model.events == ["issue RS 1", "wait RS 1", "issue AR 1", "wait AR 1", "settle 1"] * 2


def test_a_module_called_inside_itself_stays_gathered_until_the_outer_call_ends():
    model = Model(["1"])
    unit = model.blocks["1"]
    model.schedule.before_forward(unit)
    model.schedule.before_forward(unit)
    model.schedule.after_forward(unit, True)
    assert model.schedule.is_gathered(unit)
    model.schedule.after_forward(unit, True)
    assert not model.schedule.is_gathered(unit)


@pytest.mark.parametrize("broken_in", ["forward", "backward"])
def test_after_an_exception_the_next_step_starts_afresh(broken_in):
    model = Model(["1", "2"])
    if broken_in == "forward":
        model.schedule.before_root_forward()
        model.schedule.before_forward(model.root)
        model.schedule.before_forward(model.blocks["1"])
    else:
        model.forward(["1", "2"])
        model.schedule.before_backward(model.root)
        model.schedule.gradients_ready(FakeReduction(model.blocks["2"]))
        model.runtime.callbacks.clear()
    in_flight = [event for event in model.events if event.startswith("issue")]
    model.forward(["1", "2"])
    waited = [event for event in model.events if event.startswith("wait")]
    assert waited == [event.replace("issue", "wait") for event in in_flight], "ranks communicate in step again"
    model.events.clear()
    model.backward(["1", "2"])
    assert not model.runtime.gathered
    assert model.events.count("settle 1") == model.events.count("settle 2") == 1


def test_a_module_whose_outputs_can_not_be_watched_stays_gathered_until_the_settlement():
    model = Model(["1"])
    unit = model.blocks["1"]
    model.schedule.before_root_forward()
    model.schedule.before_forward(unit)
    model.schedule.after_forward(unit, recording=True, watched=False)
    assert model.schedule.is_gathered(unit)
    model.schedule.end_of_backward()
    assert not model.schedule.is_gathered(unit)
