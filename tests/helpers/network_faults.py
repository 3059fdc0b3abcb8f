"""A lossy network: a proxy."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

from eaas.net import server_records

__all__ = ["PATIENCE_S", "Proxy"]

PATIENCE_S = 40.0


class Proxy:
    """A TCP proxy to one address that can drop bytes in each direction without closing connections."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        record = server_records.find(address)
        if record is not None:
            server_records.publish(self.address, record.secret)
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        # Bytes dropped so far, by direction; None while everything passes.
        self.lost: dict[str, int | None] = {"up": None, "down": None}
        self._start(self._accept)

    def cut(self, *, up: bool = False, down: bool = False) -> None:
        """Drop all bytes to the server (up) or to the clients (down) from now on."""
        if up:
            self.lost["up"] = 0
        if down:
            self.lost["down"] = 0

    def heal(self) -> None:
        """End the cut. Its connections close, since they lack bytes; new ones pass."""
        self.lost = {"up": None, "down": None}
        for one in self._sockets[1:]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                below, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(below)
            try:
                above = socket.create_connection(self._target, timeout=PATIENCE_S)
            except ConnectionRefusedError:
                continue  # The server is gone; this side stays silent.
            above.settimeout(None)
            self._sockets.append(above)
            self._start(self._pass, below, above, "up")
            self._start(self._pass, above, below, "down")

    def _pass(self, source: socket.socket, target: socket.socket, way: str) -> None:
        try:
            while data := source.recv(1 << 16):
                lost = self.lost[way]
                if lost is None:
                    target.sendall(data)
                else:
                    self.lost[way] = lost + len(data)
        except OSError:
            return
        finally:
            # During a cut the end of a connection is dropped as well.
            if self.lost[way] is None:
                with contextlib.suppress(OSError):
                    target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)
