"""Bodies of `test_fsdp_order.py`: ranks that run other modules than the others."""

import numpy as np

import hyper_parallel as hp
from hyper_parallel.core.fsdp.unit import unit_of, units_of
from tests.equivalence.control_bodies import built, held
from tests.equivalence.fsdp_bodies import compare
from tests.equivalence.toy import ToyConfig, batch


def step(backend, config, loss, parameters):
    return hp.value_and_grad(loss, parameters)(batch(backend, config, 0))[1]


def evaluate(backend, config, loss):
    with backend.autograd.no_grad():
        loss(batch(backend, config, 0))


def diverging(backend, sizes, case, good, **options):
    """After some good steps the last rank does something else. Returns what this rank was told, whether it was given
    gradients in spite of it, and the worst error of a good step afterwards."""
    config = ToyConfig(blocks=3, calls=(0, 1, 2))
    config, model, loss, whole, whole_loss = built(backend, config, hp.DeviceMesh.from_sizes(sizes), **options)
    parameters = [p for _, p in hp.trainable_parameters(model)]
    for _ in range(good):
        step(backend, config, loss, parameters)
    odd = backend.collectives.rank() == backend.collectives.world_size() - 1
    message, given = None, False
    try:
        if case == "skips":
            model.calls = (0, 2) if odd else config.calls
            given = bool(step(backend, config, loss, parameters))
        elif case == "repeats":
            model.calls = (0, 1, 2, 1) if odd else config.calls
            given = bool(step(backend, config, loss, parameters))
        elif case == "evaluates":
            evaluate(backend, config, loss) if odd else step(backend, config, loss, parameters)
        elif case == "gathers":
            model.layers[1].unshard() if odd else step(backend, config, loss, parameters)
        elif case == "settings":
            model.set_requires_gradient_sync(not odd)
            given = bool(step(backend, config, loss, parameters))
        elif case == "another loss":
            if odd:
                hp.value_and_grad(lambda x: (loss(x), x.sum() * model.temperature)[1], parameters)(
                    batch(backend, config, 0)
                )
            given = bool(step(backend, config, loss, parameters))
    except hp.ConfigError as error:
        message = str(error)
    model.calls = config.calls
    model.set_requires_gradient_sync(True)
    errors = [compare(backend, config, model, loss, whole, whole_loss) for _ in range(3)]
    assert held(model, backend) == 0
    return message, given, max(errors)


def changing_together(backend):
    """All ranks drop layers by one seed, evaluate, and break off together; returns the worst error."""
    config = ToyConfig(blocks=3, calls=(0, 1, 2))
    config, model, loss, whole, whole_loss = built(backend, config)
    parameters = [p for _, p in hp.trainable_parameters(model)]
    draws, errors = np.random.default_rng(3), []

    def broken(x):
        loss(x)
        raise ValueError("in the middle")

    for index in range(10):
        if index >= 3:
            model.calls = whole.calls = tuple(each for each in config.calls if draws.random() < 0.7) or (1,)
        errors.append(compare(backend, config, model, loss, whole, whole_loss))
        if index % 3 == 2:
            evaluate(backend, config, loss)
        if index in (4, 8):
            try:
                hp.value_and_grad(broken, parameters)(batch(backend, config, 0))
            except ValueError:
                pass
    return max(errors)


def announcements(backend):
    """How many exchanges each of six steps took, then each of four evaluations, and how many units there are."""
    config, model, loss, _, _ = built(backend)
    parameters, counts = [p for _, p in hp.trainable_parameters(model)], []
    total = 0
    for index in range(10):
        step(backend, config, loss, parameters) if index < 6 else evaluate(backend, config, loss)
        now = unit_of(model).schedule._runtime.order.announced
        counts.append(now - total)
        total = now
    return counts, len(list(units_of(backend, model)))


def broken_collective(backend):
    """What is said when the gather of a layer fails."""
    config, model, loss, _, _ = built(backend)
    parameters = [p for _, p in hp.trainable_parameters(model)]
    step(backend, config, loss, parameters)
    runtime = unit_of(model).schedule._runtime._runtime
    whole = runtime.wait_gather

    def wait_gather(unit):
        whole(unit)
        if unit.name == "layers.1":
            raise hp.CommunicationError("all_gather over the ranks 0, 1 has timed out")

    runtime.wait_gather = wait_gather
    try:
        step(backend, config, loss, parameters)
    except hp.CommunicationError as error:
        return str(error)
