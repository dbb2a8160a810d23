"""What every rank does in test_sequence_lengths.py."""

import mindspore as ms
import numpy as np
from mindspore import nn

import hyper_parallel as hp
from hyper_parallel.core.errors import ContractError
from hyper_parallel.models.config import DecoderConfig
from hyper_parallel.models.mindspore_decoder import Decoder, DecoderLayer

SIZES = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
}


class Block(DecoderLayer):
    """Takes tensors only: a reentrant recompute can't hand on what else is called."""

    def construct(self, hidden, _):
        return super().construct(hidden, self.tables)


class Checkpointed(nn.Cell):
    """A block that is computed again in backward, its hooks included."""

    def __init__(self, block, reentrant):
        super().__init__(auto_prefix=False)
        self.block = block
        self.reentrant = reentrant

    def construct(self, hidden, _):
        return ms.recompute(self.block, hidden, None, use_reentrant=self.reentrant)


def checkpoint(model, how, reentrant):
    """Have blocks computed again: by a property of each cell, which leaves its own hooks out, or by a function."""
    blocks = list(model.model.layers)
    if how == "cell":
        for block in blocks:
            block.recompute(use_reentrant=reentrant)
    else:
        model.model.layers = nn.CellList([Checkpointed(block, reentrant) for block in blocks])


def build():
    ms.set_seed(3)
    np.random.seed(3)
    config = DecoderConfig(**SIZES)
    model = Decoder(config)
    model.model.layers = nn.CellList([Block(config) for _ in range(config.num_layers)])
    for block in model.model.layers:
        block.tables = model.model.tables
    model.model.tables = None
    return model


def loss_of(model, batches):
    """The sum of the losses of several batches, each of a forward of its own."""
    tokens = [ms.Tensor(ids, ms.int32) for ids in batches]
    return lambda: sum(hp.cross_entropy(model(ids)[:, :-1], ids[:, 1:], model) for ids in tokens)


def batches_of(lengths):
    numbers = np.random.default_rng(7)
    return [numbers.integers(0, SIZES["vocab_size"], (2, length)) for length in lengths]


def several_lengths(backend, sizes, lengths, how, reentrant, mode):
    """The worst error of the loss and of any gradient, relative to the largest element."""
    batches, rank = batches_of(lengths), backend.collectives.rank()
    whole, model = build(), build()
    backend.modules.load_parameters(
        model, {use.name: use.parameter.asnumpy() for use in backend.modules.parameter_uses(whole)}
    )
    plan = hp.plan(model, hp.DeviceMesh.from_sizes(sizes))
    hp.parallelize(model, plan, mode=mode)
    names, parameters = zip(*hp.trainable_parameters(model))
    layouts = [plan.layout(name) for name in names]
    if how:
        checkpoint(model, how, reentrant)
    value, found = hp.value_and_grad(loss_of(model, batches), list(parameters))()
    expected_value, expected = hp.value_and_grad(loss_of(whole, batches), whole.trainable_params())()
    errors = {"loss": abs(float(value.asnumpy() - expected_value.asnumpy()))}
    for name, layout, one, other in zip(names, layouts, found, expected, strict=True):
        other = other.asnumpy()
        errors[name] = np.abs(one.asnumpy() - layout.shard(other, rank)).max() / np.abs(other).max()
    return errors


def without_a_token(backend, ranks, length):
    """The message that a step is refused with, and the worst error of the logits without a gradient."""
    ids, rank = np.random.default_rng(7).integers(0, SIZES["vocab_size"], (2, length)), backend.collectives.rank()
    whole, model = build(), build()
    weights = {use.name: use.parameter.asnumpy() for use in backend.modules.parameter_uses(whole)}
    backend.modules.load_parameters(model, weights)
    plan = hp.plan(model, hp.DeviceMesh.from_sizes({"tensor": ranks}))
    hp.parallelize(model, plan)
    tokens = ms.Tensor(ids, ms.int32)
    parameters = [each for _, each in hp.trainable_parameters(model)]
    try:
        hp.value_and_grad(lambda: model(tokens).sum(), parameters)()
        message = ""
    except ContractError as error:
        message = str(error)
    with ms._no_grad():
        found, expected = model(tokens).asnumpy(), whole(tokens).asnumpy()
    width = found.shape[-1]
    return message, np.abs(found - expected[..., rank * width : (rank + 1) * width]).max()
