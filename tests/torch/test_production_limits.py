"""Production mode in PyTorch: undone without a trace, refused untouched, and nothing but the model's code inside."""

from __future__ import annotations

import copy
import gc
import sys

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel import ConfigError, ContractError, LayoutError, PlanError, backends
from hyper_parallel.core.execution.apply import apply_plan, execution_of, restore
from hyper_parallel.core.execution.inprocess import InProcessWorld
from hyper_parallel.core.fsdp import build as units
from tests.torch.all_ranks import on_all_ranks
from tests.torch.production import LLAMA, planned, tokens
from tests.torch.test_hugging_face import EXPERTS, FAMILIES, HEAD, build

pytestmark = pytest.mark.usefixtures("in_double_precision")


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


@pytest.mark.parametrize(
    "family, sizes",
    [
        ("llama with biases", {"shard": 2, "tensor": 2}),
        ("gpt2", {"shard": 2, "tensor": 2}),
        ("gpt_oss", {"expert": 2, "tensor": 2}),
        ("falcon with one key", {"replicate": 2, "tensor": 2}),
        ("deepseek_v3", {"shard": 2, "expert": 2}),
    ],
)
def test_restore_gives_back_the_very_model(family, sizes):
    model = build(*FAMILIES[family])
    plan = planned(model, sizes)
    before, ids = seen(model), tokens(2, 8)
    expected = model(input_ids=ids).logits

    def body(backend, own):
        assert execution_of(own).plan is plan and seen(own) != before
        own(input_ids=ids).logits.sum().backward()
        restore(backend, own)
        assert execution_of(own) is None and seen(own) == before
        for name, parameter in own.named_parameters():
            assert parameter.grad is None, name
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
        gc.disable()  # callbacks of a collection would be counted too
        sys.setprofile(note)
        try:
            return forward(*args, **kwargs)
        finally:
            sys.setprofile(None)
            gc.enable()

    module.forward = counted
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        del module.forward
    return names


def work(names: list[str]) -> list[str]:
    """Without the look-ups of parameters, which take a call less where a module is shown the full tensor."""
    return [name for name in names if name != "__getattr__"]


# What may drop has hooks inside of its boundaries, where ranks begin or end to draw for themselves.
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
def test_inside_of_boundaries_runs_what_runs_without_a_plan(family):
    kind, extra = FAMILIES[family]
    model = build(kind, dict(extra) | NO_DROPOUT if family == "gpt2" else extra)
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


def test_a_call_that_asks_for_a_balance_loss_beside_cut_experts_is_refused():
    model = build(*FAMILIES["qwen3_moe"])
    plan = planned(model, {"tensor": 2})
    ids = tokens(2, 8)
    with torch.no_grad():
        expected = model(input_ids=ids, labels=ids, output_router_logits=True).loss

    def body(backend, own):
        with torch.no_grad():  # the loss itself is right
            found = own(input_ids=ids, labels=ids, output_router_logits=True).loss
        with pytest.raises(ConfigError, match="output_router_logits=True, whose balance loss would count 2 times"):
            own(input_ids=ids, labels=ids, output_router_logits=True)
        own.config.output_router_logits = True
        with pytest.raises(ConfigError, match="called with output_router_logits=True"):
            own(input_ids=ids, labels=ids)
        own(input_ids=ids, labels=ids, output_router_logits=False).loss.backward()
        return found

    for found in on_all_ranks(model, plan, body):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)  # float32


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


def test_a_module_that_changes_its_input_in_place_is_told_by_name():
    model = build(*FAMILIES["llama"])
    plan = hp.plan(model, hp.DeviceMesh.from_sizes({"tensor": 2}), {"sequence_parallel": False})

    def body(backend, own):
        mlp = own.model.layers[0].mlp
        inner = mlp.forward
        mlp.forward = lambda hidden: inner(hidden.mul_(2))  # whoever calls it still holds the hidden states
        with pytest.raises(
            RuntimeError, match=r"the input 'hidden' of model\.layers\.0\.mlp is a view .* modified inplace"
        ):
            own(input_ids=tokens(2, 8))

    on_all_ranks(model, plan, body)
