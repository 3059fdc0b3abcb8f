"""grpc: the arena is the client's own memory, and a stream carries slots to the server's arena and back.

It stands in for one-sided writes: neither the connection above nor the server's loop knows of it. One stream
a connection; a frame is the bytes of one slot.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import grpc

from attention_client.transports.goodbye import say_goodbye
from eaas.grpc_client import MESSAGE_BYTES
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.wire import Arena, RequestHeader, SlotState
from eaas.wire.slot import RESULT_HEADER_BYTES, reply_bell

__all__ = ["open_grpc"]

# A larger slot is not filled: its frame would not pass. 4 KiB are for headers and the message's fields.
_FRAME_BYTES = MESSAGE_BYTES - 4096
_CLOSE_S = 2.0


class _Cable:
    """See `attention_client.connection.Link`. Two threads: gRPC's own sends, `cable` receives."""

    first_slot = 0
    reply_bell = reply_bell(0)

    def __init__(
        self, granted: pb.ConnectResponse, channel: grpc.Channel, on_lost: Callable[[str], None]
    ) -> None:
        self.slots = granted.slots
        self.generation = granted.generation
        self.arena = Arena.create_local(
            granted.slots,
            min(granted.payload_capacity, _FRAME_BYTES),
            min(granted.result_capacity, _FRAME_BYTES),
            granted.server_incarnation,
        )
        for slot in range(granted.slots):
            self.arena.set_generation(slot, granted.generation)
        self._connection_id = granted.connection_id
        self._on_lost = on_lost
        self._outbox: queue.SimpleQueue[pb.ExchangeRequest | None] = queue.SimpleQueue()
        self._outbox.put(pb.ExchangeRequest(connection_id=self._connection_id))
        self._closed = threading.Event()
        self._service = expert_pb2_grpc.ExpertServiceStub(channel)
        # A stream that lives as long as the connection: keepalive pings, not a deadline, find a dead peer.
        self._stream = self._service.Exchange(self._frames())
        self._receiver = threading.Thread(target=self._receive, name="cable", daemon=True)
        self._receiver.start()

    def kick(self, slot: int) -> None:
        # Copied here, not by the sending thread: that one may outlive the arena.
        offset = self.arena.request_offset(slot)
        header = RequestHeader.unpack_from(self.arena.buffer, offset)
        frame = self.arena.buffer[offset : offset + header.end]
        self._outbox.put(pb.ExchangeRequest(slot=slot, data=frame))

    def close(self) -> None:
        self._closed.set()
        self._outbox.put(None)
        self._stream.cancel()
        self._receiver.join(_CLOSE_S)
        say_goodbye(self._service, self._connection_id)

    def _frames(self) -> Iterator[pb.ExchangeRequest]:
        yield from iter(self._outbox.get, None)

    def _receive(self) -> None:
        reason = "the server ended the stream"
        try:
            for response in self._stream:
                self._deliver(response)
        except grpc.RpcError as error:
            reason = f"stream: {error.code().name}"
        except ValueError as error:
            reason = f"wrong frame: {error}"
            self._stream.cancel()
        self._outbox.put(None)
        if not self._closed.is_set():
            self._on_lost(reason)

    def _deliver(self, response: pb.ExchangeResponse) -> None:
        slot, data = response.slot, response.data
        room = RESULT_HEADER_BYTES + self.arena.result_capacity
        if slot >= self.slots or not RESULT_HEADER_BYTES <= len(data) <= room:
            raise ValueError(f"slot {slot} of {self.slots}, {len(data)} bytes of {room}")
        if self.arena.flags.load(slot) != SlotState.WRITTEN:
            raise ValueError(f"an answer in slot {slot}, where nobody asked")
        offset = self.arena.result_offset(slot)
        self.arena.buffer[offset : offset + len(data)] = data
        self.arena.server_done(slot)
        self.arena.flags.ring(self.reply_bell)


def open_grpc(
    granted: pb.ConnectResponse, channel: grpc.Channel, on_lost: Callable[[str], None]
) -> _Cable:
    """Make a local arena and join it to the server's (see `Opener`)."""
    return _Cable(granted, channel, on_lost)
