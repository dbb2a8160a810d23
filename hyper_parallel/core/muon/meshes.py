"""Names for the axes of a framework's own device mesh, which may be called anything."""

from __future__ import annotations

from typing import Sequence

from hyper_parallel.core.errors import LayoutError
from hyper_parallel.core.mesh import AXES

CALLED = {
    "pp": "pipeline",
    "dp_replicate": "replicate",
    "ddp": "replicate",
    "hsdp": "replicate",
    "replica": "replicate",
    "dp": "shard",
    "dp_shard": "shard",
    "dp_shard_cp": "shard",
    "fsdp": "shard",
    "ep": "expert",
    "cp": "context",
    "sp": "context",
    "tp": "tensor",
    "model": "tensor",
}
"""What others call the axes."""

_BY_PLACE = {
    1: ("shard",),
    2: ("replicate", "shard"),
    3: ("replicate", "shard", "tensor"),
    4: ("replicate", "shard", "expert", "tensor"),
    5: ("replicate", "shard", "expert", "context", "tensor"),
    6: AXES,
}


def names_of_axes(names: Sequence[str] | None, count: int) -> tuple[str, ...]:
    """Our names for `count` axes that are called `names`: those we know, where they stand in our order; else by their
    place. What is sent depends on placements only, so a name is for messages.

    Raises:
        LayoutError: there are more axes than names.
    """
    known = tuple(CALLED.get(name, name) for name in names or ())
    order = [AXES.index(name) for name in known if name in AXES]
    if len(order) == count and order == sorted(set(order)):
        return known
    if count not in _BY_PLACE:
        raise LayoutError(f"a device mesh of {count} axes; there are names for {len(AXES)}: {', '.join(AXES)}")
    return _BY_PLACE[count]
