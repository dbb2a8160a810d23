"""Followed tensors in every way in which a model's code and its user handle tensors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hyper_parallel import backends
from hyper_parallel.core.errors import ContractError
from hyper_parallel.core.rules.state import COPIED, PARTIAL, WHOLE, State, cut
from hyper_parallel.core.validation.watch import Track, Watch

BACKEND = backends.load("torch")
LINE = "boundary model.here, input hidden"


@pytest.fixture
def watch() -> Watch:
    return Watch(BACKEND, ("tensor",), (2,))


def followed(watch: Watch, tensor: torch.Tensor, state: State, live: bool = True) -> torch.Tensor:
    return BACKEND.interception.follow(tensor, Track(watch, (state,), LINE, live))


def state(tensor: torch.Tensor) -> State:
    return BACKEND.interception.track_of(tensor).states[0]


def part(watch, *shape: int, dim: int = -1) -> torch.Tensor:
    return followed(watch, torch.randn(*shape, requires_grad=True), cut(dim % len(shape)))


def test_what_comes_of_a_followed_tensor_is_followed(watch):
    x = part(watch, 2, 4)
    assert isinstance(x, torch.Tensor) and x.shape == (2, 4) and x.dtype == torch.float32 and x.is_floating_point()
    for made in (x + 1, 2 * x, torch.ones(2, 4) - x, F.silu(x), x.T.T, torch.cat([x, x], 0)):
        assert state(made) == cut(1)
    assert [state(each) for each in x.max(0)] == [cut(0), cut(0)]
    assert watch.operators > 6


def test_autograd_sees_plain_tensors_and_gives_plain_gradients(watch):
    leaf = torch.randn(2, 4, requires_grad=True)
    x = followed(watch, leaf * 1, cut(1))
    (x * x).sum().backward()
    assert type(leaf.grad) is torch.Tensor
    torch.testing.assert_close(leaf.grad, 2 * leaf.detach())


def test_what_is_written_in_place_keeps_its_identity_and_its_state(watch):
    x = part(watch, 2, 4)
    y = x * 1
    same = y
    y += 1
    y.mul_(2)
    assert y is same and state(y) == cut(1)
    with pytest.raises(ContractError, match="is shard"):
        followed(watch, torch.zeros(2, 4), cut(0)).add_(x.detach())


def test_a_plain_tensor_that_is_written_with_followed_ones_is_followed_from_then_on(watch):
    rows = torch.zeros(3, 4)
    rows.copy_(part(watch, 3, 4).detach())
    assert state(rows) == cut(1)
    sums = torch.zeros(3, 4)
    sums.index_add_(0, torch.tensor([2, 0]), followed(watch, torch.randn(2, 4), PARTIAL))
    assert state(sums) == PARTIAL


def test_a_constant_that_the_code_makes_fits_any_part_and_other_numbers_do_not(watch):
    assert state(part(watch, 2, 4) + torch.ones(2, 4)) == cut(1)
    with pytest.raises(ContractError, match="other .* is whole along dim 1"):
        part(watch, 2, 4) + torch.arange(8.0).reshape(2, 4)


def test_a_view_of_a_new_tensor_that_is_written_says_what_the_tensor_is(watch):
    whole = part(watch, 2, 4).new_zeros(2, 6)
    whole[:, 2:].copy_(part(watch, 2, 4, dim=0).detach())
    assert state(whole) == cut(0)


def test_values_are_read_of_what_is_whole_and_of_nothing_else(watch):
    whole = followed(watch, torch.tensor(3.0), WHOLE)
    assert whole.item() == 3.0 and float(whole) == 3.0 and bool(whole > 2) and f"{whole:.1f}" == "3.0"
    assert whole.tolist() == 3.0 and whole.detach().numpy() == 3.0
    pending = followed(watch, torch.tensor(3.0), PARTIAL)
    for read in (lambda: pending.item(), lambda: bool(pending), lambda: float(pending), lambda: pending.tolist()):
        with pytest.raises(ContractError, match="partial"):
            read()
    with pytest.raises(ContractError, match=r"shard\(0\)"):
        if (part(watch, 4, dim=0) > 0).tolist():
            pass


def test_printing_shows_the_state_and_never_fails(watch):
    assert repr(part(watch, 2, 2)).startswith("tensor: shard(1) tensor([[")
    assert str(followed(watch, torch.tensor(1.0), PARTIAL)).startswith("tensor: partial tensor(1.")


def test_copies_are_followed(watch):
    x = followed(watch, torch.ones(2, 2), cut(0))
    copied = copy.deepcopy(x)
    assert copied is not x and state(copied) == cut(0) and copied.data_ptr() != x.data_ptr()
    assert state(copy.deepcopy([x, x])[1]) == cut(0)


def test_detached_and_unrecorded_tensors_take_no_part(watch):
    weight = followed(watch, torch.randn(4, 4, requires_grad=True), cut(0))
    x = followed(watch, torch.randn(2, 4, requires_grad=True), WHOLE)
    with pytest.raises(ContractError, match="nothing sums it up"):
        F.linear(x, weight)
    assert state(F.linear(x.detach(), weight)) == cut(1)
    with torch.no_grad():
        assert state(F.linear(x, weight)) == cut(1)
    assert state(F.linear(x.detach().requires_grad_().detach(), weight)) == cut(1)


def test_autocast_casts_what_is_followed(watch):
    x, weight = followed(watch, torch.randn(2, 4), COPIED), part(watch, 4, 4, dim=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = F.linear(x, weight)
    assert out.dtype == torch.bfloat16 and state(out) == cut(1)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_again_what_it_computed_before(watch, reentrant):
    leaf, weight = torch.randn(2, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)

    def mlp(x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return F.silu(F.linear(x, own)) ** 2

    expected = torch.autograd.grad(mlp(leaf, weight).sum(), (leaf, weight))
    x, own = followed(watch, leaf * 1, COPIED), followed(watch, weight * 1, cut(0))
    out = checkpoint(mlp, x, own, use_reentrant=reentrant)
    assert state(out) == cut(1)
    seen = watch.operators
    out.sum().backward()
    assert watch.operators > seen + 2  # the recompute is followed as well
    torch.testing.assert_close((leaf.grad, weight.grad), expected)


def test_backward_starts_from_what_has_a_whole_gradient_on_every_rank(watch):
    for fits in (WHOLE, PARTIAL):
        followed(watch, torch.randn((), requires_grad=True) * 1, fits).backward()
    for name, wrong in (("shard", cut(0)), ("its gradient partial", COPIED)):
        with pytest.raises(ContractError, match=name):
            followed(watch, torch.randn(1, requires_grad=True).sum(0, True), wrong).backward()
    x = part(watch, 2, 4)
    with pytest.raises(ContractError, match="not the gradient of this tensor"):
        torch.autograd.backward([x * 1], [torch.ones(2, 4)])
    torch.autograd.backward([x * 1], [followed(watch, torch.ones(2, 4), cut(1))])


def test_a_gradient_with_respect_to_a_followed_tensor(watch):
    x = part(watch, 2, 4)
    (gradient,) = torch.autograd.grad((x * 3).sum(), x)
    assert torch.equal(gradient, torch.full((2, 4), 3.0))


def test_a_function_of_the_users_own_that_saves_a_followed_tensor_gets_its_gradient(watch):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 2 * x * gradient

    leaf = torch.randn(2, 4, requires_grad=True)
    out = Square.apply(followed(watch, leaf * 1, cut(1)))
    assert state(out) == cut(1)
    out.sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * leaf.detach())


def test_a_function_of_the_users_own_may_write_in_place(watch):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    leaf = torch.randn(2, 4, requires_grad=True)
    x = followed(watch, leaf * 1, cut(1))
    out = Doubled.apply(x)
    assert out is x and state(out) == cut(1)
    out.sum().backward()
    assert torch.equal(leaf.grad, torch.full((2, 4), 2.0))


def test_a_tensor_that_asks_for_a_gradient_and_is_not_followed_is_refused(watch):
    x = part(watch, 2, 4)
    with pytest.raises(ContractError) as caught:
        x + torch.ones(2, 4, requires_grad=True)
    assert "add: it uses a tensor of shape [2, 4] that asks for a gradient, which the plan does not follow" in str(
        caught.value
    )


def test_an_error_says_where_what_was_found_what_is_legal_and_which_line(watch):
    watch.running.extend(["", "model.layers.0.mlp"])
    x, y = part(watch, 2, 4), followed(watch, torch.randn(2, 4, requires_grad=True), COPIED)
    with pytest.raises(ContractError) as caught:
        x + y
    assert str(caught.value) == (
        "model.layers.0.mlp: add over tensor: add: other [2, 4] is whole along dim 1, where input [2, 4] holds only "
        "this rank's part\n"
        "  found: input [2, 4] is tensor: shard(1)\n"
        "  found: other [2, 4] is tensor: replicate, its gradient partial\n"
        "  legal: other as shard(1), of size 1 there, or the same all along it\n"
        f"  plan: {LINE}"
    )


def test_an_operator_without_a_rule_is_named_with_the_line_that_gives_it_one(watch):
    with pytest.raises(ContractError) as caught:
        torch.linalg.eigvals(followed(watch, torch.eye(2), WHOLE))
    assert "torch.linalg.eigvals: the operator torch.linalg.eigvals has no rule" in str(caught.value)
    assert "hyper_parallel.register_rule('torch.linalg.eigvals', like=\"pointwise\")" in str(caught.value)
