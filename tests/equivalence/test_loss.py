"""The cross entropy of logits that are cut along the vocabulary, on real ranks of both backends, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel import DeviceMesh
from hyper_parallel.core.regions import chunk_bounds
from hyper_parallel.models.config import DecoderConfig
from hyper_parallel.models.weights import initial_weights
from tests.equivalence import loss_bodies as bodies
from tests.equivalence.loss_bodies import Case

ROUNDED = {"float64": 1e-12, "float32": 1e-6}
"""Of losses of size 10 at most, sums of 100 exponentials: some ten roundings of 2e-16, and of 6e-8 to be relative."""
HALF = {"float16": 2**-11, "bfloat16": 2**-8}
"""The gradient is rounded once, to the dtype of the logits."""


def whole_loss(case):
    """Loss and gradient of the whole logits, in float64."""
    logits = case.logits.astype(np.float64)
    counted = case.targets != case.ignore_index
    shifted = logits - logits.max(-1, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    one_hot = np.eye(case.vocabulary)[np.where(counted, case.targets, 0)]
    divisor = counted.sum() if case.reduction == "mean" else 1
    if not counted.any():
        return (np.nan if case.reduction == "mean" else 0.0), np.zeros_like(logits)
    value = -(log_softmax * one_hot)[counted].sum() / divisor
    return case.factor * value, case.factor * (np.exp(log_softmax) - one_hot) * counted[..., None] / divisor


def check(found, case, ranks):
    """All ranks have the loss of the whole, bit by bit the same, and their parts of its gradient."""
    value, gradient = whole_loss(case)
    bound = ROUNDED["float64" if case.dtype == "float64" else "float32"]
    for rank, each in enumerate(found):
        start, stop = chunk_bounds(case.vocabulary, ranks, rank)
        assert each.value.shape == () and each.value_dtype == ("float64" if case.dtype == "float64" else "float32")
        np.testing.assert_array_equal(each.value, found[0].value)
        np.testing.assert_allclose(each.value, value, rtol=bound, atol=bound)
        assert each.gradient.shape == (*case.targets.shape, stop - start) and each.gradient_dtype == case.dtype
        np.testing.assert_allclose(
            each.gradient, gradient[..., start:stop], rtol=HALF.get(case.dtype, 0), atol=bound * abs(case.factor)
        )


def random_case(seed, vocabulary, shape=(2, 5), **rest):
    """Logits that the dtype holds exactly, and targets in every rank's part."""
    made = np.random.default_rng(seed)
    logits = made.standard_normal((*shape, vocabulary)).astype(np.float32) * 3
    if rest.get("dtype") in HALF:  # 8 bits, which bfloat16 holds as well
        logits = np.round(logits * 16) / 16
        logits = np.clip(logits, -8, 8)
    return Case(logits, made.integers(0, vocabulary, shape), **rest)


def some_ignored(case):
    targets = case.targets.copy()
    targets[..., ::2] = case.ignore_index
    return targets


def cases():
    """Every kind of vocabulary, dtype, reduction and target."""
    plain = random_case(1, 97)
    made = {
        "97 entries": plain,
        "a sum": random_case(2, 97, reduction="sum"),
        "in parts of one size": random_case(3, 64),
        "3 entries": random_case(4, 3),
        "one entry": random_case(5, 1),
        "one token": random_case(6, 97, shape=()),
        "no token": random_case(7, 97, shape=(0,), reduction="sum"),
        "mean of no token": random_case(7, 97, shape=(2, 0)),
        "float64": random_case(8, 97, dtype="float64"),
        "float64, 3 entries": random_case(9, 3, dtype="float64", reduction="sum"),
        "float16": random_case(10, 97, dtype="float16"),
        "bfloat16": random_case(11, 97, dtype="bfloat16"),
        "scaled": random_case(12, 97, factor=-2.5),
        "int32 targets": Case(plain.logits, plain.targets.astype(np.int32)),
        "int8 targets": Case(plain.logits, plain.targets.astype(np.int8)),
        "large logits": Case(plain.logits * 1000, plain.targets, dtype="float64"),
        "some ignored": Case(plain.logits, some_ignored(plain)),
        "some ignored in a sum": Case(plain.logits, some_ignored(plain), reduction="sum"),
        "entry 60 ignored": Case(plain.logits, np.where(plain.targets % 2, 60, plain.targets), ignore_index=60),
        "all ignored": Case(plain.logits, np.full_like(plain.targets, -100)),
        "all ignored in a sum": Case(plain.logits, np.full_like(plain.targets, -100), reduction="sum"),
        "every target in one part": Case(plain.logits, np.full_like(plain.targets, 96), dtype="float64"),
    }
    return made


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_has_the_loss_of_the_whole_and_its_part_of_the_gradient(pool, backend_name, ranks):
    mesh = DeviceMesh((ranks,), ("tensor",))
    found = pool(backend_name, ranks).run(bodies.losses, list(cases().values()), mesh)
    for place, (name, case) in enumerate(cases().items()):
        try:
            check([each[place] for each in found], case, ranks)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_logits_that_are_whole_have_the_loss_of_the_framework(pool, backend_name):
    found = pool(backend_name, 1).run(bodies.whole_losses, list(cases().values()))
    for each, (name, case) in zip(found[0], cases().items(), strict=True):
        try:
            check([each], case, ranks=1)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_ranks_with_other_samples_have_losses_of_their_own(pool, backend_name):
    mesh = DeviceMesh((2, 2), ("shard", "tensor"))
    by_rank = [random_case(20, 97), None, random_case(21, 97), None]
    found = pool(backend_name, 4).run(bodies.own_losses, by_rank, mesh)
    check(found[:2], by_rank[0], 2)
    check(found[2:], by_rank[2], 2)


def test_two_small_exchanges_go_forward_and_none_back(pool, backend_name):
    case = random_case(30, 97)
    for forward, everything in pool(backend_name, 2).run(bodies.what_is_sent, case):
        assert forward == [("all_gather", 10, "float32"), ("all_reduce", 20, "float32")]
        assert everything == forward


def test_nothing_is_recorded_under_no_grad(pool, backend_name):
    case = random_case(31, 97)
    for value in pool(backend_name, 2).run(bodies.without_recording, case):
        np.testing.assert_allclose(value, whole_loss(case)[0], rtol=ROUNDED["float32"])


def test_what_the_caller_changes_afterwards_changes_no_gradient(pool):
    case = random_case(32, 97, dtype="float64")
    found = pool("torch", 2).run(bodies.changed_afterwards, case)
    for rank, (gradient, message) in enumerate(found):
        start, stop = chunk_bounds(97, 2, rank)
        np.testing.assert_allclose(gradient, 2 * whole_loss(case)[1][..., start:stop], rtol=0, atol=1e-12)
        assert message == "cross_entropy: backward runs a second time; give the first one retain_graph=True"


def test_mistakes_are_refused_before_anything_is_sent(pool, backend_name):
    messages, others = pool(backend_name, 2).run(bodies.refusals, random_case(33, 97))
    of_values = ("too large", "negative")  # the same targets are on every rank
    assert [messages[name] for name in of_values] == [others[name] for name in of_values]
    assert messages["too large"] == (
        "ConfigError",
        "cross_entropy: targets[1, 2] is 97, but ids go from 0 to 96 (1 of 10 targets are outside); a token that is "
        "not to count has the target -100, or pass another ignore_index",
    )
    assert messages["negative"][1].startswith("cross_entropy: targets[0, 1] is -1, but ids go from 0 to 96 (1 of 10")
    assert messages["floating targets"] == (
        "ConfigError",
        "cross_entropy: targets are of float32; pass the ids of the right entries as whole numbers (probabilities of "
        "all entries are not offered)",
    )
    assert messages["integer logits"] == (
        "ConfigError",
        "cross_entropy: logits are of int64; they must be one of float16, bfloat16, float32, float64",
    )
    assert messages["numpy targets"] == (
        "ConfigError",
        f"cross_entropy: targets must be a tensor of {backend_name}, found <class 'numpy.ndarray'>",
    )
    assert messages["shifted"] == (
        "LayoutError",
        "cross_entropy: logits of shape (2, 5, 49) do not fit targets of shape (2, 4): logits have the dims of the "
        "targets, and the vocabulary as one more at the end",
    )
    assert [rank["another part"] for rank in (messages, others)] == [
        (
            "LayoutError",
            "cross_entropy: the logits hold 49 entries of the vocabulary at rank 0, which has [0, 51) of 101, 51 "
            "entries; pass this rank's part, as the head returns it",
        ),
        (
            "LayoutError",
            "cross_entropy: the logits hold 48 entries of the vocabulary at rank 1, which has [51, 101) of 101, 50 "
            "entries; pass this rank's part, as the head returns it",
        ),
    ]
    assert messages["reduction"] == ("ConfigError", """cross_entropy: reduction is 'none'; write "mean" or "sum\"""")
    assert messages["ignore_index"] == (
        "ConfigError",
        "cross_entropy: ignore_index is None; write a whole number, as -100",
    )


# The loss of a model

DECODER = {
    "vocab_size": 97,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "initializer_range": 0.2,
}
IDS = np.random.default_rng(40).integers(0, 97, (4, 10))


def decoder_weights(tied=False):
    config = DECODER | {"tie_word_embeddings": tied}
    return config, initial_weights(DecoderConfig(**config), seed=1)


@pytest.mark.parametrize(
    "mesh",
    [DeviceMesh((4,), ("tensor",)), DeviceMesh((2, 2), ("shard", "tensor"))],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_parallelized_model_has_the_loss_and_the_gradients_of_one_device(pool, backend_name, mesh, tied):
    config, weights = decoder_weights(tied)
    found = pool(backend_name, mesh.size).run(bodies.model_losses, config, weights, IDS, mesh)
    whole, gradients = found[0][0]
    # A rank has the mean of its own samples, all of one length.
    np.testing.assert_allclose(np.mean([after[0] for _, after in found]), whole, rtol=1e-6)
    for rank, (_, (value, parts)) in enumerate(found):
        assert value == found[mesh.group_of(rank, ["tensor"])[0]][1][0], "the same on all tensor ranks"
        for name, (part, layout) in parts.items():
            expected = layout.shard(gradients[name][0], rank)
            # float32, two layers: some hundred roundings of 6e-8 of the largest.
            np.testing.assert_allclose(part, expected, rtol=0, atol=1e-5 * abs(gradients[name][0]).max(), err_msg=name)


def test_a_module_around_the_model_will_do_if_it_holds_no_other(pool):
    config, weights = decoder_weights()
    mesh = DeviceMesh((2,), ("tensor",))
    ((value, message), _) = pool("torch", 2).run(bodies.losses_through_wrappers, config, weights, IDS, mesh)
    (((whole, _), _), _) = pool("torch", 2).run(bodies.model_losses, config, weights, IDS, mesh)
    np.testing.assert_allclose(value, whole, rtol=1e-6)
    assert message == (
        "cross_entropy: `model` holds several parallelized models, ['actor', 'critic']; pass one of them"
    )
