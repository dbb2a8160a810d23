"""`hyper_parallel.Muon` as a `torch.optim.Optimizer`, and PyTorch's AdamW inside of it."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Callable, Mapping, NoReturn, Sequence

import torch

from hyper_parallel.core.backend import Parameter, Tensor
from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.muon.face import Planned, refuse_copy
from hyper_parallel.core.muon.meshes import names_of_axes
from hyper_parallel.core.placement import Placement, Replicate, Shard, StridedShard

if TYPE_CHECKING:
    from hyper_parallel.core.muon.optimizer import MuonEngine


def own_layout(parameter: Parameter) -> Layout | None:
    """See `core.backend.Optimizing`. A DTensor's device mesh and placements in our words."""
    if not _is_dtensor(parameter):
        return None
    return _layout(parameter.device_mesh, tuple(parameter.placements), tuple(parameter.shape))


def _is_dtensor(tensor: Tensor) -> bool:
    """Tell whether it is one of PyTorch's distributed tensors. Who has made one has imported them; they bring sympy
    along, for which nobody else has to wait."""
    theirs = sys.modules.get("torch.distributed.tensor")
    return theirs is not None and isinstance(tensor, theirs.DTensor)


def lies_alike(gradient: Tensor, parameter: Parameter) -> bool:
    """See `core.backend.Optimizing`."""
    if not _is_dtensor(gradient) or not _is_dtensor(parameter):
        return True
    return gradient.placements == parameter.placements


def laid_alike(gradient: Tensor, parameter: Parameter) -> Tensor:
    """See `core.backend.Optimizing`."""
    return gradient.redistribute(parameter.device_mesh, parameter.placements)


def local(tensor: Tensor) -> Tensor:
    """See `core.backend.Optimizing`."""
    if not _is_dtensor(tensor):
        return tensor
    with torch.no_grad():  # hands over the local tensor as it is; detaching the DTensor would cost ten times as much
        return tensor.to_local().detach()


def set_learning_rate(group: dict[str, Any], value: float) -> None:
    """See `core.backend.Optimizing`. A rate that is a tensor stays one."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(value)
    else:
        group["lr"] = value


class AdamW:
    """See `core.backend.ElementWise`: `torch.optim.AdamW`, on gradients that are put on its parameters for a step."""

    counts_together = False

    def __init__(self, groups: Sequence[tuple[Sequence[Parameter], Mapping[str, Any]]], foreach: bool | None):
        described = [{"params": list(parameters), **options} for parameters, options in groups]
        self._optimizer = torch.optim.AdamW(described, foreach=foreach)
        self._parameters = [each for group in described for each in group["params"]]

    def step(self, gradients: Sequence[Tensor | None], options: Sequence[Mapping[str, Any]]) -> None:
        """See `core.backend.ElementWise`."""
        for group, changed in zip(self._optimizer.param_groups, options, strict=True):
            group.update(changed)
        held = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()
        for parameter, gradient in zip(self._parameters, held):
            parameter.grad = gradient

    def state(self, number: int) -> dict[str, Any]:
        """See `core.backend.ElementWise`."""
        return self._optimizer.state[self._parameters[number]]

    def load(self, number: int, values: Mapping[str, Any]) -> None:
        """See `core.backend.ElementWise`."""
        parameter, state = self._parameters[number], self.state(number)
        state.clear()
        for name, value in values.items():
            if name == "step":
                state[name] = torch.tensor(float(value), dtype=torch.float32)
            else:
                state[name] = torch.empty_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
                local(state[name]).copy_(value)


class Muon(Planned, torch.optim.Optimizer):
    """Muon on matrices and AdamW on all else; made by `hyper_parallel.Muon`, which tells what it does.

    `step()` takes the gradients that are on the parameters. `param_groups`, `zero_grad`, hooks and learning-rate
    schedulers are PyTorch's.
    """

    def __init__(self, engine: MuonEngine):
        self._engine: MuonEngine | None = None
        super().__init__(engine.groups, {"lr": engine.groups[0]["lr"]})
        self._engine = engine
        self.state.update(zip(engine.parameters, engine.states()))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; called by all ranks that share parameters.

        Raises:
            GradientError, LayoutError, ConfigError: as `hyper_parallel.Muon` tells; nothing is changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        engine = self._engine
        engine.step([parameter.grad for parameter in engine.parameters], self.param_groups)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, for the same ranks, groups and plan."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        saved = self._engine.state_dict(self.param_groups)
        for hook in self._optimizer_state_dict_post_hooks.values():
            saved = hook(self, saved) or saved
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave on this rank, under the same plan.

        Raises:
            CheckpointError: it is of another plan or rank; load `full_state()` with `load_full_state` instead.
        """
        saved = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            saved = hook(self, saved) or saved
        self._engine.load_state_dict(saved, self.param_groups)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> NoReturn:
        refuse_copy()


def muon(engine: MuonEngine) -> Muon:
    """See `core.backend.Optimizing`."""
    return Muon(engine)


@lru_cache(maxsize=4096)
def _layout(mesh: Any, placements: tuple[Any, ...], shape: tuple[int, ...]) -> Layout:
    ranks = mesh.mesh.flatten().tolist()
    ours = DeviceMesh(tuple(mesh.mesh.shape), names_of_axes(mesh.mesh_dim_names, mesh.mesh.ndim), ranks)
    return Layout(ours, [_placement(each) for each in placements], shape)


def _placement(placement: Any) -> Placement:
    from torch.distributed.tensor import placement_types as theirs

    if isinstance(placement, theirs._StridedShard):
        return StridedShard(placement.dim, placement.split_factor)
    if isinstance(placement, theirs.Shard):
        return Shard(placement.dim)
    if isinstance(placement, theirs.Replicate):
        return Replicate()
    raise LayoutError(f"a parameter lies as {placement}; redistribute it to Shard or Replicate before")
