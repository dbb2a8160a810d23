"""What the ranks do in `test_dtensor_edges.py`. They return values and messages; the test knows what they must be."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np

import hyper_parallel as hp
from hyper_parallel import DeviceMesh, DTensor, Partial, Replicate, Shard
from hyper_parallel.core.backend import Backend, Tensor
from tests.equivalence.dtensor_bodies import ROWS, gradients_of, message, weighted
from tests.equivalence.primitive_bodies import parameter, strided


def line(backend: Backend) -> DeviceMesh:
    """All ranks on one axis."""
    return DeviceMesh((backend.collectives.world_size(),), ("tensor",))


def where(backend: Backend, *placements: Any) -> dict[str, Any]:
    """Where a factory makes its tensor."""
    return {"device_mesh": line(backend), "placements": list(placements), "backend": backend.name}


def leaves(backend: Backend, array: np.ndarray) -> dict[str, Any]:
    """A leaf that asks for a gradient, distributed from the first rank: the gradient of this rank's part. The other
    ranks pass a tensor that asks for none."""
    rank, mesh = backend.collectives.rank(), line(backend)
    tensor = parameter(backend, array) if rank == 0 else backend.tensors.zeros(array.shape, "float64")
    x = hp.distribute_tensor(tensor, mesh, [Shard(0)])
    plain = hp.distribute_tensor(backend.tensors.from_numpy(array), mesh, [Shard(0)])
    (gradient,) = gradients_of(backend, lambda: weighted(backend, x.full_tensor(), array + 1), [x.to_local()])
    return {
        "gradient": gradient,
        "asks": (x.requires_grad, plain.requires_grad),
        "value": backend.tensors.to_numpy(x.to_local()),
        "name": getattr(x.to_local(), "name", None),
    }


def own_order(backend: Backend) -> dict[str, str]:
    """What each rank has called for in its own words: the same thing, and meshes in another order of ranks."""
    rank = backend.collectives.rank()
    last = rank == backend.collectives.world_size() - 1
    mesh, local = line(backend), backend.tensors.zeros((3, 2), "float32")
    turned = DeviceMesh(mesh.shape, mesh.names, mesh.ranks[::-1])
    whole = (3 * mesh.size, 2)

    def made(**how: Any) -> str:
        how = {"device_mesh": mesh, "placements": [Shard(0)]} | how
        return message(lambda: DTensor.from_local(local, **how))

    def spread(on: DeviceMesh = mesh, placements: Any = (ROWS,)) -> str:
        return message(lambda: hp.distribute_tensor(local, on, placements))

    return {
        "list or tuple": made(placements=(Shard(0),) if last else [Shard(0)]),
        "by name": made(placements={"tensor": Shard(0)} if last else [Shard(0)]),
        "negative": made(placements=[Shard(-2)] if last else [Shard(0)]),
        "shape": made(shape=list(whole) if last else whole),
        "gradient": made(placements=[Replicate()], grad_placements={"tensor": Partial()} if last else [Partial()]),
        "usual gradient": made(placements=[Replicate()], grad_placements=[Replicate()] if last else None),
        "distributed": spread(placements=[Shard(-2)] if last else {"tensor": Shard(0)}),
        "another gradient": made(placements=[Replicate()], grad_placements=[Partial()] if last else None),
        "another order": made(device_mesh=turned if last else mesh),
        "another order, distributed": spread(turned if last else mesh),
        "another shape": made(shape=(1, 1) if last else whole),
        "no placement": made(placements=[Shard(2)] if last else [Shard(0)]),
    }


def strided_locals(backend: Backend) -> dict[str, Any]:
    """In-place methods on a local tensor that is no contiguous one, the buffer that it lies in, and refused calls."""
    generator, mesh, tensors = hp.Generator(5), line(backend), backend.tensors
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16", "float64"):
        for name, call in {
            "normal_": lambda x: x.normal_(generator=generator),
            "fill_": lambda x: x.fill_(2.5),
            "zero_": lambda x: x.zero_(),
        }.items():
            buffer = tensors.from_numpy(np.arange(12.0), dtype)
            x = DTensor.from_local(strided(backend, buffer), mesh, [Replicate()])
            generator.manual_seed(5)
            call(x)
            found[f"{name}, {dtype}"] = tensors.to_numpy(buffer)
    generator.manual_seed(5)
    expanded = DTensor.from_local(_expanded(backend), mesh, [Replicate()])
    for call in (lambda: expanded.normal_(generator=generator), lambda: expanded.fill_(1), lambda: expanded.zero_()):
        found.setdefault("expanded", []).append(message(call))
    found["draw"] = generator.draw
    return found


def _expanded(backend: Backend) -> Tensor:
    row = backend.tensors.from_numpy(np.float32([[1, 2, 3]]))
    if backend.name == "torch":
        return row.expand(4, 3)
    import mindspore

    return mindspore.mint.broadcast_to(row, (4, 3))


def copies(backend: Backend) -> dict[str, Any]:
    """Deep and shallow copies and pickles, and what they hold after the original is overwritten."""
    tensors, mesh = backend.tensors, line(backend)
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16", "int64"):
        x = hp.full((4, 2), 3, dtype=dtype, **where(backend, Shard(0)))
        made = {"deep": copy.deepcopy(x), "pickle": pickle.loads(pickle.dumps(x)), "shallow": copy.copy(x)}
        x.zero_()
        for name, each in made.items():
            assert (type(each), each.layout, each.dtype) == (DTensor, x.layout, x.dtype), (name, dtype)
        found[dtype] = {name: set(tensors.to_numpy(each.to_local()).ravel().tolist()) for name, each in made.items()}
    leaf = DTensor.from_local(parameter(backend, np.ones(2)), mesh, [Replicate()])
    found["leaf"] = copy.deepcopy(leaf).requires_grad
    twice = copy.deepcopy([leaf, leaf])
    found["once"] = twice[0] is twice[1] and twice[0].to_local() is not leaf.to_local()
    messages: list[str] = []

    def loss() -> Tensor:
        x = DTensor.from_local(leaf.to_local() * 2, mesh, [Replicate()])
        messages[:] = [message(lambda: copy.deepcopy(x))]
        return x.to_local().sum()

    gradients_of(backend, loss, [leaf.to_local()])
    return found | {"recorded": messages[0]}


def filled(backend: Backend) -> dict[str, Any]:
    """What tensors are filled with, and what they can't be filled with."""

    def made(value: Any, dtype: Any = "float32") -> np.ndarray:
        return backend.tensors.to_numpy(hp.full((1,), value, dtype=dtype, **where(backend, Replicate())).to_local())

    wrong = {"None": (None, "float32"), "text": ("a", "float32"), "complex": (1j, "float32"), "array": ([1], "int8")}
    wrong |= {"large": (2**70, "int64"), "256": (256, "uint8"), "negative": (-1, "uint8"), "nan": (np.nan, "int32")}
    wrong |= {"beyond": (2**2000, "float32")}
    return {
        "minus zero": np.signbit(made(-0.0)).tolist(),
        "exact": made(2**62 + 1, "int64").tolist(),
        "large float": made(2**70).tolist(),
        "cut": made(2.5, "int32").tolist(),
        "numpy": made(np.float32(1.5), np.float32).tolist(),
        "bool": made(2, "bool").tolist(),
        "complex": made(1 + 2j, "complex64").tolist(),
        **{f"refused: {name}": message(lambda case=case: made(*case)) for name, case in wrong.items()},
    }


def spellings(backend: Backend) -> dict[str, Any]:
    """Dtypes, sizes and placements as users write them."""
    names = backend.tensors.dtype_name

    def dtype_of(dtype: Any) -> str:
        return names(hp.zeros(2, dtype=dtype, **where(backend, Replicate())).to_local())

    mesh = line(backend)
    x = hp.zeros(4, 6, device_mesh=mesh, backend=backend.name)
    own = x.to_local().dtype
    local = backend.tensors.zeros((3,), "float32")
    return {
        "dtypes": [dtype_of(each) for each in (np.float32, np.dtype("int64"), own, None, "bool", np.int16, bool)],
        "placements": [x.placements, DTensor.from_local(local, mesh).placements, _spread(local, mesh)],
        "size": [x.size(), x.size(1), x.size(-2)],
        "refused": {
            "float": message(lambda: hp.zeros(2.7, **where(backend, Replicate()))),
            "text": message(lambda: hp.zeros("43", **where(backend, Replicate()))),
            "object": message(lambda: dtype_of(object)),
            "loose": message(lambda: dtype_of("float")),
            "dim": message(lambda: x.size(2)),
            "half a dim": message(lambda: x.size(0.5)),
            "mesh first": message(lambda: x.redistribute([Shard(1)])),
            "one placement": message(lambda: DTensor.from_local(local, mesh, Shard(0))),
            "array": message(lambda: np.asarray(x)),
            "truth": message(lambda: bool(x)),
        },
    }


def _spread(tensor: Tensor, mesh: DeviceMesh) -> tuple:
    return hp.distribute_tensor(tensor, mesh).placements


def moves(backend: Backend, dtypes: list[str]) -> dict[str, list[Any]]:
    """A tensor of each dtype along a chain of layouts, and pending reductions of it; wholes, as float64 or complex."""
    mesh, tensors = line(backend), backend.tensors
    is_last = backend.collectives.rank() == mesh.size - 1
    found: dict[str, list[Any]] = {}

    def numbers(tensor: Tensor) -> list[Any]:
        array = tensors.to_numpy(tensor)
        return array.astype("complex128" if array.dtype.kind == "c" else "float64").tolist()

    for dtype in dtypes:
        x = hp.distribute_tensor(tensors.from_numpy(np.arange(12).reshape(4, 3) % 8, dtype), mesh, [Shard(0)])
        chain = [x.redistribute(placements=[each]) for each in (Shard(1), Replicate(), Shard(0))]
        assert all(tensors.dtype_name(each.to_local()) == dtype for each in chain)
        found[dtype] = [numbers(each.full_tensor()) for each in chain]
        ops = () if dtype == "bool" else ("sum",) if dtype.startswith("complex") else ("sum", "max", "min")
        for op in ops:
            part = tensors.from_numpy(np.arange(4) % 2 + 2 * is_last, dtype)
            y = DTensor.from_local(part, mesh, [Partial(op)])
            scattered = y.redistribute(placements=[Shard(0)])
            found[dtype].append([numbers(each.full_tensor()) for each in (y, scattered)])
    return found


def conjugates(backend: Backend) -> list[Any]:
    """Views of torch whose elements are conjugates, or negatives, of what lies in memory."""
    import torch

    mesh = line(backend)
    z = torch.tensor([1 + 2j, 3 - 4j])
    views = {"conjugate": z.conj(), "negative": z.conj().imag, "both": -z.conj()}
    return [
        [DTensor.from_local(view, mesh, [Shard(0)]).full_tensor().tolist() for view in views.values()],
        [hp.distribute_tensor(view, mesh).to_local().tolist() for view in views.values()],
    ]


def tangents(backend: Backend) -> str:
    """Forward-mode differentiation of a transition, and of one that has nothing to do."""
    import torch
    from torch.autograd import forward_ad

    mesh = line(backend)
    with forward_ad.dual_level():
        local = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        x = DTensor.from_local(local, mesh, [Shard(0)])
        assert torch.equal(forward_ad.unpack_dual(x.to_local() * 2).tangent, torch.full((2,), 2.0))
        return message(lambda: x.full_tensor())


def kept_targets(backend: Backend) -> bool:
    """A redistribution that is repeated makes no layout again, however its placements are written."""
    x = hp.zeros(4, 6, **where(backend, Shard(0)))
    ways = ([Shard(1)], (Shard(1),), {"tensor": Shard(1)})
    layouts = [x.redistribute(placements=way).layout for way in ways for _ in range(2)]
    return all(each is layouts[0] for each in layouts)
