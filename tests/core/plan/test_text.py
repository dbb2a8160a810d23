"""What a plan says of itself: traffic and memory against numbers made by hand, the table, the reasons."""

from dataclasses import replace

import pytest

from hyper_parallel import DeviceMesh, LayoutError, PlanError, RaggedShard, ShardingPlan, plan
from hyper_parallel.core.plan.costs import Crossings, Flow, Memory, activation_bytes
from hyper_parallel.core.plan.folding import fold
from hyper_parallel.core.topology import Topology
from tests.core.plan.by_hand import MODELS, by_hand, stored

FAMILIES = sorted(path.stem for path in MODELS.glob("*.json") if path.stem != "mamba")

LAYER = {
    "self_attn.q_proj.weight": ((32, 32), "Linear"),
    "self_attn.k_proj.weight": ((16, 32), "Linear"),
    "self_attn.v_proj.weight": ((16, 32), "Linear"),
    "self_attn.o_proj.weight": ((32, 32), "Linear"),
    "mlp.gate_proj.weight": ((48, 32), "Linear"),
    "mlp.up_proj.weight": ((48, 32), "Linear"),
    "mlp.down_proj.weight": ((32, 48), "Linear"),
    "input_layernorm.weight": ((32,), "RMSNorm"),
    "post_attention_layernorm.weight": ((32,), "RMSNorm"),
}


def decoder(layers=1):
    named = {"embed_tokens.weight": ((96, 32), "Embedding")}
    for layer in range(layers):
        named |= {f"layers.{layer}.{name}": value for name, value in LAYER.items()}
    named |= {"norm.weight": ((32,), "RMSNorm"), "lm_head.weight": ((96, 32), "Linear")}
    around = {f"layers.{layer}{part}": kind for layer in range(layers) for part, kind in AROUND}
    return by_hand(named, {"layers": "ModuleList"} | around)


AROUND = (("", "DecoderLayer"), (".self_attn", "Attention"), (".mlp", "MLP"))
MESH = DeviceMesh((2, 2), ("shard", "tensor"))
BATCH = {"tokens": [4, 8]}
SUPERNODES = Topology.regular(4, ranks_per_machine=2)
"""Ranks 0 and 1 share `tensor`, and a supernode; `shard` goes between supernodes."""


def flows(made, topology=None):
    return {(flow.what, flow.kind, flow.axes, flow.tier): flow.bytes for flow in made.traffic(topology)}


# Elements of each rank, a quarter of what both axes cut and half of what only `shard` does:
MATRICES = 256 + 128 + 128 + 256 + 3 * 384
NORMS = 2 * 16
OUTSIDE, LAST_NORM = 2 * 768, 16
KEPT = 4 * (MATRICES + NORMS + OUTSIDE + LAST_NORM)


def test_memory_is_that_of_parameters_gradients_and_two_moments():
    gathered = 4 * (2 * MATRICES + 2 * NORMS)  # one of two tensor ranks, with all of `shard`
    outside = 4 * 2 * (OUTSIDE + LAST_NORM)
    assert plan(decoder(), MESH, BATCH).memory() == Memory(
        rank=0,
        parameters=KEPT,
        gradients=KEPT,
        optimizer=2 * KEPT,
        whole=4 * (1024 + 512 + 512 + 1024 + 3 * 1536 + 3 * 32 + 2 * 3072),
        gathered=max(gathered, outside),
        even=True,
    )


def test_the_rank_that_holds_the_most_counts():
    uneven = plan(by_hand({"norm.weight": ((3,), "RMSNorm")}), DeviceMesh((2,), ("shard",))).memory()
    assert (uneven.rank, uneven.parameters, uneven.even) == (0, 8, False)


def test_experts_one_by_one_are_counted_on_every_expert_rank():
    """Two of four experts are on each rank, with the embedding and the router."""
    experts = {
        f"experts.{n}.{part}_proj.weight": ((8, 8), "Linear") for n in range(4) for part in ("gate", "up", "down")
    }
    layer = {f"layers.0.mlp.{name}": value for name, value in ({"gate.weight": ((4, 8), "Router")} | experts).items()}
    model = by_hand(
        {"embed_tokens.weight": ((10, 8), "Embedding")} | layer,
        {
            "layers": "ModuleList",
            "layers.0": "Layer",
            "layers.0.mlp": "SparseMoeBlock",
            "layers.0.mlp.experts": "ModuleList",
        }
        | {f"layers.0.mlp.experts.{n}": "MLP" for n in range(4)},
        {"hidden_size": 8, "vocab_size": 10, "num_experts": 4},
    )
    held = plan(model, DeviceMesh((2,), ("expert",))).memory()
    assert (held.parameters, held.even) == (4 * (80 + 32 + 2 * 3 * 64), True)


def test_many_ranks_are_counted_at_once():
    held = plan(decoder(), DeviceMesh((2**16,), ("shard",))).memory()
    one_row_each = 6 * 32 + 48 + 3 * 1 + 2 * 32  # seven matrices, norms, vocabulary twice
    assert (held.rank, held.even, held.parameters) == (0, False, 4 * one_row_each)


def test_a_topology_of_too_few_ranks_is_refused():
    with pytest.raises(LayoutError, match="rank 2 is not in the topology, which has 2 ranks"):
        plan(decoder(), MESH).traffic(Topology.single_machine(2))


def test_what_is_frozen_has_neither_gradient_nor_moments():
    model = decoder()
    frozen = replace(model, parameters=tuple(replace(each, trainable="mlp" in each.name) for each in model.parameters))
    held = plan(frozen, MESH, BATCH).memory()
    assert (held.parameters, held.gradients, held.optimizer) == (KEPT, 4 * 3 * 384, 8 * 3 * 384)


def test_traffic_with_sequence_parallelism_is_gathers_and_scatters():
    half = 4 * 2 * 4 * 32  # float32, 2 sequences a data rank, 4 tokens of the other tensor rank, hidden size
    found = flows(plan(decoder(), MESH, BATCH), SUPERNODES)
    assert found == {
        ("parameters", "all_gather", ("shard",), "slow"): KEPT,
        ("parameters", "reduce_scatter", ("shard",), "slow"): KEPT,
        ("parameters", "all_reduce", ("tensor",), "fast"): 4 * NORMS,
        # attention and mlp, each once forward and once backward; the sequence's end forward, its beginning backward
        ("boundaries", "all_gather", ("tensor",), "fast"): 6 * half,
        ("boundaries", "reduce_scatter", ("tensor",), "fast"): 4 * half,
        # outside of the blocks the sequence is whole: the embedding forward, the head backward
        ("boundaries", "all_reduce", ("tensor",), "fast"): 2 * 2 * half,
    }


def test_traffic_without_sequence_parallelism_is_as_many_bytes_in_all_reduces():
    whole = 4 * 2 * 8 * 32
    found = flows(plan(decoder(), MESH, BATCH | {"sequence_parallel": False}))
    assert found == {
        ("parameters", "all_gather", ("shard",), "fast"): KEPT,
        ("parameters", "reduce_scatter", ("shard",), "fast"): KEPT,
        ("boundaries", "all_reduce", ("tensor",), "fast"): 6 * whole,
    }


def test_blocks_are_gathered_twice_but_for_the_two_that_backward_begins_with():
    for layers, gathers in ((1, 1), (2, 2), (3, 4), (12, 22)):
        found = flows(plan(decoder(layers), MESH))["parameters", "all_gather", ("shard",), "fast"]
        assert found == 4 * (gathers * (MATRICES + NORMS) + OUTSIDE + LAST_NORM)


def test_replicas_sum_the_piece_that_a_rank_keeps():
    found = plan(decoder(), DeviceMesh((3, 2), ("replicate", "shard"))).traffic(Topology.regular(6, 2))
    kept = 4 * (2 * MATRICES + NORMS + 2 * OUTSIDE + LAST_NORM)
    assert found[-1] == Flow("parameters", "all_reduce", ("replicate",), "slow", 2 * 2 * kept // 3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_what_a_few_ranks_say_is_what_all_ranks_say(family, sequence_parallel):
    """The crossing among the ranks that it concerns moves as much as the transition of the whole mesh."""
    mesh = DeviceMesh((2, 2, 2), ("shard", "context", "tensor"))
    made = plan(stored(family), mesh, {"tokens": [4, 16], "sequence_parallel": sequence_parallel})
    crossings = Crossings(mesh, made.tokens)
    for boundary in made.boundaries:
        for contract in (*boundary.inputs, *boundary.outputs):
            whole = contract.transition(mesh, *made.tokens)
            moved = whole.bytes(1)["fast"] + whole.conjugate.bytes(1)["fast"]
            assert sum(count for *_, count in crossings.of(contract).elements) * mesh.size == moved


def test_activations_count_in_the_dtype_of_most_trainable_elements():
    assert activation_bytes(plan(decoder(), MESH)) == 4


# The table


def test_the_table_names_contracts_transitions_roles_and_what_is_pending():
    lines = plan(decoder(), MESH, BATCH).table().splitlines()
    place = lines.index("  layers.0.self_attn: attention")
    assert lines[place + 1 : place + 3] == [
        "    in  hidden: shard(1) -> replicate on tensor: all_gather | "
        "gradient partial -> shard(1) on tensor: reduce_scatter",
        "    out hidden: partial -> shard(1) on tensor: reduce_scatter | "
        "gradient shard(1) -> replicate on tensor: all_gather",
    ]
    assert lines[lines.index("") + 1 :][:2] == [
        "parameters (float32): over shard | tensor; -: whole; pending: whole, its gradient a partial sum; "
        "local: on rank 0",
        "parameter                          shape  role              shard | tensor                  local  bytes",
    ]
    assert [line.split() for line in lines if "norm.weight" in line] == [
        ["input_layernorm.weight", "32", "norm", "shard(0)", "|", "pending", "16", "64"],
        ["post_attention_layernorm.weight", "32", "norm", "shard(0)", "|", "pending", "16", "64"],
        ["norm.weight", "32", "norm", "shard(0)", "|", "-", "16", "64"],
    ]


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3"])
def test_the_table_fits_a_terminal(family):
    mesh = DeviceMesh((2, 4, 2), ("replicate", "shard", "tensor"))
    assert max(map(len, plan(stored(family), mesh).table().splitlines())) <= 120


def test_dtypes_have_a_column_where_they_differ():
    model = decoder()
    mixed = replace(model, parameters=(replace(model.parameters[0], dtype="bfloat16"), *model.parameters[1:]))
    lines = plan(mixed, MESH).table().splitlines()
    assert any(line.startswith("parameters: over shard | tensor;") for line in lines)
    assert [line.split()[2] for line in lines if "embed_tokens.weight" in line or "lm_head.weight" in line] == [
        "bfloat16",
        "float32",
    ]


def test_notes_and_further_names_stand_below_their_parameter():
    lines = plan(stored("gpt2"), MESH).table().splitlines()
    place = next(place for place, line in enumerate(lines) if "attn.c_proj.bias" in line)
    assert lines[place + 1] == "    added by the first tensor rank, to its part of the sum"
    place = next(place for place, line in enumerate(lines) if "wte.weight" in line)
    assert lines[place + 1] == "    = lm_head.weight"


def test_one_of_a_kind_is_no_plural():
    one = plan(by_hand({"norm.weight": ((1,), "RMSNorm")}), DeviceMesh((2,), ("shard",)))
    assert one.summary().startswith("Model: 1 parameter in 1 tensor, 1 unit, mesh shard=2\n")
    alone = plan(decoder(), DeviceMesh((2,), ("tensor",)), {"tokens": [1, 1]})
    assert "activations are counted for 1 sequence of 1 token, 4 bytes an element" in alone.summary()


def test_layers_that_are_alike_are_shown_once_and_all_of_them_when_asked():
    made = plan(decoder(layers=48), MESH, BATCH)
    short, full = made.table(), made.table(full=True)
    assert "layers.0-47.self_attn: attention" in short and "layers.17." not in short
    assert len(short.splitlines()) < 60
    assert all(f"layers.{layer}.mlp: mlp" in full for layer in range(48))
    assert "unit layers.0-47: " in short and "\n  mlp.up_proj.weight " in short
    assert all(f"\n  layers.{layer}.mlp.up_proj.weight " in full for layer in range(48))


def test_folding_keeps_what_differs_apart():
    entries = [(f"layers.{n}.{part}", part + ("!" if n in (0, 3) else "")) for n in range(6) for part in ("a", "b")]
    assert fold([("embed", "e"), *entries, ("norm", "n")]) == [
        ("embed", "e"),
        ("layers.0,3.a", "a!"),
        ("layers.0,3.b", "b!"),
        ("layers.1-2,4-5.a", "a"),
        ("layers.1-2,4-5.b", "b"),
        ("norm", "n"),
    ]
    every_other = [(f"h.{n}.w", n % 2) for n in range(6)]
    assert fold(every_other) == [("h.0-4 by 2.w", 0), ("h.1-5 by 2.w", 1)]


def test_lists_in_lists_are_folded_too():
    entries = [(f"layers.{n}.experts.{e}.w", e // 2) for n in range(3) for e in range(4)]
    assert fold(entries) == [("layers.0-2.experts.0-1.w", 0), ("layers.0-2.experts.2-3.w", 1)]


# Reasons


def test_a_parameter_is_explained_pass_by_pass(tmp_path):
    made = plan(decoder(), MESH, BATCH)
    made.save(tmp_path / "plan.yaml")
    text = ShardingPlan.load(tmp_path / "plan.yaml").explain("layers.0.self_attn.k_proj.weight")
    assert text == made.explain("layers.0.self_attn.k_proj.weight")
    lines = text.splitlines()
    assert lines[0] == "layers.0.self_attn.k_proj.weight: [16, 32] float32, trainable"
    assert lines[1].startswith("  1 role: key (hidden states to keys): ") and "2 heads of 8" in lines[1]
    assert lines[2:9] == [
        "  2 group: acts in layers.0.self_attn",
        "  3 boundary: attention: takes hidden states, mixes them across positions, gives hidden states",
        "  4 template:",
        "    shard (2): strided_shard(0, 2): fully sharded data parallelism cuts dim 0, after the other axes; "
        "its gradient is summed over the axis",
        "    tensor (2): shard(0): tensor deals out whole heads",
        "  5 overrides: none",
        "  6 lint: passes; a plan with a violation is not made",
    ]
    assert lines[9:] == [
        "  unit: layers.0, gathered before forward, freed after forward",
        "  local shape: [4, 32] on rank 0",
    ]


def test_what_an_override_decided_is_remembered(tmp_path):
    lines = {"parameters": {"lm_head.weight": {"placements": {"tensor": "replicate"}}}}
    made = plan(decoder(), MESH, lines)
    assert "    tensor (2): replicate: tensor cuts the vocabulary; here it is whole" in made.explain("lm_head.weight")
    decided = next(line for line in made.explain("lm_head.weight").splitlines() if line.startswith("  5 overrides: "))
    assert "lm_head.weight" in decided and "tensor: replicate" in decided
    assert "  5 overrides: none" in made.explain("norm.weight")
    made.save(tmp_path / "plan.yaml")
    assert ShardingPlan.load(tmp_path / "plan.yaml").explain("lm_head.weight") == made.explain("lm_head.weight")


def test_a_boundary_is_explained_by_its_module():
    text = plan(decoder(), MESH, BATCH).explain("layers.0.mlp")
    assert "  1 roles: gate, up, down" in text
    assert "    in  hidden: shard(1) -> replicate on tensor: all_gather" in text


def test_a_tied_name_is_explained_as_its_parameter():
    text = plan(stored("llama_tied"), MESH).explain("lm_head.weight")
    assert "  one parameter with model.embed_tokens.weight; model.embed_tokens.weight is its first name" in text
    assert text.splitlines()[3:6] == [
        "  2 group: acts in model.embed_tokens",
        "  3 boundary: embedding: token or position indices to hidden states",
        "    as lm_head.weight it acts in lm_head: head: hidden states to logits",
    ]


def test_a_placement_that_was_written_into_the_file_is_called_so():
    made, ragged = plan(decoder(), MESH), RaggedShard((0,), (1, 1))
    first, *rest = made.parameters
    changed = replace(first, placements={**first.placements, "shard": ragged})
    text = replace(made, parameters=(changed, *rest)).explain(first.name)
    assert f"    shard (2): {ragged}: written by hand into the file of the plan" in text


def test_an_unknown_name_gets_the_closest_ones():
    with pytest.raises(PlanError, match="no boundary 'norm.wieght'; did you mean 'norm.weight'"):
        plan(decoder(), MESH).explain("norm.wieght")


def test_a_plan_without_roles_says_so():
    text = plan(decoder(), DeviceMesh((2,), ("shard",))).explain("norm.weight")
    assert "1-3 role, group, boundary: not asked, since only replicate and shard have more than one rank" in text
