"""Bodies of `test_fsdp_clip.py`: one model in which every parameter is held in another way."""

import numpy as np

import hyper_parallel as hp
from tests.equivalence.fsdp_bodies import shard
from tests.equivalence.scales import build, values
from tests.equivalence.toy import ToyConfig, batch
from tests.equivalence.toy import build as build_toy


def mixed(backend, max_norm):
    """The norm that clipping finds, the one that numpy does of the whole gradients, and how far clipped ones are off by
    dtype, before they were scaled.

    Every rank has the same batch, so that the gradient of the parameter that nobody holds is the same on all.
    """
    whole, whole_loss = _model(backend)
    model, loss = _model(backend)
    first, second = model.layers
    parameters = dict(hp.trainable_parameters(model))
    hp.fully_shard(
        first,
        mesh=hp.DeviceMesh((2,), ("shard",)),
        mp_policy=hp.MixedPrecisionPolicy(reduce_dtype="float64"),
        offload_policy=hp.CPUOffloadPolicy(),
        shard_placement_fn=lambda parameter: hp.Shard(1),
    )
    hp.fully_shard(second, mesh=hp.DeviceMesh((2,), ("replicate",)), ignored_params=[parameters["layers.1.bias"]])
    hp.fully_shard(
        model,
        mesh=hp.DeviceMesh((2,), ("shard",)),
        ignored_params=[parameters["layers.1.bias"]],
        replicate_params=[parameters["last"]],
    )
    x = backend.tensors.from_numpy(values("x"))
    gradients = hp.value_and_grad(loss, [p for _, p in hp.trainable_parameters(model)])(x)[1]
    expected = hp.value_and_grad(whole_loss, [p for _, p in hp.trainable_parameters(whole)])(x)[1]
    expected = {
        name: backend.tensors.to_numpy(each).astype("float64")
        for (name, _), each in zip(hp.trainable_parameters(whole), expected)
    }
    wanted = float(np.sqrt(sum((each**2).sum() for each in expected.values())))
    norm = hp.clip_grad_norm_(model, gradients, max_norm)
    factor = min(1.0, max_norm / (wanted + 1e-6))
    errors: dict[str, float] = {}
    for (name, parameter), gradient in zip(hp.trainable_parameters(model), gradients):
        layout, part = hp.layout_of(parameter), expected[name]
        if layout is not None:
            part = layout.shard(part, backend.collectives.rank())
        error = np.max(np.abs(backend.tensors.to_numpy(gradient) / factor - part), initial=0.0)
        dtype = backend.tensors.dtype_name(gradient)
        errors[dtype] = max(errors.get(dtype, 0.0), float(error))
    return norm, wanted, errors


def huge(backend, exponent):
    """Gradients times a power of two, which changes nothing but exponents. Returns the norm over the same power, and
    that of the gradients as they were; and whether clipping has brought the former to half of the latter."""
    config = ToyConfig()
    model, loss = build_toy(backend, config)
    shard(model, hp.DeviceMesh((2,), ("shard",)))
    gradients = hp.value_and_grad(loss, [p for _, p in hp.trainable_parameters(model)])(batch(backend, config, 0))[1]
    wanted = hp.clip_grad_norm_(model, gradients, float("inf"))
    for each in gradients:
        backend.tensors.scale_(each, 2.0**exponent)
    found = hp.clip_grad_norm_(model, gradients, wanted / 2)
    return found / 2.0**exponent, wanted, hp.clip_grad_norm_(model, gradients, float("inf")) / (wanted / 2)


def _model(backend):
    """The model of products, with one parameter in half precision."""
    model, loss = build(backend)
    uses = [use for use in backend.modules.parameter_uses(model) if use.name == "layers.1.weight"]
    backend.modules.replace_parameter(uses, backend.tensors.from_numpy(values("layers.1.weight"), "float16"))
    return model, loss
