"""How each parameter lies: of this library, of the framework's own distributed tensors, or plain. One form for all."""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.core.backend import Backend, Parameter, Tensor
from hyper_parallel.core.dtensor import DTensor
from hyper_parallel.core.errors import ConfigError, LayoutError
from hyper_parallel.core.fsdp.build import is_replaced, layout_of
from hyper_parallel.core.layout import Layout
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Partial


@dataclass(frozen=True)
class Stored:
    """A parameter of the optimizer: its name, the framework's object, and how it lies.

    `given` is a layout that the user has told beside the parameter, if any; `layout` is what counts.
    """

    name: str
    parameter: Parameter
    layout: Layout
    given: Layout | None = None


def stored(backend: Backend, name: str, parameter: Parameter | DTensor, mesh: DeviceMesh | None) -> Stored:
    """Find out how a parameter lies. One that nobody has spread lies on `mesh`, replicated, or on this rank alone.

    Raises:
        ConfigError: it is no parameter, has no values, or is shared by ranks that have not been joined.
        LayoutError: its local shape is not what its layout gives this rank, or it is a pending sum.
    """
    given = None
    if isinstance(parameter, DTensor):
        parameter, given = parameter.to_local(), parameter.layout
    if not backend.tensors.is_tensor(parameter) or not backend.autograd.is_leaf(parameter):
        raise ConfigError(f"Muon: {name} is no parameter but {type(parameter).__name__}; give parameters of the model")
    if not backend.tensors.has_values(parameter):
        raise ConfigError(f"Muon: {name} has no values yet; initialise the model before making its optimizer")
    layout = given or found_layout(backend, parameter)
    if layout is None:
        mesh = mesh or DeviceMesh((1,), ("shard",), (backend.collectives.rank(),))
        layout = Layout(mesh, {}, tuple(parameter.shape))
    if layout.mesh.size > 1 and not backend.collectives.is_initialized():
        raise ConfigError(
            f"Muon: {name} lies on {layout.mesh.size} ranks, which have not been joined; call "
            f'hyper_parallel.initialize("{backend.name}") first, in place of what the framework has for that'
        )
    local, rank = tuple(backend.optimizer.local(parameter).shape), backend.collectives.rank()
    if local != layout.local_shape(rank):
        raise LayoutError(
            f"Muon: {name} has the local shape {list(local)} on rank {rank}, where {layout} gives it "
            f"{list(layout.local_shape(rank))}"
        )
    if any(isinstance(each, Partial) and size > 1 for each, size in zip(layout.placements, layout.mesh.shape)):
        raise LayoutError(f"Muon: {name} is a pending sum, {layout}; redistribute it before")
    return Stored(name, parameter, layout, given)


def found_layout(backend: Backend, parameter: Parameter) -> Layout | None:
    """The layout of a parameter that this library or the framework has spread; None for a plain one."""
    layout = layout_of(parameter)
    return backend.optimizer.own_layout(parameter) if layout is None else layout


def change_since(backend: Backend, each: Stored) -> str | None:
    """What is different about a parameter's layout since the optimizer was made; None where nothing is."""
    parameter, layout = each.parameter, each.layout
    local = tuple(backend.optimizer.local(parameter).shape)
    wanted = layout.local_shape(backend.collectives.rank())
    if is_replaced(parameter):
        return "the model holds another parameter in its place (it was sharded or restored)"
    if each.given is None:
        found = found_layout(backend, parameter)
        if found is None and tuple(parameter.shape) == layout.shape and _is_whole(layout):
            return None
        if found != layout:
            return f"it lay as {layout}, and now as {found or f'a plain parameter of shape {list(parameter.shape)}'}"
    return None if local == wanted else f"its local shape was {list(wanted)} and is {list(local)}"


def local_gradient(backend: Backend, gradient: Tensor | None) -> Tensor | None:
    """This rank's part of a gradient."""
    return None if gradient is None else backend.optimizer.local(gradient)


def _is_whole(layout: Layout) -> bool:
    """Tell whether every rank holds all of it."""
    return not layout.cut_axes
