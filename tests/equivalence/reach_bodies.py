"""Bodies of `test_fsdp_reach.py`: code that reads or calls something of a unit while that is not gathered."""

import importlib

import numpy as np

import hyper_parallel as hp
from hyper_parallel.core.fsdp.unit import units_of
from tests.equivalence.fsdp_bodies import compare, shard, worst
from tests.equivalence.toy import ToyConfig, batch, build


def refused(call):
    """The message of the error that a call ends with."""
    try:
        call()
    except hp.ConfigError as error:
        return str(error)
    return "nothing was refused"


def built(backend, **config):
    model, loss = build(backend, ToyConfig(**config))
    shard(model, hp.DeviceMesh((2,), ("shard",)))
    return model, loss


def through(model):
    """What the first block makes of its weights without being called: a square matrix."""
    return model.layers[0].down @ model.layers[0].up


def reading(backend, model):
    """Let the model's own forward read weights of the first block when the second one has run."""
    return backend.modules.around_forward(
        model.layers[1], lambda args, kwargs: (args, kwargs), lambda output: output @ through(model)
    )


def read_in_a_forward(backend):
    """Returns what is said of it, when gradients are recorded and when not, and of a weight that is only asked what it
    is; whether the attribute is the parameter again; and the error of the next step."""
    model, loss = built(backend)
    whole, whole_loss = build(backend, ToyConfig())
    x, parameters = batch(backend, ToyConfig(), 0), [p for _, p in hp.trainable_parameters(model)]
    weight = backend.modules.registered(model.layers[0], "down")
    hook = reading(backend, model)
    messages = [refused(lambda: hp.value_and_grad(loss, parameters)(x))]
    with backend.autograd.no_grad():
        messages.append(refused(lambda: loss(x)))
    hook.remove()
    model.reshard()
    after_error = model.layers[0].down is weight
    facts = []

    def ask(output):
        seen = model.layers[0].down
        facts.append((tuple(seen.shape), seen.dtype, seen.requires_grad, "in the place of" in repr(seen)))

    hook = backend.modules.after_forward(model.layers[1], ask)
    error = compare(backend, ToyConfig(), model, loss, whole, whole_loss)
    hook.remove()
    told = facts == [(tuple(weight.shape), weight.dtype, True, True)]
    return messages, after_error and model.layers[0].down is weight, told, error


def read_when_gathered(backend):
    """The same, gathered by hand: the model is that of one device. Returns the worst error."""
    model, loss = built(backend)
    whole, whole_loss = build(backend, ToyConfig())
    reading(backend, model), reading(backend, whole)
    backend.modules.before_forward(model.layers[1], lambda args, kwargs: model.layers[0].unshard())
    error = compare(backend, ToyConfig(), model, loss, whole, whole_loss)
    held = sum(each.held_bytes() for unit in units_of(backend, model) for each in unit.parameters)
    return error, held


def called_by_itself(backend):
    """A head that belongs to the model's own unit, and an embedding inside of a unit, in training and evaluation."""
    model, _ = built(backend)
    hidden = batch(backend, ToyConfig(inputs=3), 0)
    parameters = [p for _, p in hp.trainable_parameters(model)]
    messages = [refused(lambda: hp.value_and_grad(lambda: model.head(hidden).sum(), parameters)())]
    framework = importlib.import_module(backend.name)
    if backend.name == "torch":
        words = framework.nn.Sequential(framework.nn.Embedding(6, 4), framework.nn.Linear(4, 4))
    else:
        words = framework.nn.SequentialCell(framework.nn.Embedding(6, 4), framework.nn.Dense(4, 4))
    hp.fully_shard(words, mesh=hp.DeviceMesh((2,), ("shard",)))
    ids = backend.tensors.from_numpy(np.array([[0, 1, 2]], dtype=np.int32))
    with backend.autograd.no_grad():
        shape = tuple(words(ids).shape)
        messages += [refused(lambda: model.head(hidden)), refused(lambda: words[0](ids))]
        words.unshard()
        unsharded = tuple(words[0](ids).shape)
        words.reshard()
    hp.restore(words)
    return messages, [shape, unsharded, tuple(words[0](ids).shape)]


def gradient_past_the_unit(backend):
    """Losses that read a weight of a unit, alone and beside the model. Returns what is said, and the error of the next
    step."""
    model, loss = built(backend)
    whole, whole_loss = build(backend, ToyConfig())
    x, parameters = batch(backend, ToyConfig(), 0), [p for _, p in hp.trainable_parameters(model)]
    with backend.autograd.no_grad():
        loss(x)  # units hear their names

    def penalty():
        return (model.layers[0].down * model.layers[0].down).sum()

    messages = [
        refused(lambda: hp.value_and_grad(penalty, parameters)()),
        refused(lambda: hp.value_and_grad(lambda: loss(x) + penalty(), parameters)()),
    ]
    for parameter in parameters:
        backend.autograd.forget_gradient(parameter)
    return messages, compare(backend, ToyConfig(), model, loss, whole, whole_loss)


def recurrent(backend):
    """An LSTM of each framework, which reads its weights from a list, and a linear map."""
    nn = importlib.import_module(backend.name).nn
    base, linear = (nn.Module, nn.Linear) if backend.name == "torch" else (nn.Cell, nn.Dense)

    class Model(base):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(3, 4), linear(4, 2)

        def forward(self, x):
            zeros = backend.tensors.zeros((1, x.shape[1], 4), "float32")
            return self.head(self.lstm(x, (zeros, zeros))[0])

        construct = forward

    return Model()


def weights_in_lists(backend):
    """Two steps of an LSTM that is a unit, against the same whole. Returns the worst error, and whether what holds its
    weights is what it was in the end."""
    models = [recurrent(backend), recurrent(backend)]
    values = {
        use.name: np.random.default_rng(number).normal(size=tuple(use.parameter.shape)).astype(np.float32)
        for number, use in enumerate(backend.modules.parameter_uses(models[0]))
    }
    for model in models:
        backend.modules.load_parameters(model, values)
    kinds = kinds_of(models[0].lstm)
    for module in (models[0].lstm, models[0]):
        hp.fully_shard(module, mesh=hp.DeviceMesh((2,), ("shard",)))
    errors = []
    for step in range(2):
        x = backend.tensors.from_numpy(np.random.default_rng(step).normal(size=(5, 2, 3)).astype(np.float32))
        found, wanted = (
            hp.value_and_grad(lambda: (model(x) * model(x)).sum(), [p for _, p in hp.trainable_parameters(model)])()[1]
            for model in models
        )
        for (_, parameter), f, w in zip(hp.trainable_parameters(models[0]), found, wanted):
            part = hp.layout_of(parameter).shard(backend.tensors.to_numpy(w), backend.collectives.rank())
            errors.append(worst(backend.tensors.to_numpy(f), part))
    hp.restore(models[0])
    held = [value for value in vars(models[0].lstm).values() if isinstance(value, (list, tuple)) and len(value)]
    registered = {id(use.parameter) for use in backend.modules.parameter_uses(models[0].lstm)}
    return max(errors), kinds == kinds_of(models[0].lstm) and any(id(each[0]) in registered for each in held)


def kinds_of(module):
    return {name: type(value) for name, value in vars(module).items() if isinstance(value, (list, tuple))}


def other_forwards(backend):
    """A method of the model, and of a block, that are forwards as well; one that calls the model's own; what is said of
    others. Returns the worst error, what shapes the first one saw, the messages, and the losses of the model as it was
    before, and of one that was never sharded."""
    model, whole = build(backend, ToyConfig())[0], build(backend, ToyConfig())[0]
    shapes = []

    def give_methods(toy):
        def project(x):
            shapes.append(tuple(toy.embed.shape))
            return x @ toy.embed

        toy.project, toy.all_of_it = project, lambda x: toy(x) * toy.project(x).sum()
        toy.layers[0].scaled = lambda x: x * toy.layers[0].scale
        return lambda x: (toy.layers[0].scaled(toy.project(x)) ** 2).mean() + toy.all_of_it(x).sum()

    loss, whole_loss = give_methods(model), give_methods(whole)
    shard(model, hp.DeviceMesh((2,), ("shard",)))
    hp.register_fsdp_forward_method(model, "project")
    hp.register_fsdp_forward_method(model, "all_of_it")
    hp.register_fsdp_forward_method(model.layers[0], "scaled")
    hp.register_fsdp_forward_method(whole, "project")  # no unit
    error = compare(backend, ToyConfig(), model, loss, whole, whole_loss)
    messages = [refused(lambda: hp.register_fsdp_forward_method(model, "generate"))]
    hp.restore(model)
    x = batch(backend, ToyConfig(), 0)
    losses = [float(backend.tensors.to_numpy(each(x))) for each in (loss, whole_loss)]
    return error, set(shapes), messages, losses
