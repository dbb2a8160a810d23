"""A runtime for the schedule that writes down what it is told and refuses what makes no sense, and a simulated engine
that runs random programs of units through it: nested, repeated, shared, recomputed."""

from __future__ import annotations

from dataclasses import dataclass, field

from hyper_parallel.core.fsdp.schedule import Schedule, Settings


@dataclass(eq=False)
class FakeUnit:
    name: str
    reshard_after_forward: bool | int | None = True
    stays_for_backward: bool = True
    needs_reduction: bool = True
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    early_all_reduce: bool = False
    forward_prefetch: list = field(default_factory=list)
    backward_prefetch: list = field(default_factory=list)


@dataclass(eq=False)
class FakeReduction:
    unit: FakeUnit
    kind: str = "all"
    state: str = "new"


@dataclass
class Recorder:
    """Keeps the life of every buffer and every reduction; `events` reads like the story of a step."""

    events: list = field(default_factory=list)
    buffers: dict = field(default_factory=dict)  # unit -> "coming", "readable" or "shrunk"; absent when free
    kept: list = field(default_factory=list)  # what is accumulated: (name, "full" or "shards")
    backward: bool = False
    settling: bool = False
    callbacks: list = field(default_factory=list)
    disagreements: int = 0
    most: int = 0  # most units that held a full buffer at a time

    @property
    def gathered(self):
        return {unit.name for unit, state in self.buffers.items() if state == "readable"}

    def _turn(self, unit, before, after, event):
        state = self.buffers.pop(unit, "free")
        assert state in before, f"{event} {unit.name} while it is {state}"
        if after != "free":
            self.buffers[unit] = after
        self.most = max(self.most, sum(each != "shrunk" for each in self.buffers.values()))
        self.events.append(f"{event} {unit.name}")

    def issue_gather(self, unit):
        self._turn(unit, ("free", "shrunk"), "coming", "gather")

    def wait_gather(self, unit):
        self._turn(unit, ("coming",), "readable", "wait gather")

    def shrink(self, unit):
        assert unit.reshard_after_forward not in (True, False, None)
        self._turn(unit, ("readable",), "shrunk", "shrink")

    def free(self, unit):
        self._turn(unit, ("readable", "shrunk"), "free", "free")

    def retain(self, unit):
        self._turn(unit, ("readable",), "readable", "retain")

    def _step(self, reduction, before, after, event):
        assert reduction.state == before, f"{event} {reduction.unit.name} while it is {reduction.state}"
        reduction.state = after
        self.events.append(f"{event} {reduction.unit.name}")

    def keep(self, reduction):
        self._step(reduction, "new", "kept", "keep")
        self.kept.append((reduction.unit.name, "full"))

    def issue_reduce_scatter(self, reduction):
        self._step(reduction, "new", "scattering", "issue RS")
        self._take(reduction, "full")

    def wait_reduce_scatter(self, reduction):
        early = reduction.state == "reducing behind"
        self._step(
            reduction, reduction.state if early else "scattering", "reducing" if early else "scattered", "wait RS"
        )

    def accumulate(self, reduction):
        self._step(reduction, "scattered", "kept", "accumulate")
        self.kept.append((reduction.unit.name, "shards"))

    def issue_all_reduce(self, reduction):
        if reduction.unit.early_all_reduce:
            assert self.events[-1] == f"issue RS {reduction.unit.name}", "right behind its reduce-scatter"
            self._step(reduction, "scattering", "reducing behind", "issue AR")
        else:
            self._step(reduction, "scattered", "reducing", "issue AR")
        self._take(reduction, "shards")

    def wait_all_reduce(self, reduction):
        self._step(reduction, "reducing", "reduced", "wait AR")

    def settle(self, reduction):
        before = "reduced" if reduction.unit.needs_reduction else "new"
        self._step(reduction, before, "settled", "settle")

    def end_pass(self):
        assert not [each for each in self.buffers.values() if each == "coming"] or self.backward

    def left_behind(self, reduced):
        names = {unit.name for unit in reduced}
        return [FakeReduction(FakeUnit(name)) for name in dict.fromkeys(n for n, _ in self.kept) if name not in names]

    def forget_kept(self):
        self.kept.clear()

    def _take(self, reduction, what):
        self.kept = [each for each in self.kept if each != (reduction.unit.name, what)]

    def in_backward(self):
        return self.backward

    def call_at_end_of_backward(self, callback):
        assert self.backward
        self.callbacks.append(callback)


@dataclass(eq=False)
class Call:
    """One call of a unit's module, with the calls that its forward makes. `checkpoint` computes it again in backward:
    "inside" the unit, whose hooks run once, or "around" it, so that they run again. `inputs` get gradients."""

    unit: FakeUnit
    calls: list[Call] = field(default_factory=list)
    checkpoint: str = ""
    inputs: bool = True

    def all(self):
        yield self
        for each in self.calls:
            yield from each.all()


class Interrupted(Exception):
    """What a step breaks with."""


class Engine:
    """Runs forwards and backwards of calls, and reports them as units do. `fuse` counts events until one raises."""

    def __init__(self, settings=None):
        self.runtime = Recorder()
        self.schedule = Schedule(self.runtime, settings or Settings())
        self.fuse = None

    @property
    def events(self):
        return self.runtime.events

    def forward(self, root, recording=True):
        """A forward of the outermost unit."""
        self.schedule.before_root_forward(recording)
        self._forward(root, recording, ())
        self.schedule.after_root_forward(recording)

    def backward(self, root, kind="all"):
        """A backward: every unit's gradients are complete after its first call (the last in backward)."""
        left = [each.unit for each in root.all()]
        self.runtime.backward = True
        self._backward(root, left, kind, ())
        assert not left
        self.finish()

    def finish(self):
        """The end of a backward pass."""
        (callback,), self.runtime.callbacks = self.runtime.callbacks, []
        self.runtime.settling = True
        callback()
        self.runtime.settling = self.runtime.backward = False

    def interrupt(self):
        """What is left of a pass that has raised."""
        self.runtime.callbacks.clear()
        self.runtime.backward = False
        self.fuse = None

    def _forward(self, call, recording, around):
        self._burn()
        self.schedule.before_forward(call.unit)
        around = (*around, call.unit)
        self._reads(around)
        for each in call.calls:
            self._forward(each, recording and call.checkpoint != "inside", around)
            self._reads(around)
        self.schedule.after_forward(call.unit, recording and not (call.checkpoint == "around"))

    def _recompute(self, call, around):
        if call.checkpoint == "around":
            self.schedule.before_forward(call.unit)
        self._reads((*around, call.unit))
        for each in call.calls:
            self.schedule.before_forward(each.unit)
            self._recompute(each, (*around, call.unit))
            self.schedule.after_forward(each.unit, True)
        if call.checkpoint == "around":
            self.schedule.after_forward(call.unit, True)

    def _backward(self, call, left, kind, around):
        self._burn()
        if call.checkpoint == "around":
            self._recompute(call, around)
        self.schedule.before_backward(call.unit)
        around = (*around, call.unit)
        if call.checkpoint == "inside":
            self._recompute(call, around[:-1])
        self._reads(around)
        for each in reversed(call.calls):
            self._backward(each, left, kind, around)
            self._reads(around)
        left.remove(call.unit)
        if call.unit not in left:
            self.schedule.gradients_ready(FakeReduction(call.unit, kind))
        if call.inputs:
            self.schedule.after_backward(call.unit)

    def _reads(self, units):
        for unit in units:
            assert self.runtime.buffers.get(unit) == "readable", f"{unit.name} is read while it is not there"
            assert self.schedule.gathers.is_readable(unit)

    def _burn(self):
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                raise Interrupted
