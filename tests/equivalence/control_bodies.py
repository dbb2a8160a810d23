"""Bodies of `test_fsdp_controls.py`: what can be asked of units, and what can be said to `fully_shard`."""

from unittest import mock

import numpy as np

import hyper_parallel as hp
from hyper_parallel.core.fsdp.controls import METHODS
from hyper_parallel.core.fsdp.unit import unit_of, units_of
from tests.equivalence.fsdp_bodies import compare, descend, shard, worst
from tests.equivalence.toy import ToyConfig, batch, build

MICRO_BATCHES = 3


def built(backend, config=None, mesh=None, **options):
    """A sharded toy model, its loss, and the same whole."""
    config = config or ToyConfig()
    model, loss = build(backend, config)
    whole, whole_loss = build(backend, config)
    mesh = mesh or hp.DeviceMesh((backend.collectives.world_size(),), ("shard",))
    shard(model, mesh, **options)
    return config, model, loss, whole, whole_loss


def held(model, backend):
    return sum(each.held_bytes() for unit in units_of(backend, model) for each in unit.parameters)


def gradients_of(backend, parameters, loss, x):
    return hp.value_and_grad(loss, [p for _, p in parameters])(x)[1]


def mean_over_ranks(backend, config, whole, whole_loss, indices):
    """Gradients of the whole model, summed over batches `10 * index + rank` and averaged over ranks, by name."""
    parameters = hp.trainable_parameters(whole)
    ranks, total = backend.collectives.world_size(), None
    for index in indices:
        for rank in range(ranks):
            found = gradients_of(backend, parameters, whole_loss, batch(backend, config, 10 * index + rank))
            arrays = [backend.tensors.to_numpy(each) / ranks for each in found]
            total = arrays if total is None else [a + b for a, b in zip(total, arrays)]
    return {name: array for (name, _), array in zip(parameters, total)}


def accumulated(backend, sizes, kind):
    """Micro-batches of a kind, the last of which ends the sum. Returns the worst error, and how many times gradients
    were handed over."""
    config, model, loss, whole, whole_loss = built(backend, mesh=hp.DeviceMesh.from_sizes(sizes))
    parameters, rank = hp.trainable_parameters(model), backend.collectives.rank()
    errors, times = [], []
    for step in range(2):
        total, handed = [0.0] * len(parameters), 0
        for micro in range(MICRO_BATCHES):
            last = micro == MICRO_BATCHES - 1
            if kind == "none":
                model.set_requires_gradient_sync(last)
            elif kind == "scatter":
                model.set_requires_all_reduce(last)
            elif kind == "deferred":
                model.set_is_last_backward(last)
            elif kind == "kept":
                model.set_reshard_after_backward(last)
            index = MICRO_BATCHES * step + micro
            found = gradients_of(backend, parameters, loss, batch(backend, config, 10 * index + rank))
            given = [each is not None for each in found]
            assert all(given) or not any(given)
            handed += given[0]
            total = [a if g is None else a + backend.tensors.to_numpy(g) for a, g in zip(total, found)]
            assert (held(model, backend) > 0) == (kind == "kept" and not last)
        times.append(handed)
        indices = range(MICRO_BATCHES * step, MICRO_BATCHES * (step + 1))
        wanted = mean_over_ranks(backend, config, whole, whole_loss, indices)
        errors += [worst(t, hp.layout_of(p).shard(wanted[name], rank)) for t, (name, p) in zip(total, parameters)]
    return max(errors), times


def unreached_at_last(backend):
    """A block that only the first micro-batch uses is reduced at the end all the same; returns the worst error."""
    config, model, loss, whole, whole_loss = built(backend, ToyConfig(calls=(0, 1)))
    parameters, rank = hp.trainable_parameters(model), backend.collectives.rank()
    wanted = mean_over_ranks(backend, config, whole, whole_loss, [0])
    model.set_requires_gradient_sync(False)
    gradients_of(backend, parameters, loss, batch(backend, config, rank))
    model.set_requires_gradient_sync(True)
    model.calls = (0,)
    found = gradients_of(backend, parameters, loss, batch(backend, config, 10 + rank))
    return max(
        worst(backend.tensors.to_numpy(g), hp.layout_of(p).shard(wanted[name], rank))
        for (name, p), g in zip(parameters, found)
        if name.startswith("layers.1")
    )


def frozen_since(backend, sizes, kind, names):
    """Some parameters are frozen between a micro-batch and the last one: their gradients are those of the first.
    Returns the worst error, and whether anything is kept afterwards."""
    config, model, loss, whole, whole_loss = built(backend, ToyConfig(calls=(0, 1)), hp.DeviceMesh.from_sizes(sizes))
    parameters, rank = hp.trainable_parameters(model), backend.collectives.rank()
    wanted = mean_over_ranks(backend, config, whole, whole_loss, [0])
    (model.set_requires_gradient_sync if kind == "none" else model.set_requires_all_reduce)(False)
    gradients_of(backend, parameters, loss, batch(backend, config, rank))
    model.set_requires_gradient_sync(True)
    chosen = [(name, p) for name, p in parameters if name.startswith(names)]
    for _, each in chosen:
        each.requires_grad = False
    rest = [each for each in parameters if all(each[1] is not other for _, other in chosen)]
    with mock.patch.object(backend.autograd, "deliver", wraps=backend.autograd.deliver) as deliver:
        gradients_of(backend, rest, loss, batch(backend, config, 10 + rank))
    delivered = {id(call.args[0]): call.args[1] for call in deliver.call_args_list}
    errors = [
        worst(backend.tensors.to_numpy(delivered[id(p)]), hp.layout_of(p).shard(wanted[name], rank))
        for name, p in chosen
    ]
    return max(errors), any(unit.kept for unit in units_of(backend, model))


def prefetched(backend, setting):
    """Three steps and an evaluation with a setting; returns the worst error and how many fetches were for nothing."""
    config, model, loss, whole, whole_loss = built(backend, ToyConfig(blocks=4, calls=(0, 1, 2, 3)))
    blocks = list(model.layers)
    if setting == "lists":
        model.set_modules_to_forward_prefetch(blocks[:2])
        for each, following in zip(blocks, blocks[2:]):
            each.set_modules_to_forward_prefetch([following])
        for place, each in enumerate(blocks):
            each.set_modules_to_backward_prefetch(blocks[max(place - 2, 0) : place][::-1])
    else:
        model.set_prefetch_depth(*setting)
    errors = []
    for step in range(3):
        errors.append(compare(backend, config, model, loss, whole, whole_loss, step))
        with backend.autograd.no_grad():
            loss(batch(backend, config, 0))
        assert held(model, backend) == 0
    return max(errors), unit_of(model).gathers.unused


def shrunk(backend, ranks):
    """A part of each block stays after forward. Returns the worst error, and the bytes held after forward beside those
    of whole blocks."""
    config, model, loss, whole, whole_loss = built(backend)
    for block in model.layers:
        block.set_reshard_after_forward(ranks)
    blocks = [unit_of(block) for block in model.layers]
    sizes = {}

    def watched(x):
        value = loss(x)
        sizes["held"] = sum(each.held_bytes() for unit in blocks for each in unit.parameters)
        return value

    errors = [compare(backend, config, model, watched, whole, whole_loss, step) for step in range(2)]
    assert held(model, backend) == 0
    sizes["whole"] = sum(each.spec.numel * 8 for unit in blocks for each in unit.parameters)
    return max(errors), sizes


def grouped(backend):
    """Two blocks as one unit, the third in the root's; returns the worst error and the number of units."""
    config = ToyConfig(blocks=3, calls=(0, 1, 2, 0, 1))
    model, loss = build(backend, config)
    whole, whole_loss = build(backend, config)
    mesh = hp.DeviceMesh((backend.collectives.world_size(),), ("shard",))
    both = hp.fully_shard([model.layers[0], model.layers[1]], mesh=mesh)
    assert both == [model.layers[0], model.layers[1]]
    hp.fully_shard(model, mesh=mesh)
    errors = []
    for calls in (config.calls, (0, 1, 2), (2, 0)):  # the last one leaves a member of the group out
        model.calls = whole.calls = calls
        errors.append(compare(backend, config, model, loss, whole, whole_loss))
        assert held(model, backend) == 0
    count = len(list(units_of(backend, model)))
    before = hp.full_parameters(model)
    hp.restore(model)
    assert all(np.array_equal(before[name], value) for name, value in hp.full_parameters(model).items())
    return max(errors), count


def replicated(backend):
    """Some parameters stay whole; returns the worst error, of gradients that differ from rank to rank."""
    config = ToyConfig()
    model, loss = build(backend, config)
    whole, whole_loss = build(backend, config)
    rank = backend.collectives.rank()
    uses = {use.name: use.parameter for use in backend.modules.parameter_uses(model)}
    shard(model, hp.DeviceMesh((2,), ("shard",)), replicate_params={uses["embed"], uses["layers.0.up"]})
    parameters = hp.trainable_parameters(model)
    shapes = {name: tuple(p.shape) for name, p in parameters}
    assert shapes["embed"] == (5, 3) and shapes["layers.0.up"] == (7, 3) and shapes["layers.1.up"] != (7, 3)
    wanted = mean_over_ranks(backend, config, whole, whole_loss, [0])
    found = gradients_of(backend, parameters, loss, batch(backend, config, rank))
    return max(
        worst(backend.tensors.to_numpy(g), hp.layout_of(p).shard(wanted[name], rank))
        for (name, p), g in zip(parameters, found)
    )


def unsharded_by_hand(backend):
    """Shapes that a module sees, before, between and after `unshard` and `reshard`, before and after the first step."""
    config, model, loss, whole, whole_loss = built(backend)
    block, seen = model.layers[0], []
    for _ in range(2):
        shapes = [tuple(block.up.shape)]
        handle = block.unshard(async_op=True)
        shapes.append(tuple(block.up.shape))
        handle.wait()
        handle.wait()
        shapes.append(tuple(block.up.shape))
        block.reshard()
        shapes.append(tuple(block.up.shape))
        assert hp.fully_sharded(block).unshard() is None
        error = compare(backend, config, model, loss, whole, whole_loss)
        seen.append((shapes, error, held(model, backend)))
    return seen


def restored_while_unsharding(backend):
    """`restore` comes between `unshard` and `wait`: the module's shape and error then, and what `unshard` says."""
    config, model, loss, _, whole_loss = built(backend)
    block = model.layers[0]
    unit, handle = hp.fully_sharded(block), block.unshard(async_op=True)
    hp.restore(model)
    handle.wait()
    values = [backend.tensors.to_numpy(each(batch(backend, config, 0))) for each in (loss, whole_loss)]
    try:
        unit.unshard()
    except hp.ConfigError as error:
        return tuple(block.up.shape), abs(values[0] - values[1]), str(error)


def cast_since(backend, sizes):
    """A model that is cast after it was sharded, before a step and after one, beside one that is sharded when it was
    cast. Returns whether gradients are the same bits, their dtypes, and what is said where gradients are kept."""
    config, models, same = ToyConfig(), [], []
    for cast_first in (True, False):
        model, loss = build(backend, config)
        if cast_first:
            backend.modules.convert(model, "float32")
        shard(model, hp.DeviceMesh.from_sizes(sizes))
        models.append((model, lambda x, loss=loss: loss(x).mean()))
    (wanted, wanted_loss), (model, loss) = models

    for dtype in ("float32", "float64", "float32"):
        backend.modules.convert(model, dtype)
        x = backend.tensors.from_numpy(backend.tensors.to_numpy(batch(backend, config, 0)), dtype)
        gradients = gradients_of(backend, hp.trainable_parameters(model), loss, x)
        if dtype == "float32":
            others = gradients_of(backend, hp.trainable_parameters(wanted), wanted_loss, x)
            pairs = zip(gradients, others)
            same += [np.array_equal(*map(backend.tensors.to_numpy, pair)) for pair in pairs]
        dtypes = {backend.tensors.dtype_name(each) for each in gradients}
        assert dtypes == {dtype}, dtypes
        for _, parameter in hp.trainable_parameters(model):
            backend.autograd.forget_gradient(parameter)
    model.set_requires_gradient_sync(False)
    gradients_of(backend, hp.trainable_parameters(model), loss, x)
    backend.modules.convert(model, "float64")
    try:
        loss(batch(backend, config, 0))
    except hp.ConfigError as error:
        return same, str(error)


def cast_refused(backend):
    """What the forward says of a model that MindSpore has cast in place after it was sharded."""
    import mindspore

    config, model, loss, _, _ = built(backend)
    for use in backend.modules.parameter_uses(model):
        use.parameter.set_dtype(mindspore.float32)
    try:
        loss(batch(backend, config, 0))
    except hp.ConfigError as error:
        return str(error)


def factor_and_hook(backend, sizes):
    """Gradients with a divide factor of one and a hook that negates; relative to the mean, negated: (root, blocks)."""
    config, model, loss, whole, whole_loss = built(backend, mesh=hp.DeviceMesh.from_sizes(sizes))
    ranks, rank = backend.collectives.world_size(), backend.collectives.rank()
    wanted = mean_over_ranks(backend, config, whole, whole_loss, [0])
    model.set_gradient_divide_factor(1.0)
    shapes = []

    def negate(buffer):
        shapes.append(len(buffer.shape))
        backend.tensors.scale_(buffer, -1.0)

    for block in model.layers:
        block.set_all_reduce_hook(negate)
    parameters = hp.trainable_parameters(model)
    found = gradients_of(backend, parameters, loss, batch(backend, config, rank))
    assert set(shapes) == {1} and len(shapes) == len(model.layers)
    return max(
        worst(
            backend.tensors.to_numpy(g),
            (-1 if name.startswith("layers") else ranks) * hp.layout_of(p).shard(wanted[name], rank),
        )
        for (name, p), g in zip(parameters, found)
    )


def names_and_refusals(backend):
    """The methods come and go with the unit; returns what is said of wrong calls."""
    config, model, loss, _, _ = built(backend)
    kind = type(model)
    assert all(name in vars(model.layers[1]) and not hasattr(kind, name) for name in METHODS)
    model.set_requires_all_reduce(False)
    model.layers[0].set_requires_gradient_sync(False, recurse=False)
    assert [unit.requires_gradient_sync for unit in units_of(backend, model)].count(False) == 1
    model.set_requires_gradient_sync(True)
    messages = {}

    def refused(name, call):
        try:
            call()
        except hp.HyperParallelError as error:
            messages[name] = str(error)

    refused("no unit", lambda: hp.fully_sharded(model.head))
    refused("flag", lambda: model.set_requires_gradient_sync(1))
    refused("number", lambda: model.set_reshard_after_forward(3))
    refused("prefetch", lambda: model.set_modules_to_forward_prefetch([model.head]))
    refused("one", lambda: model.set_modules_to_backward_prefetch(model.layers[0]))
    refused("depth", lambda: model.set_prefetch_depth(forward=-1))
    refused("factor", lambda: model.set_gradient_divide_factor(0))
    refused("hook", lambda: model.set_all_reduce_hook("sum"))
    assert unit_of(model.layers[0]).reshard_after_forward is None, "a refusal changes nothing"
    hp.restore(model)
    assert not any(name in vars(module) for module in (model, model.layers[0]) for name in METHODS)

    model.layers[0].reshard = "the user's own"
    refused("name", lambda: hp.fully_shard(model.layers[0]))
    refused("name in a plan", lambda: hp.parallelize(model, hp.plan(model, hp.DeviceMesh((2,), ("shard",)))))
    del model.layers[0].reshard
    mesh = hp.DeviceMesh((2,), ("shard",))
    refused("group", lambda: (hp.fully_shard([model.layers[0], model.head], mesh=mesh), model.head(None)))
    refused("empty", lambda: hp.fully_shard([]))
    return messages


def trained(backend, sizes):
    """Twenty steps of two micro-batches each; the losses, and the whole parameters at the end by name."""
    config, model, loss, _, _ = built(backend, mesh=hp.DeviceMesh.from_sizes(sizes))
    parameters, rank, losses = hp.trainable_parameters(model), backend.collectives.rank(), []
    model.set_prefetch_depth(2, 2)
    for step in range(20):
        for micro in range(2):
            model.set_requires_all_reduce(micro == 1)
            x = batch(backend, config, 100 * step + 10 * micro + rank)
            value, gradients = hp.value_and_grad(loss, [p for _, p in parameters])(x)
            losses.append(float(backend.tensors.to_numpy(value)))
            descend(backend, parameters, gradients, rate=1e-3)
    return losses, hp.full_parameters(model)


def named_dims(backend):
    """A mesh whose axes have other names, and several meshes in one model; returns the worst error."""
    config = ToyConfig()
    errors = []
    mesh = hp.DeviceMesh((2, 2), ("expert", "context"))
    for dims in ({"replicate": "expert", "shard": "context"}, {"shard": ("expert", "context")}):
        model, loss = build(backend, config)
        whole, whole_loss = build(backend, config)
        shard(model, mesh, dp_mesh_dims=dims)
        errors.append(compare(backend, config, model, loss, whole, whole_loss))
    model, loss = build(backend, config)
    whole, whole_loss = build(backend, config)
    hp.fully_shard(model.layers[0], mesh=hp.DeviceMesh((2, 2), ("replicate", "shard")))
    hp.fully_shard(model.layers[1], mesh=hp.DeviceMesh((2, 2), ("replicate", "shard"), (0, 2, 1, 3)))
    hp.fully_shard(model, mesh=hp.DeviceMesh((4,), ("shard",)))
    errors.append(compare(backend, config, model, loss, whole, whole_loss))
    return max(errors)


def half_of_the_job(backend):
    """Each half of the ranks trains a model of its own; a model of both is refused. Returns (error, message)."""
    config = ToyConfig()
    rank = backend.collectives.rank()
    mine = hp.DeviceMesh((2,), ("shard",), (0, 1) if rank < 2 else (2, 3))
    model, loss = build(backend, config)
    whole, whole_loss = build(backend, config)
    shard(model, mine)
    error = compare(backend, config, model, loss, whole, whole_loss, batch_index=rank // 2)
    model, loss = build(backend, config)
    hp.fully_shard(model.layers[0], mesh=mine)
    hp.fully_shard(model, mesh=hp.DeviceMesh((4,), ("shard",)))
    try:
        loss(batch(backend, config, 0))
    except hp.ConfigError as refused:
        return error, str(refused)
