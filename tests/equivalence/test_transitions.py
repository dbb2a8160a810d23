"""Transitions on real ranks: both backends against the oracle and against each other."""

from __future__ import annotations

from random import Random
from typing import Callable, Sequence

import numpy as np
import pytest

from hyper_parallel import Layout, Partial
from hyper_parallel.core.transition import lower
from tests.core import oracle
from tests.core.strategies import draw_pair, draw_topology
from tests.equivalence import transition_bodies as bodies
from tests.equivalence.transition_bodies import Case, contributions_of

BACKENDS = ("torch", "mindspore")
MOVES_ONLY = ("float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
SUMS = ("float64", "float16", "bfloat16", "int32")


def draw_cases(count: int, ranks: int, seed: int, dtypes: Sequence[str] = ("float32",), **kinds) -> list[Case]:
    """Random transitions over all ranks: every second one with a topology and ranks in any order, every third between
    meshes."""
    random, cases = Random(seed), []
    for number in range(count):
        order = random.sample(range(ranks), ranks) if number % 2 else range(ranks)
        source, target = draw_pair(random.randint, tuple(order), same_mesh=bool(number % 3), **kinds)
        topology = draw_topology(random.randint, range(ranks)) if number % 2 else None
        cases.append(Case(source, target, number, dtypes[number % len(dtypes)], topology))
    return cases


def tolerance(*layouts: Layout) -> dict[str, float]:
    """Sums of small whole numbers are exact in every dtype. The factor 1/k of an average is rounded to the dtype, and
    so is the product: a few units in the last place of float32 for numbers up to 2000."""
    average = any(placement == Partial("avg") for layout in layouts for placement in layout.placements)
    return {"rtol": 0, "atol": 1e-3 if average else 0}


def by_case(results: Sequence[Sequence]) -> list[tuple]:
    """What every rank found, case by case."""
    return list(zip(*results))


def in_order(layout: Layout, found: Sequence) -> list:
    """What ranks 0, 1, ... found, in the order of the mesh."""
    return [found[rank] for rank in layout.mesh.ranks]


def value_of(layout: Layout, seed: int, dtype: str) -> np.ndarray:
    """The value of what the bodies start from."""
    return oracle.reduced(layout, contributions_of(layout, seed, dtype))[()]


def check_forward(case: Case, found: Sequence[np.ndarray]) -> None:
    expected = value_of(case.source, case.seed, case.dtype)
    value = oracle.value(case.target, in_order(case.target, found))
    np.testing.assert_allclose(value, expected, **tolerance(case.source, case.target), err_msg=f"{case}")


def check_backward(case: Case, found: Sequence[np.ndarray]) -> None:
    """The gradient has the value of the one that came, and a maximum gives it to those that held it."""
    source, target = case.source, case.target
    arrived = value_of(target.gradient, case.seed + 1, case.dtype)
    value = oracle.value(source.gradient, in_order(source.gradient, found))
    transition = lower(source, target, case.topology)
    bound = tolerance(source, target) if transition.extremum is None else {"rtol": 0, "atol": 1e-5}  # ties: thirds
    np.testing.assert_allclose(value, arrived, **bound, err_msg=f"{case}")
    if transition.extremum is not None:
        parts = contributions_of(source, case.seed, case.dtype)
        best = value_of(source, case.seed, case.dtype).reshape(-1)
        for rank in source.mesh.ranks:
            local = oracle.local(source, parts, rank)
            assert not np.any(found[rank][local != best[oracle.indices(source, rank)]]), f"{case}"


@pytest.fixture
def both(pool) -> Callable[..., dict[str, list]]:
    """`both(ranks, body, *args)`: what a body returns on each rank of each backend."""

    def run(ranks: int, body: Callable, *args) -> dict[str, list]:
        return {name: pool(name, ranks).run(body, *args, timeout=120) for name in BACKENDS}

    return run


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_transitions_and_their_gradients(both, ranks):
    cases = draw_cases(300, ranks, seed=ranks)
    found = {name: by_case(results) for name, results in both(ranks, bodies.forward_and_backward, cases).items()}
    for number, case in enumerate(cases):
        of_torch, of_mindspore = (found[name][number] for name in BACKENDS)
        for results in (of_torch, of_mindspore):
            check_forward(case, [result for result, _ in results])
            check_backward(case, [gradient for _, gradient in results])
        for one, other in zip(of_torch, of_mindspore):
            bound = tolerance(case.source, case.target)
            for left, right in zip(one, other):
                np.testing.assert_allclose(left, right, **bound, err_msg=f"{case}")


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "dtypes, ops", [(MOVES_ONLY, ()), (SUMS, ("sum",))], ids=["moves of every dtype", "sums of every dtype"]
)
def test_results_without_autograd_land_where_they_are_asked_for(both, ranks, dtypes, ops):
    cases = draw_cases(70, ranks, ranks, dtypes, source_ops=ops, target_ops=ops)
    found = {name: by_case(results) for name, results in both(ranks, bodies.without_autograd, cases).items()}
    for number, case in enumerate(cases):
        for name in BACKENDS:
            check_forward(case, found[name][number])
        for one, other in zip(*(found[name][number] for name in BACKENDS)):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other, err_msg=f"{case}")


@pytest.mark.parametrize("ranks", [2, 4])
def test_half_precision_gradients(both, ranks):
    cases = draw_cases(40, ranks, ranks, ("float16", "bfloat16", "float64"), source_ops=("sum",), target_ops=("sum",))
    for results in both(ranks, bodies.forward_and_backward, cases).values():
        for case, found in zip(cases, by_case(results)):
            check_forward(case, [result for result, _ in found])
            check_backward(case, [gradient for _, gradient in found])


def test_inputs_need_not_be_contiguous(both):
    cases = [case for case in draw_cases(80, 3, seed=8) if len(case.source.shape) > 1]
    for results in both(3, bodies.strided_inputs, cases).values():
        for case, found in zip(cases, by_case(results)):
            check_forward(case, [result for result, _ in found])
            check_backward(case, [gradient for _, gradient in found])


def test_nothing_is_copied_that_the_lowering_does_not_tell(both):
    cases = draw_cases(150, 4, seed=9)
    for results in both(4, bodies.copies, cases).values():
        for case, found in zip(cases, by_case(results)):
            assert all(copied <= told for copied, told in found), f"{case}: {found}"


def test_parts_of_a_mesh_are_used_after_the_whole(pool, backend_name):
    found = pool(backend_name, 4).run(bodies.a_part_after_the_whole)
    assert [each[1] for each in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]  # its row
    assert [each[2] for each in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]  # its column
    assert [each[3:-1] for each in found] == [[], [[2, 1]], [[2, 1]], []]  # the mesh of ranks 2 and 1
    for rank, each in enumerate(found):
        assert each[0] == each[-1] == [rank % 2, rank % 2 + 2]


def test_mistakes_are_told_with_rank_and_shapes(pool, backend_name):
    for rank, messages in enumerate(pool(backend_name, 2).run(bodies.refusals)):
        own = (2 - rank, 2)
        local = f"rank {rank} holds a local tensor of shape {own} by [3, 2] on (shard: shard(0)), found (7, 2)"
        assert messages["local"] == messages["local of run"] == local
        out = f"out must be a contiguous tensor of shape (3, 2) and dtype float32 at rank {rank} by [3, 2] on"
        assert messages["shape of out"].startswith(out)
        assert messages["shape of out"].endswith("found shape (2, 3) and dtype float32")
        assert messages["dtype of out"].endswith("found shape (3, 2) and dtype float64")
        assert messages["strided out"].endswith("found shape (3, 2) and dtype float32, not contiguous")
        assert "an average needs a floating-point tensor, found int32; cast it" in messages["average"]
        assert messages["rank"].startswith(f"rank {rank} is not in the mesh shard=1")
