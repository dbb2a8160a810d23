"""Production mode on Hugging Face's models in PyTorch: all ranks in one process, held against the model itself."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel import ConfigError, LayoutError, PlanError, backends
from hyper_parallel.core.errors import ContractError
from hyper_parallel.core.execution.apply import apply_plan, execution_of, restore
from hyper_parallel.core.execution.inprocess import InProcessWorld
from hyper_parallel.core.fsdp import build as units
from hyper_parallel.core.fsdp.clip import clip_grad_norm_
from tests.torch.all_ranks import double_precision, logits_layout, on_all_ranks
from tests.torch.test_hugging_face import EXPERTS, FAMILIES, HEAD, build

LLAMA = ("llama", HEAD)
LENGTHS = {"even": (4, 8), "odd": (4, 7), "fewer tokens than ranks": (4, 1)}


@pytest.fixture(autouse=True)
def in_double_precision():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with double_precision():
        yield
    torch.set_num_threads(threads)


def planned(model: nn.Module, sizes: dict[str, int], sequence_parallel: bool = True) -> hp.ShardingPlan:
    return hp.plan(model, hp.DeviceMesh.from_sizes(sizes), {"sequence_parallel": sequence_parallel})


def tokens(samples: int, length: int) -> torch.Tensor:
    return torch.randint(0, 96, (samples, length))


def own_samples(plan: hp.ShardingPlan, rank: int, whole: torch.Tensor) -> torch.Tensor:
    """The samples of a rank: those along `replicate` and `shard` have different ones."""
    layout = hp.Layout(
        plan.mesh, {axis: hp.Shard(0) for axis in ("replicate", "shard") if axis in plan.mesh.names}, whole.shape
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


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    "sizes", [{"shard": 2, "tensor": 2}, {"replicate": 2, "tensor": 2}, {"shard": 3, "tensor": 2}], ids=str
)
@pytest.mark.parametrize(
    "family", ["llama with biases", "llama with tied embeddings", "qwen3_moe", "phi3", "gpt2", "gpt_oss"]
)
def test_data_parallel_ranks_on_top_take_the_mean(family, sizes, sequence_parallel):
    model = build(*FAMILIES[family])
    hold_against(model, planned(model, sizes, sequence_parallel), samples=6, length=8)


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("family", ["llama", "opt", "mixtral"])
def test_any_length_of_sequence(family, length):
    from tests.torch.test_hugging_face import OTHERS

    model = build(*(FAMILIES | OTHERS)[family])
    hold_against(model, planned(model, {"tensor": 4}), *length)


@pytest.mark.parametrize(
    "sizes",
    [{"num_hidden_layers": 1}, {"vocab_size": 97}, {"num_attention_heads": 8}, {"intermediate_size": 46}],
    ids=str,
)
def test_odd_sizes(sizes):
    model = build("llama", HEAD | sizes)
    ids, weights = tokens(2, 8), torch.randn(2, 8, model.config.vocab_size)
    plan = planned(model, {"tensor": 4})
    loss_of(model(input_ids=ids).logits, weights).backward()

    def body(backend, own):
        rank = backend.collectives.rank()
        loss_of(own(input_ids=ids).logits, own_weights(plan, rank, weights)).backward()
        assert_gradients_are_the_models(model, own, plan, rank)

    on_all_ranks(model, plan, body)


def test_the_padding_token_gets_no_gradient():
    model = build(*LLAMA)
    model.model.embed_tokens.padding_idx = 50
    model.zero_grad()
    ids = torch.full((2, 8), 50)
    ids[:, ::2] = 51
    plan = planned(model, {"tensor": 2})
    model(input_ids=ids).logits.sum().backward()
    assert model.model.embed_tokens.weight.grad[50].abs().max() == 0

    def body(backend, own):
        own(input_ids=ids).logits.sum().backward()
        assert_gradients_are_the_models(model, own, plan, backend.collectives.rank())

    on_all_ranks(model, plan, body)


def test_a_model_that_computes_its_own_loss_gets_that_of_the_whole_vocabulary():
    model = build(*FAMILIES["llama with tied embeddings"])
    ids, labels = tokens(2, 8), tokens(2, 8)
    labels[0, :3] = -100
    for more in ({}, {"num_items_in_batch": 7}):
        model.zero_grad()
        expected = model(input_ids=ids, labels=labels, **more).loss
        expected.backward()
        plan = planned(model, {"shard": 2, "tensor": 2})

        def body(backend, own):
            loss = own(input_ids=ids, labels=labels, **more).loss
            loss.backward()
            assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
            assert_gradients_are_the_models(model, own, plan, backend.collectives.rank())

        on_all_ranks(model, plan, body)


def test_layouts_and_whole_values_are_found_and_an_optimizer_keeps_the_ranks_together():
    model = build(*FAMILIES["qwen3"])
    plan = planned(model, {"shard": 2, "tensor": 2})
    batches = [(tokens(4, 6), torch.randn(4, 6, 96)) for _ in range(3)]
    whole = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    for ids, weights in batches:
        optimizer.zero_grad()
        loss_of(whole(input_ids=ids).logits, weights).backward()
        optimizer.step()

    def body(backend, own):
        rank = backend.collectives.rank()
        for name, parameter in own.named_parameters():
            assert units.layout_of(parameter) == plan.layout(name)
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.01)
        for ids, weights in batches:
            optimizer.zero_grad()
            logits = own(input_ids=own_samples(plan, rank, ids)).logits
            loss_of(logits, own_weights(plan, rank, weights)).backward()
            optimizer.step()
        return units.full_parameters(backend, own)

    for found in on_all_ranks(model, plan, body):
        for name, parameter in whole.named_parameters():
            # Adam divides by the root of a square, which makes 1e-13 of a small gradient 1e-9 of its step.
            torch.testing.assert_close(torch.from_numpy(found[name]), parameter.detach(), rtol=0, atol=1e-8)


def test_the_norm_counts_every_element_once():
    model = build(*LLAMA)
    plan = planned(model, {"shard": 2, "tensor": 2})
    ids, weights = tokens(4, 8), torch.randn(4, 8, 96)
    loss_of(model(input_ids=ids).logits, weights).backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()

    def body(backend, own):
        rank = backend.collectives.rank()
        loss_of(own(input_ids=own_samples(plan, rank, ids)).logits, own_weights(plan, rank, weights)).backward()
        parameters = list(own.parameters())
        norm = clip_grad_norm_(backend, own, parameters, [each.grad for each in parameters], 1.0)
        assert norm == pytest.approx(expected, rel=1e-6)  # summed over ranks in float32
        for name, parameter in own.named_parameters():
            clipped = dict(model.named_parameters())[name].grad
            expected_part = torch.from_numpy(plan.layout(name).shard(clipped.numpy(), rank))
            torch.testing.assert_close(parameter.grad, expected_part, rtol=1e-5, atol=1e-7)

    on_all_ranks(model, plan, body)


# Ways of use


def test_gradients_accumulate_and_evaluation_leaves_no_trace():
    model = build(*LLAMA).train()
    plan = planned(model, {"shard": 2, "tensor": 2})
    batches = [(tokens(4, 8), torch.randn(4, 8, 96)) for _ in range(2)]
    for ids, weights in batches:
        loss_of(model(input_ids=ids).logits, weights).backward()

    def body(backend, own):
        rank = backend.collectives.rank()
        for ids, weights in batches:
            loss_of(own(input_ids=own_samples(plan, rank, ids)).logits, own_weights(plan, rank, weights)).backward()
            own.eval()
            with torch.no_grad():
                found = own(input_ids=ids[:, :5]).logits
                assert_same(found, model(input_ids=ids[:, :5]).logits, logits_layout(plan, (4, 5, 96)), rank, "logits")
            own.train()
        assert_gradients_are_the_models(model, own, plan, rank)

    on_all_ranks(model, plan, body)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    model = build(*FAMILIES["qwen3_moe"]).train()
    plan = planned(model, {"shard": 2, "tensor": 2})
    ids, weights = tokens(4, 7), torch.randn(4, 7, 96)
    loss_of(model(input_ids=ids, use_cache=False).logits, weights).backward()

    def body(backend, own):
        rank = backend.collectives.rank()
        own.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            own.enable_input_require_grads()
        logits = own(input_ids=own_samples(plan, rank, ids), use_cache=False).logits
        loss_of(logits, own_weights(plan, rank, weights)).backward()
        assert_gradients_are_the_models(model, own, plan, rank)

    on_all_ranks(model, plan, body)


def test_steps_with_a_cache_go_on_where_the_last_one_stopped():
    model = build(*FAMILIES["qwen3"])
    plan = planned(model, {"tensor": 2}, sequence_parallel=False)
    ids = tokens(2, 9)
    expected = model(input_ids=ids).logits

    def body(backend, own):
        with torch.no_grad():
            first = own(input_ids=ids[:, :6], use_cache=True)
            rest = own(input_ids=ids[:, 6:], past_key_values=first.past_key_values, use_cache=True)
        found = torch.cat([first.logits, rest.logits], 1)
        assert_same(found, expected, logits_layout(plan, expected.shape), backend.collectives.rank(), "logits")

    on_all_ranks(model, plan, body)


def test_two_models_in_one_process():
    first, second = build(*LLAMA), build(*FAMILIES["gpt2"])
    plans = planned(first, {"tensor": 2}), planned(second, {"shard": 2})
    ids, weights = tokens(2, 6), torch.randn(2, 6, 96)
    for model in (first, second):
        loss_of(model(input_ids=ids).logits, weights).backward()
    models = [[copy.deepcopy(model) for model in (first, second)] for _ in range(2)]

    def body(backend):
        rank = backend.collectives.rank()
        both = models[rank]
        for model, plan in zip(both, plans):
            model.zero_grad()
            apply_plan(backend, model, plan)
        one, other = both
        logits = one(input_ids=ids).logits
        loss_of(other(input_ids=ids).logits, weights).backward()
        part = logits_layout(plans[0], weights.shape).shard(weights.numpy(), rank)
        loss_of(logits, torch.from_numpy(part)).backward()
        for own, model, plan in zip(both, (first, second), plans):
            assert_gradients_are_the_models(model, own, plan, rank)

    InProcessWorld(backends.load("torch"), 2).run(body)


# Undone, refused


def seen(model: nn.Module) -> dict:
    """What a model's modules hold beside parameters: names and plain values of attributes, and how many hooks."""
    plain = (int, float, str, bool, type(None))
    return {
        name: {
            key: value if isinstance(value, plain) else len(value) if "hooks" in key else type(value)
            for key, value in vars(module).items()
        }
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("family", ["llama with biases", "gpt2", "gpt_oss", "falcon with one key", "deepseek_v3"])
def test_restore_gives_back_the_very_model(family):
    model = build(*FAMILIES[family])
    plan = planned(model, {"shard": 2, "tensor": 2})
    before, ids = seen(model), tokens(2, 8)
    expected = model(input_ids=ids).logits

    def body(backend, own):
        assert execution_of(own).plan is plan and seen(own) != before
        own(input_ids=ids).logits.sum().backward()
        restore(backend, own)
        assert execution_of(own) is None and seen(own) == before
        for name, parameter in own.named_parameters():
            assert torch.equal(parameter, dict(model.named_parameters())[name]), name
            assert units.layout_of(parameter) is None
        assert torch.equal(own(input_ids=ids).logits, expected)

    on_all_ranks(model, plan, body)


def other_heads(model):
    model.model.layers[0].self_attn.num_heads = 3


def shrinking_embedding(model):
    model.model.embed_tokens.max_norm = 1.0


def balance(model):
    model.config.output_router_logits = True


def another_shape(model):
    model.model.norm.weight = nn.Parameter(torch.ones(33))


def fewer_modules(model):
    model.model.layers = model.model.layers[:1]


def tied_after_planning(model):
    model.lm_head.weight = model.model.embed_tokens.weight


REFUSED = {
    "heads that can't be dealt out": (
        other_heads,
        "self_attn.num_heads is 3, which can't be dealt out to 2 tensor ranks",
    ),
    "an embedding that rescales rows": (
        shrinking_embedding,
        "model.embed_tokens has max_norm=1.0, which looks at the whole",
    ),
    "a balance loss": (balance, "output_router_logits=true, whose balance loss would count 2 times"),
    "another shape": (another_shape, r"model.norm.weight has shape \(33,\), planned was \(32,\)"),
    "a block less": (fewer_modules, "is in the plan only"),
    "tied behind its back": (
        tied_after_planning,
        "lm_head.weight is tied to model.embed_tokens.weight in the model and not",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_the_plan_does_not_fit_is_refused_untouched(case):
    spoil, message = REFUSED[case]
    model = build("qwen3_moe", HEAD | EXPERTS)
    plan = planned(model, {"tensor": 2})
    spoil(model)
    before = seen(model)

    def body(backend):
        own = models[backend.collectives.rank()]
        with pytest.raises(PlanError, match=message):
            apply_plan(backend, own, plan)
        assert seen(own) == before
        assert all(map(torch.equal, own.parameters(), model.parameters()))

    models = [copy.deepcopy(model) for _ in range(2)]
    InProcessWorld(backends.load("torch"), 2).run(body)


def test_what_one_rank_refuses_is_refused_by_all():
    model = build(*LLAMA)
    plans = [planned(model, {"tensor": 2}), planned(model, {"tensor": 2}, sequence_parallel=False)]
    models = [copy.deepcopy(model) for _ in range(2)]
    spoiled = copy.deepcopy(model)
    spoiled.model.norm.weight = nn.Parameter(torch.ones(33))

    def differing_plans(backend):
        rank = backend.collectives.rank()
        with pytest.raises(PlanError, match=f"rank {1 - rank} has another plan than rank {rank}"):
            apply_plan(backend, models[rank], plans[rank])

    def differing_models(backend):
        rank = backend.collectives.rank()
        message = "norm.weight has shape" if rank else r"rank 1 refuses its plan, .*norm.weight has shape \(33,\)"
        with pytest.raises(PlanError, match=message):
            apply_plan(backend, spoiled if rank else models[0], plans[0])

    before = seen(model)
    for body in (differing_plans, differing_models):
        InProcessWorld(backends.load("torch"), 2).run(body)
        assert all(seen(each) == before for each in models)


def test_meshes_that_can_not_be_run_are_refused():
    model = build("qwen3_moe", HEAD | EXPERTS)

    def refusal(sizes, ranks, **more):
        plan = hp.plan(model, hp.DeviceMesh(tuple(sizes.values()), tuple(sizes), **more))

        def body(backend):
            with pytest.raises((ConfigError, LayoutError)) as caught:
                apply_plan(backend, model, plan)
            return str(caught.value)

        return InProcessWorld(backends.load("torch"), ranks).run(body)[0]

    assert "has 2 ranks, 0 to 1, but 3 have joined" in refusal({"tensor": 2}, 3)
    assert "has 4 ranks, 0 to 3, but 2 have joined" in refusal({"tensor": 4}, 2)
    assert "running the axes expert is not offered yet" in refusal({"expert": 2}, 2)
    assert "running the axes context is not offered yet" in refusal({"context": 2}, 2)


def test_applying_twice_is_refused():
    model = build(*LLAMA)
    plan = planned(model, {"tensor": 2})

    def body(backend, own):
        with pytest.raises(PlanError, match="the model is sharded already, restore it first"):
            apply_plan(backend, own, plan)
        with pytest.raises(ConfigError, match="can't be copied"):
            copy.deepcopy(own)

    on_all_ranks(model, plan, body)


def test_a_tensor_that_a_boundary_does_not_know_is_told_by_its_module():
    model = build(*LLAMA)
    plan = planned(model, {"tensor": 2})

    def body(backend, own):
        with pytest.raises(
            ContractError, match=r"the output 'hidden' of model.layers.0.mlp has the shape \[2, 8, 31\]"
        ):
            own.model.layers[0].mlp.down_proj.register_forward_hook(lambda module, args, output: output[..., 1:])
            own(input_ids=tokens(2, 8))

    on_all_ranks(model, plan, body)


# Nothing but the model's own code


def calls_in(model: nn.Module, module: nn.Module, ids: torch.Tensor) -> list[str]:
    """The Python functions, and those of the framework, that run inside of a module's forward; checks the types of
    tensors that its children meet."""
    names: list[str] = []
    forward = module.forward

    def note(frame, event, argument):
        if event == "call":
            names.append(frame.f_code.co_name)
        elif event == "c_call":
            names.append(argument.__name__)

    def counted(*args, **kwargs):
        sys.setprofile(note)
        try:
            return forward(*args, **kwargs)
        finally:
            sys.setprofile(None)

    module.forward = counted
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        del module.forward
    return names


def work(names: list[str]) -> list[str]:
    """Without the look-ups of parameters, which take a call less where a module is shown the full tensor."""
    return [name for name in names if name != "__getattr__"]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
def test_inside_of_boundaries_runs_what_runs_without_a_plan(family):
    model = build(*FAMILIES[family])
    plan = planned(model, {"tensor": 2})
    ids = tokens(2, 8)
    inner = [each.module for each in plan.boundaries if each.kind in ("attention", "mlp", "head")]

    def calls(of):
        return {name: calls_in(of, of.get_submodule(name), ids) for name in inner}

    expected = calls(model)
    assert all(len(each) > 3 for each in expected.values())
    for found in on_all_ranks(model, plan, lambda backend, own: calls(own)):
        for name, names in found.items():
            assert work(names) == work(expected[name]), name
            assert len(names) <= len(expected[name]), name


def test_modules_see_plain_tensors():
    model = build(*FAMILIES["qwen3_moe"])
    plan = planned(model, {"shard": 2, "tensor": 2})

    def body(backend, own):
        kinds = set()
        for module in own.modules():
            module.register_forward_hook(
                lambda module, args, output: kinds.update(map(type, (*args, output, *vars(module).values())))
            )
        own(input_ids=tokens(2, 8)).logits.sum().backward()
        return {kind for kind in kinds if issubclass(kind, torch.Tensor)}

    for kinds in on_all_ranks(model, plan, body):
        assert kinds <= {torch.Tensor, nn.Parameter}
