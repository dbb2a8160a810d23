"""Fixtures for the whole suite: worker pools that live as long as the session, and a time limit for every test."""

from __future__ import annotations

import signal
from typing import Callable, Iterator

import pytest

from tests.pool import Pool

DEFAULT_LIMIT_S = 300  # more than the workers' start and a body may take together


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"limit(seconds): end the test after this time (default {DEFAULT_LIMIT_S} s)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that takes too long, with the line it was in."""
    marker = item.get_closest_marker("limit")
    seconds = marker.args[0] if marker else DEFAULT_LIMIT_S

    def give_up(signum: int, frame: object) -> None:
        raise TimeoutError(f"{item.nodeid} did not finish within {seconds} s")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[str, int], Pool]]:
    """`pool(backend, ranks)`: the session's pool for a backend ("torch" or "mindspore") and 1 to 4 ranks."""
    pools: dict[tuple[str, int], Pool] = {}

    def get(backend: str, ranks: int) -> Pool:
        return pools.setdefault((backend, ranks), Pool(backend, ranks))

    yield get
    for each in pools.values():
        each.close()


@pytest.fixture(params=["torch", "mindspore"])
def backend_name(request: pytest.FixtureRequest) -> str:
    """Each backend in turn."""
    return request.param
