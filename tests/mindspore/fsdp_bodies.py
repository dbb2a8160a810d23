"""Bodies of `test_fully_sharded.py`: what MindSpore users do with a sharded cell."""

import mindspore as ms
from mindspore.experimental.optim import AdamW

import hyper_parallel as hp
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
