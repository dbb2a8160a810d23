"""Bodies of `test_fsdp_precision.py`."""

import hyper_parallel as hp
from hyper_parallel.core.fsdp.unit import units_of
from tests.equivalence.fsdp_bodies import descend, shard
from tests.equivalence.scales import build, values


def trained(backend, policy, sizes, until_last=None, steps=4):
    """Train on this rank's batches: gradients of the last step, parameters, and the dtypes that a block saw.

    With `until_last`, the name of a method of units, a step has two batches, and the method is told of the last.
    """
    model, loss = build(backend)
    shard(model, hp.DeviceMesh.from_sizes(sizes), mp_policy=hp.MixedPrecisionPolicy(**policy))
    parameters = hp.trainable_parameters(model)
    rank = backend.collectives.rank()
    for step in range(steps):
        for micro in range(2 if until_last else 1):
            if until_last:
                getattr(model, until_last)(micro == 1)
            x = backend.tensors.from_numpy(values("x", 10 * step + rank + 2 * micro))
            _, gradients = hp.value_and_grad(loss, [p for _, p in parameters])(x)
        descend(backend, parameters, gradients)
        for (_, parameter), gradient in zip(parameters, gradients):
            assert backend.tensors.dtype_name(gradient) == backend.tensors.dtype_name(parameter) == "float32"
            assert tuple(gradient.shape) == tuple(parameter.shape)
    held = {name: backend.tensors.to_numpy(g) for (name, _), g in zip(parameters, gradients)}
    return held, hp.full_parameters(model), model.layers[0].seen


def dtypes(backend, policy):
    """What a unit's collectives move, and what its module is given and gives."""
    model, loss = build(backend, blocks=1)
    outputs = []
    shard(model, hp.DeviceMesh((2,), ("shard",)), mp_policy=hp.MixedPrecisionPolicy(**policy))
    handle = backend.modules.after_forward(model.layers[0], lambda y: outputs.append(backend.tensors.dtype_name(y)))
    parameters = [p for _, p in hp.trainable_parameters(model)]
    hp.value_and_grad(loss, parameters)(backend.tensors.from_numpy(values("x")))
    handle.remove()
    counts = [each.counts for unit in units_of(backend, model) for each in unit.parameters]
    return model.layers[0].seen, outputs, sum(each.cast for each in counts), sum(each.copied for each in counts)
