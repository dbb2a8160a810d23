"""Functions of the model's code with a backward of their own, under validation: followed in both directions, on tensors
with and without values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import wrap_torch_function

import hyper_parallel as hp
from hyper_parallel.core.errors import ContractError
from hyper_parallel.core.execution.loss import planned_cross_entropy
from hyper_parallel.core.rules import table
from hyper_parallel.models.config import DecoderConfig
from hyper_parallel.models.torch_decoder import Decoder, SwiGLU
from tests.torch.test_hugging_face import close
from tests.torch.validated import on_all_ranks, planned

CONFIG = DecoderConfig(96, 32, 48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8)
IDS = torch.arange(1, 13).reshape(2, 6)
MLP = "model.layers.0.mlp"


class Swish(Function):
    """Saves what it takes."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        bent = x.sigmoid()
        return gradient * (bent * (1 + x * (1 - bent)))


class Tanh(Function):
    """Saves what it gives."""

    @staticmethod
    def forward(ctx, x):
        result = x.tanh()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, gradient):
        (result,) = ctx.saved_tensors
        return gradient * (1 - result * result)


class Again(Swish):
    """Computes once more what it differentiates."""

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            result = x * x.sigmoid()
        torch.autograd.backward(result, gradient)
        return x.grad


class TwoWays(Function):
    """Takes a number and gives two results."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor, x + 1

    @staticmethod
    def backward(ctx, first, second):
        return first * ctx.factor + second, None


class InPlace(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Clipped(Function):
    """Another gradient than that of what it computes."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()


class Linear(Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


class Unseen(Function):
    """What numpy, or a kernel of somebody's own, computes."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sigmoid(x.as_subclass(torch.Tensor))

    @staticmethod
    def backward(ctx, gradient):
        bent = ctx.saved_tensors[0].sigmoid()
        return gradient * bent * (1 - bent)


@wrap_torch_function(lambda x: (x,))
def shown(x):
    return Unseen.apply(x)


class Own(SwiGLU):
    """A feed-forward with `function` in its middle, or on what it takes in."""

    function = staticmethod(F.silu)
    first = False

    def forward(self, hidden):
        hidden = self.function(hidden) if self.first else hidden
        inner = self.up_proj(hidden) * F.silu(self.gate_proj(hidden))
        return self.down_proj(inner if self.first else self.function(inner))


def decoder_with(function, first=False):
    torch.manual_seed(0)
    model = Decoder(CONFIG).double()
    model.model.layers[0].mlp.__class__ = type("Own", (Own,), {"function": staticmethod(function), "first": first})
    return model


def validated(model, plan, around=lambda module: module):
    """The gradients of every rank, under validation, and those of the model itself."""

    def body(backend, own):
        layer = own.model.layers[0]
        layer.forward = around(layer.forward)
        planned_cross_entropy(backend, plan, own(IDS), IDS).backward()
        return {name: each.grad for name, each in own.named_parameters()}

    found = on_all_ranks(model, plan, body)
    F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten()).backward()
    return found


def assert_the_models(found, model, plan):
    for rank, gradients in enumerate(found):
        for name, parameter in model.named_parameters():
            assert close(gradients[name], parameter.grad, plan.layout(name), rank), name


def on_shapes(model, plan):
    return hp.validate(lambda: model.to("meta"), plan, tokens=(2, 6))


RIGHT = {
    "what it takes is saved": Swish.apply,
    "what it gives is saved": Tanh.apply,
    "it computes once more": Again.apply,
    "two results and a number": lambda x: sum(TwoWays.apply(x, 3.0)),
    "in place": lambda x: InPlace.apply(x * 1),
    "one behind the other": lambda x: Swish.apply(Tanh.apply(x)),
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("function", RIGHT.values(), ids=RIGHT)
def test_a_right_backward_holds_whether_its_tensor_is_a_part_or_a_copy(function, first):
    model = decoder_with(function, first)
    plan = planned(model, sequence_parallel=True)
    assert_the_models(validated(model, plan), model, plan)
    assert on_shapes(model, plan)


@pytest.mark.parametrize("reentrant", [False, True])
def test_it_holds_under_checkpointing(reentrant):
    model = decoder_with(lambda x: Swish.apply(Tanh.apply(x)))
    plan = planned(model, sequence_parallel=True)

    def checkpointed(forward):
        return lambda *args: torch.utils.checkpoint.checkpoint(forward, *args, use_reentrant=reentrant)

    assert_the_models(validated(model, plan, checkpointed), model, plan)


@pytest.mark.parametrize(("first", "state"), [(False, "shard(2)"), (True, "partial")])
def test_a_backward_that_is_wrong_on_what_a_rank_gets_is_refused_where_it_stands(first, state):
    model = decoder_with(Clipped.apply, first)
    plan = planned(model, sequence_parallel=True)
    for run in (validated, on_shapes):
        with pytest.raises(ContractError) as refused:
            run(model, plan)
        headline, *lines = str(refused.value).splitlines()
        assert headline.startswith(f"{MLP}")
        assert f"in the backward of Clipped: norm over tensor: input is {state}" in headline.replace(", and", " and")
        assert f"regions: [{{match: {MLP}, kind: opaque}}]" in lines[1]
        assert "Clipped called in a function under torch.overrides.wrap_torch_function" in lines[1]


def test_a_gradient_that_somebody_has_to_sum_up_is_missed_without_values_too():
    model = decoder_with(F.silu)
    for linear in (model.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.gate_proj):
        linear.forward = lambda x, linear=linear: Linear.apply(x, linear.weight)
    plan = planned(model, sequence_parallel=False)
    assert on_shapes(model, plan)
    mlp = next(each for each in plan.boundaries if each.module == MLP)
    lost = replace(mlp, inputs=tuple(replace(each, gradient={}) for each in mlp.inputs))
    wrong = replace(plan, boundaries=tuple(lost if each is mlp else each for each in plan.boundaries))
    with pytest.raises(
        ContractError, match="the backward of Linear: over tensor the gradient of tensor 0 among its"
    ) as told:
        on_shapes(model, wrong)
    assert "is partial, and has to be replicate" in str(told.value)
    assert f"plan: boundary {MLP}, input hidden: after: {{tensor: replicate}}, gradient: {{}}" in str(told.value)


def test_what_a_function_computes_unseen_is_refused_until_somebody_vouches_for_it(monkeypatch):
    monkeypatch.setattr(table, "_RULES", dict(table._RULES))
    model = decoder_with(Unseen.apply)
    with pytest.raises(
        ContractError, match="it uses what Unseen returns, a function with a backward of its own"
    ) as told:
        validated(model, planned(model, sequence_parallel=True))
    assert f"regions: [{{match: {MLP}, kind: opaque}}]" in str(told.value)
    opaque = {"regions": [{"match": MLP, "kind": "opaque"}]}
    plan = hp.plan(model, hp.DeviceMesh.from_sizes({"tensor": 2}), opaque)
    assert_the_models(validated(model, plan), model, plan)

    hp.register_rule(shown, like="sigmoid")
    model = decoder_with(shown)
    plan = planned(model, sequence_parallel=True)
    assert_the_models(validated(model, plan), model, plan)


def hooked(hook):
    def function(x):
        x.register_hook(hook)
        return x * 1

    return function


def signs(gradient):
    return gradient.sign()


def test_a_gradient_hook_may_scale_what_comes_and_not_bend_a_pending_sum():
    model = decoder_with(hooked(lambda gradient: gradient * 2), first=True)
    plan = planned(model, sequence_parallel=True)
    assert_the_models(validated(model, plan), model, plan)
    model = decoder_with(hooked(signs), first=True)
    with pytest.raises(ContractError, match=f"{MLP}, in the gradient hook signs: sign over tensor: input is partial"):
        on_shapes(model, plan)
