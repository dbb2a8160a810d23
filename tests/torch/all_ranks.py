"""All ranks of a plan in one process, and what they must agree on: logits, and every parameter's gradient."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import Callable, Iterator
from unittest import mock

import torch
from torch import nn

from hyper_parallel import ShardingPlan, backends
from hyper_parallel.core.backend import Backend
from hyper_parallel.core.execution.apply import apply_plan
from hyper_parallel.core.execution.inprocess import InProcessWorld
from hyper_parallel.core.layout import Layout


@contextmanager
def double_precision() -> Iterator[None]:
    """New tensors are of float64, and models that ask for float32 inside (norms, softmax, routers) get it too, so that
    nothing but float64's rounding is between two ways to compute."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with mock.patch.object(torch, "float32", torch.float64), mock.patch.object(torch, "float", torch.float64):
            with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
                yield
    finally:
        torch.set_default_dtype(before)


def on_all_ranks(model: nn.Module, plan: ShardingPlan, body: Callable[[Backend, nn.Module], object]) -> list:
    """What `body` gives on each rank, called with the rank's backend and its own model, to which `plan` is applied."""
    models = [copy.deepcopy(model) for _ in plan.mesh.ranks]
    for each in models:
        each.zero_grad()

    def on_rank(backend: Backend) -> object:
        own = models[backend.collectives.rank()]
        apply_plan(backend, own, plan)
        return body(backend, own)

    return InProcessWorld(backends.load("torch"), plan.mesh.size, timeout_s=60).run(on_rank)


def logits_layout(plan: ShardingPlan, shape: tuple[int, ...]) -> Layout:
    """How the head hands on its logits, along the axes whose ranks see the same samples; whole without a head."""
    after = next((each.outputs[0].after for each in plan.boundaries if each.kind == "head"), {})
    return Layout(plan.mesh, {axis: after[axis] for axis in ("tensor",) if axis in after}, shape)


def gradients_of_all_ranks(
    model: nn.Module, plan: ShardingPlan, inputs: dict, weights: torch.Tensor
) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """For each rank its part of the logits, and its part of each gradient of the sum of logits times `weights`."""

    def body(backend: Backend, own: nn.Module):
        logits = own(**inputs).logits
        part = logits_layout(plan, tuple(weights.shape)).shard(weights.numpy(), backend.collectives.rank())
        (logits * torch.from_numpy(part)).sum().backward()
        gradients = {name: each.grad for name, each in own.named_parameters()}
        return logits.detach(), gradients

    return on_all_ranks(model, plan, body)
