"""Descriptions of MindSpore cells: names as PyTorch has them, running statistics as buffers."""

from __future__ import annotations  # noqa: I001 (our backend first: it sets launch_blocking)

import numpy as np
import pytest

from hyper_parallel import ConfigError, DeviceMesh, ModelDescription, backends, full_parameters, plan
from hyper_parallel.backends.mindspore import modules as module_reader
from hyper_parallel.cli import main
from hyper_parallel.core.plan.model import BufferDescription, ParameterDescription, describe
from tests.mindspore import description_bodies as bodies

import mindspore as ms
from mindspore import mint, nn


class Scaled(nn.LayerNorm):
    """A layer of MindSpore's with something else under the name that PyTorch would give to its scale."""

    def __init__(self, size):
        super().__init__((size,))
        self.weight = ms.Parameter(ms.Tensor(np.zeros((1,), np.float32)), name="weight")


class Small(nn.Cell):
    def __init__(self):
        super().__init__()
        self.config = {"hidden_size": 4}
        self.embed = nn.Embedding(10, 4)
        self.layers = nn.CellList([nn.Dense(4, 4, has_bias=False), nn.Dense(4, 4)])
        self.again = self.layers[0]
        self.norm = nn.LayerNorm((4,))
        self.scaled = Scaled(4)
        self.statistics = nn.BatchNorm2d(4)
        self.more_statistics = mint.nn.BatchNorm1d(4)
        self.head = nn.Dense(4, 10, has_bias=False)
        self.head.weight = self.embed.embedding_table
        self.embed.embedding_table.requires_grad = False
        self.gamma = ms.Parameter(ms.Tensor(np.zeros((2,), np.float16)), name="gamma")
        self.register_buffer("table", ms.Tensor(np.zeros((2, 3), np.float32)), persistent=False)
        self.register_buffer("absent", None)


def described(model):
    return describe(model, backends.load("mindspore"))


def test_a_cell_is_described_with_its_buffers_and_ties():
    found = described(Small())
    assert found == ModelDescription(
        class_name="Small",
        parameters=(
            ParameterDescription("gamma", (2,), "float16", "Small"),
            ParameterDescription("embed.weight", (10, 4), "float32", "Embedding", trainable=False),
            ParameterDescription("layers.0.weight", (4, 4), "float32", "Linear"),
            ParameterDescription("layers.1.weight", (4, 4), "float32", "Linear"),
            ParameterDescription("layers.1.bias", (4,), "float32", "Linear"),
            ParameterDescription("norm.weight", (4,), "float32", "LayerNorm"),
            ParameterDescription("norm.bias", (4,), "float32", "LayerNorm"),
            ParameterDescription("scaled.gamma", (4,), "float32", "Scaled"),
            ParameterDescription("scaled.bias", (4,), "float32", "Scaled"),
            ParameterDescription("scaled.weight", (1,), "float32", "Scaled"),
            ParameterDescription("statistics.weight", (4,), "float32", "BatchNorm2d"),
            ParameterDescription("statistics.bias", (4,), "float32", "BatchNorm2d"),
            ParameterDescription("more_statistics.weight", (4,), "float32", "BatchNorm1d"),
            ParameterDescription("more_statistics.bias", (4,), "float32", "BatchNorm1d"),
        ),
        modules={
            "": "Small",
            "embed": "Embedding",
            "layers": "ModuleList",
            "layers.0": "Linear",
            "layers.1": "Linear",
            "again": "Linear",
            "norm": "LayerNorm",
            "scaled": "Scaled",
            "statistics": "BatchNorm2d",
            "more_statistics": "BatchNorm1d",
            "head": "Linear",
        },
        tied={"again.weight": "layers.0.weight", "head.weight": "embed.weight"},
        buffers=(
            BufferDescription("table", (2, 3), "float32", persistent=False),
            BufferDescription("statistics.running_mean", (4,), "float32"),
            BufferDescription("statistics.running_var", (4,), "float32"),
            BufferDescription("more_statistics.running_mean", (4,), "float32"),
            BufferDescription("more_statistics.running_var", (4,), "float32"),
            BufferDescription("more_statistics.num_batches_tracked", (), "int64"),
        ),
        config={"hidden_size": 4},
    )


def test_a_description_comes_back_equal_from_a_file(tmp_path):
    found = described(Small())
    found.save(tmp_path / "small.json")
    assert ModelDescription.load(tmp_path / "small.json") == found


def test_a_model_made_without_values_has_the_same_description():
    with module_reader.without_values():
        huge = nn.Dense(200_000, 300_000)  # 240 GB, if it had values
        small = Small()
    assert [each.shape for each in described(huge).parameters] == [(300_000, 200_000), (300_000,)]
    assert described(small) == described(Small())


def test_values_go_by_the_same_names():
    model = nn.SequentialCell(nn.Embedding(3, 2), nn.LayerNorm((2,)))
    values = {"0.weight": np.arange(6.0).reshape(3, 2), "1.weight": np.full(2, 2.0), "1.bias": np.full(2, 3.0)}
    module_reader.load_parameters(model, values)
    found = full_parameters(model)
    assert found.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(found[name], value)
    np.testing.assert_array_equal(model[1].gamma.asnumpy(), values["1.weight"])
    assert plan(model, DeviceMesh((2,), ("shard",)))["0.weight"].shape == (3, 2)
    with pytest.raises(ConfigError, match="0.embedding_table is not in the model"):
        module_reader.load_parameters(model, {"0.embedding_table": values["0.weight"]})


def test_the_command_line_plans_what_a_factory_makes(tmp_path, monkeypatch, capsys):
    lines = ["from mindspore import nn", "", "def make():", "    return nn.Dense(4, 2)", ""]
    (tmp_path / "mindspore_model_of_the_user.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--model", "mindspore_model_of_the_user:make", "--mesh", "shard=2"]) == 0
    assert "Linear: 10 parameters in 2 tensors" in capsys.readouterr().out


def test_a_plan_with_those_names_is_applied(pool):
    results = pool("mindspore", 2).run(bodies.shard_own_layers, timeout=60)
    assert [local["0.weight"] for local, _ in results] == [(3, 4), (2, 4)]
    for local, whole in results:
        assert local.keys() == whole.keys() == bodies.VALUES.keys()
        assert local["1.weight"] == local["1.bias"] == (2,)
        for name, value in bodies.VALUES.items():
            np.testing.assert_array_equal(whole[name], value)
