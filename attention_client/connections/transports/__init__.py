"""Transports to a server's slots, all with the same interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import grpc

from attention_client.connections.connection import Link
from attention_client.connections.transports.grpc_transport import open_grpc
from attention_client.connections.transports.one_sided import open_nixl
from attention_client.connections.transports.shared import open_shm
from eaas.errors import ConfigError
from eaas.one_sided import why_not
from eaas.rpc.v1 import expert_pb2 as pb

__all__ = ["Opener", "opener"]


class Opener(Protocol):
    """Opens the data path to a server that granted a connection.

    `on_lost(reason)` may be called from any thread, more than once, when the server is gone.

    Raises:
        ConnectionLostError: The server went away meanwhile.
        SharedMemoryError: The arena cannot be attached.
    """

    def __call__(
        self,
        granted: pb.ConnectResponse,
        channel: grpc.Channel,
        on_lost: Callable[[str], None],
    ) -> Link:
        """Open the link."""


_OPENERS: dict[str, Opener] = {"shm": open_shm, "grpc": open_grpc, "nixl": open_nixl}


def opener(transport: str) -> Opener:
    """The opener of a transport.

    Raises:
        ConfigError: The name is unknown (the message lists the names), or its library is not installed.
    """
    if transport == "nixl" and (missing := why_not()):
        raise ConfigError(f"transport nixl: {missing}")
    try:
        return _OPENERS[transport]
    except KeyError:
        raise ConfigError(
            f"transport {transport!r} is unknown; choose one of {', '.join(_OPENERS)}"
        ) from None
