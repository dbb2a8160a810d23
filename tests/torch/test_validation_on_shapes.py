"""Validation without devices: plans of real sizes, in one process, on tensors that have shapes only."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hyper_parallel as hp
from hyper_parallel.cli import main
from hyper_parallel.core.errors import ConfigError, ContractError
from tests.torch.test_hugging_face import FAMILIES, OTHERS, SIZES

QWEN3_235B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
}
MESH = "replicate=2,shard=6,expert=8,tensor=8"


def made(family: str) -> torch.nn.Module:
    kind, sizes = (FAMILIES | OTHERS)[family]
    config = AutoConfig.for_model(kind, **(SIZES | sizes))
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def planned(model: torch.nn.Module, sizes: dict[str, int], sequence_parallel: bool = True) -> hp.ShardingPlan:
    return hp.plan(model, hp.DeviceMesh.from_sizes(sizes), {"sequence_parallel": sequence_parallel})


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"shard": 2, "expert": 2, "context": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_of_every_family_holds_on_shapes(family, sizes):
    model = made(family)
    plan = planned(model, sizes)
    verdict = hp.validate(model, plan, (2, 8))
    assert verdict.boundaries > 5 and verdict.operators > 50 and not verdict.skipped
    believed = (each.module for each in plan.boundaries if each.region == "opaque" or each.module.endswith(".experts"))
    assert set(verdict.trusted) == set(believed)
    assert all(each.is_meta for each in model.parameters()) and "weight" not in vars(model.lm_head)


def test_experts_run_on_shapes_as_batched_products():
    model = made("qwen3_moe")
    model.set_experts_implementation("batched_mm")
    plan = planned(model, {"tensor": 2})
    assert hp.validate(model, plan, (2, 8)).trusted == ()
    wrong = replace(
        plan,
        parameters=tuple(
            replace(each, placements={"tensor": hp.Shard(1)}) if each.role == "expert_gate_up" else each
            for each in plan.parameters
        ),
    )
    with pytest.raises(ContractError, match=r"^model\.layers\.0\.mlp\.experts: chunk over tensor: "):
        hp.validate(model, wrong, (2, 8))


def test_a_broken_plan_stops_where_it_is_broken():
    model = made("llama")
    plan = planned(model, {"tensor": 2})
    without = replace(plan, boundaries=tuple(each for each in plan.boundaries if each.module != "model.layers.1.mlp"))
    with pytest.raises(ContractError, match=r"^model\.layers\.1\.mlp\.gate_proj: linear over tensor: "):
        hp.validate(model, without, (1, 8))


def test_uneven_sizes_are_run_on_the_first_and_the_last_rank():
    kind, sizes = FAMILIES["llama"]
    config = AutoConfig.for_model(kind, **(SIZES | sizes | {"vocab_size": 97, "intermediate_size": 49}))
    verdict = hp.validate(
        lambda: AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval(),
        planned(AutoModelForCausalLM.from_config(config), {"tensor": 2}),
        (1, 7),
    )
    assert verdict.ranks == (0, 1)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "opt", "bloom", "llama", "mixtral"])
def test_dropout_is_followed_in_training(family, sequence_parallel):
    model = made(family)
    plan = planned(model, {"tensor": 2}, sequence_parallel)
    states = torch.get_rng_state()
    assert "in evaluation mode: dropout was not drawn" in str(hp.validate(model, plan, (1, 8)))
    assert "evaluation" not in str(hp.validate(model.train(), plan, (1, 8)))
    assert torch.equal(states, torch.get_rng_state())


def test_what_is_the_same_on_every_rank_is_not_dropped_inside_of_a_module_that_is_cut():
    model = made("gpt2").train()
    plan = planned(model, {"tensor": 2})
    dropout = torch.nn.Dropout(0.1)
    for block in model.transformer.h:
        block.mlp.register_forward_pre_hook(lambda module, args: (dropout(args[0]),))
    with pytest.raises(ContractError) as refused:
        hp.validate(model, plan, (1, 8))
    assert str(refused.value).startswith(
        "transformer.h.0.mlp: dropout over tensor: input is replicate, its gradient partial, the same on every rank, "
        "and here each rank draws other numbers, since the module works on a part of its features or of the sequence"
    )
    assert "legal: input as shard; or dropout outside of the module, or behind its last linear" in str(refused.value)


def test_what_can_not_be_validated_is_refused():
    model = made("llama")
    plan = planned(model, {"tensor": 2})
    with pytest.raises(ConfigError, match="two whole numbers from 1 up"):
        hp.validate(model, plan, (0, 8))
    with pytest.raises(ConfigError, match="model.embed_tokens.weight has values, but only shapes are run here"):
        hp.validate(model.to_empty(device="cpu"), plan)
    with pytest.raises(ConfigError, match="for a plan"):
        hp.validate(model, "plan.yaml")


def plain_step(values: dict) -> float:
    """Seconds of the processor that a step on shapes takes without a plan."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).train()
        model.set_experts_implementation("batched_mm")
        begun = time.process_time()
        model(torch.zeros(1, 4096, dtype=torch.long)).logits.sum().backward()
    return time.process_time() - begun


@pytest.mark.parametrize("values", [QWEN3_235B, DEEPSEEK_V3], ids=lambda values: values["model_type"])
def test_real_sizes_on_768_ranks_take_less_than_a_minute(tmp_path, capsys, values):
    """A minute on two cores like those where a plain step takes 2.5 s; slower ones are given more."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    begun = time.process_time()  # of one core: by the clock it is less, but for others on the machine
    assert main(["validate", "--model", f"hf:{path}", "--mesh", MESH]) == 0
    spent = time.process_time() - begun
    assert spent < 60 / 2.5 * 10 * plain_step(values | {"num_hidden_layers": values["num_hidden_layers"] // 10})
    told = capsys.readouterr().out
    assert "the plan holds" in told and "on ranks 0 and 767" in told
    assert "believed as their boundaries say, being opaque or not to be run on shapes: model.layers." in told


def test_the_command_tells_a_broken_plan_by_its_exit_status(tmp_path, capsys):
    config, overrides = tmp_path / "config.json", tmp_path / "overrides.yaml"
    config.write_text(json.dumps({"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 1, "resid_pdrop": 0.0}))
    overrides.write_text("sequence_parallel: false\n")
    assert main(["validate", "--model", f"hf:{config}", "--mesh", "tensor=2", "--tokens", "1,8"]) == 0
    assert "GPT2LMHeadModel: the plan holds: " in capsys.readouterr().out
    model = "tests.torch.test_validation_on_shapes:dropping"
    arguments = ["validate", "--model", model, "--mesh", "tensor=2", "--tokens", "1,8", "--overrides", str(overrides)]
    assert main(arguments) == 1
    assert capsys.readouterr().out.startswith("the plan does not hold: transformer.h.0.mlp.dropout: alpha_dropout over")


def dropping() -> torch.nn.Module:
    model = made("gpt2").train()
    for block in model.transformer.h:
        block.mlp.dropout = torch.nn.AlphaDropout(0.1)
    return model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model", "json:model.json", "--mesh", "tensor=2"],
            "is the description of a model, which has no code",
        ),
        (["--model", "hf:none.json", "--mesh", "tensor=2"], "none.json"),
        (["--model", "llama", "--mesh", "tensor=2"], "names no model"),
        (["--model", "json:a", "--mesh", "tensor=2", "--tokens", "0,4"], "--tokens: '0,4' is no B,S"),
    ],
)
def test_the_command_refuses_what_it_cannot_validate(arguments, message, capsys):
    assert main(["validate", *arguments]) == 2
    assert message in capsys.readouterr().err
