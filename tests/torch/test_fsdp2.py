"""Twenty steps of AdamW beside PyTorch's own FSDP2, in float32. What two ranks sum is the same in any order, so nothing
may differ, not in one bit."""

from dataclasses import replace

import pytest
import torch

from tests.torch.fsdp2_bodies import EVEN, UNEVEN

BODY = "tests.torch.fsdp2_bodies:side_by_side"
CASES = {
    "plain": dict(config=EVEN),
    "uneven dims": dict(config=UNEVEN),
    "a block called twice": dict(config=replace(EVEN, calls=(0, 1, 0))),
    "tied": dict(config=replace(UNEVEN, tied=True)),
    "frozen": dict(config=replace(UNEVEN, frozen=("up", "embed"))),
    "kept after forward": dict(config=EVEN, reshard=False),
    "prefetch by lists": dict(config=EVEN, lists=True),
    "recompute inside, with prefetch": dict(config=EVEN, checkpoints="inside", lists=True),
    "recompute inside, reentrant": dict(config=EVEN, checkpoints="inside reentrant"),
    "recompute around": dict(config=EVEN, checkpoints="around"),
    "recompute around, reentrant": dict(config=EVEN, checkpoints="around reentrant"),
    "a divisor": dict(config=EVEN, factor=1.0),
    "accumulation without communication": dict(config=UNEVEN, accumulation="none"),
    "accumulation of shards": dict(config=UNEVEN, accumulation="scatter"),
    "accumulation while both tiers run": dict(config=UNEVEN, accumulation="deferred"),
    "accumulation without gathering again": dict(config=UNEVEN, accumulation="stay"),
}


ON_TWO_AXES = ("uneven dims", "accumulation of shards", "accumulation without gathering again")


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_equal_pytorchs_bit_for_bit(pool, case):
    assert pool("torch", 2).run(BODY, {"shard": 2}, **CASES[case]) == [(0.0, 0.0)] * 2


@pytest.mark.parametrize("case", ON_TWO_AXES)
def test_twenty_steps_on_two_axes_equal_pytorchs_bit_for_bit(pool, case):
    assert pool("torch", 4).run(BODY, {"replicate": 2, "shard": 2}, **CASES[case]) == [(0.0, 0.0)] * 4


EARLY = ("a block called twice", "tied", "recompute around, reentrant")


@pytest.mark.parametrize("case", EARLY)
def test_early_all_reduces_equal_pytorchs_bit_for_bit(pool, case):
    found = pool("torch", 4).run(BODY, {"replicate": 2, "shard": 2}, early_all_reduce=True, **CASES[case])
    assert found == [(0.0, 0.0)] * 4


def test_four_shards_are_summed_in_another_order_and_equal_within_rounding(pool):
    # we add in rank order, gloo around a ring; AdamW would divide what differs by its own size, large steps double it
    case = dict(config=EVEN, reshard=2, optimizer=torch.optim.SGD, rate=1e-4)
    for losses, parameters in pool("torch", 4).run(BODY, {"shard": 4}, **case):
        assert losses < 1e-6 and parameters < 1e-6
