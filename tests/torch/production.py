"""What the tests of production in PyTorch share: plans, every rank's part of a batch, and the comparison."""

from __future__ import annotations

import torch
from torch import nn

import hyper_parallel as hp
from tests.torch.all_ranks import logits_layout, on_all_ranks
from tests.torch.test_hugging_face import HEAD

LLAMA = ("llama", HEAD)


def planned(model: nn.Module, sizes: dict[str, int], sequence_parallel: bool = True) -> hp.ShardingPlan:
    return hp.plan(model, hp.DeviceMesh.from_sizes(sizes), {"sequence_parallel": sequence_parallel})


def tokens(samples: int, length: int) -> torch.Tensor:
    return torch.randint(0, 96, (samples, length))


def own_samples(plan: hp.ShardingPlan, rank: int, whole: torch.Tensor) -> torch.Tensor:
    """The samples of a rank: those along `replicate` and `shard` have different ones."""
    layout = hp.Layout(
        plan.mesh,
        {axis: hp.Shard(0) for axis in ("replicate", "shard", "expert") if axis in plan.mesh.names},
        whole.shape,
    )
    return torch.from_numpy(layout.shard(whole.numpy(), rank))


def loss_of(logits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A mean over samples, so that the mean over ranks is that of the whole batch."""
    return (logits * weights).sum() / len(weights)


def own_weights(plan: hp.ShardingPlan, rank: int, weights: torch.Tensor) -> torch.Tensor:
    own = own_samples(plan, rank, weights)
    return torch.from_numpy(logits_layout(plan, own.shape).shard(own.numpy(), rank))


def assert_same(found: torch.Tensor | None, whole: torch.Tensor, layout: hp.Layout, rank: int, what: str) -> None:
    """Within 1e-10 of the largest element: float64's rounding in sums of a few hundred terms stays below 1e-13."""
    expected = torch.from_numpy(layout.shard(whole.detach().numpy(), rank))
    found = torch.zeros_like(expected) if found is None else found.detach()
    assert found.shape == expected.shape, what
    scale = max(whole.abs().max().item() if whole.numel() else 0.0, 1e-3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * scale, msg=lambda text: f"{what}: {text}")


def assert_gradients_are_the_models(model: nn.Module, own: nn.Module, plan: hp.ShardingPlan, rank: int) -> None:
    expected = dict(model.named_parameters())
    for name, parameter in own.named_parameters():
        gradient = expected[name].grad
        whole = torch.zeros_like(expected[name]) if gradient is None else gradient
        assert_same(parameter.grad, whole, plan.layout(name), rank, f"rank {rank}, gradient of {name}")


def hold_against(model: nn.Module, plan: hp.ShardingPlan, samples: int, length: int) -> None:
    """One step of all ranks, each data rank on samples of its own, against one step of the model on all of them."""
    ids, weights = tokens(samples, length), torch.randn(samples, length, 96)
    loss_of(model(input_ids=ids, use_cache=False).logits, weights).backward()

    def body(backend, own):
        rank = backend.collectives.rank()
        logits = own(input_ids=own_samples(plan, rank, ids), use_cache=False).logits
        loss_of(logits, own_weights(plan, rank, weights)).backward()
        assert_gradients_are_the_models(model, own, plan, rank)

    on_all_ranks(model, plan, body)
