"""`python -m half_sender HOST:PORT KIND COUNT`: holds connections open that want nothing, until it is ended.

Kinds: `body` (a POST whose body does not end), `head` (headers that do not end), `silent` (nothing is sent)
and `idle` (a request that is answered, then nothing). A connection that the server closes is opened again.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

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
def half_senders(address: str, kind: str, count: int) -> Iterator[subprocess.Popen[str]]:
    """The attack, from a process of its own, once every connection was opened."""
    words = [sys.executable, "-m", "half_sender", address, kind, str(count)]
    attacker = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.path.dirname(__file__)},
    )
    try:
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "open\n"
        yield attacker
        assert attacker.poll() is None
    finally:
        attacker.kill()
        attacker.wait()
        assert attacker.stdout is not None
        attacker.stdout.close()


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
        # A new one for each would keep the processor busy, and nothing else.
        time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
