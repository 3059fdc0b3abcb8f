"""The client's ends of the transports to an expert server's slots, behind one interface (`Link`)."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from attention_client.connections.link import Link
from attention_client.connections.transports.automatic import open_automatic
from eaas import transports
from eaas.errors import ConfigError
from eaas.rpc.v1 import expert_pb2 as pb

__all__ = ["Opener", "opener", "requested"]

Opener = Callable[[pb.ConnectResponse, grpc.Channel, Callable[[str], None]], Link]
"""Opens the data path to a server that granted a connection: (granted, channel, on_lost) -> link.

`on_lost(reason)` may be called from any thread, more than once, when the server is lost. Raises
ConnectionLostError if the server ended after the grant, SharedMemoryError if its arena cannot be attached.
"""


def requested(transport: str) -> str:
    """Return the transport that the client names in Connect: `auto` needs a grant for `shm`."""
    return "shm" if transport == transports.AUTO else transport


def opener(transport: str) -> Opener:
    """Return the function that opens a transport's links.

    Raises:
        ConfigError: The transport is unknown, or this process cannot use it.
    """
    if transport == transports.AUTO:
        return open_automatic
    found = transports.known(transport)
    if missing := found.why_not():
        raise ConfigError(f"transport {transport}: {missing}")
    opens: Opener = transports.load(found.client)
    return opens
