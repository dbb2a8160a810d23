"""What sharding saves, seen from outside: the resident size of fresh processes."""

import contextlib

import pytest

from tests.pool import Pool

BODY = "tests.equivalence.memory_bodies:growth_through_a_forward"


@pytest.mark.parametrize("backend_name", ["torch", "mindspore"])
def test_freed_parameters_are_really_gone_between_forward_and_backward(backend_name):
    seen = {}
    for reshard in (True, False):
        with contextlib.closing(Pool(backend_name, 2)) as pool:
            seen[reshard] = pool.run(BODY, reshard, timeout=120)
    for freed, kept in zip(seen[True], seen[False]):
        whole = freed["whole"]
        # Eight blocks of 16 MiB: freed, at most one is held and the pools of allocators keep some of its size.
        assert kept["after forward"] - freed["after forward"] > 0.75 * whole
        assert kept["after forward"] > whole
