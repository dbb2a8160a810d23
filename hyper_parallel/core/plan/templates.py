"""Pass 4 for boundaries: from a type to the contracts of what goes in and out, gradients included.

Between boundaries hidden states lie as `contracts.stream` says. Inside attention, feed-forward layers, experts and the
head every tensor rank works on the whole sequence with its part of the features, so hidden states come in whole, with a
gradient that is pending, and leave as a pending sum: an all-gather and a reduce-scatter with sequence parallelism, else
nothing and an all-reduce (and the other way round for gradients).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, Mapping, Sequence

from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Partial, Replicate, Shard
from hyper_parallel.core.plan.architectures import RESIDUAL_INSIDE
from hyper_parallel.core.plan.assignment import Assignment
from hyper_parallel.core.plan.contracts import (
    FEATURES,
    BoundaryPlan,
    ByAxis,
    Contract,
    active,
    gradient_of,
    on_tensor,
    stream,
)
from hyper_parallel.core.plan.grouping import Group
from hyper_parallel.core.plan.model import ParameterDescription
from hyper_parallel.core.plan.names import parse
from hyper_parallel.core.plan.placing import Placed, has_few_heads
from hyper_parallel.core.plan.role_rules import ROLES


@dataclass(frozen=True)
class Member:
    """One parameter of a boundary with what passes 1 and 4 say of it."""

    description: ParameterDescription
    assignment: Assignment
    placed: Placed

    @property
    def is_cut(self) -> bool:
        """`tensor` cuts it."""
        return "tensor" in self.placed.placements

    @property
    def tensor(self) -> str:
        """What the tensor axis does to its role."""
        return ROLES[self.assignment.role].tensor

    @property
    def linear(self) -> str:
        """The linear that holds it, wrappers and adapters around it included; "" for a factor of an adapter."""
        name = parse(self.description.name)
        return "" if name.adapter else name.module(len(name.path))

    def width(self, dim: int | None) -> int:
        """Size of one of its dims, 0 when it has none."""
        return 0 if dim is None else self.description.shape[dim]


@dataclass(frozen=True)
class Streams:
    """The layouts that all boundaries share."""

    mesh: DeviceMesh
    sequence_parallel: bool
    hidden: int

    @property
    def outside(self) -> ByAxis:
        """Hidden states between boundaries."""
        return stream(self.mesh, self.sequence_parallel)

    @property
    def inside(self) -> ByAxis:
        """Hidden states where features are cut over `tensor`."""
        return on_tensor(self.outside, Replicate())

    @property
    def features(self) -> ByAxis:
        """Activations with cut features."""
        return on_tensor(self.outside, Shard(FEATURES))

    @property
    def pending(self) -> ByAxis:
        """Hidden states to which every tensor rank has a summand."""
        return on_tensor(self.outside, Partial())

    def contract(
        self,
        name: str,
        before: ByAxis,
        after: ByAxis,
        size: int = 0,
        pending: bool = False,
        dims: int = 3,
        inner: bool = False,
    ) -> Contract:
        """One tensor; `size` is the hidden size where not given. With `inner` a pending gradient stays so: the boundary
        around this one sums it up."""
        gradient_before = gradient_of(before, pending) if inner and pending else None
        return Contract(name, dims, size or self.hidden, before, after, gradient_of(after, pending), gradient_before)


@dataclass(frozen=True)
class Scope:
    """What a group acts in: the `block` around experts, their router and shared experts ("" where it is in none), and
    whether `tensor` cuts anything in there; outside of blocks, anything of the group, or of the attention around it.
    `kind` is the type of the module's boundary."""

    block: str
    cut: bool
    kind: str


def scopes(groups: Sequence[Group], kinds: Mapping[str, str], members: Mapping[str, Member]) -> dict[str, Scope]:
    """The scope of each group's module, and of each block."""
    cut = {group.module: any(members[name].is_cut for name in group.parameters) for group in groups}
    on_own_heads = {
        group.module: cut[group.module] and not any(members[name].placed.gathers for name in group.parameters)
        for group in groups
    }
    block_of: dict[str, str] = {}
    for block in _expert_blocks(groups, kinds):
        inside = [module for module in cut if module == block or _is_below(module, block)]
        block_of |= {module: block for module in inside if module not in block_of}
    found: dict[str, Scope] = {}
    for module, own in cut.items():
        block = block_of.get(module, "")
        if block:
            own = any(cut[each] for each, other in block_of.items() if other == block)
            found.setdefault(block, Scope(block, own, kinds.get(block, "moe")))
            block = "" if module == block else block
        elif kinds[module] == "wide_norm":
            around = (each for each in _above(module) if kinds.get(each) == "attention")
            own = any(on_own_heads[each] for each in around)
        found[module] = Scope(block, own, kinds[module])
    return found


def boundaries(
    groups: Sequence[Group],
    kinds: Mapping[str, str],
    members: Mapping[str, Member],
    streams_at: Mapping[str, Streams],
) -> list[BoundaryPlan]:
    """The contracts of every group, and of the blocks around experts, in the order of the model. `streams_at` are the
    layouts around each group's module."""
    scope_of = scopes(groups, kinds, members)
    plans: list[BoundaryPlan] = []
    begun: set[str] = set()
    for group in groups:
        scope = scope_of[group.module]
        if scope.block and scope.block not in begun and kinds.get(scope.block, "whole") == "whole":
            begun.add(scope.block)
            plans.append(_expert_block(scope, streams_at[group.module]))
        own = [members[name] for name in group.parameters]
        plans.extend(_TEMPLATES[kinds[group.module]](group, own, streams_at[group.module], scope))
    return plans


def _expert_blocks(groups: Sequence[Group], kinds: Mapping[str, str]) -> list[str]:
    """The modules that hold experts and their router as parts; where experts are a list, the group of them is one."""
    routers = [group.module for group in groups if kinds[group.module] == "router"]
    experts = dict.fromkeys(group.module for group in groups if kinds[group.module] == "experts")
    around = (
        next((each for each in (module, module.rpartition(".")[0]) if _holds(each, routers)), "") for module in experts
    )
    return [block for block in dict.fromkeys(around) if block]


def _holds(module: str, others: Sequence[str]) -> bool:
    return any(_is_below(each, module) for each in others)


def _above(module: str) -> Iterator[str]:
    while module:
        module = module.rpartition(".")[0]
        yield module


def _is_below(module: str, other: str) -> bool:
    return module.startswith(f"{other}.")


def _expert_block(scope: Scope, streams: Streams) -> BoundaryPlan:
    """Router, experts and shared experts read the same tokens and add to one sum."""
    made = streams.pending if scope.cut else streams.inside
    return BoundaryPlan(
        scope.block,
        "moe",
        (streams.contract("hidden", streams.outside, streams.inside, pending=scope.cut),),
        (streams.contract("hidden", made, streams.outside),),
    )


def _linear(group: Group, own: list[Member], streams: Streams, scope: Scope) -> Iterator[BoundaryPlan]:
    """Attention and feed-forward layers: what cuts outputs reads hidden states, what cuts inputs writes them."""
    readers = [
        m for m in own if m.tensor in ("output", "heads", "gathered", "whole") and m.assignment.input_dim is not None
    ]
    writers = [m for m in own if m.tensor == "input" and m.assignment.input_dim is not None]
    cut, adds = any(m.is_cut for m in own), group.class_name in RESIDUAL_INSIDE
    outside = streams.inside if scope.block else streams.outside
    inputs, outputs = [], []
    if readers:
        inputs.append(streams.contract("hidden", outside, streams.inside, pending=cut, inner=bool(scope.block)))
    else:
        width = writers[0].width(writers[0].assignment.input_dim)
        lies = streams.features if cut else streams.inside
        inputs.append(streams.contract("features", lies, lies, width))
    if writers:
        made = streams.pending if any(m.is_cut for m in writers) else streams.inside
        handed = streams.pending if scope.block and cut else outside
        outputs.append(streams.contract("hidden", handed if adds else made, handed))
    else:
        width = readers[0].width(readers[0].assignment.output_dim)
        lies = streams.features if cut else streams.inside
        outputs.append(streams.contract("features", lies, lies, width))
    opaque = scope.kind in _EXCHANGED and "context" in active(streams.mesh)
    note = f"{_EXCHANGED[scope.kind]} over context" if opaque else ""
    region = "opaque" if opaque else "checked"
    yield BoundaryPlan(group.module, scope.kind, tuple(inputs), tuple(outputs), region, note)
    if writers and adds:
        yield from _summed(writers, streams, made, handed)
    yield from _gathered(own, writers, streams)


_EXCHANGED = {
    "attention": "keys and values of the whole sequence are exchanged",
    "mixer": "what a mixer knows of the tokens before is handed on",
}
"""What a module exchanges by itself between parts of the sequence."""


def _summed(writers: Sequence[Member], streams: Streams, made: ByAxis, handed: ByAxis) -> Iterator[BoundaryPlan]:
    """The last linear of a module that adds a residual to what it gives: summed up before."""
    for each in (writer for writer in writers if writer.linear):
        lies = streams.features if each.is_cut else streams.inside
        features = streams.contract("features", lies, lies, each.width(each.assignment.input_dim))
        yield BoundaryPlan(each.linear, "projection", (features,), (streams.contract("hidden", made, handed),))


def _gathered(own: Sequence[Member], writers: Sequence[Member], streams: Streams) -> Iterator[BoundaryPlan]:
    """Projections that are computed in parts and used as a whole: fused ones whose blocks can't be cut alike, and
    those of a mixer."""
    for member in own:
        if not member.placed.gathers or member.assignment.input_dim is None or not member.linear:
            continue
        width = member.width(member.assignment.output_dim)
        hidden = streams.contract("hidden", streams.inside, streams.inside, pending=True, inner=True)
        whole = streams.contract("features", streams.features, streams.inside, width)
        yield BoundaryPlan(member.linear, "projection", (hidden,), (whole,))
    if not any(member.placed.gathers for member in own):
        return
    for writer in (each for each in writers if each.linear):
        features = streams.contract(
            "features", streams.inside, streams.features, writer.width(writer.assignment.input_dim)
        )
        summand = streams.contract("hidden", streams.pending, streams.pending)
        yield BoundaryPlan(writer.linear, "projection", (features,), (summand,))


def _wide_norm(group: Group, own: list[Member], streams: Streams, scope: Scope) -> Iterator[BoundaryPlan]:
    """A norm over all heads needs them all; attention goes on with its own. Fewer key/value heads than ranks are whole
    before it and after it."""
    width = own[0].description.shape[0]
    if scope.cut and has_few_heads(own[0].assignment, streams.mesh):
        heads = streams.contract("heads", streams.inside, streams.inside, width, pending=True, inner=True)
        yield BoundaryPlan(group.module, scope.kind, (heads,), (heads,))
        return
    if not scope.cut:
        yield _local(group, scope.kind, streams.inside, streams, "heads", width)
        return
    inputs = streams.contract("heads", streams.features, streams.inside, width)
    outputs = streams.contract("heads", streams.inside, streams.features, width)
    yield BoundaryPlan(group.module, scope.kind, (inputs,), (outputs,))


def _width(own: Sequence[Member], side: str) -> int:
    """The features on one side of a table or a linear; 0, for the hidden size, where no weight tells."""
    for member in own:
        assignment, shape = member.assignment, member.description.shape
        dim = getattr(assignment, side)
        if member.linear and dim is not None and assignment.input_dim is not None:
            return shape[dim]
        if assignment.role in ("embedding", "position_embedding") and len(shape) == 2:
            return shape[1]
    return 0


def _norm(group: Group, own: list[Member], streams: Streams, scope: Scope) -> Iterator[BoundaryPlan]:
    yield _local(group, scope.kind, streams.inside if scope.block else streams.outside, streams)


def _sum_norm(group: Group, own: list[Member], streams: Streams, scope: Scope) -> Iterator[BoundaryPlan]:
    """A norm needs whole sums; the block around it goes on with one summand, which is all of it on one rank."""
    lies = streams.pending if scope.cut else streams.inside
    taken, given = (streams.contract("sum", *ends) for ends in ((lies, streams.inside), (streams.inside, lies)))
    yield BoundaryPlan(group.module, scope.kind, (taken,), (given,))


def _projection(group: Group, own: list[Member], streams: Streams, scope: Scope) -> Iterator[BoundaryPlan]:
    lies = streams.outside
    taken, given = (streams.contract("hidden", lies, lies, _width(own, side)) for side in ("input_dim", "output_dim"))
    yield BoundaryPlan(group.module, scope.kind, (taken,), (given,))


def _local(
    group: Group, kind: str, lies: ByAxis, streams: Streams, name: str = "hidden", size: int = 0
) -> BoundaryPlan:
    contract = streams.contract(name, lies, lies, size)
    return BoundaryPlan(group.module, kind, (contract,), (contract,))


def _embedding(group: Group, own: list[Member], streams: Streams, scope: Scope) -> Iterator[BoundaryPlan]:
    tokens = streams.contract("tokens", streams.inside, streams.inside, size=1, dims=2)
    made = streams.pending if any(m.is_cut for m in own) else streams.inside
    hidden = streams.contract("hidden", made, streams.outside, _width(own, "output_dim"))
    yield BoundaryPlan(group.module, scope.kind, (tokens,), (hidden,))


def _head(group: Group, own: list[Member], streams: Streams, scope: Scope) -> Iterator[BoundaryPlan]:
    cut = any(m.is_cut for m in own)
    hidden = streams.contract("hidden", streams.outside, streams.inside, _width(own, "input_dim"), pending=cut)
    lies = streams.features if cut else streams.inside
    logits = streams.contract("logits", lies, lies, max(m.width(m.assignment.vocab_dim) for m in own))
    note = "the loss works on a part of the vocabulary" if cut else ""
    yield BoundaryPlan(group.module, scope.kind, (hidden,), (logits,), note=note)


def _router(group: Group, own: list[Member], streams: Streams, scope: Scope) -> Iterator[BoundaryPlan]:
    hidden = streams.contract("hidden", streams.inside, streams.inside, pending=scope.cut, inner=True)
    width = max((m.width(m.assignment.output_dim) for m in own), default=1)
    size = max(width, 1)
    scores = streams.contract("scores", streams.inside, streams.inside, size, pending=scope.cut, inner=True)
    yield BoundaryPlan(group.module, scope.kind, (hidden,), (scores,))


def _experts(group: Group, own: list[Member], streams: Streams, scope: Scope) -> Iterator[BoundaryPlan]:
    cut = any(m.is_cut for m in own) if scope.block else scope.cut
    outside = streams.inside if scope.block else streams.outside
    hidden = streams.contract("hidden", outside, streams.inside, pending=cut, inner=bool(scope.block))
    made = streams.pending if cut else streams.inside
    handed = made if scope.block else streams.outside
    dispatched = any("expert" in m.placed.placements for m in own)
    note = "tokens travel to their experts over expert" if dispatched else ""
    result = streams.contract("hidden", made, handed)
    yield BoundaryPlan(group.module, scope.kind, (hidden,), (result,), "opaque" if dispatched else "checked", note)


def _inside_other(group: Group, own: list[Member], streams: Streams, scope: Scope) -> Iterator[BoundaryPlan]:
    """Adapters and parameters kept whole act inside of another boundary, or on whole hidden states."""
    return iter(())


_TEMPLATES = {
    "attention": _linear,
    "mixer": _linear,
    "mlp": _linear,
    "up": _linear,
    "down": _linear,
    "moe": _experts,
    "norm": _norm,
    "wide_norm": _wide_norm,
    "sum_norm": _sum_norm,
    "embedding": _embedding,
    "projection": _projection,
    "head": _head,
    "router": _router,
    "experts": _experts,
    "adapter": _inside_other,
    "whole": _inside_other,
}
