"""What the tests of validation in PyTorch share: a step of all ranks in one process, and ways to break plans."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, Callable, Iterator, NamedTuple

import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel import backends
from hyper_parallel.core.backend import Backend
from hyper_parallel.core.execution.apply import apply_plan
from hyper_parallel.core.execution.inprocess import InProcessWorld
from hyper_parallel.core.execution.loss import planned_cross_entropy
from hyper_parallel.core.placement import Partial, Placement, Replicate, Shard
from hyper_parallel.core.plan.contracts import Contract
from hyper_parallel.core.plan.plan import ShardingPlan
from tests.torch.test_hugging_face import close


def planned(model: nn.Module, sequence_parallel: bool, ranks: int = 2) -> ShardingPlan:
    return hp.plan(model, hp.DeviceMesh.from_sizes({"tensor": ranks}), {"sequence_parallel": sequence_parallel})


def on_all_ranks(
    model: nn.Module, plan: ShardingPlan, body: Callable[[Backend, nn.Module], Any], validate: bool = True
) -> list[Any]:
    """What `body` gives on each rank, called with the rank's backend and its own model under the plan."""
    models = [copy.deepcopy(model) for _ in plan.mesh.ranks]

    def on_rank(backend: Backend) -> Any:
        own = models[backend.collectives.rank()]
        apply_plan(backend, own, plan, validate=validate)
        return body(backend, own)

    return InProcessWorld(backends.load("torch"), plan.mesh.size, timeout_s=20).run(on_rank)


def loss_of(backend: Backend, plan: ShardingPlan, model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return planned_cross_entropy(backend, plan, model(input_ids=ids, use_cache=False).logits, ids)


def step(model: nn.Module, plan: ShardingPlan, ids: torch.Tensor, validate: bool = True) -> list[tuple[float, dict]]:
    """The loss and each gradient, of every rank."""

    def body(backend: Backend, own: nn.Module) -> tuple[float, dict]:
        loss = loss_of(backend, plan, own, ids)
        loss.backward()
        return loss.item(), {name: each.grad for name, each in own.named_parameters()}

    return on_all_ranks(model, plan, body, validate)


def differs_from(model: nn.Module, plan: ShardingPlan, ids: torch.Tensor, results: list[tuple[float, dict]]) -> str:
    """Which number of a step is not the model's own; "" where none is."""
    model.zero_grad()
    expected = nn.functional.cross_entropy(model(input_ids=ids, use_cache=False).logits.flatten(0, 1), ids.flatten())
    expected.backward()
    for rank, (loss, gradients) in enumerate(results):
        if abs(loss - expected.item()) > 1e-10 * abs(expected.item()):
            return f"rank {rank}: the loss"
        for name, parameter in model.named_parameters():
            whole = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if not close(gradients[name], whole, plan.layout(name), rank):
                return f"rank {rank}: the gradient of {name}"
    return ""


class Mutation(NamedTuple):
    """A plan that was changed in one place: what was changed, the module or parameter that it belongs to, the plan."""

    what: str
    where: str
    plan: ShardingPlan


PLACEMENTS = (Replicate(), Partial(), Shard(0), Shard(1), Shard(2))
ENDS = ("before", "after", "gradient", "gradient_before")


def mutations(plan: ShardingPlan) -> Iterator[Mutation]:
    """Every way to change one thing of a plan: a placement, what is pending, an end of a contract, a boundary. Of
    blocks that are alike the first is changed."""
    for place, parameter in enumerate(plan.parameters):
        if ".1." not in parameter.name:
            for what, changed in _parameters(parameter, plan.mesh.axis_size("tensor")):
                parameters = (*plan.parameters[:place], changed, *plan.parameters[place + 1 :])
                yield Mutation(f"{parameter.name}: {what}", parameter.name, replace(plan, parameters=parameters))
    for place, boundary in enumerate(plan.boundaries):
        if ".1." in f"{boundary.module}.":
            continue
        others = plan.boundaries[:place], plan.boundaries[place + 1 :]
        name = boundary.module
        yield Mutation(f"{name}: no boundary", name, replace(plan, boundaries=(*others[0], *others[1])))
        for side in ("inputs", "outputs"):
            for what, contract in _contracts(getattr(boundary, side)):
                changed = replace(boundary, **{side: (contract, *getattr(boundary, side)[1:])})
                boundaries = (*others[0], changed, *others[1])
                yield Mutation(f"{name}: {side}: {what}", name, replace(plan, boundaries=boundaries))


def _parameters(parameter: Any, ranks: int) -> Iterator[tuple[str, Any]]:
    now = parameter.placements.get("tensor", Replicate())
    for other in (Replicate(), Shard(0), Shard(1)):
        fits = isinstance(other, Replicate) or (
            other.dim < len(parameter.shape) and parameter.shape[other.dim] % ranks == 0
        )
        if other != now and fits:
            placements = {} if isinstance(other, Replicate) else {"tensor": other}
            yield f"{now} -> {other}", replace(parameter, placements=placements)
    pending = () if parameter.pending else ("tensor",)
    yield f"pending -> {pending}", replace(parameter, pending=pending)


def _contracts(contracts: tuple[Contract, ...]) -> Iterator[tuple[str, Contract]]:
    for contract in contracts[:1]:
        if contract.dims < 3:
            continue
        for end in ENDS:
            now = getattr(contract, end) or contract.source_gradient
            for other in PLACEMENTS:
                if other != now.get("tensor"):
                    yield f"{end}: {now.get('tensor')} -> {other}", replace(contract, **{end: _on(now, other)})
        if contract.before != contract.after:
            yield "ends swapped", replace(contract, before=contract.after, after=contract.before)


def _on(placements: Any, placement: Placement) -> dict[str, Placement]:
    return {**placements, "tensor": placement}
