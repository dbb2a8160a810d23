"""The way of a piece to its matrix's owner: axis by axis, one collective along each (paper §6.4)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Sequence

import numpy as np

from hyper_parallel.core.topology import FAST, Topology

INSIDE, ACROSS = "inside supernodes", "across supernodes"


@dataclass(frozen=True)
class Relay:
    """The ranks of a shard group by their places, and the coordinates of each along the axes of the relay, in the order
    in which pieces go along them. At each axis a piece goes to the rank that has its owner's coordinate there. Slices
    of the result go back the same way, the last axis first."""

    ranks: tuple[int, ...]
    axes: tuple[str, ...]
    coordinates: tuple[tuple[int, ...], ...]

    @cached_property
    def _place(self) -> dict[tuple[int, ...], int]:
        return {each: place for place, each in enumerate(self.coordinates)}

    def at(self, origin: int, owner: int, hop: int) -> int:
        """The place that a piece has reached before a hop; after the last one, with `hop` the number of axes, its
        owner's."""
        return self._place[self.coordinates[owner][:hop] + self.coordinates[origin][hop:]]

    @cached_property
    def _origins(self) -> dict[tuple[int, int, int], list[int]]:
        origins: dict[tuple[int, int, int], list[int]] = {}
        places = range(len(self.ranks))
        for hop in range(len(self.axes) + 1):
            for owner in places:
                for origin in places:
                    origins.setdefault((hop, owner, self.at(origin, owner, hop)), []).append(origin)
        return origins

    def origins(self, hop: int, owner: int, place: int) -> Sequence[int]:
        """Whose pieces for an owner are at a place before a hop."""
        return self._origins.get((hop, owner, place), ())

    def line(self, place: int, hop: int) -> tuple[int, ...]:
        """The ranks, ascending, between which a hop is made: those that differ from `place` along its axis."""
        here = self.coordinates[place]
        return tuple(
            sorted(
                rank
                for rank, each in zip(self.ranks, self.coordinates)
                if each[:hop] == here[:hop] and each[hop + 1 :] == here[hop + 1 :]
            )
        )


@lru_cache(maxsize=4096)
def relay_of(ranks: tuple[int, ...], axes: tuple[str, ...], sizes: tuple[int, ...], topology: Topology) -> Relay:
    """The relay of a shard group, given its ranks in row-major order of the axes that cut its matrices.

    Inside a supernode it goes along the axes of the mesh, the innermost first. Where the group lies in several, with as
    many ranks in each, it goes inside them first, and then across, so that each piece crosses once, in one message for
    each two supernodes; where their numbers differ, or each has one, straight.
    """
    if topology.tier(ranks) == FAST:
        places = np.stack(np.unravel_index(np.arange(len(ranks)), sizes), axis=1)[:, ::-1]
        return Relay(ranks, axes[::-1], tuple(map(tuple, places.tolist())))
    homes: dict[int, list[int]] = {}
    for rank in ranks:
        homes.setdefault(topology.supernodes[rank], []).append(rank)
    named = " x ".join(axes)
    if len({len(members) for members in homes.values()}) > 1 or len(homes) == len(ranks):
        return Relay(ranks, (f"{named} {ACROSS}",), tuple((place,) for place in range(len(ranks))))
    coordinates = {
        rank: (inside, across) for across, members in enumerate(homes.values()) for inside, rank in enumerate(members)
    }
    return Relay(ranks, (f"{named} {INSIDE}", f"{named} {ACROSS}"), tuple(coordinates[rank] for rank in ranks))
