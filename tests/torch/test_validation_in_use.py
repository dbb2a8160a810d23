"""Models under validation as they are used: trained, evaluated, checkpointed, restored; regions; and gradients that
differ between ranks."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel import backends
from hyper_parallel.core.errors import ConfigError, ContractError
from hyper_parallel.core.execution.apply import execution_of, restore
from hyper_parallel.core.execution.inprocess import InProcessWorld
from hyper_parallel.core.validation.agreement import Agreement
from tests.torch.test_hugging_face import FAMILIES, build, close
from tests.torch.validated import differs_from, loss_of, on_all_ranks, planned, step

pytestmark = pytest.mark.usefixtures("in_double_precision")
IDS = torch.arange(1, 17).reshape(2, 8)


def qwen3_moe() -> tuple[torch.nn.Module, hp.ShardingPlan]:
    model = build(*FAMILIES["qwen3_moe"])
    return model, planned(model, sequence_parallel=True)


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_training_evaluation_accumulation_and_another_step():
    model, plan = qwen3_moe()

    def body(backend, own):
        optimizer = torch.optim.SGD(own.parameters(), 0.1)
        loss_of(backend, plan, own, IDS).backward()
        once = gradients(own)
        loss_of(backend, plan, own, IDS).backward()
        assert all(torch.allclose(twice, 2 * each) for twice, each in zip(gradients(own), once))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            evaluated = loss_of(backend, plan, own.eval(), IDS).item()
        trained = loss_of(backend, plan, own.train(), IDS)
        trained.backward()
        assert trained.item() == evaluated
        return evaluated

    first, second = on_all_ranks(model, plan, body)
    assert first == second


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradients(reentrant):
    model, plan = qwen3_moe()

    def body(backend, own):
        loss_of(backend, plan, own, IDS).backward()
        expected = gradients(own)
        own.zero_grad()
        own.train()
        own.gradient_checkpointing_enable({"use_reentrant": reentrant})
        loss_of(backend, plan, own, IDS).backward()
        return all(torch.equal(found, each) for found, each in zip(gradients(own), expected))

    assert all(on_all_ranks(model, plan, body))


class Normed(torch.autograd.Function):
    """Code of the user's own, which saves what is cut and computes with it in backward."""

    @staticmethod
    def forward(ctx, tensor):
        root = tensor.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        ctx.save_for_backward(tensor, root)
        return tensor * root

    @staticmethod
    def backward(ctx, gradient):
        tensor, root = ctx.saved_tensors
        return root * gradient - tensor * root**3 * (gradient * tensor).mean(-1, keepdim=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_functions_of_the_users_own_are_followed_where_a_checkpoint_computes_them_again(reentrant):
    """Their forward is not recorded, as their backward is not, and runs in backward too."""
    model, plan = qwen3_moe()

    def body(backend, own):
        own.train()
        for layer in own.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.forward = lambda hidden, norm=norm: norm.weight * Normed.apply(hidden)
        own.gradient_checkpointing_enable({"use_reentrant": reentrant})
        loss_of(backend, plan, own, IDS).backward()
        return gradients(own)

    found, expected = (on_all_ranks(model, plan, body, validate) for validate in (True, False))
    assert all(torch.equal(one, other) for a, b in zip(found, expected) for one, other in zip(a, b))


def test_the_loss_of_a_model_that_computes_its_own():
    model, plan = qwen3_moe()
    expected = model(input_ids=IDS, labels=IDS, use_cache=False).loss.item()
    for found in on_all_ranks(
        model, plan, lambda backend, own: own(input_ids=IDS, labels=IDS, use_cache=False).loss.item()
    ):
        assert found == pytest.approx(expected, rel=1e-10)


def test_a_loss_on_a_part_of_the_vocabulary_that_takes_it_for_all_is_stopped():
    model, plan = qwen3_moe()

    def body(backend, own):
        logits = own(input_ids=IDS, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), IDS.flatten() % 48)

    with pytest.raises(ContractError, match="outside of the model's modules: cross_entropy over tensor"):
        on_all_ranks(model, plan, body)


def test_restore_leaves_no_trace():
    model, plan = qwen3_moe()

    def body(backend, own):
        loss_of(backend, plan, own, IDS).backward()
        restore(backend, own)
        assert execution_of(own) is None
        logits = own(input_ids=IDS, use_cache=False).logits
        assert type(logits) is torch.Tensor
        assert all(type(each) is torch.nn.Parameter for each in own.parameters())
        return torch.equal(logits, model(input_ids=IDS, use_cache=False).logits)

    assert all(on_all_ranks(model, plan, body))


def test_two_models_in_one_process_do_not_know_of_each_other():
    model, plan = qwen3_moe()
    other = build(*FAMILIES["llama"])
    other_plan = planned(other, sequence_parallel=False)
    others = [copy.deepcopy(other) for _ in range(2)]

    def body(backend, own):
        from hyper_parallel.core.execution.apply import apply_plan

        second = others[backend.collectives.rank()]
        apply_plan(backend, second, other_plan, validate=True)
        (loss_of(backend, plan, own, IDS) + 0).backward()
        loss_of(backend, other_plan, second, IDS).backward()
        return len(execution_of(own).following.watch.boundaries), len(execution_of(second).following.watch.boundaries)

    assert on_all_ranks(model, plan, body) == [(17, 11), (17, 11)]


def with_embeddings_of_its_own(model: torch.nn.Module) -> torch.Tensor:
    return model(inputs_embeds=model.get_input_embeddings()(IDS), labels=IDS, use_cache=False).loss


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_module_that_is_called_by_itself_is_followed_where_units_have_nothing_to_do(sequence_parallel):
    model = build(*FAMILIES["llama"])
    plan = planned(model, sequence_parallel)

    def body(_, own):
        losses = [with_embeddings_of_its_own(own) for _ in range(2)]
        losses[0].backward()
        return losses[1].item(), {name: each.grad for name, each in own.named_parameters()}

    assert not differs_from_causal_loss(model, plan, on_all_ranks(model, plan, body))


def differs_from_causal_loss(model: torch.nn.Module, plan: hp.ShardingPlan, results: list[tuple[float, dict]]) -> str:
    loss = with_embeddings_of_its_own(model)
    loss.backward()
    for rank, (found, gradients) in enumerate(results):
        if abs(found - loss.item()) > 1e-10 * abs(loss.item()):  # float64's rounding
            return f"rank {rank}: the loss"
        for name, parameter in model.named_parameters():
            if not close(gradients[name], parameter.grad, plan.layout(name), rank):
                return f"rank {rank}: the gradient of {name}"
    return ""


@pytest.mark.parametrize("axis", ["shard", "replicate"])
def test_a_module_that_is_called_by_itself_is_stopped_where_its_unit_would_gather_or_sum_up(axis):
    model = build(*FAMILIES["llama"])
    plan = hp.plan(model, hp.DeviceMesh.from_sizes({axis: 2}))

    def body(_, own):
        with pytest.raises(ContractError, match="model.embed_tokens: it is called by itself, but model.embed_tokens.w"):
            own.get_input_embeddings()(IDS)
        own(input_ids=IDS, use_cache=False)
        return own.get_input_embeddings()(IDS).detach()  # the unit is gathered till backward has run

    expected = model.get_input_embeddings()(IDS)
    assert all(torch.equal(found, expected) for found in on_all_ranks(model, plan, body))


def test_an_opaque_region_runs_on_plain_tensors_and_comes_out_as_it_says():
    model, plan = qwen3_moe()
    opaque = replace(
        plan,
        boundaries=tuple(
            replace(each, region="opaque") if each.kind == "experts" else each for each in plan.boundaries
        ),
    )
    seen = []

    def body(backend, own):
        experts = own.model.layers[0].mlp.experts
        experts.register_forward_pre_hook(lambda module, args: seen.append([type(each) for each in args]))
        loss_of(backend, opaque, own, IDS).backward()
        return gradients(own)

    found, expected = (on_all_ranks(model, each, body) for each in (opaque, plan))
    assert all(torch.equal(one, other) for a, b in zip(found, expected) for one, other in zip(a, b))
    assert all(kind is torch.Tensor for kinds in seen[:2] for kind in kinds)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("match", ["model.layers.*", "model.layers.*.self_attn"])
def test_biases_of_an_opaque_region_are_added_inside_or_to_what_comes_out(match, sequence_parallel):
    model = build(*FAMILIES["llama with biases"])
    overrides = {"sequence_parallel": sequence_parallel, "regions": [{"match": match, "kind": "opaque"}]}
    plan = hp.plan(model, hp.DeviceMesh.from_sizes({"tensor": 2}), overrides)
    assert differs_from(model, plan, IDS, step(model, plan, IDS)) == ""


def test_a_mode_that_is_none_is_refused():
    model, plan = qwen3_moe()
    with pytest.raises(ConfigError, match='mode is \'debug\'; write "production" or "validate"'):
        hp.parallelize(model, plan, mode="debug")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_copies_that_differ_between_ranks_are_told_with_what_they_measure(dtype):
    mesh = hp.DeviceMesh((2,), ("tensor",))

    def body(backend):
        rank, agreement = backend.collectives.rank(), Agreement(backend, mesh, is_real=True)
        same = torch.linspace(0, 1, 100, dtype=torch.float64).to(dtype)
        agreement.check(same, ["tensor"], ContractError)
        swapped = same if rank == 0 else same.flip(0)
        with pytest.raises(ContractError, match="has to be the same on every rank of tensor, but ranks 0 and 1"):
            agreement.check(swapped, ["tensor"], ContractError)
        with pytest.raises(ContractError, match="their norms are"):
            agreement.check(same * (1 + rank), ["tensor"], ContractError)
        with pytest.raises(ContractError, match=r"of the shapes \[50\] and \[51\]"):
            agreement.check(same[: 50 + rank] * 0, ["tensor"], ContractError)
        agreement.check(torch.tensor([1, 2**60]), ["tensor"], ContractError)
        with pytest.raises(ContractError, match=r"hold others: whole numbers of the shape \[2\]"):
            agreement.check(torch.tensor([1, 2**60 + rank]), ["tensor"], ContractError)

    InProcessWorld(backends.load("torch"), 2, timeout_s=20).run(body)


class Scaled(torch.autograd.Function):
    """Code of the user's own, whose gradient is another on each rank."""

    @staticmethod
    def forward(ctx, tensor, factor):
        ctx.factor = factor
        return tensor * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def test_a_gradient_that_differs_between_ranks_is_told_with_its_boundary():
    model, plan = qwen3_moe()

    def body(backend, own):
        factor = 1.0 + backend.collectives.rank()
        own.model.norm.register_forward_hook(lambda module, args, output: Scaled.apply(output, factor))
        loss_of(backend, plan, own, IDS).backward()

    with pytest.raises(ContractError) as caught:
        on_all_ranks(model, plan, body)
    told = str(caught.value)
    assert told.startswith(
        "model.norm: the gradient of the output 'hidden', before the transition: it has to be the same on every rank "
        "of tensor, but ranks 0 and 1 of the axis hold others: their norms are "
    )
    assert told.endswith(
        "plan: boundary model.norm, output hidden: before: {tensor: replicate}, gradient: {tensor: replicate}"
    )


def test_where_no_ranks_share_a_model_nothing_is_followed():
    model = build(*FAMILIES["llama"])
    plan = hp.plan(model, hp.DeviceMesh((2,), ("shard",)))

    def body(backend, own):
        loss = loss_of(backend, plan, own, IDS)
        loss.backward()
        return type(loss), execution_of(own).following.watch.operators

    assert on_all_ranks(model, plan, body) == [(torch.Tensor, 0)] * 2


def test_a_parameter_that_the_code_reads_past_its_modules_attribute_is_named():
    model, plan = qwen3_moe()

    def body(backend, own):
        norm = own.model.norm
        norm.register_forward_pre_hook(lambda module, args: (args[0] * norm._parameters["weight"],))
        loss_of(backend, plan, own, IDS)

    with pytest.raises(ContractError, match=r"^model\.norm: mul: it uses the parameter model\.norm\.weight, "):
        on_all_ranks(model, plan, body)
