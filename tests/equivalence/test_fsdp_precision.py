"""Mixed precision in fully sharded units: what is computed in what, and the same bits on both backends."""

import numpy as np
import pytest

import hyper_parallel as hp

BODIES = "tests.equivalence.precision_bodies"
POLICIES = {
    "bfloat16": {"param_dtype": "bfloat16"},
    "bfloat16, reduced in float32": {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
    "float16, reduced in float32": {"param_dtype": "float16", "reduce_dtype": "float32"},
    "reduced in bfloat16": {"reduce_dtype": "bfloat16"},
    "bfloat16 between float32": {"param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": "float32"},
}


@pytest.mark.parametrize("sizes", [{"shard": 2}, {"replicate": 2}, {"shard": 1}], ids=str)
@pytest.mark.parametrize("case", POLICIES)
def test_both_backends_train_to_the_same_bits(pool, case, sizes):
    found = {
        name: pool(name, *sizes.values()).run(f"{BODIES}:trained", POLICIES[case], sizes)
        for name in ("torch", "mindspore")
    }
    for ours, theirs in zip(found["torch"], found["mindspore"]):
        for held, other in zip(ours[:2], theirs[:2]):
            assert held.keys() == other.keys()
            for name in held:
                np.testing.assert_array_equal(held[name], other[name], err_msg=name)


@pytest.mark.parametrize(
    ("until_last", "sizes"),
    [("set_requires_gradient_sync", {"shard": 2}), ("set_requires_all_reduce", {"replicate": 2})],
)
@pytest.mark.parametrize("case", ["bfloat16, reduced in float32", "reduced in bfloat16"])
def test_both_backends_accumulate_to_the_same_bits(pool, case, until_last, sizes):
    arguments = POLICIES[case], sizes, until_last
    found = {name: pool(name, 2).run(f"{BODIES}:trained", *arguments) for name in ("torch", "mindspore")}
    for ours, theirs in zip(found["torch"], found["mindspore"]):
        for held, other in zip(ours[:2], theirs[:2]):
            for name in held:
                np.testing.assert_array_equal(held[name], other[name], err_msg=name)


@pytest.mark.parametrize(
    ("policy", "block", "output"),
    [
        ({"param_dtype": "bfloat16"}, ("bfloat16", "bfloat16"), "bfloat16"),
        ({"param_dtype": "float16", "output_dtype": "float32"}, ("float16", "float16"), "float32"),
        ({"param_dtype": "float16", "cast_forward_inputs": False}, ("float32", "float16"), "float32"),
        ({"reduce_dtype": "bfloat16"}, ("float32", "float32"), "float32"),
    ],
    ids=str,
)
def test_modules_see_the_dtypes_of_the_policy(pool, backend_name, policy, block, output):
    for seen, outputs, cast, copied in pool(backend_name, 2).run(f"{BODIES}:dtypes", policy):
        assert tuple(each.rpartition(".")[2].lower() for each in seen) == block
        assert outputs == [output]
        assert cast > 0 and copied == 0


def test_a_dtype_may_be_named_or_be_a_frameworks_own(backend_name):
    if backend_name == "torch":
        from torch import bfloat16, float32
    else:
        from mindspore import bfloat16, float32
    assert hp.MixedPrecisionPolicy(bfloat16, float32) == hp.MixedPrecisionPolicy("bfloat16", np.float32)


@pytest.mark.parametrize("wrong", ["half", "int32", 16])
def test_what_is_no_floating_dtype_is_refused(wrong):
    with pytest.raises(hp.ConfigError, match=f"reduce_dtype is {wrong!r}; write one of bfloat16, float16"):
        hp.MixedPrecisionPolicy(reduce_dtype=wrong)
