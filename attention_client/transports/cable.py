"""grpc: the arena is the client's own memory, and a stream carries slots to the server's arena and back.

It stands in for one-sided writes: neither the connection above nor the server's loop knows of it. One stream
a connection; a frame is the bytes of one slot. What is under way is bounded by the slots: a slot that waits
for its answer is not written again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import grpc

from attention_client.transports.goodbye import say_goodbye
from attention_client.transports.mirror import mirror_arena
from eaas.grpc_client import MESSAGE_BYTES
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.wire import RequestHeader, SlotState
from eaas.wire.frame import EXCHANGE, REQUEST_FRAMES, RESPONSE_FRAMES, paste
from eaas.wire.slot import RESULT_HEADER_BYTES, reply_bell

__all__ = ["open_grpc"]

# A larger slot is not filled: its frame would not pass. 4 KiB are for headers and the message's fields.
_FRAME_BYTES = MESSAGE_BYTES - 4096
_CLOSE_S = 2.0


class _Cable:
    """See `attention_client.connection.Link`. Two threads: gRPC's own sends, `cable` asks for answers."""

    first_slot = 0
    reply_bell = reply_bell(0)

    def __init__(
        self, granted: pb.ConnectResponse, channel: grpc.Channel, on_lost: Callable[[str], None]
    ) -> None:
        self.slots = granted.slots
        self.generation = granted.generation
        self.arena = mirror_arena(granted, _FRAME_BYTES)
        self._connection_id = granted.connection_id
        self._on_lost = on_lost
        self._outbox: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._service = expert_pb2_grpc.ExpertServiceStub(channel)
        # The generated method would copy each frame twice more. A stream that lives as long as the
        # connection: keepalive pings, not a deadline, find a dead peer.
        exchange = channel.stream_stream(EXCHANGE, response_deserializer=self._deliver)
        self._stream = exchange(self._frames())
        self._receiver = threading.Thread(target=self._receive, name="cable", daemon=True)
        self._receiver.start()

    def kick(self, slot: int) -> None:
        self._outbox.put(slot)

    def close(self) -> None:
        self._closed.set()
        self._outbox.put(None)
        self._stream.cancel()
        self._receiver.join(_CLOSE_S)
        say_goodbye(self._service, self._connection_id)

    def _frames(self) -> Iterator[bytes]:
        """In gRPC's sending thread."""
        yield pb.ExchangeRequest(connection_id=self._connection_id).SerializeToString()
        for slot in iter(self._outbox.get, None):
            try:
                offset = self.arena.request_offset(slot)
                header = RequestHeader.unpack_from(self.arena.buffer, offset)
                frame = REQUEST_FRAMES.encode(slot, self.arena.buffer, offset, offset + header.end)
            except (
                ValueError
            ):  # The arena was closed under this thread, which gRPC does not wait for.
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
        """Put an answer into its slot. Returns why not; empty where all is well.

        gRPC deserialises in the thread that has just received the message. To deliver it right there saves
        the hand-over to the thread that iterates, which only asks for the next one.
        """
        try:
            slot, data, _ = RESPONSE_FRAMES.decode(message)
            room = RESULT_HEADER_BYTES + self.arena.result_capacity
            if slot >= self.slots or not RESULT_HEADER_BYTES <= len(data) <= room:
                return f"slot {slot} of {self.slots}, {len(data)} bytes of {room}"
            if self.arena.flags.load(slot) != SlotState.WRITTEN:
                return f"an answer in slot {slot}, where nobody asked"
            paste(self.arena.buffer, self.arena.result_offset(slot), data)
            self.arena.server_done(slot)
            self.arena.flags.ring(self.reply_bell)
        except ValueError as error:
            return str(error)
        return ""


def open_grpc(
    granted: pb.ConnectResponse, channel: grpc.Channel, on_lost: Callable[[str], None]
) -> _Cable:
    """Make a local arena and join it to the server's (see `Opener`)."""
    return _Cable(granted, channel, on_lost)
