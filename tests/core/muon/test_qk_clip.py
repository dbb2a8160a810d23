"""QK-clip: which rows are scaled by how much, held against logits, and where a rank holds them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel import ConfigError, DeviceMesh, Layout, Shard
from hyper_parallel.backends import load
from hyper_parallel.core.execution.inprocess import InProcessWorld
from hyper_parallel.core.muon.qk_clip import NONE, ClipOfRank, QKClip, local_boxes, plan
from hyper_parallel.core.muon.qk_heads import attentions_of
from hyper_parallel.core.placement import StridedShard
from tests.core import strategies
from tests.core.plan.by_hand import HEADS, by_hand, stored

TAU = 10.0
CLIP = QKClip(tau=TAU)
ALONE = DeviceMesh((1,), ("shard",))


def attention(config: dict | None = None, owner: str = "SomeAttention", **shapes: tuple[int, ...]):
    """One attention module; a name of two dims is a weight, of one a bias."""
    parameters = {
        f"layers.0.self_attn.{name}.{'weight' if len(shape) > 1 else 'bias'}": (shape, "Linear")
        for name, shape in shapes.items()
    }
    return by_hand(parameters, {"layers.0.self_attn": owner}, HEADS | (config or {}))


def whole(model) -> dict[str, Layout]:
    return {each.name: Layout(ALONE, {}, each.shape) for each in model.parameters}


def clipped(model, weights: dict[str, np.ndarray], maxima, clip: QKClip = CLIP) -> dict[str, np.ndarray]:
    """The weights of one attention after QK-clip on one rank."""
    of_rank = ClipOfRank(plan(model, clip), whole(model), 0)
    after = {name: weight.copy() for name, weight in weights.items()}
    for name, boxes, factors in of_rank.scales(of_rank.pack(maxima)):
        for box, factor in zip(boxes, factors, strict=True):
            after[name][box] *= factor
    return after


def random_weights(model) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(7)
    return {each.name: generator.standard_normal(each.shape) * 3 for each in model.parameters}


def of_heads(values: np.ndarray, heads: int) -> np.ndarray:
    """[tokens, heads * size] as [heads, tokens, size]."""
    return values.reshape(len(values), heads, -1).swapaxes(0, 1)


def largest(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The largest logit of each head, for [heads, tokens, size] and as many or fewer key heads."""
    keys = np.repeat(keys, len(queries) // len(keys), axis=0)
    return (queries @ keys.swapaxes(1, 2)).max((1, 2))


TOKENS = np.random.default_rng(3).standard_normal((5, 32))


def separate(weights: dict[str, np.ndarray], query_heads: int, key_heads: int) -> np.ndarray:
    """Logits of `q_proj(x) @ k_proj(x)`, with biases where there are some."""
    made = []
    for name in ("q_proj", "k_proj"):
        tail = f"layers.0.self_attn.{name}"
        made.append(TOKENS @ weights[f"{tail}.weight"].T + weights.get(f"{tail}.bias", 0.0))
    return largest(of_heads(made[0], query_heads), of_heads(made[1], key_heads))


def test_the_largest_logit_of_each_clipped_head_becomes_tau():
    model = attention({"num_key_value_heads": 4}, q_proj=(32, 32), k_proj=(32, 32), v_proj=(32, 32), o_proj=(32, 32))
    weights = random_weights(model)
    before = separate(weights, 4, 4)
    bound = float(np.sort(before)[1])  # two heads are above
    after = separate(clipped(model, weights, {"layers.0.self_attn": before}, QKClip(tau=bound)), 4, 4)
    # factors are of float32 maxima: half a unit in the last of 24 bits, twice
    np.testing.assert_allclose(after, np.minimum(before, bound), rtol=2**-23)


def test_keys_that_heads_share_take_the_factor_of_the_largest_and_biases_go_with_their_weights():
    shapes = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
    model = attention(**shapes)
    biases = {f"layers.0.self_attn.{name}.bias": ((shape[0],), "Linear") for name, shape in shapes.items()}
    model = by_hand(
        {each.name: (each.shape, "Linear") for each in model.parameters} | biases, dict(model.modules), HEADS
    )
    weights = random_weights(model)
    before = separate(weights, 4, 2)
    after = separate(clipped(model, weights, {"layers.0.self_attn": before}), 4, 2)
    gamma = np.minimum(1, TAU / before)
    shared = np.repeat(gamma.reshape(2, 2).min(1), 2)
    np.testing.assert_allclose(after, before * np.sqrt(gamma * shared), rtol=1e-6)
    assert (after <= TAU * (1 + 1e-6)).all() and (before > TAU).any()


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
def test_alpha_is_the_share_of_the_queries(alpha):
    model = attention({"num_key_value_heads": 4}, q_proj=(32, 32), k_proj=(32, 32), v_proj=(32, 32), o_proj=(32, 32))
    weights = {each.name: np.ones(each.shape) for each in model.parameters}
    maxima = {"layers.0.self_attn": [5.0, 20.0, NONE, -3.0]}
    after = clipped(model, weights, maxima, QKClip(TAU, alpha))
    query, key = (after[f"layers.0.self_attn.{name}.weight"] for name in ("q_proj", "k_proj"))
    np.testing.assert_allclose(query[:, 0].reshape(4, 8)[:, 0], [1, 0.5**alpha, 1, 1])
    np.testing.assert_allclose(key[:, 0].reshape(4, 8)[:, 0], [1, 0.5 ** (1 - alpha), 1, 1])
    for name in ("v_proj", "o_proj"):
        assert (after[f"layers.0.self_attn.{name}.weight"] == 1).all()


def test_latent_attention_scales_what_belongs_to_one_head_only():
    """Logits are those of plain and of rotated features; the rotated key is one for all heads, and stays."""
    model = stored("deepseek_v3")
    name = "model.layers.0.self_attn"
    weights = random_weights(model)
    latent = np.random.default_rng(1).standard_normal((5, 12))

    def logits(weights):
        hidden = TOKENS @ weights[f"{name}.q_a_proj.weight"].T
        query = of_heads(hidden @ weights[f"{name}.q_b_proj.weight"].T, 4)
        key = of_heads(latent @ weights[f"{name}.kv_b_proj.weight"].T, 4)[:, :, :8]
        rotated = TOKENS @ weights[f"{name}.kv_a_proj_with_mqa.weight"][12:].T
        return np.concatenate([query[:, :, :8] @ key.swapaxes(1, 2), query[:, :, 8:] @ rotated.T], 2), key

    (before, _), gamma = logits(weights), np.array([0.25, 1.0, 0.5, 1.0])
    after = clipped(model, weights, {name: TAU / gamma})
    np.testing.assert_allclose(logits(after)[0], before * gamma[:, None, None], rtol=1e-6)
    value = slice(8, 16)  # of each head of kv_b
    for changed, same in ((after, weights),):
        own, old = (each[f"{name}.kv_b_proj.weight"].reshape(4, 16, 12)[:, value] for each in (changed, same))
        np.testing.assert_array_equal(own, old)
    untouched = [each for each in weights if not each.startswith((f"{name}.q_b", f"{name}.kv_b"))]
    assert all((after[each] == weights[each]).all() for each in untouched)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "phi3", "falcon"])
def test_fused_projections_are_scaled_head_by_head(name):
    """Each head's queries and keys, out of the order that the forward code has."""
    model = stored(name)
    (clip, *_) = plan(model, QKClip(TAU)).attentions
    (fused,) = {each.parameter for each in clip.rows if each.parameter.endswith("weight")}
    weights = {each.name: np.ones(each.shape) for each in model.parameters}
    gamma = np.array([0.25, 1.0, 0.5, 1.0])
    after = clipped(model, weights, {clip.path: TAU / gamma})[fused]
    after = after.T if name == "gpt2" else after
    if name == "gpt_neox":
        query, key, value = (after.reshape(4, 3, 8, 32)[:, kind, 0, 0] for kind in range(3))
    else:
        sizes = {"gpt2": (4, 4), "phi3": (4, 2), "falcon": (4, 1)}[name]
        query, key, value = np.split(after[:, 0].reshape(-1, 8)[:, 0], [sizes[0], sum(sizes)])
    shared = gamma.reshape(len(key), -1).min(1)
    np.testing.assert_allclose(query, gamma**0.5)
    np.testing.assert_allclose(key, shared**0.5)
    np.testing.assert_array_equal(value, 1)
    biases = [each.name for each in model.parameters if each.name == fused.removesuffix("weight") + "bias"]
    assert set(biases) <= {each.parameter for each in clip.rows}


def test_adapters_around_a_projection_are_scaled_where_they_write():
    attention = "layers.0.self_attn"
    shapes = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
    parameters = {f"{attention}.{name}.weight": (shape, "Linear") for name, shape in shapes.items()}
    parameters |= {
        f"{attention}.q_proj.lora_A.default.weight": ((4, 32), "Linear"),
        f"{attention}.q_proj.lora_B.default.weight": ((32, 4), "Linear"),
    }
    names = plan(by_hand(parameters, {attention: "SomeAttention"}), QKClip()).parameters
    assert names == tuple(f"{attention}.{each}" for each in (
        "q_proj.weight", "q_proj.lora_B.default.weight", "k_proj.weight"
    ))  # fmt: skip


def test_where_norms_undo_it_or_weights_are_frozen_attention_is_left_alone():
    found, unclear = attentions_of(stored("qwen3"))
    assert not found
    assert unclear["model.layers.0.self_attn"] == "model.layers.0.self_attn.q_norm.weight norms what it would scale"
    with pytest.raises(ConfigError, match="can act on no attention of Qwen3ForCausalLM: model.layers.0.self_attn"):
        plan(stored("qwen3"), QKClip())
    model = stored("llama")
    frozen = tuple(
        replace(each, trainable=False) if each.name == "model.layers.0.self_attn.k_proj.weight" else each
        for each in model.parameters
    )
    half = plan(replace(model, parameters=frozen), QKClip())
    assert [each.path for each in half.attentions] == ["model.layers.1.self_attn"]
    assert half.left_alone == {"model.layers.0.self_attn": "model.layers.0.self_attn.k_proj.weight is frozen"}
    assert half.describe().splitlines() == [
        "QK-clip above 100, queries take the power 0.5",
        "  model.layers.1.self_attn: 4 heads, q_proj.weight, k_proj.weight",
        "  model.layers.0.self_attn: left alone, model.layers.0.self_attn.k_proj.weight is frozen",
    ]
    of_rank = ClipOfRank(half, whole(model), 0)
    with pytest.raises(ConfigError, match="can't act on model.layers.0.self_attn: .*k_proj.weight is frozen"):
        of_rank.pack({"model.layers.0.self_attn": [1.0] * 4})


def test_maxima_of_what_is_not_there_are_refused():
    model = stored("llama")
    of_rank = ClipOfRank(plan(model, QKClip()), whole(model), 0)
    with pytest.raises(ConfigError, match="has no attention 'model.layers.0'; it has model.layers.0.self_attn, "):
        of_rank.pack({"model.layers.0": [1.0] * 4})
    with pytest.raises(ConfigError, match=r"have the shape \[3\]; it has 4 heads, and each has one"):
        of_rank.pack({"model.layers.0.self_attn": [1.0] * 3})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tau": 0.0}, "tau is 0.0"),
        ({"tau": "100"}, "tau is '100'; write a number"),
        ({"alpha": 1.5}, "alpha is 1.5"),
        ({"alpha": float("nan")}, "alpha is nan"),
    ],
)
def test_settings_that_mean_nothing_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        QKClip(**arguments)


@settings(max_examples=300, deadline=None)
@given(layout=strategies.layouts().filter(lambda each: each.shape), data=st.data())
def test_a_rank_scales_what_it_holds_of_a_box(layout, data):
    """Any layout that the algebra has: scaling the local boxes of all ranks is scaling the box."""
    array = np.ones(layout.shape)
    sides = [sorted(data.draw(st.integers(0, size)) for _ in range(2)) for size in layout.shape]
    box = tuple(slice(*side) for side in sides)
    expected = array.copy()
    expected[box] *= 0.5
    for rank in layout.mesh.ranks:
        local = layout.shard(array, rank)
        for own in local_boxes(layout, rank, box):
            local[own] *= 0.5
        np.testing.assert_array_equal(local, layout.shard(expected, rank))


def layouts_on(mesh: DeviceMesh, model, cut: dict[str, dict]) -> dict[str, Layout]:
    return {
        each.name: Layout(mesh, next((p for tail, p in cut.items() if tail in each.name), {}), each.shape)
        for each in model.parameters
    }


def test_ranks_of_a_tensor_axis_have_heads_of_their_own():
    model, mesh = stored("llama"), DeviceMesh((2, 2), ("shard", "tensor"))
    cut = {"shard": StridedShard(0, 2), "tensor": Shard(0)}
    layouts = layouts_on(mesh, model, {"q_proj": cut, "k_proj": cut})
    path = "model.layers.1.self_attn"
    for rank in mesh.ranks:
        of_rank = ClipOfRank(plan(model, QKClip(TAU)), layouts, rank)
        row = of_rank.pack({path: [30.0, 40.0]})
        first = 4 + 2 * (rank % 2)
        assert np.flatnonzero(row != NONE).tolist() == [first, first + 1]
        with pytest.raises(ConfigError, match="it has 4 heads, of which this rank has 2"):
            of_rank.pack({path: [1.0]})


def on_four_ranks(maxima_of):
    """What each of 2 x 2 ranks gets, or is refused with, for the maxima that it gives."""
    model, mesh = stored("llama"), DeviceMesh((2, 2), ("shard", "tensor"))
    cut = {"shard": StridedShard(0, 2), "tensor": Shard(0)}
    clip, layouts = plan(model, QKClip(TAU)), layouts_on(mesh, model, {"q_proj": cut, "k_proj": cut})

    def body(backend):
        rank = backend.collectives.rank()
        of_rank = ClipOfRank(clip, layouts, rank)
        try:
            return of_rank.scales(of_rank.exchange(backend, maxima_of(backend, rank)))
        except ConfigError as error:
            return str(error)

    return InProcessWorld(load("torch"), 4, timeout_s=30).run(body)


def test_ranks_share_the_maxima_of_their_samples_and_scale_what_they_hold():
    def maxima_of(backend, rank):
        """Heads 0 and 1 of the ranks with even numbers, 2 and 3 of the others; a tensor, and a list."""
        largest = {0: [5.0, 40.0], 1: [1.0, 2.0], 2: [20.0, 10.0], 3: [2.0, 160.0]}[rank]
        own = {"model.layers.1.self_attn": backend.tensors.from_numpy(np.array(largest, np.float32))}
        return own | ({"model.layers.0.self_attn": [40.0] * 4} if rank == 3 else {})

    found = on_four_ranks(maxima_of)
    first, second = (f"model.layers.{layer}.self_attn" for layer in (0, 1))
    # 20, 40, 2, 160 are the largest: factors of 1/2, 1/4, 1, 1/16; each rank holds one head of queries and half a head
    # of keys, [4 or 8 rows, 32].
    queries = [0.5**0.5, 0.25**0.5, 1.0, 0.0625**0.5]
    for rank, scales in enumerate(found):
        factors = {scale.parameter: scale.factors for scale in scales}
        assert all(len(set(each)) == 1 for each in factors.values())
        own = {name: each[0] for name, each in factors.items()}
        assert own.pop(f"{first}.q_proj.weight") == own.pop(f"{first}.k_proj.weight") == 0.25**0.5
        expected = {f"{second}.k_proj.weight": [0.25**0.5, 0.0625**0.5][rank % 2]}
        head = 2 * (rank % 2) + rank // 2
        if queries[head] != 1.0:
            expected[f"{second}.q_proj.weight"] = queries[head]
        assert own == pytest.approx(expected)


@pytest.mark.parametrize(
    ("wrong", "own", "others"),
    [
        ({"model.layers.9.self_attn": [1.0]}, "has no attention 'model.layers.9.self_attn'", "of another rank"),
        ({"model.layers.0.self_attn": [np.nan, 1.0]}, "largest logit of head 2 of model.layers.0.self_attn is nan", ""),
        ({"model.layers.0.self_attn": [1.0, np.inf]}, "largest logit of head 3 of model.layers.0.self_attn is inf", ""),
    ],
)
def test_what_one_rank_has_wrong_is_refused_on_all(wrong, own, others):
    found = on_four_ranks(lambda backend, rank: wrong if rank == 1 else {"model.layers.0.self_attn": [1.0, 2.0]})
    assert own in found[1]
    assert all((others or own) in found[rank] for rank in (0, 2, 3))


def test_parameters_of_several_meshes_are_refused():
    model = stored("llama")
    layouts = whole(model)
    layouts["model.layers.0.self_attn.q_proj.weight"] = Layout(DeviceMesh((2,), ("shard",)), {}, (32, 32))
    with pytest.raises(ConfigError, match="maxima are shared along one mesh"):
        ClipOfRank(plan(model, QKClip()), layouts, 0)
