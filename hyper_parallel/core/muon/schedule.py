"""One step of distributed Muon, in order (paper §6.7, Algorithm 2)."""

from __future__ import annotations

from typing import Iterator, NamedTuple


class Event(NamedTuple):
    """Something that is done for a batch, by the ranks that take part in it."""

    what: str
    batch: int


def events(count: int) -> Iterator[Event]:
    """The events of a step with `count` batches, the same for all ranks that share work; each does those of its own
    batches, in this order, so that ranks meet in their collectives in the same order.

    - "send": pieces set out to the owners of their matrices
    - "receive": they are there, and are put together
    - "compute": owners orthogonalize
    - "land": slices of the results, which set out a batch ago, are there
    - "return": those of this batch set out
    - "apply": what is complete is handed out
    - "publish": what is updated sets out to replicas; what set out a batch ago is there
    - "settle": what set out last is there

    Pieces of one batch and slices of one are in flight at most, each while another batch is computed.
    """
    if not count:
        return
    yield Event("send", 0)
    for batch in range(count):
        yield Event("receive", batch)
        if batch + 1 < count:
            yield Event("send", batch + 1)
        yield Event("compute", batch)
        if batch:
            yield Event("land", batch - 1)
        yield Event("return", batch)
        if batch:
            yield Event("apply", batch - 1)
            yield Event("publish", batch - 1)
    yield Event("land", count - 1)
    yield Event("apply", count - 1)
    yield Event("publish", count - 1)
    yield Event("settle", count - 1)
