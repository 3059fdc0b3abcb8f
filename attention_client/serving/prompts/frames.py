"""Messages between the endpoint and the prompt worker: a length of 8 bytes, then the payload."""

from __future__ import annotations

import socket
import struct

__all__ = ["receive_frame", "send_frame"]

_LENGTH = struct.Struct("<Q")


def send_frame(channel: socket.socket, *parts: bytes) -> None:
    """Send one frame made of these parts. Raises OSError."""
    channel.sendall(_LENGTH.pack(sum(map(len, parts))))
    for part in parts:
        channel.sendall(part)


def receive_frame(channel: socket.socket) -> bytes:
    """Receive the next frame. Raises OSError; EOFError if the other side has closed the channel."""
    (length,) = _LENGTH.unpack(_receive(channel, _LENGTH.size))
    return bytes(_receive(channel, length))


def _receive(channel: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view, filled = memoryview(data), 0
    while filled < length:
        received = channel.recv_into(view[filled:])
        if not received:
            raise EOFError("the other side has closed the channel")
        filled += received
    return data
