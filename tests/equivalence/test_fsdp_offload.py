"""Shards that live on the host: the same bits as without, and copies where they have to be."""

import numpy as np
import pytest

BODIES = "tests.equivalence.offload_bodies"
ROW = 4 * 3  # bytes
PARAMETERS = 5
STEPS = 3


@pytest.mark.parametrize("far", [False, True], ids=["the device is the host", "the device has its own memory"])
@pytest.mark.parametrize(
    ("sizes", "policy"),
    [
        ({"shard": 2}, {}),
        ({"replicate": 2}, {"param_dtype": "bfloat16", "reduce_dtype": "float32"}),
        ({"shard": 1}, {}),
    ],
    ids=["sharded", "replicated, in bfloat16", "one rank"],
)
def test_offloaded_shards_train_to_the_same_bits(pool, backend_name, sizes, policy, far):
    workers = pool(backend_name, *sizes.values())
    usual = workers.run(f"{BODIES}:trained", False, False, sizes, policy)
    moved = 0
    for found, expected in zip(workers.run(f"{BODIES}:trained", True, far, sizes, policy), usual):
        for ours, theirs in zip(found[:2], expected[:2]):
            for name in theirs:
                np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
        assert found[2] == expected[2], "norms"
        assert all(found[3]) and len(found[3]) == (2 * PARAMETERS * STEPS if far else 0)
        moved += found[4]
    # The outermost unit stays gathered for backward, and so do both blocks after the first step.
    gathers = 2 * (PARAMETERS - 1) + 1 + (STEPS - 1) * PARAMETERS
    rows = 10 if "replicate" in sizes else 5  # of both ranks together
    assert moved == ROW * rows * (gathers * far + STEPS * PARAMETERS)
