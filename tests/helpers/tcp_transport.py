"""Transport `tcp` for the tests of docs/transports.md: slots as frames over a TCP connection."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Callable
from mmap import mmap
from typing import Any

import grpc

from attention_client.connections.transports.granted import MirrorLink, disconnect
from eaas.errors import ConnectionLostError
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.transports import Transport
from eaas.wire import Arena
from expert_server.transports.endpoint import Endpoint, copy_answers, copy_request
from expert_server.transports.slot_ownership import Grant, SlotTable

TCP = Transport("tcp_transport:TcpLink", "tcp_transport:TcpEndpoint")

# Slot's index and length; a client's first frame holds the connection's id.
HEAD = struct.Struct("<II")
JOIN_S = 5.0


def frame(slot: int, buffer: mmap, start: int, end: int) -> bytes:
    return HEAD.pack(slot, end - start) + buffer[start:end]


def read_frame(stream: Any) -> tuple[int, memoryview] | None:
    """A frame; None at the end of the connection."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    slot, length = HEAD.unpack(head)
    data = stream.read(length)
    return (slot, memoryview(data)) if len(data) == length else None


class TcpLink(MirrorLink):
    """The client's end: a thread sends, a thread receives."""

    transport = "tcp"

    def __init__(
        self, granted: pb.ConnectResponse, channel: grpc.Channel, on_lost: Callable[[str], None]
    ) -> None:
        super().__init__(granted, channel, on_lost)
        host, _, port = granted.hello.decode().rpartition(":")
        try:
            self._socket = socket.create_connection((host, int(port)), JOIN_S)
            self._socket.settimeout(None)
            name = self._connection_id.encode()
            self._socket.sendall(HEAD.pack(0, len(name)) + name)
        except OSError as error:
            raise ConnectionLostError(f"tcp: {error}") from error
        self._closing = False
        self._written: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name="tcp-link", daemon=True)
            for run in (self._send, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    def notify(self, slot: int) -> None:
        self._written.put(slot)

    def close(self) -> None:
        self._closing = True
        self._written.put(None)
        self._end()
        for thread in self._threads:
            thread.join(JOIN_S)
        self._socket.close()
        disconnect(self._service, self._connection_id)

    def _end(self) -> None:
        with contextlib.suppress(OSError):  # the other side was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send(self) -> None:
        for slot in iter(self._written.get, None):
            try:
                self._socket.sendall(frame(slot, self.arena.buffer, *self.request_span(slot)))
            except (OSError, ValueError):
                return  # `_receive` says so

    def _receive(self) -> None:
        reason = "the server closed the connection"
        with self._socket.makefile("rb") as stream:
            try:
                while (got := read_frame(stream)) is not None:
                    if refusal := self.deliver(*got):
                        reason = refusal
                        break
            except (OSError, ValueError) as error:
                reason = str(error)
        if not self._closing:
            self._end()
            self._on_lost(reason)


class TcpEndpoint(Endpoint):
    """The server's end: a thread accepts; two threads for each connection."""

    def __init__(self, arena: Arena, table: SlotTable) -> None:
        super().__init__(arena, table)
        self._lock = threading.Lock()
        self._open: dict[str, socket.socket] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._accepting = threading.Thread(target=self._accept, name="tcp-endpoint", daemon=True)
        self._accepting.start()

    def describe(self) -> dict[str, Any]:
        host, port = self._listener.getsockname()
        return {"hello": f"{host}:{port}".encode()}

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(JOIN_S)
        self._listener.close()
        with self._lock:
            names = list(self._open)
        for name in names:
            self._table.revoke(name)

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(connected,), name="tcp-endpoint", daemon=True
            ).start()

    def _serve(self, connected: socket.socket) -> None:
        """Read requests until the client's end; then its grant ends."""
        with connected, connected.makefile("rb") as stream:
            first = read_frame(stream)
            grant = self._table.get(str(first[1], "utf-8")) if first is not None else None
            if grant is None:
                return
            with self._lock:
                self._open[grant.connection_id] = connected
            sender = threading.Thread(target=self._answer, args=(connected, grant), daemon=True)
            sender.start()
            try:
                while (got := read_frame(stream)) is not None:
                    if copy_request(self._arena, self._table, grant, *got):
                        break
            except OSError:
                pass  # the client is gone
            self._table.revoke(grant.connection_id)
            sender.join(JOIN_S)
            with self._lock:
                del self._open[grant.connection_id]

    def _answer(self, connected: socket.socket, grant: Grant) -> None:
        try:
            for answer in copy_answers(self._arena, self._table, grant, frame):
                connected.sendall(answer)
            connected.shutdown(socket.SHUT_RDWR)
        except (OSError, ValueError):
            return  # the client, or the server's arena, is gone
