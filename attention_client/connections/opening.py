"""Open a connection to an expert server: a call grants slots, then the transport opens them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from attention_client.connections.connection import Connection
from attention_client.connections.transports import opener
from attention_client.connections.transports.granted import disconnect
from attention_client.telemetry.metrics import ClientMetrics
from eaas import versions
from eaas.config import AttentionClientConfig
from eaas.errors import ClusterError, EaasError
from eaas.net.grpc_client import channel as open_channel
from eaas.net.tls import Identity
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.types import Member, ModelShape, Role
from eaas.wire.arena import SPIN_US

__all__ = ["CONNECT_S", "Connector", "refuse_other_model"]

CONNECT_S = 5.0
"""Deadline of the call that grants slots."""


class Connector:
    """Opens connections of one client. Thread-safe.

    Args:
        client_id: Id of the client.
        shape: Model of the client.
        config: Transport, slots.
        metrics: Metrics of the client.
        on_lost: Called once with each connection that is lost.
        tls: Identity of the client; None: plain text.

    Raises:
        ConfigError: The transport is not installed.
    """

    def __init__(
        self,
        client_id: str,
        shape: ModelShape,
        config: AttentionClientConfig,
        metrics: ClientMetrics,
        on_lost: Callable[[Connection], None],
        tls: Identity | None,
    ) -> None:
        self._client_id = client_id
        self._shape = shape
        self._config = config
        self._metrics = metrics
        self._on_lost = on_lost
        self._tls = tls
        self._open_link = opener(config.transport)

    def connect(
        self, member: Member, incarnation: int, list_it: Callable[[Connection], None]
    ) -> Connection:
        """Try to connect to a server once.

        Args:
            member: The server.
            incarnation: Incarnation of the client.
            list_it: Called with the connection before it can be lost. Otherwise a connection could be lost
                first and then stay listed for ever.

        Returns:
            The connection, which may be lost already.

        Raises:
            grpc.RpcError, EaasError: The attempt failed.
        """
        channel = open_channel(member.address, Role.EXPERT_SERVER.value, self._tls)
        try:
            service = expert_pb2_grpc.ExpertServiceStub(channel)
            granted = self._ask(service, incarnation)
            early: list[str] = []
            box: list[Connection] = []

            def gone(reason: str) -> None:
                early.append(reason)
                if box:
                    box[0].lose(reason)

            try:
                link = self._open_link(granted, channel, gone)
            except EaasError:
                disconnect(service, granted.connection_id)
                raise
        except BaseException:
            channel.close()
            raise
        connection = Connection(
            member.id,
            member.incarnation,
            link,
            self._shape.hidden_size,
            SPIN_US,
            self._config.checksum,
            self._on_lost,
            channel.close,
            self._metrics,
        )
        list_it(connection)
        box.append(connection)
        if early:
            connection.lose(early[0])
        return connection

    def _ask(self, stub: expert_pb2_grpc.ExpertServiceStub, incarnation: int) -> pb.ConnectResponse:
        request = pb.ConnectRequest(
            client_id=self._client_id,
            client_incarnation=incarnation,
            transport=self._config.transport,
            slots=self._config.slots,
            hidden_size=self._shape.hidden_size,
            model_digest=self._shape.digest,
        )

        def connect(version: int) -> pb.ConnectResponse:
            request.protocol_version = version
            answer: pb.ConnectResponse = stub.Connect(request, timeout=CONNECT_S)
            return answer

        return versions.negotiate(versions.SLOTS, connect)


def refuse_other_model(
    servers: Collection[Member], shape: ModelShape, monitor_address: str
) -> None:
    """Raise ClusterError if all servers serve another checkpoint than the client."""
    if servers and all(s.model and s.model.digest != shape.digest for s in servers):
        raise ClusterError(
            f"the cluster at {monitor_address} serves another checkpoint than this client: "
            "use the model directory that its servers were started with"
        )
