"""Open a connection to an expert server: an RPC grants slots, then the transport opens the data path."""

from __future__ import annotations

from collections.abc import Callable

from attention_client.connections.connection import Connection
from attention_client.connections.transports import Opener, requested
from attention_client.connections.transports.granted import disconnect
from attention_client.telemetry.metrics import ClientMetrics
from eaas import versions
from eaas.config import AttentionClientConfig
from eaas.net.grpc_client import channel as open_channel
from eaas.net.tls import Identity
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.types import Member, ModelShape, Role
from eaas.wire.arena import SPIN_US

__all__ = ["CONNECT_S", "open_connection"]

CONNECT_S = 5.0
"""Deadline of the RPC that grants slots."""


def open_connection(
    member: Member,
    incarnation: int,
    list_it: Callable[[Connection], None],
    *,
    open_link: Opener,
    client_id: str,
    shape: ModelShape,
    config: AttentionClientConfig,
    metrics: ClientMetrics,
    on_lost: Callable[[Connection], None],
    tls: Identity | None,
) -> Connection:
    """Try once to connect to an expert server; `ServerConnections` retries in a thread.

    Args:
        member: The server.
        incarnation: Incarnation of the client.
        list_it: Called with the connection before it can be lost. Otherwise it could be lost first and then
            stay listed for ever.
        open_link: Opens the transport's link.
        client_id: Id of the client.
        shape: Model of the client.
        config: Transport, slots.
        metrics: Metrics of the client.
        on_lost: Called once, with the connection, if it is lost.
        tls: Identity of the client; None: plain text.

    Returns:
        The connection, which may be lost already.

    Raises:
        grpc.RpcError, EaasError: The attempt failed.
    """
    request = pb.ConnectRequest(
        client_id=client_id,
        client_incarnation=incarnation,
        transport=requested(config.transport),
        slots=config.slots,
        slot_tokens=config.max_batch_tokens,
        hidden_size=shape.hidden_size,
        model_digest=shape.digest,
    )
    channel = open_channel(member.address, Role.EXPERT_SERVER.value, tls)
    early: list[str] = []
    box: list[Connection] = []

    def gone(reason: str) -> None:
        early.append(reason)
        if box:
            box[0].lose(reason)

    try:
        service = expert_pb2_grpc.ExpertServiceStub(channel)

        def ask(version: int) -> pb.ConnectResponse:
            request.protocol_version = version
            answer: pb.ConnectResponse = service.Connect(request, timeout=CONNECT_S)
            return answer

        granted = versions.negotiate(versions.SLOTS, ask)
        try:
            link = open_link(granted, channel, gone)
        except BaseException:
            disconnect(service, granted.connection_id)
            raise
    except BaseException:
        channel.close()
        raise
    connection = Connection(
        member.id,
        member.incarnation,
        link,
        shape.hidden_size,
        SPIN_US,
        config.checksum,
        on_lost,
        channel.close,
        metrics,
    )
    list_it(connection)
    box.append(connection)
    if early:
        connection.lose(early[0])
    return connection
