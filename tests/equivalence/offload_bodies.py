"""Bodies of `test_fsdp_offload.py`: shards on the host. On a CPU the host is the device, so here a device is played:
memory of its own that shards must be copied to and gradients back from, and the only one that collectives may touch."""

from dataclasses import replace

import numpy as np

import hyper_parallel as hp
from hyper_parallel.core.fsdp import build as units
from hyper_parallel.core.fsdp.clip import clip_grad_norm_
from hyper_parallel.core.fsdp.counts import total
from hyper_parallel.core.fsdp.unit import units_of
from tests.equivalence.fsdp_bodies import descend
from tests.equivalence.scales import build, values


class FarTensors:
    """A framework's tensors, of which those made by `on_host` are out of reach of the device."""

    def __init__(self, tensors):
        self._tensors = tensors
        self._host = []

    def __getattr__(self, name):
        return getattr(self._tensors, name)

    def on_host(self, numel, dtype, pinned):
        made = self._tensors.on_host(numel, dtype, pinned)
        self._host.append(made)
        return made

    def is_far(self, tensor):
        """Tell whether a tensor lies on the host."""
        place = self._tensors.address(tensor)
        return any(each.nbytes and 0 <= place - self._tensors.address(each) < each.nbytes for each in self._host)

    def to_device(self, tensor):
        if not self.is_far(tensor):
            return tensor
        made = self._tensors.buffer(tensor, tensor.numel())
        self._tensors.copy_(made, tensor)
        return self._tensors.alias(made, 0, tuple(tensor.shape))


class NearCollectives:
    """A framework's collectives, which refuse what lies on the host."""

    def __init__(self, collectives, tensors):
        self._collectives = collectives
        self._tensors = tensors

    def __getattr__(self, name):
        function = getattr(self._collectives, name)
        if name not in ("all_gather", "reduce_scatter", "all_reduce"):
            return function

        def checked(*tensors, **options):
            assert not any(self._tensors.is_far(each) for each in tensors[:-1]), f"{name} of what lies on the host"
            return function(*tensors, **options)

        return checked


def _backend(backend, far):
    if not far:
        return backend
    tensors = FarTensors(backend.tensors)
    return replace(backend, tensors=tensors, collectives=NearCollectives(backend.collectives, tensors))


def trained(backend, offload, far, sizes, policy):
    """Gradients of the last of some steps, clipped, and parameters; where shards and gradients lay; what was moved."""
    backend = _backend(backend, far)
    model, loss = build(backend)
    options = {"mp_policy": hp.MixedPrecisionPolicy(**policy)}
    if offload:
        options["offload_policy"] = hp.CPUOffloadPolicy(pin_memory=False)
    for module in (*model.layers, model):
        units.fully_shard(backend, [module], hp.DeviceMesh.from_sizes(sizes), **options)
    parameters = hp.trainable_parameters(model)
    rank = backend.collectives.rank()
    norms, places = [], []
    for step in range(3):
        x = backend.tensors.from_numpy(values("x", 10 * step + rank))
        _, gradients = hp.value_and_grad(loss, [p for _, p in parameters])(x)
        norms.append(clip_grad_norm_(backend, model, [p for _, p in parameters], gradients, 1.0))
        descend(backend, parameters, gradients)
        if far:
            places += [backend.tensors.is_far(each) for each in (*gradients, *(p for _, p in parameters))]
    moved = total(each for unit in units_of(backend, model) for each in unit.parameters).moved
    held = {name: backend.tensors.to_numpy(g) for (name, _), g in zip(parameters, gradients)}
    found = units.full_parameters(backend, model)
    units.restore(backend, model)
    for use in backend.modules.parameter_uses(model):
        np.testing.assert_array_equal(backend.tensors.to_numpy(use.parameter), found[use.name])
        assert not far or not backend.tensors.is_far(use.parameter)
    return held, found, norms, places, moved
