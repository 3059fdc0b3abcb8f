"""A network namespace for one expert server, whose links can be cut (Linux, root)."""

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
    """Reason why this machine cannot make network namespaces; empty if it can. Tries to make one."""
    if os.geteuid() != 0:
        return "needs root"
    if shutil.which("ip") is None:
        return "needs iproute2"
    try:
        Namespace().remove()
    except subprocess.CalledProcessError as error:
        return f"root may not make network namespaces here: {error.stderr.decode().strip()}"
    return ""


class Namespace:
    """A network namespace with two links to this one: "monitor" and "data".

    Attributes:
        monitor_host: Address for a monitor outside.
        server_host: Address for a server inside.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        # A namespace needs a new number, because the kernel removes the links some time after the namespace.
        number = (os.getpid() + 997 * next(self._numbers)) % (1 << 14)
        self.name = f"eaas-{number}"
        # Eight addresses of the range for network tests (RFC 2544), four for each link.
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
        """File by which the first expert server's process enters the namespace."""
        return f"/run/netns/{self.name}"

    def _join(self, link: str, outside: str, outer: str, inner: str) -> None:
        peer = ("peer", "name", link, "netns", self.name)
        self._ip("link", "add", outside, "type", "veth", *peer)
        self._ip("addr", "add", f"{outer}/30", "dev", outside)
        self._ip("link", "set", outside, "up")
        self._ip("-n", self.name, "addr", "add", f"{inner}/30", "dev", link)
        self.mend(link)

    @staticmethod
    def _ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=_COMMAND_S)

    def cut(self, link: str) -> None:
        """Cut a link ("monitor" or "data"), for the fault "partition": packets are lost without an error."""
        self._ip("-n", self.name, "link", "set", link, "down")

    def mend(self, link: str) -> None:
        """Restore a link that was cut: new packets pass again."""
        self._ip("-n", self.name, "link", "set", link, "up")

    def remove(self) -> None:
        """Delete the namespace and its links, after the cluster has ended."""
        self._ip("netns", "del", self.name)
