"""How a connection to an expert server comes about: a call grants slots, then the transport opens them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from attention_client.connection import Connection
from attention_client.metrics import ClientMetrics
from attention_client.transports import opener
from attention_client.transports.goodbye import say_goodbye
from eaas import versions
from eaas.config import AttentionClientConfig
from eaas.errors import ClusterError, EaasError
from eaas.grpc_client import channel as open_channel
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.tls import Identity
from eaas.types import Member, ModelShape, Role

__all__ = ["CONNECT_S", "Connector", "refuse_other_model"]

CONNECT_S = 5.0
"""Deadline of the call that grants slots."""


class Connector:
    """Makes connections of one client. Any thread may call it.

    Args:
        client_id: Of the client.
        shape: The model that it runs.
        config: Transport, slots.
        metrics: Of the client.
        on_lost: Called once with each connection that is lost.
        tls: Who the client is; None: plain text.

    Raises:
        ConfigError: The transport is not installed: one error, and not one for each server.
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
        """Connect to a server once.

        Args:
            member: The server.
            incarnation: Of the client.
            list_it: Called with the connection before it can be lost: one that is lost before it is listed
                would be listed for ever.

        Returns:
            The connection, which may be lost already.

        Raises:
            grpc.RpcError, EaasError: There is none; why.
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
                say_goodbye(service, granted.connection_id)
                raise
        except BaseException:
            channel.close()
            raise
        connection = Connection(
            member.id,
            member.incarnation,
            link,
            self._shape.hidden_size,
            self._config.spin_us,
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
    """Raise ClusterError where all servers serve another checkpoint than the client."""
    if servers and all(s.model and s.model.digest != shape.digest for s in servers):
        raise ClusterError(
            f"the cluster at {monitor_address} serves another checkpoint than this client: "
            "give the directory that its servers were started with"
        )
