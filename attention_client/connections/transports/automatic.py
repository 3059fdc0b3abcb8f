"""Transport `auto`: shared memory where this process can map the server's arena, else gRPC."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from attention_client.connections.link import Link
from attention_client.connections.transports.grpc_transport import GrpcLink
from attention_client.connections.transports.shared import SharedLink
from eaas.errors import ConnectionLostError, SharedMemoryError
from eaas.log import get_logger
from eaas.rpc.v1 import expert_pb2 as pb

__all__ = ["open_automatic"]

_log = get_logger(__name__)


def open_automatic(
    granted: pb.ConnectResponse, channel: grpc.Channel, on_lost: Callable[[str], None]
) -> Link:
    """Open a link by `shm`, or by `grpc` if the server's arena cannot be mapped (see `Opener`).

    Both use the same granted slots, so that a failed attempt leaves nothing behind. Each connection decides
    anew, since a server may return elsewhere.
    """
    try:
        return SharedLink(granted, channel, on_lost)
    except (ConnectionLostError, SharedMemoryError) as error:
        _log.info("%s: grpc, because shm is not possible: %s", granted.connection_id, error)
    return GrpcLink(granted, channel, on_lost)
