"""The ways to take a step of Muon that `muon.py` compares: ours, and peers that run on a CPU.

All are given the same model under PyTorch's FSDP2, the same gradients, and the same maths: EMA momentum of 0.95 with
Nesterov, five steps of the usual quintic, decay of 0.1, the scale that matches AdamW. Peers work in bfloat16 as they
are. `InFloat32` gives them float32 where they cast, so that they can be compared in it too.

What of a peer does not run on a CPU as it is, and what is done about it, stands at its class. Nothing of their code is
here: `muon_fsdp2` and `torchtitan` are looked for among the installed packages, and left out where they are missing.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import TorchFunctionMode

import hyper_parallel
from hyper_parallel.backends.torch import muon as kernels
from hyper_parallel.core.muon.newton_schulz import NewtonSchulz

RATE, DECAY, MOMENTUM = 1e-2, 0.1, 0.95


class Block(nn.Module):
    """The six matrices of a decoder's block, all that Muon is given of it."""

    def __init__(self, width: int):
        super().__init__()
        for name in ("query", "key", "value", "output"):
            self.register_parameter(name, nn.Parameter(torch.randn(width, width) / width**0.5))
        self.up = nn.Parameter(torch.randn(2 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(width, 2 * width) / (2 * width) ** 0.5)


def whole_model(width: int, blocks: int) -> nn.ModuleList:
    """The same model on every rank, not sharded."""
    torch.manual_seed(0)
    return nn.ModuleList(Block(width) for _ in range(blocks))


def gradients_of(model: nn.Module, number: int) -> dict[str, Tensor]:
    """Full-rank gradients, the same on every rank: what a tiny batch leaves empty, Newton-Schulz fills with noise."""
    generator = torch.Generator().manual_seed(1000 + number)
    return {name: torch.randn(each.shape, generator=generator) for name, each in model.named_parameters()}


class Way(ABC):
    """A model under FSDP2 and its optimizer."""

    def __init__(self, model: nn.ModuleList, mesh: DeviceMesh, dtype: str):
        for block in model:
            fully_shard(block, mesh=mesh)
        self.model, self.mesh, self.dtype = model, mesh, dtype
        self.named: dict[str, Any] = dict(model.named_parameters())

    @classmethod
    def missing(cls) -> str | None:
        """What to install for it, or None."""
        return None

    @classmethod
    def runs_on(cls, mesh: tuple[int, int]) -> bool:
        """Whether it can be tried on so many copies and shards."""
        return True

    @abstractmethod
    def step(self) -> None:
        """Take a step with the gradients that the parameters have."""

    @abstractmethod
    def momenta(self) -> list[Tensor]:
        """The momentum tensors of this rank."""

    def give(self, local: dict[str, Tensor]) -> None:
        """Set this rank's parts of gradients. Some peers overwrite what they are given, so they get a copy."""
        for name, parameter in self.named.items():
            part = DTensor.from_local(local[name].clone(), self.mesh, parameter.placements, run_check=False,
                                      shape=parameter.shape, stride=parameter.stride())  # fmt: skip
            parameter.grad = part

    def local(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of whole tensors."""
        return {
            name: distribute_tensor(tensor, self.mesh, self.named[name].placements, src_data_rank=None).to_local()
            for name, tensor in whole.items()
        }

    def whole(self) -> dict[str, Tensor]:
        """The whole parameters, on every rank."""
        return {name: each.detach().full_tensor() for name, each in self.named.items()}


class Ours(Way):
    """`hyper_parallel.Muon` on the parameters of FSDP2. The ranks share a machine, so they are one supernode, where
    copies share the work."""

    topology: Any = None

    def __init__(self, model: nn.ModuleList, mesh: DeviceMesh, dtype: str):
        super().__init__(model, mesh, dtype)
        matrices = [{"params": list(self.named.items()), "algorithm": "muon"}]
        self.optimizer = hyper_parallel.Muon(
            matrices, lr=RATE, weight_decay=DECAY, momentum=MOMENTUM, ns_dtype=dtype, topology=self.topology
        )

    def step(self) -> None:
        self.optimizer.step()

    def momenta(self) -> list[Tensor]:
        return [state["momentum_buffer"] for state in self.optimizer.state.values() if state]


class OursApart(Ours):
    """The same where each copy is a supernode: both compute everything, and nothing crosses between them."""

    topology = hyper_parallel.Topology((0, 0, 1, 1), (0, 0, 1, 1))

    @classmethod
    def runs_on(cls, mesh: tuple[int, int]) -> bool:
        return mesh == (2, 2)


class Naive(Way):
    """What one writes first: gather every matrix, orthogonalize it on every rank, keep one's part. It uses our kernels
    on batches of one shape, and gathers in the dtype of Newton-Schulz, so that only the distribution differs."""

    def __init__(self, model: nn.ModuleList, mesh: DeviceMesh, dtype: str):
        super().__init__(model, mesh, dtype)
        self._momenta = {name: torch.zeros_like(each.to_local()) for name, each in self.named.items()}
        self._settings = NewtonSchulz(dtype=dtype)
        self._shapes: dict[tuple[int, ...], list[str]] = {}
        for name, each in self.named.items():
            self._shapes.setdefault(tuple(each.shape), []).append(name)

    @torch.no_grad()
    def step(self) -> None:
        for shape, names in self._shapes.items():
            gradients = [self.named[name].grad.to_local() for name in names]
            momenta = [self._momenta[name] for name in names]
            inputs = kernels.momenta_(momenta, gradients, MOMENTUM, "ema", True)
            whole = torch.stack([self._full(name, each) for name, each in zip(names, inputs)])
            updates = dict(zip(names, kernels.newton_schulz(whole, self._settings)))
            parts = [
                distribute_tensor(updates[n], self.mesh, self.named[n].placements, src_data_rank=None) for n in names
            ]
            local = [self.named[name].to_local() for name in names]
            torch._foreach_mul_(local, 1 - RATE * DECAY)
            updates = [each.to_local().float() for each in parts]
            torch._foreach_add_(local, updates, alpha=-RATE * 0.2 * max(shape) ** 0.5)

    def _full(self, name: str, part: Tensor) -> Tensor:
        parameter = self.named[name]
        cast = part.to(getattr(torch, self.dtype))
        return DTensor.from_local(cast, self.mesh, parameter.placements, run_check=False, shape=parameter.shape,
                                  stride=parameter.stride()).full_tensor()  # fmt: skip

    def momenta(self) -> list[Tensor]:
        return list(self._momenta.values())


class Peer(Way):
    """An optimizer of others."""

    optimizer: torch.optim.Optimizer

    def step(self) -> None:
        with InFloat32() if self.dtype == "float32" else ExitStack():
            self.optimizer.step()

    def momenta(self) -> list[Tensor]:
        tensors = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return [each.to_local() if isinstance(each, DTensor) else each for each in tensors]


class TorchMuon(Peer):
    """`torch.optim.Muon` on DTensors, as it is: each operator of each iteration is a collective."""

    def __init__(self, model: nn.ModuleList, mesh: DeviceMesh, dtype: str):
        super().__init__(model, mesh, dtype)
        self.optimizer = torch.optim.Muon(
            self.named.values(), lr=RATE, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
        )


class MuonFsdp2(Peer):
    """muon-fsdp2 of PyPI: each matrix is gathered on one rank, in turns, and its parts are scattered, in float32. Along
    one axis only, on parts of one size. It compiles its iterations, for which a compiler has to be installed."""

    def __init__(self, model: nn.ModuleList, mesh: DeviceMesh, dtype: str):
        super().__init__(model, mesh, dtype)
        module = importlib.import_module("muon_fsdp2")
        group = {"params": list(self.named.values()), "lr": RATE, "weight_decay": DECAY, "momentum": MOMENTUM}
        self.optimizer = module.Muon([group | {"rms_scale": True, "use_muon": True}])

    @classmethod
    def runs_on(cls, mesh: tuple[int, int]) -> bool:
        return mesh[0] == 1

    @classmethod
    def missing(cls) -> str | None:
        return None if importlib.util.find_spec("muon_fsdp2") else "pip install muon-fsdp2==0.3.0"


class DistMuon(Peer):
    """TorchTitan's DistMuon: packed all-to-alls to owners and back, two buckets at a time, in the dtype of parameters.

    It asks for CUDA: for the check of the device a subclass says what device there is, and its context of streams is
    made with the streams of a CPU, which do nothing. Each block is a bucket."""

    def __init__(self, model: nn.ModuleList, mesh: DeviceMesh, dtype: str):
        super().__init__(model, mesh, dtype)
        flex_shard = _flex_shard()
        dist_muon, runtime = (
            importlib.import_module(f"{flex_shard.__name__}.{name}")
            for name in ("dist_muon", "_optimizer_reshard_runtime")
        )
        layout = flex_shard.ComputeLayout({"shard": flex_shard.Owned()})
        group = {"params": tuple(self.named.values()), "param_names": tuple(self.named)}

        class OnCpu(dist_muon.DistMuon):
            def _validate_parameter_storage(self) -> torch.device:
                return torch.device("cpu")

        with _streams_of_cpu(runtime):
            self.optimizer = OnCpu(
                [group],
                compute_sharding_by_fqn=dict.fromkeys(self.named, layout),
                bucket_configs=[flex_shard.BucketConfig((f"{block}.*",)) for block in range(len(model))],
                lr=RATE, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw",
            )  # fmt: skip

    @classmethod
    def missing(cls) -> str | None:
        return None if importlib.util.find_spec("torchtitan") else "pip install --no-deps torchtitan==0.3.0"


class InFloat32(TorchFunctionMode):
    """Where a peer casts to bfloat16, it gets float32."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.bfloat16 or kwargs.get("dtype") is torch.bfloat16:
            # A copy, as from float32 these make one: what comes of it is divided in place.
            return args[0].to(torch.float32, copy=True)
        return function(*args, **kwargs)


def _flex_shard() -> ModuleType:
    """The part of TorchTitan that holds DistMuon, without the rest and what that needs."""
    name = "torchtitan_flex_shard"
    path = Path(importlib.util.find_spec("torchtitan").submodule_search_locations[0]) / "distributed" / "flex_shard"
    spec = importlib.util.spec_from_file_location(name, path / "__init__.py", submodule_search_locations=[str(path)])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def _streams_of_cpu(runtime: ModuleType) -> Iterator[None]:
    """The peer makes its context of streams here as a CPU has them."""
    context, slot = runtime._CommunicationContext, runtime._PipelineSlot

    def create(device: torch.device) -> Any:
        event = torch.cpu.Event
        slots = (slot(runtime._BufferSlot(), event(), event(), event()) for _ in range(runtime._NUM_PIPELINE_SLOTS))
        return context(torch.cpu, torch.cpu.Stream(), tuple(slots))

    usual, context.create = context.create, staticmethod(create)
    try:
        yield
    finally:
        context.create = usual


WAYS: dict[str, type[Way]] = {
    "ours": Ours,
    "ours, apart": OursApart,
    "naive": Naive,
    "torch.optim.Muon": TorchMuon,
    "muon-fsdp2": MuonFsdp2,
    "DistMuon": DistMuon,
}
