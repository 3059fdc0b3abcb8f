"""The expert server's end of the grpc transport: copies requests into the arena and results out of it.

To the loop it is one more client: it changes flags as a client on the same host does. A stream and its grant
end together. A frame for a slot that is not free ends the connection, and gRPC reads one frame ahead at most,
so the slots bound the memory of requests under way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc

from eaas.log import get_logger
from eaas.wire import Arena, RequestHeader, ResultHeader, SlotState
from eaas.wire.frame import EXCHANGE, REQUEST_FRAMES, RESPONSE_FRAMES, Frame, paste
from eaas.wire.slot import DOORBELL, REQUEST_HEADER_BYTES
from expert_server.transports.slot_ownership import Grant, SlotTable

__all__ = ["ExchangeHandler"]

_log = get_logger(__name__)
_ANSWERED = SlotState.DONE.mask | SlotState.OFFLINE.mask
# Longest sleep of a stream without answers. Answers and the end of the grant wake it at once.
_IDLE_US = 60_000_000


class ExchangeHandler(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Serves `ExpertService.Exchange`, the stream of requests and answers of a remote client.

    The generated handler would copy each frame twice more in each direction.

    Args:
        arena: The server's arena.
        table: Slot ownership.
    """

    def __init__(self, arena: Arena, table: SlotTable) -> None:
        self._arena = arena
        self._table = table

    def service(self, handler_call_details: Any) -> Any:
        """For gRPC, at each call: return a handler for one new Exchange stream; None for other methods."""
        if handler_call_details.method != EXCHANGE:
            return None
        stream = _Stream(self._arena, self._table)
        return grpc.stream_stream_rpc_method_handler(stream.serve, stream.receive)


class _Stream:
    """The Exchange stream of one client connection. Its slots are freed when it ends.

    Ends with FAILED_PRECONDITION if the connection is unknown or revoked, and with INVALID_ARGUMENT after a
    frame that does not fit its slot.
    """

    def __init__(self, arena: Arena, table: SlotTable) -> None:
        self._arena = arena
        self._table = table
        self._grant: Grant | None = None
        self._refusal = ""

    # -- in, by gRPC's polling thread -----------------------------------------------------------------

    def receive(self, message: bytes) -> bool:
        """Write a client's request frame into its slot; the first frame only names the connection.

        gRPC deserialises in the thread that received the message. Writing here saves the hand-over to the
        thread that iterates.

        Returns:
            Whether the frame was accepted.
        """
        try:
            frame = REQUEST_FRAMES.decode(message)
            if self._grant is None:
                self._grant = self._table.get(frame.connection_id)
            elif not self._refusal:
                self._refusal = self._write(self._grant, frame)
        except ValueError as error:
            self._refusal = str(error)
        return self._grant is not None and not self._refusal

    def _write(self, grant: Grant, frame: Frame) -> str:
        """Write a request frame into its slot, and wake the loop.

        Returns the reason for refusing the frame, which ends the stream, or an empty string.
        """
        arena, data = self._arena, frame.data
        capacity = REQUEST_HEADER_BYTES + grant.payload_capacity
        if frame.slot >= grant.slots or not REQUEST_HEADER_BYTES <= len(data) <= capacity:
            return f"slot {frame.slot} of {grant.slots}, {len(data)} bytes of {capacity}"
        # After a short frame, the loop would compute with the end of an earlier payload.
        wanted = RequestHeader.unpack_from(data, 0).end
        if wanted != len(data):
            return f"{len(data)} bytes where the header says {wanted}"
        slot = grant.first_slot + frame.slot
        with self._table.copying(grant) as valid:
            if not valid:
                return ""  # `_answers` also notices this and ends the stream.
            if arena.flags.load(slot) != SlotState.FREE:
                return f"slot {frame.slot} is not free"
            paste(arena.buffer, arena.request_offset(slot), data)
            if arena.client_write_done(slot):
                arena.flags.ring(DOORBELL)
        return ""

    # -- out, by the call's own thread ----------------------------------------------------------------

    def serve(self, requests: Iterator[bool], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Send the loop's answers to the client until either side ends the stream; then revoke its slots."""
        grant = self._grant if next(requests, False) else None
        if grant is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "unknown connection: connect first")
            return
        threading.Thread(
            target=self._read_all, args=(grant, requests), name="exchange", daemon=True
        ).start()
        # gRPC may abandon this generator when the client disconnects; the callback then revokes the grant.
        if context.add_callback(lambda: self._table.revoke(grant.connection_id)):
            yield from self._answers(grant)
        self._table.revoke(grant.connection_id)
        if self._refusal:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, self._refusal)
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the connection is over")

    def _read_all(self, grant: Grant, requests: Iterator[bool]) -> None:
        """Read request frames until the client's stream ends, then revoke its slots."""
        try:
            if not all(requests):
                _log.warning("%s: connection ended: %s", grant.client_id, self._refusal)
        except grpc.RpcError as error:
            _log.debug("%s: stream ended: %s", grant.client_id, error)
        finally:
            self._table.revoke(grant.connection_id)

    def _answers(self, grant: Grant) -> Iterator[bytes]:
        """Yield frames with the loop's results, for gRPC to send, until the grant is revoked."""
        flags = self._arena.flags
        while True:
            seen = flags.seq(grant.reply_bell)
            with self._table.copying(grant) as valid:
                if not valid:
                    return
                frames = self._collect(grant)
            if frames:
                yield from frames
                continue
            flags.wait(
                grant.first_slot, grant.slots, _ANSWERED, grant.reply_bell, seen, 0, _IDLE_US
            )

    def _collect(self, grant: Grant) -> list[bytes]:
        """Copy the computed results into frames, and free their slots for the client's next requests."""
        arena = self._arena
        frames = []
        for slot in arena.flags.scan(grant.first_slot, grant.slots, SlotState.DONE.mask):
            offset = arena.result_offset(slot)
            end = offset + ResultHeader.unpack_from(arena.buffer, offset).end
            frame = RESPONSE_FRAMES.encode(slot - grant.first_slot, arena.buffer, offset, end)
            # Free before the answer is sent, because the client may use this slot once it has the answer.
            if arena.client_free(slot):
                frames.append(frame)
        return frames
