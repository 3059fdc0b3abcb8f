"""Transport `grpc`: the arena is the client's own memory, and a stream copies slots to the server and back.

It replaces one-sided writes without changing the connection or the server's loop. Each connection has one
stream, and a frame holds the bytes of one slot. The slots bound the data in flight, because a slot is not
written again before its answer.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import grpc

from attention_client.connections.transports.granted import MirrorLink, disconnect
from eaas.net.grpc_client import MESSAGE_BYTES
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.wire.frame import EXCHANGE, REQUEST_FRAMES, RESPONSE_FRAMES

__all__ = ["GrpcLink"]

# Most bytes of a slot that fit into a frame; 4 KiB are for headers and message fields.
_FRAME_BYTES = MESSAGE_BYTES - 4096
_CLOSE_S = 2.0


class GrpcLink(MirrorLink):
    """The client's end of the stream of slots. A gRPC thread sends, and a thread of this link receives."""

    transport = "grpc"

    def __init__(
        self, granted: pb.ConnectResponse, channel: grpc.Channel, on_lost: Callable[[str], None]
    ) -> None:
        super().__init__(granted, channel, on_lost, _FRAME_BYTES)
        self._outbox: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        # The generated method would copy each frame twice more. The stream has no deadline, because it stays
        # open as long as the connection; keepalive pings detect a dead server.
        exchange = channel.stream_stream(EXCHANGE, response_deserializer=self._deliver)
        self._stream = exchange(self._frames())
        self._receiver = threading.Thread(target=self._receive, name="grpc-link", daemon=True)
        self._receiver.start()

    def notify(self, slot: int) -> None:
        """Queue a written slot for gRPC's sending thread (see `Link`)."""
        self._outbox.put(slot)

    def close(self) -> None:
        """End the stream and its receiving thread, and give the slots back (see `Link`)."""
        self._closed.set()
        self._outbox.put(None)
        self._stream.cancel()
        self._receiver.join(_CLOSE_S)
        disconnect(self._service, self._connection_id)

    def _frames(self) -> Iterator[bytes]:
        """Yield a frame for each written slot; runs in gRPC's sending thread."""
        yield pb.ExchangeRequest(connection_id=self._connection_id).SerializeToString()
        for slot in iter(self._outbox.get, None):
            try:
                span = self.request_span(slot)
                frame = REQUEST_FRAMES.encode(slot, self.arena.buffer, *span)
            except ValueError:  # The arena was closed, because gRPC does not wait for this thread.
                return
            yield frame

    def _receive(self) -> None:
        reason = "the server ended the stream"
        try:
            for refusal in self._stream:
                if refusal:
                    reason = f"wrong frame: {refusal}"
                    self._stream.cancel()
                    break
        except grpc.RpcError as error:
            reason = f"stream: {error.code().name}"
        self._outbox.put(None)
        if not self._closed.is_set():
            self._on_lost(reason)

    def _deliver(self, message: bytes) -> str:
        """Copy an answer into its slot and wake its layer call. Returns an error message; empty on success.

        Used as gRPC's deserialiser, because gRPC deserialises in the thread that receives the message. This
        avoids a hand-over to the thread that iterates.
        """
        try:
            slot, data, _ = RESPONSE_FRAMES.decode(message)
            return self.deliver(slot, data)
        except ValueError as error:
            return str(error)
