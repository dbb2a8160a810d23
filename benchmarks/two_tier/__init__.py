"""Supernodes on one machine: ranks as processes in network namespaces, with a fast link inside a supernode and a slow
one between supernodes, which the kernel really limits.

    with Network(Links(fast_mbit=2000, slow_mbit=200)) as network:
        results = run(network, body, argument)  # calls body(place, argument) on every rank

Needs Linux, root, `ip` and `tc`. Rates are limited, latency is not added; what ranks compute shares this machine's
cores.
"""

from .network import Links, Network, NetworkUnavailable
from .ranks import Place, RankFailed, run

__all__ = ["Links", "Network", "NetworkUnavailable", "Place", "RankFailed", "run"]
