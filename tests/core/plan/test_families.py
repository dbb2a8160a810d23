"""Plans of the stored families against tables written from their forward code: placements, gradients, boundaries."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

import hyper_parallel as hp
from hyper_parallel import PlanError, ShardingPlan
from hyper_parallel.core.placement import Replicate
from hyper_parallel.core.plan.contracts import Contract
from tests.core.plan.by_hand import layerless, stored
from tests.core.plan.placement_truth import KEY_VALUE_HEADS, KINDS, PLACES, SIDES

WITH_EXPERTS = sorted(name for name, codes in PLACES.items() if any("+E" in code for code in codes.values()))


def planned(name: str, sequence_parallel: bool = True, **mesh: int) -> ShardingPlan:
    model = stored(name)
    return hp.plan(model, hp.DeviceMesh.from_sizes(mesh), {"sequence_parallel": sequence_parallel})


def shared_over_tensor(code: str, ranks: int) -> tuple[str, int]:
    """The placement over `tensor` ("" for whole) of a code of the tables, and the dim that it cuts (-1 for none)."""
    words = code.split()
    if words[0] == "blocks":
        return f"strided_shard({words[1]}, {words[2]})", int(words[1])
    if words[0] == "cut" or (words[0] == "few" and words[1] != "norm" and ranks <= KEY_VALUE_HEADS):
        return f"shard({words[1]})", int(words[1])
    return "", -1


def pending_over_tensor(code: str, ranks: int, sequence_parallel: bool) -> bool:
    word = code.split()[0]
    return word == "inside" or (word == "stream" and sequence_parallel) or (word == "few" and ranks > KEY_VALUE_HEADS)


def found(plan: ShardingPlan) -> dict[str, tuple[dict[str, str], tuple[str, ...]]]:
    """Placements and pending axes by name, further names of tied parameters included; layers must not differ."""
    result = {}
    for name in [each.name for each in plan.parameters] + list(plan.tied):
        each = plan[name]
        told = {axis: str(placement) for axis, placement in each.placements.items()}, each.pending
        assert result.setdefault(layerless(name), told) == told, name
    return result


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", sorted(PLACES))
def test_tensor_parallel_placements(name, ranks, sequence_parallel):
    expected = {}
    for parameter, code in PLACES[name].items():
        placement, _ = shared_over_tensor(code, ranks)
        pending = ("tensor",) if pending_over_tensor(code, ranks, sequence_parallel) else ()
        expected[parameter] = ({"tensor": placement} if placement else {}, pending)
    assert found(planned(name, sequence_parallel, tensor=ranks)) == expected


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_are_dealt_out_whole(name):
    expected = {}
    for parameter, code in PLACES[name].items():
        placement, _ = shared_over_tensor(code, 2)
        placements = {"expert": "shard(0)"} if "+E" in code else {}
        pending = [] if "+E" in code else ["expert"]  # other samples on other ranks, but tokens travel to experts
        pending += ["tensor"] if pending_over_tensor(code, 2, True) else []
        expected[parameter] = placements | ({"tensor": placement} if placement else {}), tuple(pending)
    assert found(planned(name, expert=2, tensor=2)) == expected


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", sorted(PLACES))
def test_data_parallelism_cuts_what_the_other_axes_leave(name, ranks):
    experts = {"expert": 2} if name in WITH_EXPERTS else {}
    plan = planned(name, shard=2, tensor=ranks, **experts)
    for parameter, (placements, pending) in found(plan).items():
        code = PLACES[name][parameter]
        _, dim = shared_over_tensor(code, ranks)
        ways = ranks if dim == 0 else 2 if "+E" in code else 1
        # All first dims here keep both ranks busy, or there is no other dim. Cut after the other axes, pieces are
        # strided.
        assert placements.pop("shard") == (f"strided_shard(0, {ways})" if ways > 1 else "shard(0)"), parameter
        assert "shard" in pending


@pytest.mark.parametrize("name", sorted(PLACES))
def test_every_rank_holds_its_part_and_all_ranks_hold_everything(name):
    plan = planned(name, shard=2, tensor=2)
    for each in plan.parameters:
        layout = plan.layout(each.name)
        array = np.arange(prod(each.shape)).reshape(each.shape)
        assert each.local_shape == layout.local_shape(0)
        assert np.array_equal(layout.assemble([layout.shard(array, rank) for rank in range(4)]), array), each.name


LETTERS = {"replicate": "R", "partial": "P", "shard(1)": "S", "shard(2)": "F"}


def told(contract: Contract) -> str:
    """A contract over `tensor` in the words of the tables."""

    def letter(side) -> str:
        return LETTERS[str(side.get("tensor", Replicate()))]

    before, after, gradient, source = map(
        letter, (contract.before, contract.after, contract.gradient, contract.source_gradient)
    )
    return f"{before} > {after}: {gradient}, {source}"


EDGES = ["R > S: S, R", "S > R: R, S"]
"""What the first block makes of hidden states that it takes in, and the last of what it hands on."""


def wanted(kind: str, ranks: int, sequence_parallel: bool) -> tuple[str, str]:
    if kind == "all key heads":
        kind = "all heads" if ranks <= KEY_VALUE_HEADS else "too few heads"
    # Without sequence parallelism hidden states are the same on all ranks.
    return tuple(side if sequence_parallel else side.replace("S", "R") for side in SIDES[kind])


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", sorted(KINDS))
def test_contracts_of_boundaries(name, ranks, sequence_parallel):
    plan = planned(name, sequence_parallel, tensor=ranks)
    edges = [each for each in plan.boundaries if each.kind in ("entry", "exit")]
    assert {layerless(each.module) for each in plan.boundaries if each not in edges} == set(KINDS[name])
    assert [told(each) for edge in edges for each in (*edge.inputs, *edge.outputs)] == EDGES * sequence_parallel
    for each in (each for each in plan.boundaries if each not in edges):
        (taken,), (given,) = each.inputs, each.outputs
        sides = told(taken), told(given)
        assert sides == wanted(KINDS[name][layerless(each.module)], ranks, sequence_parallel), each.module


@pytest.mark.parametrize("name", sorted(KINDS))
def test_other_axes_cut_samples_and_tokens(name):
    plan = planned(name, replicate=2, shard=2, context=2, tensor=2)
    for each in plan.boundaries:
        for contract in (*each.inputs, *each.outputs):
            for side in (contract.before, contract.after, contract.gradient):
                told = {axis: str(placement) for axis, placement in side.items() if axis != "tensor"}
                assert told == {"replicate": "shard(0)", "shard": "shard(0)", "context": "shard(1)"}, each.module
        assert each.region == ("opaque" if each.kind == "attention" else "checked")


def test_a_state_space_mixer_is_refused_parameter_by_parameter():
    with pytest.raises(PlanError) as refused:
        planned("mamba", tensor=2)
    names = {layerless(each.name) for each in stored("mamba").parameters if ".mixer." in each.name}
    assert len(names) == 9
    for name in names:
        assert f"{name.replace('*', '0')} and 1 more like it: no rule knows" in str(refused.value)


def test_heads_that_can_not_be_dealt_out_are_refused():
    with pytest.raises(PlanError, match="4 heads can't be dealt out to 3 tensor ranks"):
        planned("llama", tensor=3)
