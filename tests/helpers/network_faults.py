"""Networks that lose what they are told to: a namespace with cables, and a proxy."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable
from typing import Any

PATIENCE_S = 40.0


class Namespace:
    """A network namespace that is joined with this one by two cables, one to the monitor and one for data.

    Attributes:
        monitor_host: Where a monitor of this namespace is to listen.
        server_host: Where a server inside is to listen.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        # Another one each time: the kernel removes the cables of a namespace some time after it is deleted.
        number = (os.getpid() + 997 * next(self._numbers)) % (1 << 14)
        self.name = f"eaas-{number}"
        # A range for tests of networks (RFC 2544): eight addresses, of which each cable has four.
        base = (198 << 24) + (18 << 16) + 8 * number
        monitor_host, monitor_end, _, _, data_host, data_end = (
            socket.inet_ntoa(struct.pack(">I", base + i)) for i in range(1, 7)
        )
        self.monitor_host, self.server_host = monitor_host, data_end
        self._ip("netns", "add", self.name)
        try:
            self._ip("-n", self.name, "link", "set", "lo", "up")
            self._join("monitor", f"em{number}", monitor_host, monitor_end)
            self._join("data", f"ed{number}", data_host, data_end)
        except BaseException:
            self.remove()
            raise

    @property
    def path(self) -> str:
        """Of the file that a process enters it by."""
        return f"/run/netns/{self.name}"

    def _join(self, cable: str, outside: str, outer: str, inner: str) -> None:
        peer = ("peer", "name", cable, "netns", self.name)
        self._ip("link", "add", outside, "type", "veth", *peer)
        self._ip("addr", "add", f"{outer}/30", "dev", outside)
        self._ip("link", "set", outside, "up")
        self._ip("-n", self.name, "addr", "add", f"{inner}/30", "dev", cable)
        self.mend(cable)

    @staticmethod
    def _ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=PATIENCE_S)

    def cut(self, cable: str) -> None:
        """Nothing comes through a cable any more, and nobody is told."""
        self._ip("-n", self.name, "link", "set", cable, "down")

    def mend(self, cable: str) -> None:
        """It does again."""
        self._ip("-n", self.name, "link", "set", cable, "up")

    def remove(self) -> None:
        """The cables go with it."""
        self._ip("netns", "del", self.name)


class Proxy:
    """Between clients and one address; loses what it is told to, and closes nothing."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = [self._listener]
        self._threads: list[threading.Thread] = []
        # By direction: bytes that were thrown away; None while everything passes.
        self.lost: dict[str, int | None] = {"up": None, "down": None}
        self._start(self._accept)

    def cut(self, *, up: bool = False, down: bool = False) -> None:
        """From now on lose what goes up to the server, or down to the clients."""
        if up:
            self.lost["up"] = 0
        if down:
            self.lost["down"] = 0

    def heal(self) -> None:
        """What was cut is over: its connections end, since bytes of them are missing, and new ones pass."""
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
                continue  # It is gone, and this side says nothing of that.
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
            # The end of a connection gets lost like all else.
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
