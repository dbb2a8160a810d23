"""Which matrices parameters hold, against what the forward code of each architecture does with their outputs."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel import ConfigError
from hyper_parallel.core.muon.adapters import packed_view, views_of
from hyper_parallel.core.muon.matrices import LogicalMatrix, MatrixView, split_rows, usual_view
from tests.core.plan.by_hand import HEADS, by_hand, renamed, stored


def numbered(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape)


def matrices(view: MatrixView, weight: np.ndarray) -> dict[str, np.ndarray]:
    """Every logical matrix [out, in] of a parameter, [planes, out, in] where it has planes; by label."""
    planes = weight.reshape(view.planes, *view.plane)
    found = {}
    for matrix in view.matrices:
        rows, columns = (np.concatenate([np.array(each) for each in side]) for side in (matrix.rows, matrix.columns))
        own = planes[:, rows[:, None], columns[None, :]]
        own = own.swapaxes(1, 2) if matrix.transposed else own
        assert own.shape[1:] == matrix.shape
        found[matrix.label] = own if view.lead else own[0]
    return found


def assert_holds(view: MatrixView, weight: np.ndarray, expected: dict[str, np.ndarray]) -> None:
    found = matrices(view, weight)
    assert list(found) == list(expected)
    for label, own in expected.items():
        np.testing.assert_array_equal(found[label], own, err_msg=label)


def view_in(name: str, tail: str) -> MatrixView:
    views = views_of(stored(name))
    (found,) = {view for each, view in views.items() if each.endswith(tail)}
    return found


def one(shape: tuple[int, ...], owner: str, name: str, modules: dict[str, str], config: dict | None = None):
    """The view of a parameter in a small model."""
    return views_of(by_hand({name: (shape, owner)}, modules, HEADS | (config or {})))[name]


def test_concatenated_projections_are_queries_keys_and_values():
    """Phi-3: `qkv[..., :32]`, then 16 of keys, then 16 of values."""
    weight = numbered(64, 32)
    assert_holds(
        view_in("phi3", "qkv_proj.weight"),
        weight,
        {"query": weight[:32], "key": weight[32:48], "value": weight[48:]},
    )


def test_a_projection_stored_transposed_is_split_along_its_columns():
    """GPT-2: `x @ weight`, [in, out], then `split(32)`."""
    weight = numbered(32, 96)
    query, key, value = np.split(weight.T, 3)
    assert_holds(view_in("gpt2", "c_attn.weight"), weight, {"query": query, "key": key, "value": value})
    assert_holds(view_in("gpt2", "c_fc.weight"), numbered(32, 128), {"": numbered(32, 128).T})


def test_groups_of_heads_are_gathered_into_queries_keys_and_values():
    """GPT-NeoX: `view(.., heads, 3 * size)`, then `chunk(3)`."""
    weight = numbered(96, 32)
    query, key, value = (weight.reshape(4, 3, 8, 32)[:, kind].reshape(32, 32) for kind in range(3))
    assert_holds(view_in("gpt_neox", "query_key_value.weight"), weight, {"query": query, "key": key, "value": value})


def test_groups_of_several_queries_a_key_and_a_value():
    """Falcon: `view(.., groups, queries + 2, size)`; all but the last two are queries."""
    weight = numbered(64, 32)
    name, around = "h.0.self_attention.query_key_value.weight", {"h.0.self_attention": "FalconAttention"}
    dense = {"h.0.self_attention.dense.weight": ((32, 32), "FalconLinear")}
    config = HEADS | {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2}
    view = views_of(by_hand({name: ((64, 32), "FalconLinear")} | dense, around, config))[name]
    grouped = weight.reshape(2, 4, 8, 32)
    assert_holds(
        view,
        weight,
        {
            "query": grouped[:, :2].reshape(32, 32),
            "key": grouped[:, 2].reshape(16, 32),
            "value": grouped[:, 3].reshape(16, 32),
        },
    )


def test_gates_and_ups_end_to_end():
    weight = numbered(96, 32)
    assert_holds(view_in("phi3", "gate_up_proj.weight"), weight, {"gate": weight[:48], "up": weight[48:]})


def test_packed_experts_are_matrices_of_their_own_and_their_gates_and_ups_too():
    """Mixtral: `linear(x, gate_up[expert]).chunk(2)`, [experts, out, in]."""
    weight = numbered(4, 96, 32)
    assert_holds(view_in("mixtral", "experts.gate_up_proj"), weight, {"gate": weight[:, :48], "up": weight[:, 48:]})
    down = numbered(4, 32, 48)
    assert_holds(view_in("mixtral", "experts.down_proj"), down, {"": down})
    assert view_in("mixtral", "experts.down_proj").planes == 4


def test_packed_experts_stored_transposed_with_gates_and_ups_one_by_one():
    """gpt-oss: `x @ gate_up[expert]`, [experts, in, out], then `[..., ::2]` and `[..., 1::2]`."""
    weight = numbered(4, 32, 96)
    gate, up = weight[..., ::2].swapaxes(1, 2), weight[..., 1::2].swapaxes(1, 2)
    assert_holds(view_in("gpt_oss", "experts.gate_up_proj"), weight, {"gate": gate, "up": up})


def test_latent_attention_has_two_factors_of_queries_and_of_keys_and_values():
    """DeepSeek: each head of q_b is `split([8, 4])`, of kv_b `split([8, 8])`; kv_a is `split([12, 4])`."""
    weight = numbered(48, 16)
    plain, turned = np.split(weight.reshape(4, 12, 16), [8], axis=1)
    assert_holds(
        view_in("deepseek_v3", "q_b_proj.weight"),
        weight,
        {"query": plain.reshape(32, 16), "rotated query": turned.reshape(16, 16)},
    )
    weight = numbered(64, 12)
    key, value = weight.reshape(4, 2, 8, 12).swapaxes(0, 1).reshape(2, 32, 12)
    assert_holds(view_in("deepseek_v3", "kv_b_proj.weight"), weight, {"key": key, "value": value})
    weight = numbered(16, 32)
    assert_holds(
        view_in("deepseek_v3", "kv_a_proj_with_mqa.weight"), weight, {"latent": weight[:12], "rotated key": weight[12:]}
    )
    assert len(view_in("deepseek_v3", "q_a_proj.weight").matrices) == 1


def test_queries_without_a_latent_of_their_own_have_two_factors_too():
    attention = "layers.0.self_attn"
    latent = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 12}
    shapes = {"q_proj": (48, 32), "kv_a_proj_with_mqa": (16, 32), "kv_b_proj": (64, 12), "o_proj": (32, 32)}
    model = by_hand(
        {f"{attention}.{name}.weight": (shape, "Linear") for name, shape in shapes.items()},
        {attention: "DeepseekV2Attention"},
        HEADS | latent,
    )
    view = views_of(model)[f"{attention}.q_proj.weight"]
    assert [(each.label, each.shape) for each in view.matrices] == [("query", (32, 32)), ("rotated query", (16, 32))]


def test_names_of_latent_attention_tell_where_the_planner_knows_no_role():
    """LongCat has two attentions in a list in each block."""
    latent = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    around = {"layers.0.self_attn.0": "LongcatFlashMLA"}
    found = [
        [each.label for each in one(shape, "Linear", f"layers.0.self_attn.0.{name}.weight", around, latent).matrices]
        for name, shape in {"q_b_proj": (48, 16), "kv_b_proj": (64, 12), "kv_a_proj_with_mqa": (16, 32)}.items()
    ]
    assert found == [["query", "rotated query"], ["key", "value"], ["latent", "rotated key"]]
    other = one((50, 16), "Linear", "layers.0.self_attn.0.q_b_proj.weight", around, latent)
    assert len(other.matrices) == 1


@pytest.mark.parametrize(
    ("owner", "name", "shape", "config", "expected"),
    [
        (
            "Mamba2Mixer",
            "in_proj.weight",
            (148, 32),
            {"n_groups": 2, "state_size": 4, "num_heads": 4},
            {"gate": 64, "input": 64, "B": 8, "C": 8, "step": 4},
        ),
        ("JetMoeMoE", "input_linear.weight", (4, 96, 32), {}, {"gate": 48, "up": 48}),
        ("LongcatFlashExperts", "gate_up_proj", (4, 96, 32), {}, {"gate": 48, "up": 48}),
        ("Phi4MultimodalAttention", "qkv_proj.weight", (64, 32), {}, {"query": 32, "key": 16, "value": 16}),
    ],
)
def test_what_architectures_say_of_linears_that_are_not_planned(owner, name, shape, config, expected):
    view = one(shape, "Linear" if "." in name else owner, f"layers.0.it.{name}", {"layers.0.it": owner}, config)
    assert {each.label: each.shape[0] for each in view.matrices} == expected
    assert view.planes == (4 if len(shape) == 3 else 1)


def test_queries_with_a_gate_beside_each():
    """Qwen3-Next: `q_proj(x).view(.., heads, 2 * size).chunk(2)`."""
    weight, attention = numbered(64, 32), "layers.0.self_attn"
    shapes = {"q_proj": (64, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
    model = by_hand(
        {f"{attention}.{name}.weight": (shape, "Linear") for name, shape in shapes.items()},
        {attention: "Qwen3NextAttention"},
    )
    query, gate = weight.reshape(4, 2, 8, 32).swapaxes(0, 1).reshape(2, 32, 32)
    assert_holds(views_of(model)[f"{attention}.q_proj.weight"], weight, {"query": query, "gate": gate})


def test_mixers_of_tokens_say_how_their_projections_are_taken_apart():
    """Qwen3-Next: for each of two key heads 8 of queries, 8 of keys, 16 of values, 16 of gates."""
    config = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    around = {"layers.0.linear_attn": "Qwen3NextGatedDeltaNet"}
    weight = numbered(96, 32)
    parts = np.split(weight.reshape(2, 48, 32), [8, 16, 32], axis=1)
    assert_holds(
        one((96, 32), "Linear", "layers.0.linear_attn.in_proj_qkvz.weight", around, config),
        weight,
        {label: part.reshape(-1, 32) for label, part in zip(("query", "key", "value", "gate"), parts)},
    )
    weight = numbered(8, 32)
    beta, decay = weight.reshape(2, 2, 2, 32).swapaxes(0, 1).reshape(2, 4, 32)
    view = one((8, 32), "Linear", "layers.0.linear_attn.in_proj_ba.weight", around, config)
    assert_holds(view, weight, {"beta": beta, "decay": decay})


def test_an_order_that_no_cut_respects_is_still_taken_apart():
    """CodeGen: `view(.., 4, 3 * 8).split(8)`: queries, values, keys."""
    weight = numbered(96, 32)
    query, value, key = (weight.reshape(4, 3, 8, 32)[:, kind].reshape(32, 32) for kind in range(3))
    view = one((96, 32), "Linear", "h.0.attn.qkv_proj.weight", {"h.0.attn": "CodeGenAttention"})
    assert_holds(view, weight, {"query": query, "value": value, "key": key})


def test_a_bare_parameter_of_a_known_class():
    weight = numbered(96, 32)
    view = one((96, 32), "MultiheadAttention", "layers.0.self_attn.in_proj_weight", {})
    assert_holds(view, weight, dict(zip(("query", "key", "value"), np.split(weight, 3))))


def test_sizes_that_the_configuration_does_not_explain_leave_one_matrix():
    around = {"layers.0.linear_attn": "Qwen3NextGatedDeltaNet"}
    view = one((96, 32), "Linear", "layers.0.linear_attn.in_proj_qkvz.weight", around)
    assert view == MatrixView((96, 32), 0, 1)


@pytest.mark.parametrize(
    ("shape", "owner", "plane", "planes", "transposed"),
    [
        ((16, 3, 4, 4), "Conv2d", (16, 48), 1, False),
        ((16, 8, 3), "Conv1d", (16, 24), 1, False),
        ((16, 8, 3, 3, 3), "Conv3d", (16, 216), 1, False),
        ((8, 16, 3), "ConvTranspose1d", (8, 48), 1, True),
        ((5, 8, 16), "Stranger", (8, 16), 5, False),
        ((8, 1, 16), "Stranger", (8, 16), 1, False),
        ((8, 16), "Conv1D", (8, 16), 1, True),
    ],
)
def test_what_classes_tell(shape, owner, plane, planes, transposed):
    view = one(shape, owner, "blocks.0.kernel.weight", {})
    assert (view.plane, view.planes, view.matrices[0].transposed) == (plane, planes, transposed)


def test_names_that_wrappers_change_change_nothing():
    model = stored("deepseek_v3")
    wrapped = renamed(model, lambda name: name.replace("self_attn.", "self_attn._orig_mod."), {})
    before, after = views_of(model), views_of(wrapped)
    assert list(before.values()) == list(after.values())


def test_views_by_hand_win_the_later_one_over_the_earlier():
    model = stored("llama")
    views = views_of(model, {"**.q_proj.weight": {"heads": 4}, "model.layers.0.**.q_proj.weight": "whole"})
    assert views["model.layers.0.self_attn.q_proj.weight"] == usual_view((32, 32))
    weight = numbered(32, 32)
    heads = {f"head {head}": weight[8 * head : 8 * head + 8] for head in range(4)}
    assert_holds(views["model.layers.1.self_attn.q_proj.weight"], weight, heads)


def test_a_tied_parameter_is_found_under_both_names():
    views = views_of(stored("llama_tied"), {"lm_head.weight": {"split_rows": [90, 6], "labels": ["tokens", "spare"]}})
    assert [each.label for each in views["model.embed_tokens.weight"].matrices] == ["tokens", "spare"]
    assert "lm_head.weight" not in views


def test_short_forms_keep_how_a_parameter_is_stored():
    """GPT-2's columns are outputs, so its heads are blocks of columns."""
    name = "transformer.h.0.attn.c_attn.weight"
    weight = numbered(32, 96)
    view = views_of(stored("gpt2"), {name: {"heads": 12}})[name]
    assert_holds(view, weight, {f"head {head}": weight[:, 8 * head : 8 * head + 8].T for head in range(12)})
    plain = views_of(stored("gpt2"), {name: {"transposed": False}})[name]
    assert plain == MatrixView((32, 96), 0, 1)


def test_short_forms_of_every_kind():
    model = by_hand({"blocks.0.bank": ((4, 6, 8), "Bank"), "blocks.0.w": ((12, 8), "Linear")})
    given = {
        "blocks.0.bank": {"experts": True, "transposed": True, "split_rows": [2, 2], "groups": 2, "labels": ["a", "b"]},
        "blocks.0.w": {"interleaved": 3},
    }
    views, bank, weight = views_of(model, given), numbered(4, 6, 8), numbered(12, 8)
    a, b = bank.swapaxes(1, 2)[:, [0, 1, 4, 5]], bank.swapaxes(1, 2)[:, [2, 3, 6, 7]]
    assert_holds(views["blocks.0.bank"], bank, {"a": a, "b": b})
    assert_holds(views["blocks.0.w"], weight, {f"kind {kind}": weight[kind::3] for kind in range(3)})
    flat = views_of(model, {"blocks.0.bank": {"experts": False}})["blocks.0.bank"]
    assert (flat.planes, flat.plane) == (1, (4, 48))


def test_a_view_by_hand_is_taken_as_it_is():
    view = split_rows((32, 32), (8, 24))
    assert views_of(stored("llama"), {"model.layers.0.self_attn.q_proj.weight": view})[
        "model.layers.0.self_attn.q_proj.weight"
    ] is view  # fmt: skip


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model.nowhere.weight": "whole"}, ["'model.nowhere.weight' fits no parameter", "names are as"]),
        ({"**.q_proj**": "whole"}, ["** stands alone between dots"]),
        ({"model.norm.weight": {"heads": 2}}, ["model.norm.weight [32] is no matrix"]),
        ({"**.q_proj.weight": {"heads": 5}}, ["self_attn.q_proj.weight: 32 outputs are no multiple of heads 5"]),
        ({"**.q_proj.weight": {"split_rows": [8, 8]}}, ["[32, 32] has 32 outputs", "1 x (8 + 8) = 16"]),
        ({"**.q_proj.weight": {"split_rows": [8, 24], "labels": ["a"]}}, ["2 split_rows and 1 labels"]),
        ({"**.q_proj.weight": {"split_rows": []}}, ["split_rows is sizes of the matrices", "found []"]),
        ({"**.q_proj.weight": {"head": 4}}, ["there is no 'head'", "heads (so many matrices"]),
        ({"**.q_proj.weight": {"heads": 4, "interleaved": 2}}, ["heads and interleaved are two ways"]),
        ({"**.q_proj.weight": {"groups": 4}}, ["groups belongs to split_rows"]),
        ({"**.q_proj.weight": {"heads": True}}, ["heads is so many matrices", "found True"]),
        ({"**.q_proj.weight": {"experts": True}}, ["[32, 32]: with experts along dim 0 it needs three dims"]),
        ({"**.q_proj.weight": "split"}, ["'split' is no view", "MatrixView"]),
        ({"**.q_proj.weight": MatrixView((16, 32), 0, 1)}, ["has the shape [32, 32], and the view is of [16, 32]"]),
    ],
)
def test_what_can_not_be_is_refused_by_name(given, words):
    with pytest.raises(ConfigError) as raised:
        views_of(stored("llama"), given)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_parts_that_leave_outputs_out_are_no_view():
    with pytest.raises(ConfigError, match=r"\[8, 4\] has 8 outputs, found 2 x \(3\) = 6"):
        packed_view((8, 4), [("a", 3)], groups=2)


def test_a_matrix_that_is_repeated_is_one_range():
    view = packed_view((8, 4), [("a", 2)], groups=4)
    assert view.matrices == (LogicalMatrix((range(8),), (range(4),), label="a"),)
