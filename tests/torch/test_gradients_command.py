"""`hyper-parallel validate --gradients`: a small version of a model, run under its plan in this process."""

from __future__ import annotations

import json
import re

import pytest
import torch

from hyper_parallel.cli import main
from hyper_parallel.gradients_command import reduced
from tests.torch.test_validation_on_shapes import DEEPSEEK_V3, QWEN3_235B


@pytest.fixture(autouse=True)
def one_thread_for_each_rank():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def validate(model: str, mesh: str, *more: str) -> int:
    return main(["validate", "--model", model, "--mesh", mesh, "--gradients", *more])


def configuration(tmp_path, values: dict) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    return f"hf:{path}"


@pytest.mark.parametrize(
    ("values", "mesh", "told"),
    [
        (QWEN3_235B, "tensor=2", "num_hidden_layers 94 -> 2, num_attention_heads 64 -> 32, num_key_value_heads 4 -> 2"),
        (DEEPSEEK_V3, "shard=2,tensor=2", "n_routed_experts 256 -> 16, kv_lora_rank 512 -> 24"),
        ({"model_type": "gpt2"}, "tensor=2", "vocab_size 50257 -> 256, n_embd 768 -> 32, n_layer 12 -> 2"),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else None,
)
def test_a_small_version_of_a_configuration_gives_the_numbers_of_one_device(tmp_path, capsys, values, mesh, told):
    assert validate(configuration(tmp_path, values), mesh) == 0
    out = capsys.readouterr().out
    assert out.startswith("a small version of ") and told in out
    assert "every number is that of one device" in out
    assert len(set(re.findall(r"loss, .*  ([\d.]{9})", out))) == 1


def test_layers_are_as_many_as_asked_for(tmp_path, capsys):
    assert validate(configuration(tmp_path, {"model_type": "llama"}), "tensor=2", "--layers", "1") == 0
    assert "num_hidden_layers 32 -> 1" in capsys.readouterr().out


def test_small_sizes_fit_each_other():
    values = QWEN3_235B | {"layer_types": ["full_attention"] * 94, "eos_token_id": 151645, "n_group": 1}
    small = reduced(values, ranks=4, layers=3)
    assert small["num_attention_heads"] == 16 * small["num_key_value_heads"] == 64
    assert (small["head_dim"], small["num_experts"], small["num_experts_per_tok"]) == (16, 16, 8)
    assert (small["layer_types"], small["eos_token_id"]) == (["full_attention"] * 3, 255)
    tiny = {"hidden_size": 8, "num_attention_heads": 2, "vocab_size": 11, "num_layers": 1}
    assert reduced(tiny, ranks=1, layers=2) == tiny


FACTORY = """
from transformers import LlamaConfig, LlamaForCausalLM

def make(dropout=0.0):
    sizes = dict(vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(**sizes, attention_dropout=dropout, attn_implementation="eager"))

def dropping():
    return make(0.5).train()

class Nameless:
    pass

def nameless():
    model = make()
    model.config = Nameless()
    return model
"""


@pytest.fixture
def factory(tmp_path, monkeypatch):
    (tmp_path / "made_for_gradients.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    return "made_for_gradients"


def test_a_factorys_model_runs_as_it_is(factory, capsys):
    assert validate(f"{factory}:make", "shard=2,tensor=2", "--tokens", "1,8") == 0
    assert "every number is that of one device" in capsys.readouterr().out


def test_another_number_is_told_by_the_exit_status(factory, capsys):
    """A model that draws for dropout gives another number at each call, and its ranks are threads here."""
    assert validate(f"{factory}:dropping", "tensor=2") == 1
    told = capsys.readouterr().out
    assert "this is not the model" in told
    assert "ranks that are threads of one process share its random generators" in told


def test_what_can_not_be_run_is_refused(factory, tmp_path, capsys):
    assert validate(f"{factory}:make", "shard=64") == 2
    assert "all ranks run in this process, and shard=64 has 64; write a mesh of at most 16" in capsys.readouterr().err
    assert validate(f"{factory}:nameless", "shard=2") == 2
    assert "write its vocab_size into model.config" in capsys.readouterr().err
    assert validate(f"json:{tmp_path}/model.json", "tensor=2") == 2
    assert "which has no code to run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--model", "hf:x.json", "--layers", "2"], "--layers is for --gradients"),
        (["--model", "a:b", "--gradients", "--layers", "2"], "--layers is for hf:CONFIG.json"),
        (["--model", "hf:x.json", "--gradients", "--layers", "0"], "--layers is 0; write a whole number from 1 up"),
    ],
)
def test_options_that_do_not_go_together_end_with_a_message(options, told, capsys):
    with pytest.raises(SystemExit):
        main(["validate", "--mesh", "tensor=2", *options])
    assert told in capsys.readouterr().err
