"""`hyper-parallel validate --gradients`: run one step of a small version of a model, and compare its numbers."""

from __future__ import annotations

import argparse
from inspect import signature
from typing import Any, Callable

import numpy as np

import hyper_parallel
from hyper_parallel.core.backend import Module
from hyper_parallel.core.equivalence.batch import data_ranks
from hyper_parallel.core.errors import ConfigError
from hyper_parallel.core.mesh import DeviceMesh
from hyper_parallel.core.plan.model_json import config_of
from hyper_parallel.plan_command import load_code, load_model, make_of_configuration, read_configuration

MOST_RANKS = 16
"""All ranks run in this process, each with a model of its own."""

SMALL = {
    "vocab_size": 256,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
"""What a size of a configuration is made where it is larger."""

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
QUERIES = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
HEAD = 16
"""The features of a head, and of the hidden states for each where a configuration derives the one from the other."""


def run(options: argparse.Namespace, mesh: DeviceMesh, tokens: tuple[int, int]) -> int:
    """Print the report. Returns 0 when every number is that of one device, else 1.

    Raises:
        ConfigError, PlanError: there is nothing to compare; the message has a line for each thing to put right.
    """
    if mesh.size > MOST_RANKS:
        raise ConfigError(
            f"--gradients: all ranks run in this process, and {mesh} has {mesh.size:,}; write a mesh of at most "
            f"{MOST_RANKS}, with the same axes"
        )
    make = _small(options.model, mesh, options.layers or 2) if options.model.startswith("hf:") else _own(options.model)
    asked = {} if options.overrides is None else {"overrides": options.overrides}
    model = make()
    plan = hyper_parallel.plan(model, mesh, **asked)
    report = hyper_parallel.check_gradients(make, plan, _batch(model, mesh, tokens))
    print(report.table())
    return 0 if report.ok else 1


def _own(text: str) -> Callable[[], Module]:
    load_code(text)  # refuses what has no code

    def make() -> Module:
        return load_model(text)

    return make


def _small(text: str, mesh: DeviceMesh, layers: int) -> Callable[[], Module]:
    """What makes the small version of a configuration's model; says what has been made smaller."""
    path = text.partition(":")[2]
    config = read_configuration(path)
    before = config.to_dict()
    values = reduced(before, mesh.axis_size("tensor"), layers)
    changed = [f"{key} {before[key]} -> {each}" for key, each in values.items() if _is_told(before[key], each)]
    print(f"a small version of {path}: {', '.join(changed) or 'as it is'}\n")
    small = type(config).from_dict(values)

    def make() -> Module:
        model = make_of_configuration(small, path, with_values=True).eval()
        if any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules()):
            model.set_experts_implementation("eager")  # others lack float64
        return model

    return make


def _is_told(before: Any, after: Any) -> bool:
    return before != after and isinstance(before, int)


def reduced(values: dict[str, Any], ranks: int, layers: int) -> dict[str, Any]:
    """The values of a configuration with small sizes: as many query heads share a key head as before, and there are
    heads, and experts to choose from, for every tensor rank."""
    new = dict(values)
    depth = next((values[key] for key in LAYERS if _is_size(values.get(key))), None)
    for key, value in values.items():
        if key in LAYERS and _is_size(value):
            new[key] = min(value, layers)
        elif isinstance(value, (list, tuple)) and len(value) == depth:
            new[key] = value[:layers]  # something for each layer
        elif key in SMALL and _is_size(value):
            new[key] = min(value, SMALL[key])
        elif key in EXPERTS and _is_size(value):
            chosen, groups = (values.get(each) or 1 for each in ("num_experts_per_tok", "n_group"))
            new[key] = min(value, max(2 * chosen, 2 * groups, ranks))
        elif key.endswith("_token_id") and isinstance(value, int):
            new[key] = min(value, new.get("vocab_size", value) - 1, SMALL["vocab_size"] - 1)
    _reduce_heads(values, new, ranks)
    return new


def _reduce_heads(values: dict[str, Any], new: dict[str, Any], ranks: int) -> None:
    queries = next((key for key in QUERIES if _is_size(values.get(key))), None)
    hidden = next((key for key in HIDDEN if _is_size(values.get(key))), None)
    if queries is None or hidden is None:
        return
    keys = next((key for key in KEYS if _is_size(values.get(key))), None)
    shared = values[queries] // values[keys] if keys else 1
    few = min(values[keys] if keys else values[queries], max(ranks, 2))
    new[queries] = few * shared
    if keys:
        new[keys] = few
    if not _is_size(values.get("qk_rope_head_dim")) and _is_size(values.get("head_dim")):
        new["head_dim"] = min(values["head_dim"], HEAD)
    # Where a configuration says how wide a head is, its hidden states are as wide as they like.
    heads = few if _is_size(values.get("head_dim")) else few * shared
    new[hidden] = min(values[hidden], max(heads * HEAD, 2 * HEAD))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _batch(model: Module, mesh: DeviceMesh, tokens: tuple[int, int]) -> dict[str, Any]:
    """Random tokens for every rank that has samples of its own."""
    code = model.forward if hasattr(model, "forward") else model.construct
    known = list(signature(code).parameters)
    vocabulary = config_of(model).get("vocab_size")
    if not known or not _is_size(vocabulary):
        raise ConfigError(
            f"--gradients: {type(model).__name__} does not tell its tokens: write its vocab_size into model.config, "
            "and take tokens as the first argument; or call hyper_parallel.check_gradients with a batch"
        )
    shape = tokens[0] * data_ranks(mesh), tokens[1]
    name = "input_ids" if "input_ids" in known else known[0]
    batch: dict[str, Any] = {name: np.random.default_rng(0).integers(0, vocabulary, shape)}
    return batch | ({"use_cache": False} if "use_cache" in known or hasattr(model, "generate") else {})
