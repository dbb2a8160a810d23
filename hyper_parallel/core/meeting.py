"""Where all ranks meet over connections of their own, so that each may end right afterwards.

A communication library may answer every message it gets, from a thread of its own, and let the sender wait for that
answer. After its last collective a rank can't know whether its answers have left: if it ends then, another rank may
wait for one until its time is up. Here nothing has to be answered by a process that has ended: what it has written the
system delivers.
"""

from __future__ import annotations

import secrets
import socket
import time
from contextlib import suppress
from typing import Any, Callable

from hyper_parallel.core.backend import Launch
from hyper_parallel.core.job import Call

_HERE = b"."  # all that is ever said: this rank is here; all ranks are
_KEY_BYTES = 16
_RANK_BYTES = 4


class Meeting:
    """The connections of one rank: the first rank's to all others, the others' to the first."""

    def __init__(self, launch: Launch, share: Callable[[Any], Any], call: Call):
        """Connect; called by every rank at the same time.

        Args:
            launch: how this process has joined. The first rank is reached at the address that it shows to
                `launch.master_address`.
            share: gives every rank the value that the first one calls it with.
            call: what to name in errors.

        Raises:
            CommunicationError: a rank has not connected within `launch.timeout_s`.
        """
        self._timeout_s = launch.timeout_s
        self._is_first = launch.rank == 0
        self._peers: dict[int, socket.socket] = {}
        try:
            if self._is_first:
                self._receive_all(launch, share)
            else:
                self._peers[0] = _connected(launch, *share(None))
        except OSError as error:
            self.close()
            raise call.error(f"this rank could not connect to the others: {error}") from error

    def hold(self, call: Call) -> None:
        """Return when every rank has called; from then on no rank needs another one to go on.

        Raises `CommunicationError`, which names `call`, when a rank has left or does not come in time."""
        try:
            if not self._is_first:
                self._say()
            for rank in self._peers:
                self._hear(rank, call)
            if self._is_first:
                self._say()
        except BaseException:
            # The others hear of it at once, and nobody can take a late word for one of the next meeting.
            self.close()
            raise

    def close(self) -> None:
        """Give the connections up; whoever still waits for this rank is told that it has left."""
        for connection in self._peers.values():
            connection.close()

    def _receive_all(self, launch: Launch, share: Callable[[Any], Any]) -> None:
        deadline = time.monotonic() + launch.timeout_s
        key = secrets.token_bytes(_KEY_BYTES)
        with socket.create_server((_own_address(launch), 0), backlog=launch.world_size) as server:
            share((server.getsockname(), key))
            while len(self._peers) < launch.world_size - 1:
                server.settimeout(max(1e-3, deadline - time.monotonic()))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, launch.world_size)) - set(self._peers))
                    raise TimeoutError(f"ranks {missing} have not come within {launch.timeout_s:g} s") from None
                connection.settimeout(launch.timeout_s)
                rank = _introduced(connection, key)
                if rank is None:
                    connection.close()
                else:
                    self._peers[rank] = connection

    def _say(self) -> None:
        for connection in self._peers.values():
            with suppress(OSError):  # whoever has gone is noticed by hearing nothing of it
                connection.sendall(_HERE)

    def _hear(self, rank: int, call: Call) -> None:
        try:
            heard = self._peers[rank].recv(1)
        except TimeoutError as error:
            raise call.error(f"rank {rank} has not come within {self._timeout_s:g} s") from error
        except OSError:
            heard = b""
        if heard != _HERE:
            raise call.error(f"rank {rank} has left")


def _own_address(launch: Launch) -> str:
    """The address that this machine has towards the master's, which all ranks have reached. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((launch.master_address, launch.master_port))
        return probe.getsockname()[0]


def _connected(launch: Launch, address: tuple[str, int], key: bytes) -> socket.socket:
    connection = socket.create_connection(address, timeout=launch.timeout_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(key + launch.rank.to_bytes(_RANK_BYTES, "big"))
    return connection


def _introduced(connection: socket.socket, key: bytes) -> int | None:
    """The rank at the other end; None for a stranger."""
    said = b""
    with suppress(OSError):
        while len(said) < _KEY_BYTES + _RANK_BYTES and (more := connection.recv(_KEY_BYTES + _RANK_BYTES - len(said))):
            said += more
    known = secrets.compare_digest(said[:_KEY_BYTES], key)
    return int.from_bytes(said[_KEY_BYTES:], "big") if known else None
