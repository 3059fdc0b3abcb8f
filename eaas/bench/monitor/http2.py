"""The few frames of HTTP/2 (RFC 9113) that a gRPC client needs, made and read by hand. No I/O.

gRPC's own client takes as much processor time a message as the monitor's server does: on one machine it would
measure itself. These frames cost a simulated member a fiftieth of that, and a real server reads them.

Terms:
  frame: 9 bytes of head (length, kind, flags, stream), then the payload.
  message: what gRPC carries in DATA frames: a zero byte, four of length, the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

__all__ = [
    "ACK",
    "CANCEL",
    "DATA",
    "END_STREAM",
    "GOAWAY",
    "HEADERS",
    "MESSAGE_HEAD_BYTES",
    "OPENING",
    "PING",
    "RST_STREAM",
    "SETTINGS",
    "WINDOW",
    "WINDOW_UPDATE",
    "Frame",
    "Frames",
    "Messages",
    "frame",
    "message",
    "request_head",
    "window_update",
]

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM = ACK = 1
CANCEL = struct.pack(">I", 8)
"""Payload of the RST_STREAM that the kernel of a killed process does not send, but its peer's gRPC sees."""
WINDOW = (1 << 31) - 1
"""What we let the server send before we have read it, on the connection and on each stream."""

MESSAGE_HEAD_BYTES = 5

_END_HEADERS = 4
_FIRST_WINDOW = 65_535
_INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 4, 5
_HEAD = struct.Struct(">BHBBI")
_MESSAGE_HEAD = struct.Struct(">BI")


class Frame(NamedTuple):
    """One frame as it came."""

    kind: int
    flags: int
    stream: int
    payload: bytes


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """The bytes of a frame."""
    size = len(payload)
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def window_update(stream: int, more: int) -> bytes:
    """A frame that lets the peer send `more` bytes more; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", more))


OPENING = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + frame(
        SETTINGS, 0, 0, struct.pack(">HIHI", _INITIAL_WINDOW_SIZE, WINDOW, _MAX_FRAME_SIZE, 1 << 20)
    )
    + window_update(0, WINDOW - _FIRST_WINDOW)
)
"""What a client says first."""


def request_head(
    stream: int, path: str, authority: str, metadata: Iterable[tuple[str, str]] = ()
) -> bytes:
    """The HEADERS frame of a gRPC call (HPACK, RFC 7541: literals that neither side has to remember)."""
    fields = (
        (":path", path),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *metadata,
    )
    # Of HPACK's static table: `:method: POST` and `:scheme: http`.
    block = b"\x83\x86" + b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)
    return frame(HEADERS, _END_HEADERS, stream, block)


def _text(text: str) -> bytes:
    if len(text) > 126:
        raise ValueError(f"{text}: longer than the 126 bytes that one byte of length can say")
    return bytes([len(text)]) + text.encode()


def message(payload: bytes) -> bytes:
    """A gRPC message, not compressed."""
    return _MESSAGE_HEAD.pack(0, len(payload)) + payload


class Frames:
    """Cuts what a connection brings into frames."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are whole now; to be iterated to its end."""
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
    """Cuts the DATA payloads of one stream into gRPC messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are whole now; to be iterated to its end."""
        if self._rest:
            data = self._rest + data
        start, end = 0, len(data)
        while end - start >= 5:
            following = start + 5 + _MESSAGE_HEAD.unpack_from(data, start)[1]
            if following > end:
                break
            yield data[start + 5 : following]
            start = following
        self._rest = data[start:]
