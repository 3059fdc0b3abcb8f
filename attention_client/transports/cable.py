"""grpc: the arena is the client's own memory, and a stream carries slots to the server's arena and back.

It stands in for one-sided writes: neither the connection above nor the server's loop knows of it. One stream
a connection; a frame is the bytes of one slot.
"""

from __future__ import annotations

import queue
import struct
import threading
from collections.abc import Callable, Iterator

import grpc

from attention_client.transports.goodbye import say_goodbye
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.wire import Arena, RequestHeader
from eaas.wire.slot import RESULT_HEADER_BYTES, reply_bell

__all__ = ["open_grpc"]



class _Cable:
    first_slot = 0
    reply_bell = reply_bell(0)

    def __init__(
        self, granted: pb.ConnectResponse, channel: grpc.Channel, on_lost: Callable[[str], None]
    ) -> None:
        self.slots = granted.slots
        self.generation = granted.generation
        self.arena = Arena.create_local(
            granted.slots,
            granted.payload_capacity,
            granted.result_capacity,
            granted.server_incarnation,
        )
        self._connection_id = granted.connection_id
        self._on_lost = on_lost
        self._outbox: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._service = expert_pb2_grpc.ExpertServiceStub(channel)
        # A stream that lives as long as the connection: keepalive pings, not a deadline, find a dead peer.
        self._stream = self._service.Exchange(self._requests())
        self._receiver = threading.Thread(target=self._receive, name="cable", daemon=True)
        self._receiver.start()

    def kick(self, slot: int) -> None:
        self._outbox.put(slot)

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._outbox.put(None)
        self._stream.cancel()
        say_goodbye(self._service, self._connection_id)

    def _requests(self) -> Iterator[pb.ExchangeRequest]:
        yield pb.ExchangeRequest(connection_id=self._connection_id)
        while (slot := self._outbox.get()) is not None:
            offset = self.arena.request_offset(slot)
            header = RequestHeader.unpack_from(self.arena.buffer, offset)
            frame = self.arena.buffer[offset : offset + header.end]
            yield pb.ExchangeRequest(slot=slot, data=frame)

    def _receive(self) -> None:
        reason = "the server ended the stream"
        try:
            for response in self._stream:
                self._deliver(response)
        except grpc.RpcError as error:
            reason = f"stream: {error.code().name}"
        except (ValueError, struct.error) as error:
            reason = f"wrong frame: {error}"
            self._stream.cancel()
        self._outbox.put(None)
        if not self._closed.is_set():
            self._on_lost(reason)

    def _deliver(self, response: pb.ExchangeResponse) -> None:
        slot, data = response.slot, response.data
        if slot >= self.slots or len(data) > RESULT_HEADER_BYTES + self.arena.result_capacity:
            raise ValueError(f"slot {slot}, {len(data)} bytes")
        offset = self.arena.result_offset(slot)
        self.arena.buffer[offset : offset + len(data)] = data
        self.arena.server_done(slot)
        self.arena.flags.ring(self.reply_bell)


def open_grpc(
    granted: pb.ConnectResponse, channel: grpc.Channel, on_lost: Callable[[str], None]
) -> _Cable:
    """Make a local arena and join it to the server's (see `Opener`)."""
    return _Cable(granted, channel, on_lost)
