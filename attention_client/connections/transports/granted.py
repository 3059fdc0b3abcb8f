"""Slots granted by an expert server: mirror them in a local arena, and give them back."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from eaas.log import get_logger
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1.expert_pb2_grpc import ExpertServiceStub
from eaas.wire import Arena, RequestHeader, SlotState
from eaas.wire.frame import paste
from eaas.wire.slot import RESULT_HEADER_BYTES, reply_doorbell

__all__ = ["MirrorLink", "disconnect", "mirror_arena"]

_log = get_logger(__name__)
_DEADLINE_S = 1.0


def mirror_arena(granted: pb.ConnectResponse, most_bytes: int | None = None) -> Arena:
    """Make an arena in the client's private memory with the granted slots, for transports that copy slots.

    The slots are numbered from 0 and get the grant's generation.

    Args:
        granted: The server's answer to Connect.
        most_bytes: Largest payload or result that the transport carries; None: no limit.
    """
    payload, result = granted.payload_capacity, granted.result_capacity
    if most_bytes is not None:
        payload, result = min(payload, most_bytes), min(result, most_bytes)
    arena = Arena.create_local(granted.slots, payload, result, granted.server_incarnation)
    for slot in range(granted.slots):
        arena.set_generation(slot, granted.generation)
    return arena


class MirrorLink:
    """Base of links whose arena is the client's own memory, with slots numbered from 0."""

    first_slot = 0
    direct = False
    reply_doorbell = reply_doorbell(0)

    def __init__(
        self,
        granted: pb.ConnectResponse,
        channel: grpc.Channel,
        on_lost: Callable[[str], None],
        most_bytes: int | None = None,
    ) -> None:
        self.slots = granted.slots
        self.generation = granted.generation
        self.arena = mirror_arena(granted, most_bytes)
        self.payload_capacity = self.arena.payload_capacity
        self.result_capacity = self.arena.result_capacity
        self._connection_id = granted.connection_id
        self._on_lost = on_lost
        self._service = ExpertServiceStub(channel)

    def request_span(self, slot: int) -> tuple[int, int]:
        """Where a written request begins and ends in the arena. Raises ValueError after the arena's end."""
        offset = self.arena.request_offset(slot)
        return offset, offset + RequestHeader.unpack_from(self.arena.buffer, offset).end

    def deliver(self, slot: int, data: memoryview) -> str:
        """Copy an answer, header and result, into its slot and wake its layer call.

        Returns:
            Why the answer does not fit, which must end the connection; an empty string if it does.
        """
        capacity = RESULT_HEADER_BYTES + self.arena.result_capacity
        if slot >= self.slots or not RESULT_HEADER_BYTES <= len(data) <= capacity:
            return f"slot {slot} of {self.slots}, {len(data)} bytes of {capacity}"
        if self.arena.flags.load(slot) != SlotState.WRITTEN:
            return f"an answer in slot {slot}, which has no request"
        paste(self.arena.buffer, self.arena.result_offset(slot), data)
        self.arena.server_done(slot)
        self.arena.flags.ring(self.reply_doorbell)
        return ""


def disconnect(service: ExpertServiceStub, connection_id: str) -> bool:
    """Give a closed connection's slots back to the server. Returns whether the server answered.

    Without this call, the server takes the slots back when the client's lease ends.
    """
    try:
        service.Disconnect(pb.DisconnectRequest(connection_id=connection_id), timeout=_DEADLINE_S)
    except grpc.RpcError as error:
        _log.debug("%s: the server did not answer Disconnect: %s", connection_id, error)
        return False
    return True
