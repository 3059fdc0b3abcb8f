"""The balancer's channel pool: reuses gRPC connections to servers, as connecting costs more than a call."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import grpc

from eaas.net.grpc_client import channel
from eaas.net.tls import Identity
from eaas.types import Role

__all__ = ["PooledChannel", "ServerChannels"]


@dataclass(eq=False)
class PooledChannel:
    """A pooled gRPC connection to a server.

    Attributes:
        channel: The connection.
        calls: Number of running calls.
    """

    channel: grpc.Channel
    calls: int = 0


class ServerChannels:
    """One gRPC connection per called expert server. The planner's thread and the reader's have one pool each.

    Args:
        tls: This process's identity; None: plain text.
    """

    def __init__(self, tls: Identity | None = None) -> None:
        self._tls = tls
        self._channels: dict[str, PooledChannel] = {}
        # Connections that take no new calls and are closed after their last one.
        self._closing: set[PooledChannel] = set()

    def acquire(self, address: str) -> PooledChannel:
        """Return the connection to a server for one more call. `release` it when the call is over."""
        pooled = self._channels.get(address)
        if pooled is None:
            pooled = PooledChannel(channel(address, Role.EXPERT_SERVER.value, self._tls))
            self._channels[address] = pooled
        pooled.calls += 1
        return pooled

    def release(self, pooled: PooledChannel, *, works: bool) -> None:
        """Give a connection back after a call. A failed one takes no new calls and closes after its last one.

        The next call then opens a new connection, with the current certificate.
        """
        pooled.calls -= 1
        if not works:
            for address in [a for a, other in self._channels.items() if other is pooled]:
                self._retire(address)
        if pooled in self._closing and not pooled.calls:
            self._closing.remove(pooled)
            pooled.channel.close()

    def keep(self, addresses: Container[str]) -> None:
        """Close the connections to all other servers, which have left, each after its last call."""
        for address in [a for a in self._channels if a not in addresses]:
            self._retire(address)

    def close(self) -> None:
        """Close all connections; running calls are cancelled."""
        for pooled in (*self._channels.values(), *self._closing):
            pooled.channel.close()
        self._channels.clear()
        self._closing.clear()

    def _retire(self, address: str) -> None:
        pooled = self._channels.pop(address)
        if pooled.calls:
            self._closing.add(pooled)
        else:
            pooled.channel.close()
