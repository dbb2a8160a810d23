"""What every rank does in test_gradients.py."""

from dataclasses import replace

import hyper_parallel as hp
from tests.equivalence.decoder_bodies import build


def check(backend, config, weights, ids, sizes, forgotten=None, tolerance=None):
    """The report on the decoder under a plan, which may have forgotten the sum of a parameter's gradient."""

    def make():
        return build(backend, config, weights)

    plan = hp.plan(make(), hp.DeviceMesh.from_sizes(sizes))
    if forgotten is not None:
        assert plan[forgotten].pending == ("tensor",)
        parameters = (replace(each, pending=()) if each.name == forgotten else each for each in plan.parameters)
        plan = replace(plan, parameters=tuple(parameters))
    return hp.check_gradients(make, plan, {"input_ids": ids}, tolerance=tolerance)


def refusal(backend, config, weights, ids, sizes):
    """What a mesh of another number of ranks is told."""
    try:
        check(backend, config, weights, ids, sizes)
    except hp.ConfigError as error:
        return str(error)
    return ""
