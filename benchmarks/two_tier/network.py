"""The network: a namespace with one interface for each rank, all of them on one bridge."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Iterator

INTERFACE = "up0"
_MTU = 9000
_PREFIX = "hp2t"  # of the names of namespaces, followed by the process that has made them
_CLONE_NEWNET = 0x40000000
_FAST_CLASS, _SLOW_CLASS = "1:1", "1:2"
_made = itertools.count()


class NetworkUnavailable(Exception):
    """This machine can't have such a network; says why."""


@dataclass(frozen=True)
class Links:
    """What each rank can send, in Mbit/s: to ranks of its supernode and, beside that, to all others."""

    fast_mbit: float
    slow_mbit: float


class Network:
    """A network of `supernodes` times `ranks_each` ranks while it is entered. At the end all of it is taken away, also
    when an exception or SIGTERM ends the program; what a killed program has left, the next one takes away."""

    def __init__(self, links: Links, supernodes: int = 2, ranks_each: int = 2):
        self.links, self.supernodes, self.ranks_each = links, supernodes, ranks_each
        self._name = f"{_PREFIX}{os.getpid()}n{next(_made)}"
        self._switch = f"{self._name}_switch"
        self._previous_handler = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.supernodes * self.ranks_each

    def supernode(self, rank: int) -> int:
        """The supernode of a rank."""
        return rank // self.ranks_each

    def address(self, rank: int) -> str:
        """The address of a rank."""
        return f"10.77.{self.supernode(rank)}.{rank % self.ranks_each + 1}"

    def __enter__(self) -> Network:
        _require()
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, _end)
        try:
            _remove_what_is_left()
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*map(self._namespace, range(self.size)), self._switch):
            if name in _namespaces():
                _run("ip", "netns", "del", name)
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)
            self._previous_handler = None

    def set_links(self, links: Links) -> None:
        """Change what ranks can send, while they run."""
        for rank in range(self.size):
            _run("tc", "-n", self._namespace(rank), "-batch", "-", lines=_classes("change", links))
        self.links = links

    def enter(self, rank: int) -> None:
        """Move this thread, and what it starts, to the place of a rank."""
        with open(f"/run/netns/{self._namespace(rank)}") as file:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"can't enter the namespace of rank {rank}")

    def _namespace(self, rank: int) -> str:
        return f"{self._name}_{rank}"

    def _build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _set_up(self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge0", "mtu", str(_MTU), "up", "type", "bridge")
        for rank in range(self.size):
            name, port = self._namespace(rank), f"port{rank}"
            _run("ip", "netns", "add", name)
            _set_up(name)
            plug = [
                "link set lo up",
                f"link add {INTERFACE} mtu {_MTU} type veth peer name {port} netns {self._switch}",
                f"addr add {self.address(rank)}/16 dev {INTERFACE}",
                f"link set {INTERFACE} up",
            ]
            _run("ip", "-n", name, "-batch", "-", lines=plug)
            _run("ip", "-n", self._switch, "link", "set", port, "mtu", str(_MTU), "master", "bridge0", "up")
            near = f"10.77.{self.supernode(rank)}.0/24"
            match = f"protocol ip prio 1 u32 match ip dst {near} flowid {_FAST_CLASS}"
            limit = [
                f"qdisc add dev {INTERFACE} root handle 1: htb default {_SLOW_CLASS[-1]}",
                *_classes("add", self.links),
                f"qdisc add dev {INTERFACE} parent {_FAST_CLASS} bfifo limit 8mb",
                f"qdisc add dev {INTERFACE} parent {_SLOW_CLASS} bfifo limit 8mb",
                f"filter add dev {INTERFACE} parent 1: {match}",
            ]
            _run("tc", "-n", name, "-batch", "-", lines=limit)


def sent_bytes() -> dict[str, int]:
    """What the rank at whose place this process is has sent on each tier so far, headers included."""
    told = _run("tc", "-s", "class", "show", "dev", INTERFACE)
    sent = dict(re.findall(r"class htb (\S+) .*?Sent (\d+) bytes", told, re.S))
    return {"fast": int(sent[_FAST_CLASS]), "slow": int(sent[_SLOW_CLASS])}


def _classes(verb: str, links: Links) -> Iterator[str]:
    """How much goes out at once is two packets, or what a link carries in 100 microseconds."""
    for name, mbit in ((_FAST_CLASS, links.fast_mbit), (_SLOW_CLASS, links.slow_mbit)):
        burst = int(max(2 * _MTU + 256, mbit * 1e6 / 8 * 1e-4))
        rate = f"rate {mbit}mbit ceil {mbit}mbit burst {burst} cburst {burst} quantum 60000"
        yield f"class {verb} dev {INTERFACE} parent 1: classid {name} htb {rate}"


def _set_up(name: str) -> None:
    """No IPv6, so that a library which looks for the interface's address finds one. A pause does not slow a sender
    down. Reno, whatever the machine prefers: where acknowledgements queue up behind what is sent the other way, BBR
    takes a link for slower than it is, for some tenths of a second after each pause."""
    settings = ("net.ipv6.conf.all.disable_ipv6=1", "net.ipv4.tcp_slow_start_after_idle=0")
    _run("ip", "netns", "exec", name, "sysctl", "-qw", *settings, "net.ipv4.tcp_congestion_control=reno")


def _require() -> None:
    if not sys.platform.startswith("linux"):
        raise NetworkUnavailable(f"network namespaces are a part of Linux; this is {sys.platform}")
    missing = [each for each in ("ip", "tc", "sysctl") if shutil.which(each) is None]
    if missing:
        raise NetworkUnavailable(f"there is no `{missing[0]}` here; install iproute2 and procps")
    if os.geteuid():
        raise NetworkUnavailable("only root may make network namespaces; this is another user")


def _run(*command: str, lines: Iterator[str] | list[str] = ()) -> str:
    ended = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=30)
    if ended.returncode:
        raise NetworkUnavailable(f"`{' '.join(command)}` failed: {ended.stderr.strip()}")
    return ended.stdout


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def _remove_what_is_left() -> None:
    """Namespaces of programs that are no more."""
    for name in _namespaces():
        made = re.match(rf"{_PREFIX}(\d+)n", name)
        if made and not os.path.exists(f"/proc/{made[1]}"):
            with contextlib.suppress(NetworkUnavailable):  # another program may be at it, too
                _run("ip", "netns", "del", name)


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
