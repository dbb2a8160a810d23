"""A decoder's configuration and its initial weights: data, without a framework."""

import ast
from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.core.errors import ConfigError
from hyper_parallel.models.config import DecoderConfig
from hyper_parallel.models.weights import initial_weights

MODELS = Path(__file__).parents[2] / "hyper_parallel" / "models"
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
}


def config(**changes):
    return DecoderConfig(**(SIZES | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be a positive whole number, found 0"),
        ({"hidden_size": 64.0}, "hidden_size must be a positive whole number, found 64.0"),
        ({"num_layers": True}, "num_layers must be a positive whole number, found True"),
        ({"rope_theta": "1e4"}, "rope_theta must be a positive number, found '1e4'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, found nan"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, found 1"),
        ({"num_heads": 5}, "num_heads must be a multiple of num_kv_heads, found 5 and 2"),
        ({"head_dim": 15}, r"head_dim must be even \(rotary positions turn pairs\), found 15"),
    ],
)
def test_a_field_that_can_not_be_is_named_with_its_value(changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_all_wrong_fields_are_named_at_once():
    with pytest.raises(ConfigError, match="vocab_size(.|\n)*rope_theta"):
        config(vocab_size=-1, rope_theta=0)


def test_initial_weights_are_float32_ones_and_normal_numbers_of_the_given_width():
    weights = initial_weights(config(initializer_range=0.05), seed=3)
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}
    norms = [array for name, array in weights.items() if "norm" in name]
    assert len(norms) == 9 and all((array == 1).all() for array in norms)
    numbers = np.concatenate([array.ravel() for name, array in weights.items() if "norm" not in name])
    # 84k draws: the standard error of the mean is 0.05 / 290 = 1.7e-4, of the deviation 1.2e-4; five of each.
    assert abs(numbers.mean()) < 9e-4
    assert abs(numbers.std() - 0.05) < 6e-4


def test_a_tensor_depends_on_the_seed_and_its_name_alone():
    small, other = initial_weights(config(), 1), initial_weights(config(), 2)
    deep = initial_weights(config(num_layers=4), 1)
    for name, array in small.items():
        np.testing.assert_array_equal(array, deep[name])
        assert "norm" in name or (array != other[name]).mean() > 0.99
    first, second = (small[f"model.layers.{index}.mlp.up_proj.weight"] for index in range(2))
    assert (first != second).mean() > 0.99


def test_initial_weights_stay_what_they_were():
    matrix = initial_weights(config(), seed=0)["model.layers.1.self_attn.k_proj.weight"]
    np.testing.assert_array_equal(matrix[0, :3], np.float32([0.012708039, -0.00032238182, -0.01609938]))


@pytest.mark.parametrize("name", ["torch_decoder.py", "mindspore_decoder.py"])
def test_a_decoder_knows_nothing_of_hyper_parallel(name):
    nodes = ast.walk(ast.parse((MODELS / name).read_text()))
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert len(imports) >= 4 and not [line for line in map(ast.unparse, imports) if "hyper_parallel" in line]
