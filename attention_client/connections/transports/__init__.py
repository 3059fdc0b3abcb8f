"""Transports between a client and an expert server's slots, behind one interface.

shm     the server's arena, mapped into the client (same machine, pid namespace and user)
grpc    a stream of slots
nixl    one-sided writes
auto    shm where the client can map the arena, else grpc; decided for each connection
"""

from __future__ import annotations

from collections.abc import Callable

import grpc

from attention_client.connections.link import Link
from attention_client.connections.transports.automatic import open_automatic
from attention_client.connections.transports.grpc_transport import GrpcLink
from attention_client.connections.transports.one_sided import open_nixl
from attention_client.connections.transports.shared import SharedLink
from eaas.errors import ConfigError, ConnectionLostError, SharedMemoryError
from eaas.one_sided import why_not
from eaas.rpc.v1 import expert_pb2 as pb

__all__ = ["TRANSPORTS", "Opener", "opener", "requested"]

TRANSPORTS = ("shm", "grpc", "nixl")
"""Transports that a connection can have; `auto` chooses from the first two."""

Opener = Callable[[pb.ConnectResponse, grpc.Channel, Callable[[str], None]], Link]
"""Opens the data path to a server that granted a connection: (granted, channel, on_lost) -> link.

`on_lost(reason)` may be called from any thread, more than once, when the server is lost. Raises
ConnectionLostError if the server ended after the grant, SharedMemoryError if its arena cannot be attached.
"""


def _open_shared(
    granted: pb.ConnectResponse, channel: grpc.Channel, on_lost: Callable[[str], None]
) -> Link:
    try:
        return SharedLink(granted, channel, on_lost)
    except (ConnectionLostError, SharedMemoryError) as error:
        raise type(error)(
            f"{error}; transport shm needs server and client on one host, in one container and "
            "as one user: run them so, or give the client --transport auto"
        ) from error


_OPENERS: dict[str, Opener] = {
    "auto": open_automatic,
    "shm": _open_shared,
    "grpc": GrpcLink,
    "nixl": open_nixl,
}


def requested(transport: str) -> str:
    """Return the transport that the client names in Connect: `auto` needs a grant for `shm`."""
    return "shm" if transport == "auto" else transport


def opener(transport: str) -> Opener:
    """Return the function that opens a transport's links. ConfigError: its library is not installed."""
    if transport == "nixl" and (missing := why_not()):
        raise ConfigError(f"transport nixl: {missing}")
    return _OPENERS[transport]
