"""The expert server's gRPC service: slots for clients, placements from the balancer, weights for peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc

from eaas import transports, versions
from eaas.errors import SharedMemoryError
from eaas.log import get_logger
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.types import ModelShape, Role
from eaas.wire import Arena
from eaas.wire.header import result_length, slot_sizes
from expert_server.experts.placements import PlacementHandler
from expert_server.load_report.hotness import HotnessHandler
from expert_server.transports.endpoint import Endpoint
from expert_server.transports.slot_ownership import Grant, SlotTable
from expert_server.weights.sharing import CheckpointSharer

__all__ = ["ROLES", "SERVICE", "ExpertService", "add_expert_service"]

_log = get_logger(__name__)
SERVICE = "eaas.rpc.v1.ExpertService"
_BALANCERS = (
    *("PreparePlacement", "RetirePlacement", "HoldSpares", "Drain", "ListExperts", "ReadHotness"),
)
_CLIENTS = ("Connect", "Disconnect", "Exchange", "Join")
_PEERS = ("DescribeCheckpoint", "ReadShard")
ROLES = (
    dict.fromkeys(_BALANCERS, (Role.BALANCER.value,))
    | dict.fromkeys(_CLIENTS, (Role.ATTENTION_CLIENT.value,))
    | dict.fromkeys(_PEERS, (Role.EXPERT_SERVER.value,))
)
"""Roles that may call each method."""
_CALLS = ("Connect", "Disconnect", "Drain")
# A client may connect before this server hears of its registration.
_UNKNOWN_S = 5.0


class ExpertService:
    """The expert server's gRPC methods (`expert.proto`), registered by `add_expert_service`.

    Args:
        arena: The server's arena.
        table: Slot ownership.
        shape: The model's shape.
        placements: Handles the balancer's placements.
        sharer: Sends the checkpoint to other servers.
        hotness: Reports expert loads to the balancer.
        on_drain: Called for each Drain call, to start leaving; must not block.
        living_clients: Incarnations of the live clients, by id; None while the monitor is silent.
    """

    def __init__(
        self,
        arena: Arena,
        table: SlotTable,
        shape: ModelShape,
        placements: PlacementHandler,
        sharer: CheckpointSharer,
        hotness: HotnessHandler,
        on_drain: Callable[[], None],
        living_clients: Callable[[], Mapping[str, int] | None] = lambda: None,
    ) -> None:
        self._arena = arena
        self._table = table
        self._shape = shape
        self.placements = placements
        self.sharer = sharer
        self.hotness = hotness
        self._on_drain = on_drain
        self._living_clients = living_clients
        # Of the transports that this server registers with the monitor, and from which clients choose.
        self.endpoints: dict[str, Endpoint] = {
            name: transports.load(transport.server)(arena, table)
            for name, transport in transports.usable().items()
        }

    def Connect(
        self, request: pb.ConnectRequest, context: grpc.ServicerContext
    ) -> pb.ConnectResponse:
        """Grant a client a run of slots in this server's arena, in which it writes all its later requests.

        The call is aborted if the client does not fit this server, or no run is free.
        """
        self._check(request, context)
        for endpoint in self.endpoints.values():
            endpoint.supersede(request.client_id, request.client_incarnation)
        grant = self._grant(request, context)
        living = self._living_clients() if grant is None else None
        # Slots of clients that are not live members go to a live one.
        if living is not None and self._table.revoke_unknown(living, _UNKNOWN_S):
            grant = self._grant(request, context)
        if grant is None:
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"no {request.slots} free slots of {self._arena.slots}; "
                "raise expert_server.slots or lower attention_client.slots",
            )
        assert grant is not None  # abort raises
        return pb.ConnectResponse(
            connection_id=grant.connection_id,
            generation=grant.generation,
            server_incarnation=self._arena.incarnation,
            first_slot=grant.first_slot,
            slots=grant.slots,
            reply_doorbell=grant.reply_doorbell,
            slot_count=self._arena.slots,
            payload_capacity=grant.payload_capacity,
            result_capacity=grant.result_capacity,
            epoch=self.placements.epoch,
            **self.endpoints[request.transport].describe(),
        )

    def _grant(self, request: pb.ConnectRequest, context: grpc.ServicerContext) -> Grant | None:
        """Grant slots for the client's steps, or for smaller ones if memory is scarce; None: no slots."""
        row_bytes = result_length(1, self._shape.hidden_size)
        most = self._arena.result_capacity // row_bytes
        # A client that does not say reads the arena's capacities.
        tokens = min(request.slot_tokens or most, most)
        sizes = slot_sizes(tokens, self._shape.hidden_size, self._shape.top_k)
        if not request.slot_tokens:
            sizes = sizes[-1:]
        client = request.client_id, request.client_incarnation
        try:
            grant = self._table.grant(*client, request.slots, sizes)
        except SharedMemoryError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        if grant is not None and grant.result_capacity < sizes[-1][1]:
            _log.warning(
                "%s: %d slots of %d tokens, not %d, because /dev/shm is full: larger layer calls take "
                "several requests. Mount it larger (docker run --shm-size)",
                request.client_id,
                request.slots,
                grant.result_capacity // row_bytes,
                tokens,
            )
        return grant

    def _check(self, request: pb.ConnectRequest, context: grpc.ServicerContext) -> None:
        refusal = versions.refusal(
            versions.SLOTS, request.protocol_version, "the slots", request.client_id, "this server"
        )
        if refusal is not None:
            context.set_trailing_metadata(refusal.trailing)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal.details)
        if request.transport not in self.endpoints:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"transport {request.transport!r}; this server has {', '.join(self.endpoints)}",
            )
        if request.model_digest != self._shape.digest:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "the client serves another checkpoint than this server",
            )
        if request.hidden_size != self._shape.hidden_size:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"hidden size {request.hidden_size}, the model has {self._shape.hidden_size}",
            )
        if not request.client_id or not 1 <= request.slots <= self._arena.slots:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"client {request.client_id!r}, {request.slots} slots (of {self._arena.slots})",
            )

    def Disconnect(
        self, request: pb.DisconnectRequest, context: grpc.ServicerContext
    ) -> pb.DisconnectResponse:
        """Free the slots of a connection that its client gives up; requests in them are dropped."""
        for endpoint in self.endpoints.values():
            endpoint.leave(request.connection_id)
        self._table.revoke(request.connection_id)
        return pb.DisconnectResponse()

    def close(self) -> None:
        """End the transports' connections and the readers for peers, before the arena is closed."""
        for endpoint in self.endpoints.values():
            endpoint.close()
        self.sharer.close()

    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainResponse:
        """Start to hand this server's experts over and to leave, as an operator asked the balancer."""
        self._on_drain()
        return pb.DrainResponse()


def add_expert_service(service: ExpertService, server: grpc.Server) -> None:
    """Register the service's methods on a gRPC server, at start.

    ReadShard sends plain bytes, to skip protobuf's copies.
    """
    handlers: dict[str, Any] = {
        name: grpc.unary_unary_rpc_method_handler(
            getattr(owner, name),
            getattr(pb, f"{name}Request").FromString,
            getattr(pb, f"{name}Response").SerializeToString,
        )
        for owner, names in (
            (service, _CALLS),
            (service.placements, PlacementHandler.CALLS),
            (service.sharer, CheckpointSharer.CALLS),
            (service.hotness, HotnessHandler.CALLS),
        )
        for name in names
    }
    handlers["ReadShard"] = grpc.unary_stream_rpc_method_handler(
        service.sharer.ReadShard,
        pb.ReadShardRequest.FromString,
    )
    ours = grpc.method_handlers_generic_handler(SERVICE, handlers)
    others = (handler for endpoint in service.endpoints.values() for handler in endpoint.handlers())
    server.add_generic_rpc_handlers((ours, *others))
