"""The parameters of a decoder as numpy arrays: their names and shapes, and their initial values."""

from __future__ import annotations

import hashlib

import numpy as np

from hyper_parallel.models.config import DecoderConfig


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter, in the order of the model; a tied output head is not listed."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    layer = {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def initial_weights(config: DecoderConfig, seed: int) -> dict[str, np.ndarray]:
    """Name -> float32 array: norms are ones, matrices normal with `config.initializer_range`.

    A tensor's numbers depend on `seed`, its name and its shape alone, so that adding a layer changes no other.
    """
    return {
        name: np.ones(shape, np.float32) if len(shape) == 1 else _normal(seed, name, shape, config.initializer_range)
        for name, shape in parameter_shapes(config).items()
    }


def _normal(seed: int, name: str, shape: tuple[int, ...], deviation: float) -> np.ndarray:
    """Normal numbers from a stream of their own."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    return generator.standard_normal(shape, np.float32) * np.float32(deviation)
