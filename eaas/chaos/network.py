"""A network that loses what it is told to: a namespace with cables (Linux, as root)."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import struct
import subprocess

__all__ = ["Namespace", "why_no_namespace"]

_COMMAND_S = 40.0


def why_no_namespace() -> str:
    """Why there can be no network namespaces here; empty: there can."""
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("ip") is None:
        return "needs iproute2"
    try:
        Namespace().remove()
    except subprocess.CalledProcessError as error:
        return f"needs root that may make network namespaces: {error.stderr.decode().strip()}"
    return ""


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
        subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=_COMMAND_S)

    def cut(self, cable: str) -> None:
        """Nothing comes through a cable any more, and nobody is told."""
        self._ip("-n", self.name, "link", "set", cable, "down")

    def mend(self, cable: str) -> None:
        """It does again."""
        self._ip("-n", self.name, "link", "set", cable, "up")

    def remove(self) -> None:
        """The cables go with it."""
        self._ip("netns", "del", self.name)
