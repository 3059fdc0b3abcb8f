"""Connections to servers that are used again: to connect costs both ends more than a call does."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import grpc

from eaas.grpc_client import channel
from eaas.tls import Identity
from eaas.types import Role

__all__ = ["Line", "ServerLines"]


@dataclass(eq=False)
class Line:
    """A connection.

    Attributes:
        channel: To a server.
        calls: That run on it.
    """

    channel: grpc.Channel
    calls: int = 0


class ServerLines:
    """A connection to each server that was called. One thread at a time.

    Args:
        tls: Who this process is to the servers; None: plain text.
    """

    def __init__(self, tls: Identity | None = None) -> None:
        self._tls = tls
        self._lines: dict[str, Line] = {}
        # Not used for new calls; some still run on them.
        self._left: set[Line] = set()

    def take(self, address: str) -> Line:
        """The connection for one call more. `give_back` it when the call is over."""
        line = self._lines.get(address)
        if line is None:
            line = Line(channel(address, Role.EXPERT_SERVER.value, self._tls))
            self._lines[address] = line
        line.calls += 1
        return line

    def give_back(self, line: Line, *, works: bool) -> None:
        """A call is over. The next one connects anew, with the certificate of then, where it failed."""
        line.calls -= 1
        if not works:
            for address in [a for a, other in self._lines.items() if other is line]:
                self._leave(address)
        if line in self._left and not line.calls:
            self._left.remove(line)
            line.channel.close()

    def keep(self, addresses: Container[str]) -> None:
        """Lets go of all others, each when its calls are over."""
        for address in [a for a in self._lines if a not in addresses]:
            self._leave(address)

    def close(self) -> None:
        """Ends all calls."""
        for line in (*self._lines.values(), *self._left):
            line.channel.close()
        self._lines.clear()
        self._left.clear()

    def _leave(self, address: str) -> None:
        line = self._lines.pop(address)
        if line.calls:
            self._left.add(line)
        else:
            line.channel.close()
