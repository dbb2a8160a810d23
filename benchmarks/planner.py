"""How long planning takes, from a description to a saved plan, without weights, ranks or devices.

The large models have the names of the stored descriptions in tests/data/models and the sizes of the published
configurations. "lowered" counts the transitions that were worked out: boundaries that are alike share one.

    python benchmarks/planner.py
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from pathlib import Path
from time import process_time
from typing import Any, Mapping

from hyper_parallel import DeviceMesh, ModelDescription, ShardingPlan, plan
from hyper_parallel.core.plan.model import ParameterDescription
from hyper_parallel.core.topology import Topology
from hyper_parallel.core.transition import lower

MODELS = Path(__file__).parents[1] / "tests" / "data" / "models"

QWEN3_235B = {
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "moe_intermediate_size": 1536,
    "vocab_size": 151936,
}
DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "vocab_size": 129280,
}
LLAMA_1000 = {
    "hidden_size": 4096,
    "num_hidden_layers": 111,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def qwen3_235b() -> ModelDescription:
    """Qwen3-235B-A22B."""
    size = QWEN3_235B
    hidden, head, experts, inner = (
        size["hidden_size"],
        size["head_dim"],
        size["num_experts"],
        size["moe_intermediate_size"],
    )
    return scaled(
        "qwen3_moe",
        size,
        {"layers": (size["num_hidden_layers"], lambda layer: 0)},
        {
            "embed_tokens.weight|lm_head.weight": (size["vocab_size"], hidden),
            "q_proj.weight": (size["num_attention_heads"] * head, hidden),
            "k_proj.weight|v_proj.weight": (size["num_key_value_heads"] * head, hidden),
            "o_proj.weight": (hidden, size["num_attention_heads"] * head),
            "q_norm.weight|k_norm.weight": (head,),
            "experts.gate_up_proj": (experts, 2 * inner, hidden),
            "experts.down_proj": (experts, hidden, inner),
            "gate.weight": (experts, hidden),
            "norm.weight|layernorm.weight": (hidden,),
        },
    )


def deepseek_v3() -> ModelDescription:
    """DeepSeek-V3, without its head for a second token."""
    size = DEEPSEEK_V3
    hidden, experts, inner = size["hidden_size"], size["n_routed_experts"], size["moe_intermediate_size"]
    heads, plain, turned, value = (
        size[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    dense, first = size["intermediate_size"], size["first_k_dense_replace"]
    return scaled(
        "deepseek_v3",
        size,
        {"layers": (size["num_hidden_layers"], lambda layer: int(layer >= first))},
        {
            "embed_tokens.weight|lm_head.weight": (size["vocab_size"], hidden),
            "q_a_proj.weight": (size["q_lora_rank"], hidden),
            "q_a_layernorm.weight": (size["q_lora_rank"],),
            "q_b_proj.weight": (heads * (plain + turned), size["q_lora_rank"]),
            "kv_a_proj_with_mqa.weight": (size["kv_lora_rank"] + turned, hidden),
            "kv_a_layernorm.weight": (size["kv_lora_rank"],),
            "kv_b_proj.weight": (heads * (plain + value), size["kv_lora_rank"]),
            "o_proj.weight": (hidden, heads * value),
            "shared_experts.gate_proj.weight|shared_experts.up_proj.weight": (inner, hidden),
            "shared_experts.down_proj.weight": (hidden, inner),
            "experts.gate_up_proj": (experts, 2 * inner, hidden),
            "experts.down_proj": (experts, hidden, inner),
            "gate.weight": (experts, hidden),
            "gate.e_score_correction_bias": (experts,),
            "mlp.gate_proj.weight|mlp.up_proj.weight": (dense, hidden),
            "mlp.down_proj.weight": (hidden, dense),
            "norm.weight|layernorm.weight": (hidden,),
        },
    )


def deepseek_v3_one_by_one() -> ModelDescription:
    """The same model with its experts in a list, each a feed-forward layer of its own, as other code keeps them."""
    packed = deepseek_v3()
    experts, hidden, inner = (DEEPSEEK_V3[key] for key in ("n_routed_experts", "hidden_size", "moe_intermediate_size"))
    parts = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    modules, parameters = dict(packed.modules), []
    for each in packed.parameters:
        block, _, leaf = each.name.rpartition(".")
        if leaf == "gate_up_proj":
            modules[block] = "ModuleList"
            for number in range(experts):
                modules[f"{block}.{number}"] = "DeepseekV3MLP"
                for part, shape in parts.items():
                    linear = f"{block}.{number}.{part}"
                    modules[linear] = "Linear"
                    parameters.append(ParameterDescription(f"{linear}.weight", shape, "bfloat16", "Linear"))
        elif leaf != "down_proj":
            parameters.append(each)
    return replace(packed, parameters=tuple(parameters), modules=modules)


def llama_of_1000_tensors() -> ModelDescription:
    """A Llama of 8B's sizes and 111 layers: 1,002 tensors."""
    size = LLAMA_1000
    hidden, head, inner = size["hidden_size"], size["head_dim"], size["intermediate_size"]
    return scaled(
        "llama",
        size,
        {"layers": (size["num_hidden_layers"], lambda layer: 0)},
        {
            "embed_tokens.weight|lm_head.weight": (size["vocab_size"], hidden),
            "q_proj.weight": (size["num_attention_heads"] * head, hidden),
            "k_proj.weight|v_proj.weight": (size["num_key_value_heads"] * head, hidden),
            "o_proj.weight": (hidden, size["num_attention_heads"] * head),
            "gate_proj.weight|up_proj.weight": (inner, hidden),
            "down_proj.weight": (hidden, inner),
            "norm.weight|layernorm.weight": (hidden,),
        },
    )


def scaled(
    name: str, config: Mapping[str, Any], lists: Mapping[str, tuple], shapes: Mapping[str, tuple]
) -> ModelDescription:
    """A stored description with other sizes. `lists` gives the length of the list of blocks and which stored block each
    one is like; `shapes` maps endings of names, separated by "|", to shapes, and the first that fits counts."""
    stored = ModelDescription.load(MODELS / f"{name}.json")
    ((block, (count, like)),) = lists.items()
    pattern = re.compile(rf"(.*\b{block})\.(\d+)((?:\..*)?)")

    def repeated(names: Mapping[str, Any]) -> dict[str, Any]:
        """Everything under its new names: what belongs to a block once for each block that is like it."""
        outside = {each: value for each, value in names.items() if not pattern.fullmatch(each)}
        inside: dict[int, list] = {}
        for each, value in names.items():
            if found := pattern.fullmatch(each):
                inside.setdefault(int(found[2]), []).append((found[1], found[3], value))
        blocks = {
            f"{before}.{layer}{after}": value for layer in range(count) for before, after, value in inside[like(layer)]
        }
        return outside | blocks

    def shape_of(each: ParameterDescription) -> tuple[int, ...]:
        for endings, shape in shapes.items():
            if any(each.name.endswith(ending) for ending in endings.split("|")):
                return shape
        raise KeyError(f"no shape is given for {each.name}")

    made = repeated({each.name: replace(each, shape=shape_of(each), dtype="bfloat16") for each in stored.parameters})
    return replace(
        stored,
        parameters=tuple(replace(each, name=name) for name, each in made.items()),
        modules=repeated(stored.modules),
        buffers=(),
        config={**stored.config, **config},
    )


CASES = (
    ("Llama, 1,002 tensors", llama_of_1000_tensors, {"replicate": 2, "shard": 4, "tensor": 8}, 32),
    ("Qwen3-235B-A22B", qwen3_235b, {"replicate": 6, "shard": 2, "expert": 16, "tensor": 4}, 384),
    ("DeepSeek-V3", deepseek_v3, {"replicate": 6, "shard": 4, "expert": 8, "tensor": 4}, 384),
    (
        "DeepSeek-V3, one by one",
        deepseek_v3_one_by_one,
        {"replicate": 6, "shard": 4, "expert": 8, "context": 4},
        384,
    ),
)


def main() -> None:
    columns = "".join(f"{step:>8}" for step in ("describe", "plan", "save", "load", "table"))
    print(f"{'model':24}{'tensors':>9}{'ranks':>7}  {columns}{'lowered':>9}  (CPU seconds)")
    for title, make, sizes, supernode in CASES:
        mesh = DeviceMesh.from_sizes(sizes)
        lower.cache_clear()
        batch = {"tokens": (mesh.size // mesh.axis_size("tensor"), 4096)}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.yaml"
            times = [process_time()]
            make().save(Path(folder) / "model.json")
            model = ModelDescription.load(Path(folder) / "model.json")
            times.append(process_time())
            made = plan(model, mesh, batch)
            times.append(process_time())
            made.save(path)
            times.append(process_time())
            assert ShardingPlan.load(path) == made
            times.append(process_time())
            made.table(Topology.regular(mesh.size, 8, supernode // 8))
            times.append(process_time())
        spent = "".join(f"{later - earlier:8.2f}" for earlier, later in zip(times, times[1:]))
        print(f"{title:24}{len(made.parameters):9,}{mesh.size:7}  {spent}{lower.cache_info().misses:9}")


if __name__ == "__main__":
    main()
