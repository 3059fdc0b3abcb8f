"""One connection of simulated members to the monitor, with any number of gRPC calls on it."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from benchmarks.monitor import http2
from eaas.net.grpc_secret import proof

__all__ = ["Call", "Line"]

_CONNECT_S = 10.0
_CHUNK = 1 << 18
# Received bytes after which this side extends the server's window.
_UPDATE_AT = 1 << 24
_SERVICE = "/eaas.rpc.v1.MonitorService/"


class Call(NamedTuple):
    """Callbacks of a gRPC call to the monitor.

    Attributes:
        answered: Called with each message from the monitor.
        ended: Called when the monitor has ended the call.
    """

    answered: Callable[[bytes], None]
    ended: Callable[[], None]


class Line:
    """One connection to the monitor. Only the constructor blocks; `fileno` is for a selector.

    Raises OSError: nothing listens at the address.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._authority = address
        self._proof = proof(address)
        self._socket = socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)
        self._out = bytearray(http2.OPENING)
        # DATA frames that do not fit the server's window yet, in order.
        self._held: deque[bytes] = deque()
        self._window = 65_535
        self._unread = 0
        self._frames = http2.Frames()
        self._calls: dict[int, tuple[Call, http2.Messages]] = {}
        self._next_stream = 1

    def fileno(self) -> int:
        """Descriptor of the connection's socket."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether bytes wait that the kernel has not accepted."""
        return bool(self._out)

    def call(self, method: str, request: bytes, call: Call, *, more: bool = False) -> int:
        """Begin a call of the monitor's gRPC service; return the id of its HTTP/2 stream.

        Args:
            method: Its name in the contract.
            request: The first message, serialized.
            more: More messages follow (`send`).
        """
        stream = self._next_stream
        self._next_stream += 2
        self._calls[stream] = (call, http2.Messages())
        self._out += http2.request_head(stream, _SERVICE + method, self._authority, self._proof)
        self.send(stream, http2.message(request), 0 if more else http2.END_STREAM)
        return stream

    def send(self, stream: int, message: bytes, flags: int = 0) -> None:
        """Queue a message (`http2.message`) on a call for the next `flush`."""
        data = http2.frame(http2.DATA, flags, stream, message)
        if self._held or self._window < len(message):
            self._held.append(data)
        else:
            self._window -= len(message)
            self._out += data

    def cancel(self, stream: int) -> None:
        """Cancel a call; its `ended` callback is not called."""
        if self._calls.pop(stream, None) is not None:
            self._out += http2.frame(http2.RST_STREAM, 0, stream, http2.CANCEL)

    def flush(self) -> None:
        """Send as many queued bytes as the kernel accepts."""
        if self._out:
            with contextlib.suppress(BlockingIOError):
                del self._out[: self._socket.send(self._out)]

    def pump(self) -> None:
        """Read received bytes and call the callbacks. Raises ConnectionError if the monitor has closed."""
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError(f"{self._authority} closed a connection")
        for frame in self._frames.feed(data):
            self._handle(frame)
        if self._unread >= _UPDATE_AT:
            self._out += http2.window_update(0, self._unread)
            self._unread = 0

    def _handle(self, frame: http2.Frame) -> None:
        kind, flags, stream, payload = frame
        if kind == http2.DATA:
            self._unread += len(payload)
            if known := self._calls.get(stream):
                call, messages = known
                for message in messages.feed(payload):
                    call.answered(message)
        elif kind == http2.WINDOW_UPDATE and stream == 0:
            self._window += struct.unpack(">I", payload)[0]
            while self._held and self._window >= len(self._held[0]) - 9:
                self._window -= len(self._held[0]) - 9
                self._out += self._held.popleft()
        elif kind in (http2.SETTINGS, http2.PING) and not flags & http2.ACK:
            answer = payload if kind == http2.PING else b""
            self._out += http2.frame(kind, http2.ACK, 0, answer)
        elif kind == http2.GOAWAY:
            raise ConnectionResetError(f"{self._authority} ends a connection: {payload[8:]!r}")
        ends = flags & http2.END_STREAM and kind in (http2.DATA, http2.HEADERS)
        if (ends or kind == http2.RST_STREAM) and (known := self._calls.pop(stream, None)):
            known[0].ended()

    def close(self) -> None:
        """Close the connection to the monitor."""
        self._socket.close()
