"""gRPC calls to the monitor over HTTP/2 frames (RFC 9113) that are made and read by hand.

gRPC's client takes as much processor time per message as the monitor. These frames take a fiftieth of that.
Only `Line` does I/O.

Terms:
  frame: 9 bytes of head (length, kind, flags, stream), then the payload.
  message: what gRPC carries in DATA frames: a zero byte, four of length, the bytes.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from eaas.net.grpc_secret import proof

__all__ = [
    "CANCEL",
    "DATA",
    "HEADERS",
    "OPENING",
    "RST_STREAM",
    "WINDOW",
    "Call",
    "Frame",
    "Frames",
    "Line",
    "Messages",
    "frame",
    "message",
    "request_head",
]

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM = ACK = 1
CANCEL = struct.pack(">I", 8)
"""Payload of a RST_STREAM that cancels a call."""
WINDOW = (1 << 31) - 1
"""Flow-control window of the connection and of each stream."""

_MESSAGE_HEAD_BYTES = 5

_END_HEADERS = 4
_FIRST_WINDOW = 65_535
_INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 4, 5
_HEAD = struct.Struct(">BHBBI")
_MESSAGE_HEAD = struct.Struct(">BI")
_CONNECT_S = 10.0
_CHUNK = 1 << 18
# Received bytes after which this side extends the server's window.
_UPDATE_AT = 1 << 24
_SERVICE = "/eaas.rpc.v1.MonitorService/"


class Frame(NamedTuple):
    """A frame received from the monitor."""

    kind: int
    flags: int
    stream: int
    payload: bytes


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Encode a frame as bytes."""
    size = len(payload)
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def _window_update(stream: int, more: int) -> bytes:
    """Make a frame that extends the peer's window by `more` bytes; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", more))


OPENING = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + frame(
        SETTINGS, 0, 0, struct.pack(">HIHI", _INITIAL_WINDOW_SIZE, WINDOW, _MAX_FRAME_SIZE, 1 << 20)
    )
    + _window_update(0, WINDOW - _FIRST_WINDOW)
)
"""The client's connection preface and settings."""


def request_head(
    stream: int, path: str, authority: str, metadata: Iterable[tuple[str, str]] = ()
) -> bytes:
    """Make the HEADERS frame of a gRPC call (HPACK, RFC 7541: literals without indexing)."""
    fields = (
        (":path", path),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *metadata,
    )
    # Entries of HPACK's static table: `:method: POST` and `:scheme: http`.
    block = b"\x83\x86" + b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)
    return frame(HEADERS, _END_HEADERS, stream, block)


def _text(text: str) -> bytes:
    if len(text) > 126:
        raise ValueError(f"{text}: longer than 126 bytes, the limit of a one-byte length")
    return bytes([len(text)]) + text.encode()


def message(payload: bytes) -> bytes:
    """Encode a payload as an uncompressed gRPC message."""
    return _MESSAGE_HEAD.pack(0, len(payload)) + payload


class Frames:
    """Splits the received bytes of a connection into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Add received bytes; yield the frames that are complete. The caller must iterate to the end."""
        if self._rest:
            data = self._rest + data
        start, end = 0, len(data)
        while end - start >= 9:
            high, low, kind, flags, stream = _HEAD.unpack_from(data, start)
            following = start + 9 + (high << 16 | low)
            if following > end:
                break
            yield Frame(kind, flags, stream & WINDOW, data[start + 9 : following])
            start = following
        self._rest = data[start:]


class Messages:
    """Splits the DATA payloads of a stream into gRPC messages."""

    def __init__(self) -> None:
        # A snapshot of many members comes in hundreds of pieces.
        self._pieces: list[bytes] = []
        self._size = 0
        # Bytes until the first message is complete.
        self._needed = _MESSAGE_HEAD_BYTES

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add a DATA payload; yield the messages that are complete. The caller must iterate to the end."""
        self._pieces.append(data)
        self._size += len(data)
        if self._size < self._needed:
            return
        data = b"".join(self._pieces)
        start, end = 0, len(data)
        self._needed = _MESSAGE_HEAD_BYTES
        while end - start >= _MESSAGE_HEAD_BYTES:
            size = _MESSAGE_HEAD_BYTES + _MESSAGE_HEAD.unpack_from(data, start)[1]
            if start + size > end:
                self._needed = size
                break
            yield data[start + _MESSAGE_HEAD_BYTES : start + size]
            start += size
        self._pieces, self._size = [data[start:]], end - start


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
        self._out = bytearray(OPENING)
        self._unread = 0
        self._frames = Frames()
        self._calls: dict[int, tuple[Call, Messages]] = {}
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
        self._calls[stream] = (call, Messages())
        self._out += request_head(stream, _SERVICE + method, self._authority, self._proof)
        self.send(stream, message(request), 0 if more else END_STREAM)
        return stream

    def send(self, stream: int, data: bytes, flags: int = 0) -> None:
        """Queue a message (`message`) on a call for the next `flush`.

        Heartbeats are small, and the server extends its window long before they fill it.
        """
        self._out += frame(DATA, flags, stream, data)

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
        for one in self._frames.feed(data):
            self._handle(one)
        if self._unread >= _UPDATE_AT:
            self._out += _window_update(0, self._unread)
            self._unread = 0

    def _handle(self, one: Frame) -> None:
        kind, flags, stream, payload = one
        if kind == DATA:
            self._unread += len(payload)
            if known := self._calls.get(stream):
                call, messages = known
                for answer in messages.feed(payload):
                    call.answered(answer)
        elif kind in (SETTINGS, PING) and not flags & ACK:
            answer = payload if kind == PING else b""
            self._out += frame(kind, ACK, 0, answer)
        elif kind == GOAWAY:
            raise ConnectionResetError(f"{self._authority} ends a connection: {payload[8:]!r}")
        ends = flags & END_STREAM and kind in (DATA, HEADERS)
        if (ends or kind == RST_STREAM) and (known := self._calls.pop(stream, None)):
            known[0].ended()

    def close(self) -> None:
        """Close the connection to the monitor."""
        self._socket.close()
