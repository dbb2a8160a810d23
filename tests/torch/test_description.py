"""Descriptions of PyTorch modules, and of Hugging Face's models on the meta device."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

from hyper_parallel import ConfigError, ModelDescription, PlanError, backends
from hyper_parallel.cli import main
from hyper_parallel.core.plan.model import BufferDescription, ParameterDescription, describe
from hyper_parallel.plan_command import describe_hugging_face

MODELS = sorted((Path(__file__).parents[1] / "data" / "models").glob("*.json"))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = {"hidden_size": 4}
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4)])
        self.again = self.layers[0]
        self.norm = nn.BatchNorm1d(4).to(torch.bfloat16)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.embed.weight.requires_grad = False
        self.register_buffer("table", torch.zeros(2, 3), persistent=False)
        self.register_buffer("mask", self.table)
        self.register_buffer("absent", None)


def described(model):
    return describe(model, backends.load("torch"))


def test_a_module_is_described_with_its_buffers_and_ties():
    assert described(Small()) == ModelDescription(
        class_name="Small",
        parameters=(
            ParameterDescription("embed.weight", (10, 4), "float32", "Embedding", trainable=False),
            ParameterDescription("layers.0.weight", (4, 4), "float32", "Linear"),
            ParameterDescription("layers.1.weight", (4, 4), "float32", "Linear"),
            ParameterDescription("layers.1.bias", (4,), "float32", "Linear"),
            ParameterDescription("norm.weight", (4,), "bfloat16", "BatchNorm1d"),
            ParameterDescription("norm.bias", (4,), "bfloat16", "BatchNorm1d"),
        ),
        modules={
            "": "Small",
            "embed": "Embedding",
            "layers": "ModuleList",
            "layers.0": "Linear",
            "layers.1": "Linear",
            "again": "Linear",
            "norm": "BatchNorm1d",
            "head": "Linear",
        },
        tied={"again.weight": "layers.0.weight", "head.weight": "embed.weight"},
        buffers=(
            BufferDescription("table", (2, 3), "float32", persistent=False),
            BufferDescription("norm.running_mean", (4,), "bfloat16"),
            BufferDescription("norm.running_var", (4,), "bfloat16"),
            BufferDescription("norm.num_batches_tracked", (), "int64"),
        ),
        config={"hidden_size": 4},
    )


@pytest.fixture
def one_rank():
    """A process group of this process alone, as FSDP2 needs one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_what_fsdp2_has_sharded_goes_by_the_names_that_it_had(one_rank):
    model = Small().float()
    before = described(model)
    for module in (*model.layers, model):
        torch.distributed.fsdp.fully_shard(module)
    after = described(model)
    assert type(model).__name__ != "Small" and after.class_name == "Small"
    assert after.modules == before.modules
    assert [each.module_class for each in after.parameters] == [each.module_class for each in before.parameters]


def test_the_meta_device_gives_the_same_description():
    with backends.load("torch").modules.without_values():
        without = Small()
    assert {each.device.type for each in without.parameters()} == {"meta"}
    assert described(without) == described(Small())


def test_what_is_described_comes_back_equal_from_a_file(tmp_path):
    found = described(Small())
    found.save(tmp_path / "small.json")
    assert ModelDescription.load(tmp_path / "small.json") == found


def test_a_dtype_that_no_plan_knows_is_refused():
    model = nn.Linear(2, 2, bias=False)
    model.register_buffer("packed", torch.empty(2, dtype=torch.float8_e5m2fnuz))
    with pytest.raises(PlanError, match="packed has the dtype float8_e5m2fnuz, which no plan knows; known are bool"):
        described(model)


def configuration(path, folder, **changes):
    """The configuration of a family as a file of its own."""
    config = json.loads(path.read_text())["config"] | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_family_of_hugging_face_is_described_from_its_configuration(path, tmp_path):
    found, expected = describe_hugging_face(configuration(path, tmp_path)), ModelDescription.load(path)
    assert found.parameters == expected.parameters
    assert found.buffers == expected.buffers
    assert found.modules == expected.modules
    assert found.tied == expected.tied
    # transformers adds what the class has by default.
    assert {key: found.config.get(key) for key in expected.config} == expected.config
    found.save(tmp_path / "again.json")
    assert ModelDescription.load(tmp_path / "again.json") == found


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_parameters_have_the_dtype_that_the_configuration_says(key, tmp_path):
    llama = next(path for path in MODELS if path.stem == "llama")
    found = describe_hugging_face(configuration(llama, tmp_path, **{key: "bfloat16"}))
    assert {each.dtype for each in found.parameters} == {"bfloat16"}
    assert {each.dtype for each in found.buffers} == {"float32"}
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, "the model_type of .*config.json is 'lama', which .*; did you mean 'llama'"),
        ({"model_type": "t5"}, "config.json describes a t5, which is no causal language model"),
        ({"model_type": None}, "is None, which transformers does not know"),
        ({"hidden_size": "wide"}, "transformers makes no model of .*config.json: .*hidden_size"),
    ],
)
def test_a_configuration_of_no_model_is_refused_on_one_line(changes, message, tmp_path):
    llama = next(path for path in MODELS if path.stem == "llama")
    with pytest.raises(ConfigError, match=message) as caught:
        describe_hugging_face(configuration(llama, tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_the_command_line_plans_a_configuration_and_a_factory(tmp_path, monkeypatch, capsys):
    llama = next(path for path in MODELS if path.stem == "llama_tied")
    arguments = ["plan", "--mesh", "shard=2", "--model"]
    assert main([*arguments, f"hf:{configuration(llama, tmp_path)}"]) == 0
    assert "LlamaForCausalLM: 18,592 parameters in 20 tensors" in capsys.readouterr().out
    lines = ["from torch import nn", "", "def make():", "    return nn.Linear(4, 2)", ""]
    (tmp_path / "torch_model_of_the_user.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "torch_model_of_the_user:make"]) == 0
    assert "Linear: 10 parameters in 2 tensors" in capsys.readouterr().out
