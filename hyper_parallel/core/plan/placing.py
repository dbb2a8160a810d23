"""Pass 4 for parameters: from a role to a placement on every active mesh axis.

| Axis | What it does to a parameter |
|---|---|
| `tensor` | cuts the vocabulary, output or input features or heads, as the role says; or leaves it whole |
| `expert` | deals out the experts |
| `context` | nothing: every rank sees another part of the sequence |
| `shard` | cuts one dim after all other axes have cut theirs |
| `replicate` | nothing |
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Iterator, Mapping

from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.placement import Placement, RaggedShard, Replicate, Shard, StridedShard
from hyper_parallel.core.plan.assignment import Assignment
from hyper_parallel.core.plan.contracts import active
from hyper_parallel.core.plan.model import ParameterDescription
from hyper_parallel.core.plan.role_rules import ROLES

DATA_PARALLEL = ("replicate", "shard")
"""Axes whose placements are never set by hand: fully sharded data parallelism decides them."""

BY_TOKEN = ("norm", "projection")
"""Families that work on each token for itself, on the stream, whose sequence is cut over `tensor` with sequence
parallelism."""


@dataclass(frozen=True)
class Problem:
    """What forbids a placement over `axis`: `rule` names the check, `message` sizes and reason, `fix` is the placement
    over that axis that mends it in an override."""

    rule: str
    message: str
    axis: str
    fix: str = "replicate"


@dataclass(frozen=True)
class Placed:
    """What pass 4 says of one parameter.

    `pending` are the axes along which the raw gradient of the local part is a partial sum. With `gathers`, the module's
    output is cut where its blocks are not, and is gathered before it is split.
    """

    placements: Mapping[str, Placement] = field(default_factory=dict)
    pending: tuple[str, ...] = ()
    gathers: bool = False
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Surroundings:
    """What placing one parameter needs to know of the others. `all_heads`: it stands in attention whose fused
    projection is gathered, so that every rank works on all heads."""

    mesh: DeviceMesh
    sequence_parallel: bool
    experts: int | None = None
    all_heads: bool = False


def place(
    parameter: ParameterDescription,
    assignment: Assignment,
    around: Surroundings,
    given: Mapping[str, Placement] | None = None,
) -> Placed:
    """Place a parameter on every active axis. `given` are placements that a user decides, on axes but those of
    `DATA_PARALLEL`; `pending` is that of a parameter whose boundary is cut."""
    given = {axis: each for axis, each in (given or {}).items() if around.mesh.axis_size(axis) > 1}
    placed = Placed()
    if around.mesh.axis_size("tensor") > 1 and given.get("tensor") != Replicate():
        placed = _on_tensor(parameter, assignment, around)
    if given.get("expert") != Replicate():
        placed = _on_expert(parameter, assignment, placed, around)
    if given:
        placed = _with_given(assignment, placed, given)
    placements = with_shard(parameter, placed.placements, around.mesh)
    return replace(placed, placements=placements, pending=_pending(parameter, assignment, placed, around))


def _on_tensor(parameter: ParameterDescription, assignment: Assignment, around: Surroundings) -> Placed:
    how, ranks = ROLES[assignment.role].tensor, around.mesh.axis_size("tensor")
    dim = {"vocabulary": assignment.vocab_dim, "input": assignment.input_dim}.get(how, assignment.output_dim)
    if how == "whole" or dim is None:
        return Placed(notes=_notes_on_bias(parameter, assignment) if how == "input" else ())
    size = parameter.shape[dim]
    if around.all_heads and is_of_heads(parameter, assignment):
        return Placed(notes=("every rank works on all heads: kept whole",))
    problems = tuple(_tensor_problems(parameter, assignment, size, ranks))
    if assignment.role in ("key", "value") and has_few_heads(assignment, around.mesh) and not problems:
        return Placed(notes=(f"{assignment.heads} key/value heads for {ranks} tensor ranks: kept whole",))
    gated = around.all_heads and assignment.role == "attention_gate"
    if how == "gathered" or gated or (assignment.role == "qkv" and assignment.heads and assignment.heads % ranks):
        note = "" if how == "gathered" or gated else f"{assignment.heads} groups of heads for {ranks} tensor ranks: "
        return Placed({"tensor": Shard(dim)}, gathers=True, notes=(f"{note}cut as one, and its output is gathered",))
    if how in ("output", "heads") and len(assignment.packing) > 1:
        alike = len(set(assignment.packing)) == 1
        if alike and not assignment.sliced:
            return Placed({"tensor": StridedShard(dim, len(assignment.packing))}, problems=problems)
        blocks = " + ".join(map(str, assignment.packing))
        why = "are taken apart where the configuration says" if alike else "can't be cut alike"
        note = f"blocks of {blocks} {why}: cut as one, and its output is gathered"
        return Placed({"tensor": Shard(dim)}, gathers=True, notes=(note,), problems=problems)
    uneven = (f"{size} over {ranks} tensor ranks: uneven",) if size % ranks else ()
    return Placed({"tensor": Shard(dim)}, notes=uneven, problems=problems)


def is_of_heads(parameter: ParameterDescription, assignment: Assignment) -> bool:
    """Tell whether a parameter of attention has something for each head, and is no part of a projection."""
    is_bare = parameter.name.rpartition(".")[2] not in ("weight", "bias")
    return assignment.role in ("sink", "per_head_norm") or (assignment.role == "attention_gate" and is_bare)


def _notes_on_bias(parameter: ParameterDescription, assignment: Assignment) -> tuple[str, ...]:
    """Of a bias behind a weight cut along its inputs."""
    if assignment.input_dim is not None:
        return ()
    if _is_handed_out(parameter, assignment):
        return ("handed out by its module, and added after the reduction",)
    return ("added by the first tensor rank, to its part of the sum",)


def _is_handed_out(parameter: ParameterDescription, assignment: Assignment) -> bool:
    """Tell whether a bias is no linear's, and its module leaves the adding to what is around it."""
    kind = ROLES[assignment.role]
    is_bare = parameter.name.rpartition(".")[2] not in ("weight", "bias")
    return is_bare and kind.tensor == "input" and kind.boundary != "experts"


def _tensor_problems(
    parameter: ParameterDescription, assignment: Assignment, size: int, ranks: int
) -> Iterator[Problem]:
    by_heads = ROLES[assignment.role].tensor == "heads" or assignment.role == "attention_output"
    if by_heads:
        heads = assignment.heads
        few = assignment.role in ("key", "value") and heads and ranks % heads == 0
        if heads is None and not (assignment.packing and len(set(assignment.packing)) > 1):
            yield Problem("heads", f"nothing tells how many heads its {size} features hold", "tensor")
        elif heads is not None and heads % ranks and not few:
            kind = "key/value heads" if assignment.role in ("key", "value") else "heads"
            yield Problem("heads", f"{heads} {kind} can't be dealt out to {ranks} tensor ranks", "tensor")
    if assignment.interleaved > 1 and size % (ranks * assignment.interleaved):
        yield Problem(
            "divisibility",
            f"{size} features, {assignment.interleaved} kinds one by one, can't be cut for {ranks} tensor ranks",
            "tensor",
        )
    elif not by_heads:
        part = size // max(len(assignment.packing), 1)
        if (ranks - 1) * -(-part // ranks) >= part:
            what = "tokens" if assignment.vocab_dim is not None else "features"
            yield Problem("divisibility", f"{part} {what} leave nothing for the last of {ranks} tensor ranks", "tensor")


def _on_expert(parameter: ParameterDescription, assignment: Assignment, placed: Placed, around: Surroundings) -> Placed:
    ranks = around.mesh.axis_size("expert")
    if ranks == 1 or (assignment.expert_dim is None and assignment.expert is None):
        return placed
    packed = assignment.expert_dim is not None
    count = parameter.shape[assignment.expert_dim] if packed else around.experts
    if not count or count % ranks:
        problem = Problem("divisibility", f"{count} experts can't be dealt out to {ranks} expert ranks", "expert")
        return replace(placed, problems=(*placed.problems, problem))
    if packed:
        return replace(placed, placements={"expert": Shard(assignment.expert_dim), **placed.placements})
    owner = assignment.expert // (count // ranks)
    if any(getattr(each, "dim", None) == 0 for each in placed.placements.values()):
        problem = Problem(
            "experts",
            f"expert {assignment.expert} is a module of its own, held by expert rank {owner}, and `tensor` cuts its "
            "first dim; both are offered only for experts that are packed into one tensor",
            "tensor",
        )
        return replace(placed, problems=(*placed.problems, problem))
    return replace(placed, placements={"expert": _all_with(owner, ranks), **placed.placements})


@lru_cache(maxsize=4096)
def _all_with(owner: int, ranks: int) -> RaggedShard:
    """One rank holds all of it; experts by the thousand lie so."""
    return RaggedShard((0,), tuple(int(place == owner) for place in range(ranks)))


def _with_given(assignment: Assignment, placed: Placed, given: Mapping[str, Placement]) -> Placed:
    """What a user decides. A parameter is cut as its role says, or whole: another cut is another computation, and is
    told, not made."""
    problems = list(placed.problems)
    role = "none" if assignment.role == "whole" else assignment.role
    for axis, each in given.items():
        usual = placed.placements.get(axis, Replicate())
        if each not in (usual, Replicate()):
            whole = "is kept whole" if usual == Replicate() else f"is cut as {usual}"
            message = f"{axis}: {each}, but the role {role} {whole} over {axis}"
            problems.append(Problem("consistent", message, axis, "auto"))
    return replace(placed, problems=tuple(problems))


def with_shard(
    parameter: ParameterDescription, placements: Mapping[str, Placement], mesh: DeviceMesh
) -> dict[str, Placement]:
    """The placements with that over `shard`, where it has more than one rank, cut after the other axes.

    What no other axis cuts is cut along its first dim, also where that is too short and leaves ranks with nothing: a
    leading-dim shard moves no bytes beside the collective. Else it is the first dim that keeps every rank busy, or the
    longest. A scalar is whole; so is what a ragged shard has for itself.
    """
    ordered = {axis: placements[axis] for axis in mesh.names if axis in placements and axis != "shard"}
    if mesh.axis_size("shard") == 1 or not parameter.shape:
        return ordered
    taken = {dim for each in ordered.values() if isinstance(each, RaggedShard) for dim in each.dims}
    free = [dim for dim in range(len(parameter.shape)) if dim not in taken]
    if not free:
        return ordered
    cut = {dim: prod(mesh.axis_size(axis) for axis, each in ordered.items() if _dim(each) == dim) for dim in free}
    length = {dim: -(-parameter.shape[dim] // cut[dim]) for dim in free}
    busy = [dim for dim in free if length[dim] >= mesh.axis_size("shard")]
    dim = busy[0] if busy else max(free, key=lambda each: length[each])
    if not any(cut[each] > 1 for each in free):
        dim = free[0]
    chosen = Shard(dim) if cut[dim] == 1 else StridedShard(dim, cut[dim])
    ordered["shard"] = chosen
    return {axis: ordered[axis] for axis in mesh.names if axis in ordered}


def _dim(placement: Placement) -> int | None:
    return getattr(placement, "dim", None)


def _pending(
    parameter: ParameterDescription, assignment: Assignment, placed: Placed, around: Surroundings
) -> tuple[str, ...]:
    """Every axis whose ranks see other tokens, or other parts of what follows, than this one."""
    axes = []
    for axis in active(around.mesh):
        if axis == "expert":
            pending = "expert" not in placed.placements
        elif axis == "tensor":
            pending = "tensor" not in placed.placements and _computes_part(parameter, assignment, around)
        else:
            pending = axis in (*DATA_PARALLEL, "context")
        if pending:
            axes.append(axis)
    return tuple(axes)


def settled(placed: Placed, assignment: Assignment, cut: bool) -> Placed:
    """The same in a boundary where `tensor` cuts something, or nothing: there every rank computes all of every
    gradient, unless it sees other tokens."""
    if cut or ROLES[assignment.role].boundary in BY_TOKEN:
        return placed
    return replace(placed, pending=tuple(axis for axis in placed.pending if axis != "tensor"))


def _computes_part(parameter: ParameterDescription, assignment: Assignment, around: Surroundings) -> bool:
    """Tell whether each tensor rank computes only a part of the gradient of a parameter that is whole: on the stream
    where the sequence is cut, between cut parameters always."""
    kind = ROLES[assignment.role]
    if kind.boundary == "wide_norm":
        return has_few_heads(assignment, around.mesh)
    if kind.boundary in BY_TOKEN or _is_handed_out(parameter, assignment):
        return around.sequence_parallel
    if around.all_heads and (assignment.role == "head_norm" or is_of_heads(parameter, assignment)):
        return False
    return kind.pending or kind.tensor != "whole"


def has_few_heads(assignment: Assignment, mesh: DeviceMesh) -> bool:
    """Tell whether there are fewer heads than tensor ranks: then every rank has all of them and uses its own."""
    return assignment.heads is not None and assignment.heads < mesh.axis_size("tensor")
