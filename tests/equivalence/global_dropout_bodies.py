"""What every rank does in test_global_dropout.py."""

import numpy as np

import hyper_parallel as hp
from tests.equivalence.decoder_bodies import build
from tests.equivalence.production_bodies import DATA, gradients_of, own_ids

PENDING = hp.Partial()


class Dropping:
    """Puts `hyper_parallel.dropout` into a decoder as its code would call it: on what is whole, on a part of the
    features, on a pending sum and on a part of the sequence, where it is one."""

    def __init__(self, backend, mesh, sequence_parallel, batch, length, mixed=PENDING):
        self._modules, self._mesh = backend.modules, mesh
        self._sequence = {"tensor": hp.Shard(1)} if sequence_parallel else {}
        self._batch, self._length, self._mixed = batch, length, mixed
        self._generator = hp.Generator(21)

    def restart(self):
        """Draw the same again."""
        self._generator.manual_seed(21)

    def add(self, decoder):
        """A decoder that drops."""
        config = decoder.config
        for layer in decoder.model.layers:
            self._before(layer.mlp.down_proj, config.intermediate_size, {"tensor": hp.Shard(2)})
            self._behind(layer.self_attn.o_proj, config.hidden_size, {"tensor": self._mixed})
            self._behind(layer.input_layernorm, config.hidden_size, self._sequence)
        self._before(decoder.lm_head, config.hidden_size, {})
        return decoder

    def _drop(self, x, features, placements):
        samples = {axis: hp.Shard(0) for axis in DATA if axis in self._mesh.names}
        layout = hp.Layout(self._mesh, samples | placements, (self._batch, self._length, features))
        return hp.dropout(x, 0.25, generator=self._generator, layout=layout)

    def _before(self, module, *how):
        def enter(args, kwargs):
            return (self._drop(args[0], *how), *args[1:]), kwargs

        self._modules.around_forward(module, enter, lambda output: output)

    def _behind(self, module, *how):
        self._modules.around_forward(module, lambda *given: given, lambda output: self._drop(output, *how))


def step(backend, config, weights, ids, sizes, sequence_parallel, mode):
    """The loss and all gradients, with the layouts that they have; `sizes` None for one device."""
    rank = backend.collectives.rank()
    model = build(backend, config, weights)
    backend.modules.convert(model, "float64")
    alone = sizes is None
    mesh = hp.DeviceMesh((1, 1), ("shard", "tensor"), [rank]) if alone else hp.DeviceMesh.from_sizes(sizes)
    dropping = Dropping(backend, mesh, sequence_parallel, *ids.shape)
    dropping.add(model)
    if alone:
        return gradients_of(backend, model, ids)[:2]
    plan = hp.plan(model, mesh, {"sequence_parallel": sequence_parallel})
    hp.parallelize(model, plan, mode=mode)
    loss, gradients, _ = gradients_of(backend, model, own_ids(plan, rank, ids))
    return loss, gradients, {name: plan.layout(name) for name in gradients}


def both(backend, config, weights, ids, sizes, sequence_parallel):
    """How far production is from one device, relative to the largest of a tensor; whether validation is the same."""
    rank = backend.collectives.rank()
    whole_loss, whole = step(backend, config, weights, ids, None, False, "production")
    loss, gradients, layouts = step(backend, config, weights, ids, sizes, sequence_parallel, "production")
    again = step(backend, config, weights, ids, sizes, sequence_parallel, "validate")
    same = again[0] == loss and all(np.array_equal(again[1][name], each) for name, each in gradients.items())
    samples = sizes.get("shard", 1)
    mean = sum(backend.collectives.gather_objects(loss)) / backend.collectives.world_size()
    errors = [abs(mean - whole_loss) / abs(whole_loss)]
    for name, gradient in gradients.items():
        difference = np.abs(gradient - layouts[name].shard(whole[name], rank)).max(initial=0.0)
        errors.append(difference / np.abs(whole[name]).max())
    assert samples * sizes["tensor"] == backend.collectives.world_size()
    return max(errors), same


def refused(backend, config, weights, ids):
    """What is said of layouts that are wrong: of one that has another shape in both modes, of one that takes a pending
    sum for whole in validation."""
    told, mesh = {}, hp.DeviceMesh.from_sizes({"tensor": 2})
    for name, mode, sequence_parallel, mixed in (
        ("shape", "production", True, hp.Partial()),
        ("shape, followed", "validate", True, hp.Partial()),
        ("whole", "validate", False, hp.Replicate()),
    ):
        model = build(backend, config, weights)
        Dropping(backend, mesh, sequence_parallel, *ids.shape, mixed).add(model)
        plan = hp.plan(model, mesh, {"sequence_parallel": False})
        hp.parallelize(model, plan, mode=mode)
        try:
            gradients_of(backend, model, ids)
        except hp.HyperParallelError as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told
