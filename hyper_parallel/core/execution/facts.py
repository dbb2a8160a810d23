"""A plan beside the model that it is for: what everything that carries the plan out looks up."""

from __future__ import annotations

from functools import cached_property

from hyper_parallel.core.backend import Backend, Module, ParameterUse
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import MODEL_AXES
from hyper_parallel.core.placement import Placement
from hyper_parallel.core.plan.contracts import BoundaryPlan
from hyper_parallel.core.plan.plan import ParameterPlan, ShardingPlan


class Facts:
    """The modules, uses and local layouts of one model under one plan, on this rank."""

    def __init__(self, backend: Backend, model: Module, plan: ShardingPlan):
        self.backend = backend
        self.model = model
        self.plan = plan
        self.rank = backend.collectives.rank()
        self.ranks = plan.mesh.axis_size("tensor")
        self.place = plan.mesh.coordinates(self.rank).get("tensor", 0)
        """This rank's place among the tensor ranks."""

    @cached_property
    def modules(self) -> dict[str, Module]:
        """Every module by its name."""
        return dict(self.backend.modules.named_modules(self.model))

    @cached_property
    def uses(self) -> dict[str, list[ParameterUse]]:
        """Every use of each parameter, by its first name, in definition order."""
        uses: dict[str, list[ParameterUse]] = {}
        for use in self.backend.modules.parameter_uses(self.model):
            uses.setdefault(self.plan.tied.get(use.name, use.name), []).append(use)
        return uses

    @cached_property
    def boundaries(self) -> dict[str, BoundaryPlan]:
        """The boundaries by their module."""
        return {each.module: each for each in self.plan.boundaries}

    @cached_property
    def cut(self) -> set[str]:
        """The modules of boundaries of which `tensor` cuts a parameter."""
        return {each.boundary for each in self.plan.parameters if is_cut(each)}

    @cached_property
    def cut_in(self) -> dict[str, bool]:
        """Of every module with parameters, in itself or below, whether `tensor` cuts one of them."""
        found: dict[str, bool] = {}
        for name, uses in self.uses.items():
            cut = is_cut(self.plan[name])
            for use in uses:
                module = use.name
                while module:
                    module = module.rpartition(".")[0]
                    found[module] = found.get(module, False) or cut
        return found

    def along_model(self, parameter: ParameterPlan) -> Layout:
        """How a parameter lies along the axes that cut it, before `shard` does."""
        return Layout(self.plan.mesh, model_placements(parameter), parameter.shape)

    def local_shape(self, parameter: ParameterPlan) -> tuple[int, ...]:
        """Shape of what modules see of a parameter on this rank."""
        return self.along_model(parameter).local_shape(self.rank)


def model_placements(parameter: ParameterPlan) -> dict[str, Placement]:
    """A parameter's placements along the axes on which modules see a part of it."""
    return {axis: each for axis, each in parameter.placements.items() if axis in MODEL_AXES}


def is_cut(parameter: ParameterPlan) -> bool:
    """Tell whether `tensor` cuts a parameter."""
    return "tensor" in parameter.placements


def is_in(name: str, module: str) -> bool:
    """Tell whether something stands in a module; everything does in the model itself, ""."""
    return module == "" or name == module or name.startswith(f"{module}.")
