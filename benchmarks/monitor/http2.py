"""The HTTP/2 frames (RFC 9113) that a gRPC client needs, made and read by hand. No I/O.

gRPC's client takes as much processor time per message as the monitor. These frames take a fiftieth of that.

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
"""Payload of a RST_STREAM that cancels a call."""
WINDOW = (1 << 31) - 1
"""Flow-control window of the connection and of each stream."""

MESSAGE_HEAD_BYTES = 5

_END_HEADERS = 4
_FIRST_WINDOW = 65_535
_INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 4, 5
_HEAD = struct.Struct(">BHBBI")
_MESSAGE_HEAD = struct.Struct(">BI")


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


def window_update(stream: int, more: int) -> bytes:
    """Make a frame that extends the peer's window by `more` bytes; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", more))


OPENING = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + frame(
        SETTINGS, 0, 0, struct.pack(">HIHI", _INITIAL_WINDOW_SIZE, WINDOW, _MAX_FRAME_SIZE, 1 << 20)
    )
    + window_update(0, WINDOW - _FIRST_WINDOW)
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
        self._needed = MESSAGE_HEAD_BYTES

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add a DATA payload; yield the messages that are complete. The caller must iterate to the end."""
        self._pieces.append(data)
        self._size += len(data)
        if self._size < self._needed:
            return
        data = b"".join(self._pieces)
        start, end = 0, len(data)
        self._needed = MESSAGE_HEAD_BYTES
        while end - start >= MESSAGE_HEAD_BYTES:
            size = MESSAGE_HEAD_BYTES + _MESSAGE_HEAD.unpack_from(data, start)[1]
            if start + size > end:
                self._needed = size
                break
            yield data[start + MESSAGE_HEAD_BYTES : start + size]
            start += size
        self._pieces, self._size = [data[start:]], end - start
