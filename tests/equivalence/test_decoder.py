"""The two decoders against Hugging Face's Qwen3, against each other, and against themselves."""

from pathlib import Path

import numpy as np
import pytest

from hyper_parallel.models.config import DecoderConfig
from hyper_parallel.models.weights import initial_weights, parameter_shapes
from tests.equivalence import decoder_bodies as bodies

# Made by Hugging Face's Qwen3ForCausalLM in PyTorch: token ids, weights p:NAME, the loss, gradients g:NAME.
QWEN3 = np.load(Path(__file__).parents[1] / "data" / "qwen3_tiny.npz")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
VARIANTS = {
    "tied embeddings": {"tie_word_embeddings": True},
    "as many keys as queries": {"num_kv_heads": 4},
    "one key for all queries": {"num_kv_heads": 1, "num_layers": 1},
    "heads wider than the model": {"head_dim": 14, "num_heads": 3, "num_kv_heads": 3},
    "odd sizes": {"vocab_size": 37, "hidden_size": 23, "intermediate_size": 29, "rope_theta": 1e6},
}


def random_case(seed=0, batch=3, length=11, **changes):
    """Sizes, weights wide enough for attention to matter, and token ids."""
    sizes = SIZES | {"initializer_range": 0.3} | changes
    ids = np.random.default_rng(seed).integers(0, sizes["vocab_size"], (batch, length))
    return sizes, initial_weights(DecoderConfig(**sizes), seed), ids


def assert_gradients_agree(found, expected, relative):
    """Every gradient within `relative` of its own largest element."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=relative * np.abs(gradient).max(), err_msg=name)


def test_loss_and_every_gradient_are_those_of_hugging_face(pool, backend_name):
    weights = {name[2:]: QWEN3[name] for name in QWEN3 if name.startswith("p:")}
    expected = {name[2:]: QWEN3[name] for name in QWEN3 if name.startswith("g:")}
    [(loss, gradients)] = pool(backend_name, 1).run(bodies.loss_and_gradients, SIZES, weights, QWEN3["__ids"])
    # float32 sums of a few hundred terms in another order: a few units of 6e-8.
    assert loss == pytest.approx(float(QWEN3["__loss"]), rel=1e-6)
    assert_gradients_agree(gradients, expected, relative=5e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_decoders_agree(pool, variant):
    case = random_case(**VARIANTS[variant])
    [(torch_loss, torch_gradients)] = pool("torch", 1).run(bodies.loss_and_gradients, *case)
    [(mindspore_loss, mindspore_gradients)] = pool("mindspore", 1).run(bodies.loss_and_gradients, *case)
    # As above; the wide weights make intermediate values, and with them the rounding, some ten times larger.
    assert mindspore_loss == pytest.approx(torch_loss, rel=2e-6)
    assert_gradients_agree(mindspore_gradients, torch_gradients, relative=5e-5)


def test_a_tied_gradient_is_the_sum_of_both_uses(pool, backend_name):
    sizes, weights, ids = random_case(tie_word_embeddings=True)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    untied = sizes | {"tie_word_embeddings": False}, weights | {head: weights[embedding]}, ids
    [(_, tied)] = pool(backend_name, 1).run(bodies.loss_and_gradients, sizes, weights, ids)
    [(_, apart)] = pool(backend_name, 1).run(bodies.loss_and_gradients, *untied)
    apart[embedding] += apart.pop(head)
    assert_gradients_agree(tied, apart, relative=5e-6)  # rounding of one more sum


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_have_the_names_and_shapes_that_weights_are_made_for(pool, backend_name, tied):
    sizes, weights, _ = random_case(tie_word_embeddings=tied)
    [(shapes, shared)] = pool(backend_name, 1).run(bodies.parameters, sizes, weights)
    expected = parameter_shapes(DecoderConfig(**sizes))
    head = {"lm_head.weight": expected["model.embed_tokens.weight"]} if tied else {}
    assert list(shapes.items()) == list((expected | head).items())
    assert shared == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})


def test_a_token_sees_none_after_it_and_no_other_row(pool, backend_name):
    sizes, weights, ids = random_case(batch=2, length=9)
    changed = ids.copy()
    changed[0, 5] = (changed[0, 5] + 1) % sizes["vocab_size"]
    [(before, after, shorter)] = pool(backend_name, 1).run(bodies.logits, sizes, weights, ids, changed, ids[1:, :4])
    np.testing.assert_array_equal(before[0, :5], after[0, :5])
    np.testing.assert_array_equal(before[1], after[1])
    assert (np.abs(before[0, 5:] - after[0, 5:]).max(axis=-1) > 1e-3).all(), "the token and all after it change"
    # Another shape is another order of sums: float32 rounding of logits around 10.
    np.testing.assert_allclose(shorter[0], before[1, :4], rtol=0, atol=5e-5)


def test_more_tokens_than_positions_are_refused(pool, backend_name):
    sizes, weights, ids = random_case(length=12, max_position_embeddings=11)
    [message] = pool(backend_name, 1).run(bodies.refusal, sizes, weights, ids)
    assert message == "12 tokens in a row, but max_position_embeddings is 11"
