"""The expert server's end of the grpc transport: copies requests into the arena and results out of it.

A stream and its grant end together. A frame for a slot that is not free ends the connection, and gRPC reads
one frame ahead at most, so the slots bound the memory of requests under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from eaas.log import get_logger
from eaas.wire import Arena
from eaas.wire.frame import EXCHANGE, REQUEST_FRAMES, RESPONSE_FRAMES
from expert_server.transports.endpoint import Endpoint, copy_answers, copy_request
from expert_server.transports.slot_ownership import Grant, SlotTable

__all__ = ["GrpcEndpoint"]

_log = get_logger(__name__)


class GrpcEndpoint(Endpoint):
    """Serves `ExpertService.Exchange`, the stream of requests and answers of a remote client."""

    def handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        """Return the handler of Exchange. The generated one would copy each frame twice more each way."""
        return (_Exchange(lambda: _Stream(self._arena, self._table)),)


class _Exchange(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, stream: Callable[[], _Stream]) -> None:
        self._stream = stream

    def service(self, handler_call_details: Any) -> Any:
        """Return a handler for one new stream; None for other methods."""
        if handler_call_details.method != EXCHANGE:
            return None
        stream = self._stream()
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
                self._refusal = copy_request(
                    self._arena, self._table, self._grant, frame.slot, frame.data
                )
        except ValueError as error:
            self._refusal = str(error)
        return self._grant is not None and not self._refusal

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
            yield from copy_answers(self._arena, self._table, grant, RESPONSE_FRAMES.encode)
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
