"""What every rank does in test_regions.py."""

import importlib
from types import SimpleNamespace

import hyper_parallel as hp
from hyper_parallel.core.errors import ContractError
from hyper_parallel.core.execution.adaptations import Adaptations
from hyper_parallel.core.execution.region_collectives import find_collectives
from hyper_parallel.core.plan.contracts import BoundaryPlan
from hyper_parallel.core.validation.agreement import Agreement
from hyper_parallel.core.validation.regions import RegionLook
from hyper_parallel.models.config import DecoderConfig
from tests.equivalence.decoder_bodies import build
from tests.equivalence.production_bodies import gradients_of, own_ids

ULYSSES = {
    "parameters": {"model.layers.*.self_attn.**": {"placements": {"tensor": "replicate"}}},
    "regions": {
        "model.layers.*.self_attn": {
            "kind": "opaque",
            "inputs": {"hidden": {"after": {"tensor": "shard(1)"}}},
            "outputs": {"hidden": {"before": {"tensor": "shard(1)"}}},
        }
    },
}
"""Whole weights on every rank, which see this rank's tokens."""


def bound(backend, sizes, validate=False, region="opaque"):
    """A module, and the collectives that it has in a plan where it is a region."""
    mesh = hp.DeviceMesh.from_sizes(sizes)
    module, found = importlib.import_module(backend.name).nn.Identity(), Adaptations()
    plan = SimpleNamespace(mesh=mesh, boundaries=[BoundaryPlan("block", "region", (), (), region)])
    find_collectives(SimpleNamespace(backend=backend, modules={"block": module}, plan=plan), found)
    found.apply()
    if validate:
        agreement = Agreement(backend, mesh, is_real=True)
        found.collectives[0].look = RegionLook(backend, mesh, agreement)
    return module, hp.collectives(module)


def step(backend, function, value, weights):
    """The result of `function(value)`, and the gradient of the sum of the result times `weights`."""
    leaf = backend.tensors.from_numpy(value)
    leaf = backend.autograd.as_leaf(leaf, leaf)
    seen = []

    def loss():
        seen.append(function(leaf))
        return (seen[-1] * backend.tensors.from_numpy(weights)).sum()

    _, (gradient,) = backend.autograd.value_and_grad(loss, [leaf])()
    return backend.tensors.to_numpy(seen[-1]), backend.tensors.to_numpy(gradient)


def calls(backend, sizes, validate, cases):
    """For each case, a function, its arguments, the ranks' values and weights, what this rank gets."""
    module, ranks = bound(backend, sizes, validate)
    place = ranks.rank("tensor")

    def call(name, arguments):
        return lambda tensor: getattr(ranks, name)(tensor, "tensor", **arguments)

    return [
        step(backend, call(name, arguments), values[place], weights[place])
        for name, arguments, values, weights in cases
    ]


def rows(backend, sizes, validate, values, weights, sent):
    """Rows that travel and come back, doubled, where this rank sends `sent[rank]`: what has come, what is back, and the
    gradient."""
    module, ranks = bound(backend, sizes, validate)
    place = ranks.rank("tensor")
    mine = sent[place]
    received = ranks.counts(mine, "tensor")
    come = []

    def there_and_back(tensor):
        come.append(ranks.exchange(tensor, "tensor", mine, received))
        return ranks.exchange(come[-1] * 2, "tensor", received, mine)

    back, gradient = step(backend, there_and_back, values[place], weights[place])
    return backend.tensors.to_numpy(come[-1]), back, gradient


def on_shapes(backend, config, sizes, tokens):
    """What has been believed when the decoder with this attention is validated on shapes, or what is wrong."""
    made = importlib.import_module(f"tests.equivalence.ulysses_{backend.name}")
    with backend.modules.without_values():
        model = made.with_ulysses(made.Decoder(DecoderConfig(**config)))
    plan = hp.plan(model, hp.DeviceMesh.from_sizes(sizes), ULYSSES)
    try:
        return hp.validate(model, plan, tokens).trusted
    except ContractError as error:
        return str(error)


def ulysses(backend, config, weights, ids, sizes, mode):
    """A step of the decoder with this attention: loss, gradients and layouts, as `production_bodies.one_step`."""
    made = importlib.import_module(f"tests.equivalence.ulysses_{backend.name}")
    model = made.with_ulysses(build(backend, config, weights))
    if sizes is None:
        return gradients_of(backend, model, ids)[:2]
    plan = hp.plan(model, hp.DeviceMesh.from_sizes(sizes), ULYSSES)
    hp.parallelize(model, plan, mode=mode)
    loss, gradients, tensors = gradients_of(backend, model, own_ids(plan, backend.collectives.rank(), ids))
    norm = hp.clip_grad_norm_(model, tensors, float("inf"))
    hp.restore(model)
    return loss, gradients, {name: plan.layout(name) for name in gradients}, norm
