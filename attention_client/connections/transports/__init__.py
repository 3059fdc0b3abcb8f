"""Transports between a client and an expert server's slots (`shm`, `grpc`, `nixl`), behind one interface."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from attention_client.connections.link import Link
from attention_client.connections.transports.grpc_transport import GrpcLink
from attention_client.connections.transports.one_sided import open_nixl
from attention_client.connections.transports.shared import SharedLink
from eaas.errors import ConfigError
from eaas.one_sided import why_not
from eaas.rpc.v1 import expert_pb2 as pb

__all__ = ["Opener", "opener"]

Opener = Callable[[pb.ConnectResponse, grpc.Channel, Callable[[str], None]], Link]
"""Opens the data path to a server that granted a connection: (granted, channel, on_lost) -> link.

`on_lost(reason)` may be called from any thread, more than once, when the server is lost. Raises
ConnectionLostError if the server ended after the grant, SharedMemoryError if its arena cannot be attached.
"""

_OPENERS: dict[str, Opener] = {"shm": SharedLink, "grpc": GrpcLink, "nixl": open_nixl}


def opener(transport: str) -> Opener:
    """Return the function that opens a transport's links. ConfigError: its library is not installed."""
    if transport == "nixl" and (missing := why_not()):
        raise ConfigError(f"transport nixl: {missing}")
    return _OPENERS[transport]
