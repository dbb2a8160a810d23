"""Bodies of `test_fully_sharded.py`: what MindSpore users do with a sharded cell."""

import mindspore as ms
import numpy as np
from mindspore.experimental.optim import AdamW

import hyper_parallel as hp
from hyper_parallel.backends.mindspore import autograd
from hyper_parallel.core.fsdp.counts import total
from hyper_parallel.core.fsdp.unit import units_of
from tests.equivalence.fsdp_bodies import shard, worst
from tests.equivalence.toy import ToyConfig, batch, build


def sharded_and_whole(backend, config):
    model, loss = build(backend, config)
    whole, whole_loss = build(backend, config)
    shard(model, hp.DeviceMesh((2,), ("shard",)))
    return model, loss, whole, whole_loss


def compare(backend, model, found, whole, wanted):
    rank = backend.collectives.rank()
    return max(
        worst(backend.tensors.to_numpy(f), hp.layout_of(p).shard(backend.tensors.to_numpy(w), rank))
        for (_, p), f, w in zip(hp.trainable_parameters(model), found, wanted)
    )


def framework_value_and_grad(backend):
    """MindSpore's own `value_and_grad` returns finished shards, `has_aux` included."""
    config = ToyConfig()
    model, loss, whole, whole_loss = sharded_and_whole(backend, config)

    def differentiate(some_model, some_loss):
        function = ms.value_and_grad(
            lambda x: (some_loss(x), x.sum()), None, some_model.trainable_params(), has_aux=True
        )
        return function(batch(backend, config, 0))[1]

    return compare(backend, model, differentiate(model, loss), whole, differentiate(whole, whole_loss))


def stock_optimizer(backend):
    """Two steps of MindSpore's AdamW on shards equal two steps on the whole parameters."""
    config = ToyConfig(dtype="float32")
    model, loss, whole, whole_loss = sharded_and_whole(backend, config)
    for each, each_loss in ((model, loss), (whole, whole_loss)):
        parameters = each.trainable_params()
        optimizer = AdamW(parameters, lr=0.01)
        for step in range(2):
            _, gradients = ms.value_and_grad(each_loss, None, parameters)(batch(backend, config, step))
            optimizer(gradients)
    found, wanted = hp.full_parameters(model), hp.full_parameters(whole)
    return max(worst(found[name], wanted[name]) for name in wanted)


def recomputed(backend):
    """Blocks, each a unit of its own, under `Cell.recompute()`."""
    config = ToyConfig()
    model, loss, whole, whole_loss = sharded_and_whole(backend, config)
    for block in model.layers:
        block.recompute()
    names = [p for _, p in hp.trainable_parameters(model)]
    _, found = hp.value_and_grad(loss, names)(batch(backend, config, 0))
    _, wanted = hp.value_and_grad(whole_loss, whole.trainable_params())(batch(backend, config, 0))
    return compare(backend, model, found, whole, wanted)


def result_thrown_away(backend):
    """A step whose loss does not depend on the model leaves the next step right."""
    config = ToyConfig()
    model, loss, whole, whole_loss = sharded_and_whole(backend, config)
    parameters = [p for _, p in hp.trainable_parameters(model)]
    hp.value_and_grad(lambda x: (loss(x), x.sum() * model.temperature)[1], parameters)(batch(backend, config, 1))
    _, found = hp.value_and_grad(loss, parameters)(batch(backend, config, 0))
    _, wanted = hp.value_and_grad(whole_loss, whole.trainable_params())(batch(backend, config, 0))
    return compare(backend, model, found, whole, wanted)


class EngineWithoutQueue:
    """MindSpore's engine as a version would be that lacks the queue of final callbacks."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        if name == "queue_backward_final_callback":
            raise AttributeError(name)
        return getattr(self._engine, name)


def without_the_private_queue(backend):
    """Our `value_and_grad` settles at its end; the framework's own is refused. Returns (worst error, message)."""
    config = ToyConfig()
    model, loss, whole, whole_loss = sharded_and_whole(backend, config)
    parameters, x = [p for _, p in hp.trainable_parameters(model)], batch(backend, config, 0)
    engine, message = autograd._engine, None
    autograd._engine = EngineWithoutQueue(engine)
    try:
        for _ in range(2):
            _, found = hp.value_and_grad(loss, parameters)(x)
        try:
            ms.value_and_grad(loss, None, parameters)(x)
        except hp.ConfigError as error:
            message = str(error)
    finally:
        autograd._engine = engine
        engine.set_grad_flag(False)
    _, wanted = hp.value_and_grad(whole_loss, whole.trainable_params())(x)
    return compare(backend, model, found, whole, wanted), message


def framework_accumulation(backend):
    """MindSpore's own `value_and_grad`: the sum of what it returns over micro-batches is the whole sum."""
    config = ToyConfig()
    model, loss, whole, whole_loss = sharded_and_whole(backend, config)
    parameters, x = model.trainable_params(), batch(backend, config, 0)
    model.set_requires_gradient_sync(False)
    _, first = ms.value_and_grad(loss, None, parameters)(x)
    model.set_requires_gradient_sync(True)
    _, second = ms.value_and_grad(loss, None, parameters)(x)
    assert not any(np.any(each.asnumpy()) for each in first)
    _, wanted = hp.value_and_grad(whole_loss, whole.trainable_params())(x)
    return compare(backend, model, second, whole, [2 * each for each in wanted])


def gathered_under_recompute(backend):
    """Bytes that gathers of a step bring, without and with `Cell.recompute`, and fetches for nothing."""
    config, found = ToyConfig(), []
    for again in (False, True):
        model, loss, _, _ = sharded_and_whole(backend, config)
        if again:
            for block in model.layers:
                block.recompute()
        units = list(units_of(backend, model))
        for step in range(2):
            counts = total(each for unit in units for each in unit.parameters).gathered
            hp.value_and_grad(loss, model.trainable_params())(batch(backend, config, step))
        found.append(total(each for unit in units for each in unit.parameters).gathered - counts)
    return found, units[0].gathers.unused
