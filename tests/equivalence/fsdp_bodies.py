"""Bodies of `test_fully_sharded.py`: one rank of a sharded toy model beside the same model whole."""

import numpy as np

import hyper_parallel as hp
from hyper_parallel.core.fsdp.unit import unit_of, units_of
from tests.equivalence.toy import ToyConfig, batch, build


def shard(model, mesh, wrap_blocks=True, **options):
    """Blocks first, the model last."""
    if wrap_blocks:
        for block in model.layers:
            hp.fully_shard(block, mesh=mesh, **options)
    return hp.fully_shard(model, mesh=mesh, **options)


def descend(backend, parameters, gradients, rate=0.1):
    """Plain gradient descent, in place on whatever each parameter holds."""
    for (_, parameter), gradient in zip(parameters, gradients):
        if gradient is not None:
            step = backend.tensors.from_numpy(-rate * backend.tensors.to_numpy(gradient))
            with backend.autograd.no_grad():
                backend.tensors.add_(backend.tensors.alias(backend.tensors.flat(parameter), 0, step.shape), step)


def reference(backend, config, ranks, steps):
    """The whole model on one device: losses, last gradients and parameters for the mean over all ranks' batches."""
    model, loss = build(backend, config)
    parameters = hp.trainable_parameters(model)
    losses, gradients = [], None
    for step in range(steps):
        total = None
        values = []
        for rank in range(ranks):
            value, each = hp.value_and_grad(loss, [p for _, p in parameters])(batch(backend, config, step * 10 + rank))
            arrays = [None if g is None else backend.tensors.to_numpy(g) for g in each]
            total = arrays if total is None else [a if b is None else a + b for a, b in zip(total, arrays)]
            values.append(float(backend.tensors.to_numpy(value)))
        gradients = [None if array is None else array / ranks for array in total]
        losses.append(float(np.mean(values)))
        descend(backend, parameters, [None if g is None else backend.tensors.from_numpy(g) for g in gradients])
    names = [name for name, _ in parameters]
    return losses, dict(zip(names, gradients)), hp.full_parameters(model)


def worst(found, wanted):
    """Largest error relative to the largest element; shapes must agree."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    return float(np.max(np.abs(found - wanted), initial=0.0) / max(np.max(np.abs(wanted), initial=0.0), 1e-30))


def train(backend, sizes, config=None, steps=3, through_plan=False, **options):
    """Train sharded and compare with the whole model; returns what the test asserts on."""
    config = config or ToyConfig()
    rank, ranks = backend.collectives.rank(), backend.collectives.world_size()
    mesh = hp.DeviceMesh.from_sizes(sizes)
    model, loss = build(backend, config)
    whole_shapes = {name: tuple(p.shape) for name, p in hp.trainable_parameters(model)}
    if through_plan:
        hp.parallelize(model, hp.plan(model, mesh))
    else:
        shard(model, mesh, **options)
    parameters = hp.trainable_parameters(model)
    losses, gradients = [], []
    for step in range(steps):
        value, gradients = hp.value_and_grad(loss, [p for _, p in parameters])(batch(backend, config, step * 10 + rank))
        losses.append(float(backend.tensors.to_numpy(value)))
        held = sum(each.held_bytes() for unit in units_of(backend, model) for each in unit.parameters)
        assert held == 0, f"{held} bytes of full parameters are left after step {step}"
        descend(backend, parameters, gradients)
    wanted_losses, wanted_gradients, wanted_parameters = reference(backend, config, ranks, steps)
    all_losses = backend.collectives.gather_objects(losses)
    errors = {"loss": worst(np.mean(all_losses, axis=0), np.array(wanted_losses))}
    for (name, parameter), gradient in zip(parameters, gradients):
        layout = hp.layout_of(parameter)
        assert layout.shape == whole_shapes[name]
        assert tuple(parameter.shape) == layout.local_shape(rank)
        if wanted_gradients[name] is None:
            assert gradient is None or not np.any(backend.tensors.to_numpy(gradient)), name
        else:
            found = backend.tensors.to_numpy(gradient)
            errors[f"gradient of {name}"] = worst(found, layout.shard(wanted_gradients[name], rank))
    for name, value in hp.full_parameters(model).items():
        errors[name] = worst(value, wanted_parameters[name])
    return errors


def evaluate_then_train(backend):
    """No-grad evaluation between steps sees the newest parameters and leaves nothing gathered."""
    config = ToyConfig()
    model, loss = build(backend, config)
    whole, whole_loss = build(backend, config)
    shard(model, hp.DeviceMesh((backend.collectives.world_size(),), ("shard",)))
    parameters = hp.trainable_parameters(model)
    for step in range(2):
        for _ in range(2):
            with backend.autograd.no_grad():
                found = float(backend.tensors.to_numpy(loss(batch(backend, config, 7))))
                wanted = float(backend.tensors.to_numpy(whole_loss(batch(backend, config, 7))))
            assert abs(found - wanted) < 1e-12 * abs(wanted)
            assert sum(each.held_bytes() for unit in units_of(backend, model) for each in unit.parameters) == 0
        _, gradients = hp.value_and_grad(loss, [p for _, p in parameters])(batch(backend, config, step))
        descend(backend, parameters, gradients)
        values = hp.full_parameters(model)
        backend.modules.load_parameters(whole, values)
    return True


def memory_through_a_step(backend, reshard_after_forward):
    """Which units hold full parameters, seen between forward and backward and after each."""
    config = ToyConfig(inputs=6, width=4, hidden=8, blocks=3, calls=(0, 1, 2))
    model, loss = build(backend, config)
    mesh = hp.DeviceMesh((backend.collectives.world_size(),), ("shard",))
    for block in model.layers:
        hp.fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    hp.fully_shard(model, mesh=mesh)
    block_unit, root = unit_of(model.layers[0]), unit_of(model)

    def held(unit):
        return sum(each.held_bytes() for each in unit.parameters)

    seen = {}

    def watched(x):
        value = loss(x)
        seen["blocks after forward"] = sum(held(unit_of(block)) for block in model.layers)
        seen["root after forward"] = held(root)
        return value

    parameters = [p for _, p in hp.trainable_parameters(model)]
    hp.value_and_grad(watched, parameters)(batch(backend, config, 0))
    seen["all after step"] = sum(held(unit) for unit in units_of(backend, model))
    seen["one block whole"] = sum(each.spec.numel * 8 for each in block_unit.parameters)
    seen["root whole"] = sum(each.spec.numel * 8 for each in root.parameters if not each.spec.is_whole)
    return seen


def restored(backend):
    """`restore` gives the values, the shapes and a working model back."""
    config = ToyConfig(tied=True)
    model, loss = build(backend, config)
    before = hp.full_parameters(model)
    with backend.autograd.no_grad():
        wanted = float(backend.tensors.to_numpy(loss(batch(backend, config, 0))))
    hp.parallelize(model, hp.plan(model, hp.DeviceMesh((backend.collectives.world_size(),), ("shard",))))
    hp.restore(model)
    assert not list(units_of(backend, model))
    uses = {use.name: use.parameter for use in backend.modules.parameter_uses(model)}
    assert uses["head.weight"] is uses["embed"], "the tie survives"
    for name, value in before.items():
        np.testing.assert_array_equal(backend.tensors.to_numpy(uses[name]), value)
    parameters = [p for _, p in hp.trainable_parameters(model)]
    value, gradients = hp.value_and_grad(loss, parameters)(batch(backend, config, 0))
    return float(backend.tensors.to_numpy(value)) == wanted and all(
        tuple(g.shape) == tuple(p.shape) for g, p in zip(gradients, parameters)
    )


def refusals(backend):
    """Every wrong call of fully_shard; returns the messages."""
    world = backend.collectives.world_size()
    mesh = hp.DeviceMesh((world,), ("shard",))
    calls = {
        "policy": lambda model: hp.fully_shard(model, mesh=mesh, mp_policy=object()),
        "offload": lambda model: hp.fully_shard(model, mesh=mesh, offload_policy=object()),
        "number": lambda model: hp.fully_shard(model, mesh=mesh, reshard_after_forward=world + 1),
        "mesh": lambda model: hp.fully_shard(model, mesh="2x2"),
        "size": lambda model: hp.fully_shard(model, mesh=hp.DeviceMesh((world + 1,), ("shard",))),
        "axis": lambda model: hp.fully_shard(model, mesh=hp.DeviceMesh((world,), ("tensor",))),
        "twice": lambda model: shard(hp.fully_shard(model, mesh=mesh), mesh, wrap_blocks=False),
        "tied": lambda model: (hp.fully_shard(model.head, mesh=mesh), hp.fully_shard(model, mesh=mesh)),
        "list": lambda model: hp.fully_shard([*model.layers, "head"], mesh=mesh),
        "replicate": lambda model: hp.fully_shard(model, mesh=mesh, replicate_params=["embed"]),
        "dims": lambda model: hp.fully_shard(model, mesh=mesh, dp_mesh_dims={"shard": "context"}),
        "no dims": lambda model: hp.fully_shard(model, mesh=mesh, dp_mesh_dims={}),
        "dim twice": lambda model: hp.fully_shard(model, mesh=mesh, dp_mesh_dims={"shard": ("shard", "shard")}),
        "dim left": lambda model: hp.fully_shard(
            model, mesh=hp.DeviceMesh((1, world), ("shard", "tensor")), dp_mesh_dims={"shard": "shard"}
        ),
        "placement": lambda model: hp.fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: "rows"),
        "plan": lambda model: hp.parallelize(model, hp.plan(build(backend, ToyConfig(width=4))[0], mesh)),
    }
    messages = {}
    for name, call in calls.items():
        model, _ = build(backend, ToyConfig(tied=True))
        try:
            call(model)
        except hp.HyperParallelError as error:
            messages[name] = str(error)
    return messages


def clipped_norm(backend, sizes, max_norm):
    """Global norm and clipped gradients, sharded against whole; returns (norm, wanted norm, worst error)."""
    config = ToyConfig()
    rank, ranks = backend.collectives.rank(), backend.collectives.world_size()
    model, loss = build(backend, config)
    shard(model, hp.DeviceMesh.from_sizes(sizes))
    parameters = hp.trainable_parameters(model)
    _, gradients = hp.value_and_grad(loss, [p for _, p in parameters])(batch(backend, config, rank))
    norm = hp.clip_grad_norm_(model, gradients, max_norm)
    _, wanted, _ = reference(backend, config, ranks, 1)
    wanted_norm = float(np.sqrt(sum(np.sum(g**2) for g in wanted.values())))
    factor = min(1.0, max_norm / (wanted_norm + 1e-6))
    error = max(
        worst(backend.tensors.to_numpy(g), factor * hp.layout_of(p).shard(wanted[name], rank))
        for (name, p), g in zip(parameters, gradients)
    )
    return norm, wanted_norm, error


def after_an_exception(backend):
    """A forward that raises leaves a model that trains on as if nothing had been."""
    config = ToyConfig()
    model, loss = build(backend, config)
    shard(model, hp.DeviceMesh((backend.collectives.world_size(),), ("shard",)))
    parameters = [p for _, p in hp.trainable_parameters(model)]

    def broken(x):
        loss(x)
        raise ValueError("in the middle")

    wanted, wanted_gradients = hp.value_and_grad(loss, parameters)(batch(backend, config, 0))
    try:
        hp.value_and_grad(broken, parameters)(batch(backend, config, 1))
    except ValueError:
        pass
    found, gradients = hp.value_and_grad(loss, parameters)(batch(backend, config, 0))
    same = [
        np.array_equal(backend.tensors.to_numpy(a), backend.tensors.to_numpy(b))
        for a, b in zip(gradients, wanted_gradients)
    ]
    return float(found) == float(wanted) and all(same)


def forward_twice_before_backward(backend):
    """Two forwards in one backward add their gradients."""
    config = ToyConfig()
    rank = backend.collectives.rank()
    model, loss = build(backend, config)
    whole, whole_loss = build(backend, config)
    shard(model, hp.DeviceMesh((backend.collectives.world_size(),), ("shard",)))
    one, two = batch(backend, config, 0), batch(backend, config, 1)
    parameters, whole_parameters = hp.trainable_parameters(model), hp.trainable_parameters(whole)
    _, found = hp.value_and_grad(lambda: loss(one) + loss(two), [p for _, p in parameters])()
    _, wanted = hp.value_and_grad(lambda: whole_loss(one) + whole_loss(two), [p for _, p in whole_parameters])()
    return max(
        worst(backend.tensors.to_numpy(f), hp.layout_of(p).shard(backend.tensors.to_numpy(w), rank))
        for (_, p), f, w in zip(parameters, found, wanted)
    )


def train_on_the_last_dim(backend):
    """Shard the last dim of every matrix: pieces are joined and cut by copies."""
    return train(backend, {"shard": 3}, shard_placement_fn=lambda p: hp.Shard(len(p.shape) - 1) if p.shape else None)


def compare(backend, config, model, loss, whole, whole_loss, batch_index=0):
    """Worst gradient error of what is trainable now, of a sharded model against a whole one."""
    rank = backend.collectives.rank()
    found_parameters, wanted_parameters = hp.trainable_parameters(model), hp.trainable_parameters(whole)
    assert [name for name, _ in found_parameters] == [name for name, _ in wanted_parameters]
    x = batch(backend, config, batch_index)
    _, found = hp.value_and_grad(loss, [p for _, p in found_parameters])(x)
    _, wanted = hp.value_and_grad(whole_loss, [p for _, p in wanted_parameters])(x)
    errors = []
    for (_, p), f, w in zip(found_parameters, found, wanted):
        layout = hp.layout_of(p)
        wanted_part = layout.shard(np.zeros(layout.shape) if w is None else backend.tensors.to_numpy(w), rank)
        errors.append(worst(np.zeros_like(wanted_part) if f is None else backend.tensors.to_numpy(f), wanted_part))
    return max(errors)


def freeze_and_unfreeze(backend):
    """Train all, then without `up`, then without any block, then all again."""
    config = ToyConfig()
    model, loss = build(backend, config)
    whole, whole_loss = build(backend, config)
    shard(model, hp.DeviceMesh((2,), ("shard",)))
    errors = []
    for frozen in ((), ("up",), ("layers",), ()):
        for each in (model, whole):
            for use in backend.modules.parameter_uses(each):
                use.parameter.requires_grad = not any(part in use.name for part in frozen)
        errors.append(compare(backend, config, model, loss, whole, whole_loss))
    return errors


def teacher_pass_first(backend):
    """The first use of the model is without gradients, inside a step that is recorded."""
    config = ToyConfig()
    model, loss = build(backend, config)
    whole, whole_loss = build(backend, config)
    shard(model, hp.DeviceMesh((2,), ("shard",)))

    def with_teacher(x):
        with backend.autograd.no_grad():
            loss(x)
        return loss(x)

    return compare(backend, config, model, with_teacher, whole, whole_loss)


def update_while_gathered(backend):
    """A step breaks after its forward, the shards change, and what is read is the change."""
    config = ToyConfig()
    model, loss = build(backend, config)
    before = hp.full_parameters(model)
    shard(model, hp.DeviceMesh((2,), ("shard",)))

    def broken(x):
        loss(x)
        raise ValueError("in the middle")

    try:
        hp.value_and_grad(broken, [p for _, p in hp.trainable_parameters(model)])(batch(backend, config, 0))
    except ValueError:
        pass
    assert unit_of(model).is_gathered()
    for _, parameter in hp.trainable_parameters(model):
        backend.tensors.scale_(backend.tensors.flat(parameter), 2.0)
    errors = [worst(value, 2 * before[name]) for name, value in hp.full_parameters(model).items()]
    hp.restore(model)
    return errors + [worst(value, 2 * before[name]) for name, value in hp.full_parameters(model).items()]


def dropped_model_is_alive(backend):
    """Whether a sharded and trained model survives its last reference."""
    import gc
    import weakref

    config = ToyConfig()
    model, loss = build(backend, config)
    shard(model, hp.DeviceMesh((1,), ("shard",)))
    hp.value_and_grad(loss, [p for _, p in hp.trainable_parameters(model)])(batch(backend, config, 0))
    reference = weakref.ref(model.layers[0])
    del model, loss
    gc.collect()
    return reference() is not None


def edited_plans(backend):
    """What becomes of a plan that somebody has changed by hand; the model must not change when it is refused."""
    config = ToyConfig()
    mesh = hp.DeviceMesh((2,), ("shard",))

    def edit(change):
        model, _ = build(backend, config)
        values = hp.plan(model, mesh).to_dict()
        change(values, values["parameters"].get("layers.0.up"))
        try:
            hp.parallelize(model, hp.ShardingPlan.from_dict(values))
        except hp.HyperParallelError as error:
            assert not list(units_of(backend, model))
            shapes = {tuple(use.parameter.shape) for use in backend.modules.parameter_uses(model) if "up" in use.name}
            assert shapes == {(7, 3)}
            return f"{type(error).__name__}: {error}"
        return f"applied: {tuple(dict(hp.trainable_parameters(model))['layers.0.up'].shape)}"

    messages = {
        "dim 1": edit(lambda plan, up: up.update(placements={"shard": "shard(1)"})),
        "dim 5": edit(lambda plan, up: up.update(placements={"shard": "shard(5)"})),
        "partial": edit(lambda plan, up: up.update(placements={"shard": "partial"})),
        "axis": edit(lambda plan, up: up.update(placements={"tensor": "shard(0)"})),
        "dtype": edit(lambda plan, up: up.update(dtype="float32")),
        "frozen": edit(lambda plan, up: up.update(trainable=False)),
        "moved": edit(lambda plan, up: up.update(unit="layers.1")),
        "no root": edit(lambda plan, up: plan["units"].pop()),
        "root first": edit(lambda plan, up: plan["units"].reverse()),
        "twice": edit(lambda plan, up: plan["units"].insert(0, plan["units"][1])),
        "missing": edit(lambda plan, up: plan["parameters"].pop("layers.0.up")),
    }
    model, _ = build(backend, config)
    plan = hp.plan(model, mesh)
    hp.parallelize(model, plan)
    try:
        hp.parallelize(model, plan)
    except hp.HyperParallelError as error:
        messages["sharded"] = f"{type(error).__name__}: {error}"
    return messages


def odd_meshes(backend):
    """The messages for a mesh of the other half of the ranks and for one in another order."""
    messages = []
    others = (2, 3) if backend.collectives.rank() < 2 else (0, 1)
    for mesh in (
        hp.DeviceMesh((2,), ("shard",), others),
        hp.DeviceMesh((2, 2), ("replicate", "shard"), (1, 0, 2, 3)),
    ):
        model, _ = build(backend, ToyConfig())
        try:
            hp.fully_shard(model, mesh=mesh)
        except hp.LayoutError as error:
            messages.append(str(error))
    return messages
