"""What the ranks do in `test_dtensor.py`. They return numpy arrays and messages; the test knows what they must be."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import numpy as np

import hyper_parallel as hp
from hyper_parallel import DeviceMesh, DTensor, HyperParallelError, Layout, Partial, RaggedShard, Replicate, Shard
from hyper_parallel.core.backend import Backend, Tensor
from hyper_parallel.core.placement import Placement
from tests.core.arithmetic_cases import OPERATIONS
from tests.equivalence.primitive_bodies import parameter

ROWS = Shard(0)
PLACED: dict[str, Placement] = {
    "replicate": Replicate(),
    "shard": ROWS,
    "partial": Partial(),
    "max": Partial("max"),
}


class Sides(NamedTuple):
    """An operation on two tensors: their layouts, local arrays by rank, and the gradient of the whole result."""

    symbol: str
    left: Layout
    right: Layout
    locals: tuple[Sequence[np.ndarray], Sequence[np.ndarray]]
    gradient: np.ndarray


def message(call: Callable[[], Any]) -> str:
    """What an error that is raised on purpose says, after its class."""
    try:
        call()
    except HyperParallelError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def part(layout: Layout, local: Tensor) -> DTensor:
    """The distributed tensor of a layout and this rank's local tensor."""
    return DTensor.from_local(
        local,
        layout.mesh,
        layout.placements,
        shape=layout.shape,
        grad_placements=layout.gradient_placements,
        run_check=False,
    )


def weighted(backend: Backend, local: Tensor, weights: np.ndarray) -> Tensor:
    """A loss whose gradient by `local` is `weights`."""
    return (local * backend.tensors.from_numpy(weights)).sum()


def gradients_of(backend: Backend, loss: Callable[[], Tensor], parameters: Sequence[Any]) -> list[np.ndarray]:
    """The gradients of a loss by some parameters."""
    _, gradients = backend.autograd.value_and_grad(loss, parameters)()
    return [backend.tensors.to_numpy(gradient) for gradient in gradients]


def arithmetic(backend: Backend, cases: Sequence[Sides]) -> list[tuple[Layout, np.ndarray, list[np.ndarray]]]:
    """Layout and whole of each result, and the gradients of both local tensors."""
    rank, found = backend.collectives.rank(), []
    for case in cases:
        layouts = case.left, case.right
        sides = [parameter(backend, held[layout.mesh.position(rank)]) for layout, held in zip(layouts, case.locals)]
        seen: list[Any] = []

        def loss(case: Sides = case, layouts: Any = layouts, sides: Any = sides, seen: Any = seen) -> Tensor:
            result = OPERATIONS[case.symbol](*map(part, layouts, sides))
            whole = result.full_tensor()
            seen[:] = result.layout, backend.tensors.to_numpy(whole)
            return weighted(backend, whole, case.gradient)

        gradients = gradients_of(backend, loss, sides)
        found.append((*seen, gradients))
    return found


def bias(backend: Backend, x: Layout, of_bias: Layout, ending: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """`x + bias`, seen by a loss through the whole, or through parts of it that each rank computes alone."""
    rank = backend.collectives.rank()
    sides = [parameter(backend, x.shard(arrays["x"], rank)), parameter(backend, of_bias.shard(arrays["bias"], rank))]
    seen = {}

    def loss() -> Tensor:
        result = part(x, sides[0]) + part(of_bias, sides[1])
        if ending == "whole":
            local, weights = result.full_tensor(), arrays["weights"]
        else:  # the sum of what all ranks weigh is the loss; where they hold the same, each takes a part of the weights
            local = result.to_local(grad_placements={"tensor": Partial()} if ending == "parts" else None)
            weights = result.layout.gradient.shard(arrays["weights"], rank)
            if ending == "parts":
                weights = weights * (rank + 1) / sum(range(1, x.mesh.size + 1))
        seen["value"] = backend.tensors.to_numpy(local)
        return weighted(backend, local, weights)

    return {"gradients": gradients_of(backend, loss, sides), **seen}


def numbers(backend: Backend, cases: Sequence[tuple[Layout, Sequence[np.ndarray]]]) -> list[dict[str, np.ndarray]]:
    """Arithmetic with numbers, and its gradient."""
    rank, found = backend.collectives.rank(), []
    for layout, held in cases:
        local = parameter(backend, held[layout.mesh.position(rank)])
        x = part(layout, local)
        results = {"x + 3": x + 3, "3 + x": 3 + x, "x - 3": x - 3, "3 - x": 3 - x, "-x": -x, "x * 3": x * 3.0}
        results |= {"np.float64(3) * x": np.float64(3) * x, "x / 4": x / 4, "(x + 1) * 2 - x": (x + 1) * 2 - x}
        if all(size == 1 or not isinstance(each, Partial) for size, each in zip(layout.mesh.shape, layout.placements)):
            results["4 / x"] = 4 / x
        wholes = {name: backend.tensors.to_numpy(each.full_tensor()) for name, each in results.items()}

        def loss(layout: Layout = layout, local: Any = local) -> Tensor:
            whole = ((3 - part(layout, local)) * 2 + 1).full_tensor()
            return weighted(backend, whole, np.ones(layout.shape))

        wholes["gradient"] = gradients_of(backend, loss, [local])[0]
        found.append(wholes)
    return found


def refusals_of_arithmetic(backend: Backend) -> dict[str, str]:
    """What arithmetic refuses; the sum at the end proves that the ranks are still in step."""
    mesh = DeviceMesh((backend.collectives.world_size(),), ("tensor",))
    ones = {
        name: hp.ones(4, device_mesh=mesh, placements=[each], backend=backend.name) for name, each in PLACED.items()
    }
    plain, array = ones["replicate"].to_local(), np.ones(4)
    calls = {
        "product of sums": lambda: ones["partial"] * ones["partial"],
        "a number over a sum": lambda: 1 / ones["partial"],
        "over a sum": lambda: ones["shard"] / ones["partial"],
        "maximum and tensor": lambda: ones["max"] + ones["replicate"],
        "maximum and number": lambda: ones["max"] * 2,
        "minus a maximum": lambda: -ones["max"],
        "plain tensor": lambda: ones["shard"] + plain,
        "array before": lambda: array * ones["shard"],
    }
    messages = {name: message(call) for name, call in calls.items()}
    for name, call in {
        "plain tensor before": lambda: plain + ones["shard"],
        "text": lambda: ones["shard"] + "a",
    }.items():
        try:
            call()
            messages[name] = "accepted"
        except (TypeError, HyperParallelError) as error:  # MindSpore does not ask the right side
            messages[name] = type(error).__name__
    assert backend.tensors.to_numpy((ones["partial"] + ones["shard"]).full_tensor()).tolist() == [2, 2, 2, 2]
    return messages


def in_bfloat16(backend: Backend) -> list[Any]:
    """A bias in bfloat16, added to a pending sum."""
    mesh = DeviceMesh((backend.collectives.world_size(),), ("tensor",))
    where = {"device_mesh": mesh, "dtype": "bfloat16", "backend": backend.name}
    bias = DTensor.from_local(backend.tensors.from_numpy(np.float32([0.5, 2]), "bfloat16"), mesh, [Replicate()])
    whole = (hp.ones(2, placements=[Partial()], **where) + bias).full_tensor()
    return [backend.tensors.dtype_name(whole), backend.tensors.to_numpy(whole).tolist()]


# Made from local tensors


def from_locals(backend: Backend, layouts: Sequence[Layout], array: np.ndarray) -> list[tuple[Any, ...]]:
    """What a tensor says of itself whose shape is found from the local ones, and what it holds as a whole."""
    rank, found = backend.collectives.rank(), []
    for layout in layouts:
        local = backend.tensors.from_numpy(layout.shard(array, rank))
        x = DTensor.from_local(local, layout.mesh, layout.placements)
        assert x.to_local() is local and x.device_mesh == layout.mesh and x.dtype == local.dtype
        assert (x.ndim, x.numel(), x.local_shape) == (array.ndim, array.size, layout.local_shape(rank))
        found.append((x.layout, repr(x), backend.tensors.to_numpy(x.full_tensor())))
    return found


def wrong_locals(backend: Backend, wrong: int) -> dict[str, str]:
    """Messages on this rank when rank `wrong` gives something else than the others; then all is well again."""
    rank, world = backend.collectives.rank(), backend.collectives.world_size()
    mesh = DeviceMesh((world,), ("tensor",))
    tensors, here = backend.tensors, rank == wrong

    def made(held: Sequence[int], dtype: str = "float32", placed: Placement = ROWS, **how: Any) -> str:
        return message(lambda: DTensor.from_local(tensors.zeros(held, dtype), mesh, [placed], **how))

    messages = {
        "replicated": made((3, 5 if here else 4), placed=Replicate()),
        "sharded": made((3, 5 if here else 4)),
        "sharded, shape given": made((7 if here else 2, 4), shape=(2 * world, 4)),
        "dims": made((3,) if here else (3, 4)),
        "dtype": made((3, 4), "float16" if here else "float32"),
        "placements": made((3, 4), placed=Replicate() if here else ROWS),
        "no dim": made((3,), placed=Shard(1)),
        "ragged": made((3,), placed=RaggedShard((0, 1), [1] * world)),
        "unchecked": made((7 if here else 2, 4), shape=(2 * world, 4), run_check=False),
        "unchecked, no shape": made((2, 4), run_check=False),
        "no mesh": message(lambda: DTensor.from_local(tensors.zeros((1,), "float32"), "mesh", [Shard(0)])),
        "larger mesh": message(
            lambda: DTensor.from_local(
                tensors.zeros((1,), "float32"), DeviceMesh((world + 1,), ("tensor",)), [Shard(0)]
            )
        ),
    }
    x = DTensor.from_local(tensors.from_numpy(np.float32([rank])), mesh, [Shard(0)])
    assert tensors.to_numpy(x.full_tensor()).tolist() == list(range(world))
    return messages


# Moved


def moved(backend: Backend, layouts: Sequence[Layout], array: np.ndarray) -> list[list[np.ndarray]]:
    """The local arrays along a chain of layouts, the whole at the end, and the gradient of the first local tensor."""
    rank = backend.collectives.rank()
    first = parameter(backend, layouts[0].shard(array, rank))
    seen: list[np.ndarray] = []

    def loss() -> Tensor:
        x = part(layouts[0], first)
        seen[:] = []
        for layout in layouts[1:]:
            x = x.redistribute(layout.mesh, layout.placements)
            assert (x.layout, x.device_mesh, x.shape) == (layout, layout.mesh, array.shape)
            seen.append(backend.tensors.to_numpy(x.to_local()))
        whole = x.full_tensor()
        seen.append(backend.tensors.to_numpy(whole))
        return weighted(backend, whole, array + 1)

    return [*gradients_of(backend, loss, [first]), *seen]


def column_parallel(backend: Backend, array: np.ndarray) -> list[np.ndarray]:
    """Sequence parallelism: rows are gathered for a computation of which each rank does a part. The gradient of the
    rows when each rank weighs the whole with its rank, by all ways to say so."""
    rank, world = backend.collectives.rank(), backend.collectives.world_size()
    layout = Layout(DeviceMesh((world,), ("tensor",)), [Shard(0)], array.shape)
    rows = parameter(backend, layout.shard(array, rank))
    pending = {"tensor": Partial()}
    ways = (
        lambda x: x.redistribute(placements=[Replicate()], grad_placements=pending).to_local(),
        lambda x: x.full_tensor(grad_placements=pending),
        lambda x: x.redistribute(placements={}).to_local(grad_placements=[Partial()]),
    )
    return [
        gradients_of(backend, lambda way=way: weighted(backend, way(part(layout, rows)), array * rank), [rows])[0]
        for way in ways
    ]


def plain(backend: Backend, source: Layout, target: Layout, array: np.ndarray) -> list[np.ndarray]:
    """A plain local tensor in another layout, and the gradient of the first one."""
    first = parameter(backend, source.shard(array, backend.collectives.rank()))
    seen = []

    def loss() -> Tensor:
        local = hp.redistribute(first, source, target)
        seen[:] = [backend.tensors.to_numpy(local)]
        return weighted(backend, local, seen[0])

    return [*gradients_of(backend, loss, [first]), *seen]


def submesh(backend: Backend) -> list[list[float]]:
    """The full mesh, then a mesh of two ranks that the others do not know of, then the full mesh again."""
    rank, world = backend.collectives.rank(), backend.collectives.world_size()
    meshes = [DeviceMesh((world,), ("shard",)), DeviceMesh((2,), ("shard",), ranks=(0, 1))]
    found = []
    for mesh in (meshes[0], meshes[1], meshes[0]):
        if rank in mesh.ranks:
            local = backend.tensors.from_numpy(np.float64([rank + 1]))
            x = DTensor.from_local(local, mesh, [Shard(0)])
            total = DTensor.from_local(local, mesh, [Partial()]) + x.redistribute(placements=[Replicate()]).detach() * 0
            found.append(backend.tensors.to_numpy(x.full_tensor()).tolist())
            found.append(backend.tensors.to_numpy(total.full_tensor()).tolist())
    if rank not in meshes[1].ranks:
        found.append(message(lambda: DTensor.from_local(backend.tensors.zeros((1,), "float32"), meshes[1], [Shard(0)])))
    return found


# Distributed from one rank


def distributed(backend: Backend, layouts: Sequence[Layout], array: np.ndarray, source: int | None) -> list[np.ndarray]:
    """The local arrays of tensors that only one rank knows, or all with `source` None."""
    rank, found = backend.collectives.rank(), []
    for layout in layouts:
        knows = source is None or rank == layout.mesh.ranks[source]
        tensor = backend.tensors.from_numpy(array if knows else np.full_like(array, np.nan))
        x = hp.distribute_tensor(tensor, layout.mesh, layout.placements, src_data_rank=source)
        assert x.layout == layout
        found.append(backend.tensors.to_numpy(x.to_local()))
    return found


def distributed_gradient(backend: Backend, layout: Layout, array: np.ndarray) -> np.ndarray:
    """The gradient of the tensor of which every rank cuts its part."""
    tensor = parameter(backend, array)

    def loss() -> Tensor:
        x = hp.distribute_tensor(tensor, layout.mesh, layout.placements, src_data_rank=None)
        return weighted(backend, x.full_tensor(), array)

    return gradients_of(backend, loss, [tensor])[0]


def refused_distributions(backend: Backend) -> dict[str, str]:
    """What `distribute_tensor` refuses, on every rank alike."""
    rank, world = backend.collectives.rank(), backend.collectives.world_size()
    mesh, last = DeviceMesh((world,), ("tensor",)), rank == world - 1
    tensors = backend.tensors

    def made(whole: Sequence[int], dtype: str = "float32", placed: Placement = ROWS, **how: Any) -> str:
        return message(lambda: hp.distribute_tensor(tensors.zeros(whole, dtype), mesh, [placed], **how))

    weight, recorded = parameter(backend, np.ones(3)), []

    def loss() -> Tensor:
        recorded[:] = [message(lambda: hp.distribute_tensor(weight * 2 if last else weight, mesh, [Shard(0)]))]
        return (weight * 1).sum()

    gradients_of(backend, loss, [weight])
    return {
        "shape": made((3, 5 if last else 4)),
        "dtype": made((3, 4), "float16" if last else "float32"),
        "source": made((3, 4), src_data_rank=world),
        "dim": made((3, 4), placed=Shard(2)),
        "other sources": made((3, 4), src_data_rank=int(last)),
        "recorded": recorded[0],
        "array": message(lambda: hp.distribute_tensor(np.ones(3), mesh, [Shard(0)])),
    }


# Made from nothing


def factories(backend: Backend, layouts: Sequence[Layout], seed: int) -> list[dict[str, np.ndarray]]:
    """The local arrays of factories and in-place methods, drawn one after the other."""
    hp.manual_seed(seed)
    own = hp.Generator(seed + 1)
    found = []
    for layout in layouts:
        where = {"device_mesh": layout.mesh, "placements": layout.placements, "backend": backend.name}
        empty = hp.empty(layout.shape, **where)
        made = {
            "zeros": hp.zeros(layout.shape, dtype="int64", **where),
            "ones": hp.ones(*layout.shape, dtype=empty.dtype, **where),
            "full": hp.full(layout.shape, 2.5, dtype="bfloat16", **where),
            "filled": hp.empty(layout.shape, **where).fill_(3),
            "zeroed": hp.empty(layout.shape, **where).zero_(),
        }
        if not any(isinstance(each, Partial) for each in layout.placements):
            made |= {
                "rand": hp.rand(*layout.shape, **where),
                "randn": hp.randn(layout.shape, dtype="float64", **where),
                "own": hp.rand(layout.shape, dtype="float16", generator=own, **where),
                "normal_": hp.zeros(layout.shape, **where).normal_(2, 0.5),
                "uniform_": hp.zeros(layout.shape, dtype="bfloat16", **where).uniform_(-1, 3),
                "bernoulli_": hp.zeros(layout.shape, dtype="bool", **where).bernoulli_(0.25, generator=own),
            }
        assert empty.local_shape == layout.local_shape(backend.collectives.rank())
        assert all(each.layout == layout for each in made.values())
        found.append({name: backend.tensors.to_numpy(each.to_local()) for name, each in made.items()})
    return found


def dropped(backend: Backend, layout: Layout, array: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """A tensor of which a part is dropped, and the gradient of its local tensor."""
    local = parameter(backend, layout.shard(array, backend.collectives.rank()))
    seen = {}

    def loss() -> Tensor:
        hp.manual_seed(seed)
        x = part(layout, local)
        assert hp.dropout(x, 0.5, training=False) is x
        whole = hp.dropout(x, 0.25).full_tensor()
        seen["whole"] = backend.tensors.to_numpy(whole)
        return weighted(backend, whole, array)

    return {"gradient": gradients_of(backend, loss, [local])[0], **seen}


def refusals_in_place(backend: Backend) -> dict[str, str]:
    """What may not be overwritten, or not drawn."""
    world = backend.collectives.world_size()
    mesh = DeviceMesh((world,), ("tensor",))
    where = {"device_mesh": mesh, "placements": [Partial()], "backend": backend.name}
    weight, messages = parameter(backend, np.ones(3)), {}

    def loss() -> Tensor:
        x = DTensor.from_local(weight * 2, mesh, [Replicate()])
        messages["recorded"] = message(lambda: x.normal_())
        assert backend.tensors.to_numpy(x.detach().fill_(5).to_local()).tolist() == [5, 5, 5]
        return (weight * 1).sum()

    gradients_of(backend, loss, [weight])
    return messages | {
        "pending": message(lambda: hp.rand(3, **where)),
        "whole numbers": message(lambda: hp.zeros(3, dtype="int32", **{**where, "placements": [Shard(0)]}).normal_()),
        "dtype": message(lambda: hp.zeros(3, **{**where, "dtype": "float33"})),
        "no placements": message(lambda: hp.zeros(3, **where).redistribute()),
        "other ranks": message(
            lambda: hp.zeros(3, **where).redistribute(DeviceMesh((1,), ("tensor",), ranks=[0]), [Shard(0)])
        ),
    }


def recompute(backend: Backend) -> str:
    """Dropout inside PyTorch's checkpoint, whose recompute would draw another mask."""
    from torch.utils.checkpoint import checkpoint

    mesh = DeviceMesh((1,), ("tensor",))
    weight = parameter(backend, np.ones(3))

    def drop(tensor: Tensor) -> Tensor:
        return hp.dropout(DTensor.from_local(tensor, mesh, [Replicate()]), 0.5).to_local()

    return message(lambda: (checkpoint(drop, weight, use_reentrant=False) * weight).sum().backward())
