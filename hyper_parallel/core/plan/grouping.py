"""Pass 2: which parameters act together, and in which module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

from hyper_parallel.core.plan.assignment import RoleResult
from hyper_parallel.core.plan.model import ModelDescription
from hyper_parallel.core.plan.names import Name, acts_in, parse
from hyper_parallel.core.plan.role_rules import LIST_CLASSES, ROLES
from hyper_parallel.core.plan.sizes import Path


@dataclass(frozen=True)
class Group:
    """A boundary in the making: `module` is called as a whole, `parameters` are what it holds for itself.

    Parameters that are tied stand in each group under the name that they have there, so that a head without a weight of
    its own is a group too.
    """

    module: str
    class_name: str
    parameters: tuple[str, ...]


def group(model: ModelDescription, roles: RoleResult) -> tuple[Group, ...]:
    """Put every name that has a role into exactly one group, groups in the order of their first parameter.

    * Attention is one group: its projections with the norms of heads, sinks, latents. A norm over all heads
      (`wide_norm`) is a group of its own inside, since it needs whole rows where attention has cut ones.
    * A feed-forward layer is one group. Where its projections stand in a block beside other things, as in OPT, or
      beside what is unknown or kept whole, no module holds them alone, and each is a group.
    * Experts belong to the module that is called with tokens: the one that packs them, or the block around a list of
      them. Their router is a group of its own unless its parameters stand in the same module; what corrects its choice
      belongs to it, wherever it stands.
    * Norms, embeddings, heads and projections are groups alone. Adapters stand with their linear.

    Names in `roles.unknown` are in no group.
    """
    names = {name: parse(name) for name in roles.assignments}
    places: dict[str, str] = {}
    linears: dict[Path, str] = {}
    families = {name: ROLES[each.role].boundary for name, each in roles.assignments.items()}
    for name, parsed in names.items():
        if not parsed.adapter or families[name] == "whole":
            places[name] = _place(parsed, families[name], model)
        if not parsed.adapter:
            linears[parsed.path] = name
    around = {above for name, place in places.items() if families[name] == "attention" for above in _above(place)}
    strange = [*roles.unknown, *(name for name, family in families.items() if family == "whole")]
    around |= {above for name in strange for above in _above(name) if above.rpartition(".")[2].isdigit()}
    for name, place in places.items():
        if families[name] == "mlp" and place in around:
            places[name] = names[name].module(len(names[name].path))
    routers = [places[name] for name in places if roles.assignments[name].role == "router"]
    for name, place in places.items():
        if roles.assignments[name].role == "router_correction":
            places[name] = next((router for router in routers if router.startswith(f"{place}.")), place)
    modules: dict[str, list[str]] = {}
    for name, parsed in names.items():
        module = places[name] if name in places else places[linears[parsed.path]]
        modules.setdefault(module, []).append(name)
    return tuple(Group(module, model.modules.get(module, ""), tuple(members)) for module, members in modules.items())


def _above(module: str) -> Iterator[str]:
    """The qualified names of all modules around `module`."""
    while module:
        module = module.rpartition(".")[0]
        yield module


def _place(name: Name, family: str, model: ModelDescription) -> str:
    """The qualified name of the module that a parameter of this family acts in."""
    depth = len(name.path)
    if family == "experts":
        return _experts_module(name, model)
    if family == "router":
        return name.module(_router_depth(name.path))
    if family in ("attention", "mixer", "mlp"):
        return name.module(len(acts_in(name)))
    return name.module(depth)


_ROUTERS = ("gate", "router")


def _router_depth(path: Path) -> int:
    """The router itself, where its parameters lie in a module of its own or in a helper below it."""
    depth = next((depth for depth in range(len(path), 0, -1) if path[depth - 1] in _ROUTERS), len(path))
    while depth > 1 and path[depth - 2] in _ROUTERS:
        depth -= 1
    return depth


def _experts_module(name: Name, model: ModelDescription) -> str:
    """The innermost module around the experts that is called: lists are not."""
    depth = len(name.path)
    if "experts" in name.path:
        depth = len(name.path) - name.path[::-1].index("experts")
    elif name.leaf in ("weight", "bias"):
        depth -= 1
    while depth > 1 and model.modules.get(name.inner(depth)) in LIST_CLASSES:
        depth -= 1
    return name.module(depth)
