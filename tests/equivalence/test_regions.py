"""Collectives of opaque regions on both backends and real ranks: each function against numpy, and a model of them."""

import numpy as np
import pytest

from hyper_parallel.core.regions import chunk_bounds
from tests.equivalence import region_bodies as bodies
from tests.equivalence.test_decoder import SIZES, random_case
from tests.equivalence.test_production import assert_step, ranks_of

WHOLE = (5, 6, 4)
"""Two dims that divide by two ranks, and one that never does."""


def parts(whole, dim, ranks):
    """What each rank has of an array that is cut by ceil-chunk."""
    return [np.take(whole, range(*chunk_bounds(whole.shape[dim], ranks, rank)), dim) for rank in range(ranks)]


def in_place(part, whole, dim, ranks, rank):
    """Zeros, with a rank's part in its place."""
    made = [np.zeros_like(each) for each in parts(whole, dim, ranks)]
    made[rank] = part
    return np.concatenate(made, dim)


def cases(ranks):
    """A function, its arguments, what each rank gives it, the gradient that comes back to each rank, and what each rank
    must get: the result, and the gradient of what it gave."""
    random = np.random.default_rng(0)

    def arrays(shape=WHOLE):
        return [random.normal(size=shape) for _ in range(ranks)]

    def same(shape=WHOLE):
        return [random.normal(size=shape)] * ranks

    each, back, one, agreed = arrays(), arrays(), same(), same()
    total, total_back = sum(each), sum(back)
    yield "all_reduce", {"gradient": "partial"}, each, back, [total] * ranks, [total_back] * ranks
    yield "all_reduce", {"gradient": "replicate"}, each, agreed, [total] * ranks, agreed
    yield "sum_gradient", {}, one, back, one, [total_back] * ranks
    for dim in (0, -2):
        arguments, at = {"dim": dim}, dim % 3
        cut, cut_back = parts(one[0], at, ranks), parts(back[0], at, ranks)
        whole_length = {"length": WHOLE[at]}
        yield (
            "all_gather",
            arguments | whole_length | {"gradient": "partial"},
            cut,
            back,
            one,
            parts(total_back, at, ranks),
        )
        yield (
            "all_gather",
            arguments | whole_length | {"gradient": "replicate"},
            cut,
            agreed,
            one,
            parts(agreed[0], at, ranks),
        )
        uneven = {"uneven": WHOLE[at] % ranks != 0}
        yield "reduce_scatter", arguments | uneven, each, cut_back, parts(total, at, ranks), [back[0]] * ranks
        zeros = [in_place(part, one[0], at, ranks, rank) for rank, part in enumerate(cut_back)]
        yield "split", arguments | uneven | {"gradient": "partial"}, one, cut_back, cut, zeros
        yield "split", arguments | uneven | {"gradient": "replicate"}, one, cut_back, cut, [back[0]] * ranks
    for split, concat in ((2, 0), (0, 2)):
        arguments = {"split_dim": split, "concat_dim": concat, "length": WHOLE[concat], "uneven": split == 0}
        ends = [parts(array, dim, ranks) for array in (one[0], back[0]) for dim in (concat, split)]
        yield "all_to_all", arguments, ends[0], ends[3], ends[1], ends[2]
    for by in (1, -1, ranks):
        to = [each[(rank - by) % ranks] for rank in range(ranks)]
        yield "shift", {"by": by}, each, back, to, [back[(rank + by) % ranks] for rank in range(ranks)]


@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_function_and_its_gradient_are_as_described(pool, backend_name, ranks, validate):
    known = list(cases(ranks))
    results = pool(backend_name, ranks).run(bodies.calls, {"tensor": ranks}, validate, [case[:4] for case in known])
    for rank, found in enumerate(results):
        for (name, arguments, *_, values, gradients), (value, gradient) in zip(known, found, strict=True):
            # Sums of four numbers in another order: float64's rounding.
            np.testing.assert_allclose(value, values[rank], rtol=1e-14, atol=1e-14, err_msg=f"{name} {arguments}")
            np.testing.assert_allclose(gradient, gradients[rank], rtol=1e-14, atol=1e-14, err_msg=f"{name} {arguments}")


@pytest.mark.parametrize("validate", [False, True])
def test_rows_travel_there_and_back_and_nothing_is_a_row_of_zeros(pool, backend_name, validate):
    random = np.random.default_rng(1)
    sent = [[0, 3], [0, 2]]
    values, weights = ([random.normal(size=(sum(counts), 4)) for counts in sent] for _ in range(2))
    results = pool(backend_name, 2).run(bodies.rows, {"tensor": 2}, validate, values, weights, sent)
    come = [np.zeros((1, 4)), np.concatenate(values)]
    for rank, (there, back, gradient) in enumerate(results):
        np.testing.assert_array_equal(there, come[rank])
        np.testing.assert_array_equal(back, 2 * values[rank])
        np.testing.assert_array_equal(gradient, 2 * weights[rank])


@pytest.mark.parametrize("mode", ["production", "validate"])
@pytest.mark.parametrize("sizes, length", [({"tensor": 2}, 9), ({"shard": 2, "tensor": 2}, 7), ({"tensor": 4}, 11)])
def test_attention_that_trades_tokens_for_heads_is_that_of_one_device(pool, backend_name, sizes, length, mode):
    case = random_case(batch=2, length=length, num_heads=8, num_kv_heads=4, num_layers=1)
    [(loss, gradients)] = pool(backend_name, 1).run(bodies.ulysses, *case, None, mode)
    results = pool(backend_name, ranks_of(sizes)).run(bodies.ulysses, *case, sizes, mode)
    # float32, as for the decoder's own attention on such wide weights.
    assert_step(results, loss, gradients, relative=5e-5)


def test_the_code_of_regions_runs_on_shapes(pool, backend_name):
    config = SIZES | {"num_heads": 8, "num_kv_heads": 4}
    [believed] = pool(backend_name, 1).run(bodies.on_shapes, config, {"shard": 2, "tensor": 4}, (1, 7))
    assert believed == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    [wrong] = pool(backend_name, 1).run(bodies.on_shapes, config, {"tensor": 8}, (1, 16))
    assert wrong == (
        "all_to_all over tensor in model.layers.0.self_attn: its dim 2 of 4 does not divide by the 8 ranks of tensor; "
        "write uneven=True to cut it into [1, 1, 1, 1, 0, 0, 0, 0]"
    )
