"""What every rank does in test_step_counts.py."""

import gc
import sys
from collections import Counter

import hyper_parallel as hp
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.transition import lower
from tests.equivalence.decoder_bodies import build
from tests.equivalence.production_bodies import loss_of, parallel

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
ENGINE = ("BackwardCFunction.apply",)
"""What an engine runs, in Python, to get to the backward of an operation of ours."""


def counts_of_a_step(backend, config, weights, ids, sizes, sequence_parallel):
    """Of a step (forward, loss, backward) without a plan and with one, what `Watch` saw; and what the plan tells."""
    model, plan = parallel(backend, config, weights, sizes, sequence_parallel)
    transitions = transitions_of(plan, ids.shape)
    alone = build(backend, config, weights)
    hooked = hooked_by(transitions, sequence_parallel)
    hook(backend, alone, hooked, [unit.name for unit in plan.units])
    watches = []
    for each in (alone, model):
        parameters = [parameter for _, parameter in hp.trainable_parameters(each)]
        step = hp.value_and_grad(loss_of(backend, each, ids), parameters)
        step()  # what is worked out in a first step is looked up afterwards
        watches.append(Watch().over(step))
    return *(each.result() for each in watches), expected_of(plan, transitions, hooked)


def operators_of_a_step(backend, config, weights, ids, sizes, sequence_parallel):
    """PyTorch's operators, those of backward included, that run in a step without a plan and with one outside of our
    functions; and with one the classes of the tensors that meet an operator, or a function of the framework."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    classes = set()

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            classes.update(each.__name__ for each in types)
            return function(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            classes.update(each.__name__ for each in types)
            operators.update([] if watch.is_inside() else [operator.name()])
            return operator(*args, **(kwargs or {}))

    found = []
    for model in (build(backend, config, weights), parallel(backend, config, weights, sizes, sequence_parallel)[0]):
        parameters = [parameter for _, parameter in hp.trainable_parameters(model)]
        step, watch, operators = hp.value_and_grad(loss_of(backend, model, ids), parameters), Watch(), Counter()
        step()
        classes.clear()
        with Functions(), Operators():
            watch.over(step)
        found.append(operators)
    return *found, sorted(classes)


def transitions_of(plan, shape):
    """For each contract of the plan that does anything: its module, the side, and the stages of this plan's transition,
    forward and backward. Worked out from the plan alone."""
    found = []
    for boundary in plan.boundaries:
        for side, contracts in (("input", boundary.inputs), ("output", boundary.outputs)):
            for contract in contracts:
                whole = (*shape, contract.size)
                source = Layout(plan.mesh, contract.before, whole, gradient=contract.source_gradient)
                target = Layout(plan.mesh, contract.after, whole, gradient=contract.gradient)
                program = lower(source, target).program(0)
                if program.forward or program.backward:
                    found.append((boundary.module, side, program.forward, program.backward))
    return found


def hooked_by(transitions, sequence_parallel):
    """Modules with hooks for transitions, and the one in which sequences are cut and put together again."""
    return [*dict.fromkeys(module for module, *_ in transitions), *(["model"] if sequence_parallel else ())]


def expected_of(plan, transitions, hooked):
    """How often each collective, and each operation of ours, runs in a step.

    A stage of a transition is one collective at most. The loss of a cut vocabulary gathers the largest logits and sums
    up one buffer. A unit sums up, in one buffer, the gradients of parameters of which each rank has computed a part."""
    pending = {each.unit for each in plan.parameters if set(each.pending) & {"tensor"}}
    calls = Counter(stage.collective for *_, forward, backward in transitions for stage in (*forward, *backward))
    calls += Counter(all_gather=1, all_reduce=1 + len(pending))
    calls.pop(None, None)
    return {
        "collectives": dict(calls),
        "operations": len(transitions) + 1,
        "hooked": len(hooked) + len(plan.units),
        "reduced": len(pending),
    }


def hook(backend, model, crossed, units):
    """Hooks that do nothing, where a plan has some: what a framework does to call them is no work of ours."""
    modules = dict(backend.modules.named_modules(model))
    for name in crossed:
        backend.modules.around_forward(modules[name], lambda args, kwargs: (args, kwargs), lambda output: output)
    for name in units:
        backend.modules.before_forward(modules[name], lambda args, kwargs: None)
        backend.modules.after_forward(modules[name], lambda output: None)


class Watch:
    """Counts the Python frames and the C functions of a step, apart for the model's own and for ours: what runs in, or
    is called by, a function of HyperParallel."""

    def __init__(self):
        self._inside = 0  # frames on the stack from the outermost one of ours on
        self._own = Counter()
        self._ours = Counter()

    def over(self, step):
        """Watch a call of `step`."""
        gc.disable()  # callbacks of a collection would be counted too
        sys.setprofile(self._note)
        try:
            step()
        finally:
            sys.setprofile(None)
            gc.enable()
        return self

    def is_inside(self):
        """Tell whether a function of ours is running."""
        return self._inside > 0

    def result(self):
        """The model's own functions without look-ups of attributes, of which a parameter that a unit shows takes one
        less; and ours."""
        own = {name: count for name, count in self._own.items() if not name.endswith("__getattr__")}
        return own, dict(self._ours)

    def _note(self, frame, event, argument):
        if event == "return":
            self._inside -= bool(self._inside)
        elif event == "c_call":
            if not self._inside:
                self._own[getattr(argument, "__qualname__", argument.__name__)] += 1
        elif event == "call":
            ours = is_ours(frame.f_code)
            self._inside += bool(self._inside or ours)
            if not self._inside:
                self._own[frame.f_code.co_qualname] += 1
            elif ours:
                self._ours[frame.f_code.co_qualname] += 1


def is_ours(code):
    """A function of HyperParallel; the two decoders are the user's, and `value_and_grad` runs the whole step."""
    if code.co_qualname in ENGINE:
        return True
    ours = "/hyper_parallel/" in code.co_filename and "/hyper_parallel/models/" not in code.co_filename
    return ours and code.co_qualname != "value_and_grad.<locals>.run"
