"""Machines for a test: namespaces with their own network, processes, host name and mounts.

All of them see the files of this machine, except what is mounted over them. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from waiting import eventually

__all__ = ["Host", "Hosts", "run_all", "why_no_hosts"]

_CALL_S = 60.0
# The first process of the namespaces: bash, since it reaps orphans.
_FIRST = """
hostname {name}; mount --make-rprivate /; mount -t proc proc /proc
{mounts}
ip link set lo up
while :; do sleep 1000 & wait $!; done
"""
_NAMESPACES = ("--net", "--pid", "--mount", "--uts", "--ipc")


def why_no_hosts() -> str:
    """Why this machine cannot make hosts; empty if it can."""
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "ip", "link", "set", "lo", "up"],
        capture_output=True,
        text=True,
        timeout=_CALL_S,
    )
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


def _call(*words: str) -> None:
    subprocess.run(words, check=True, timeout=_CALL_S, capture_output=True)


class Host:
    """One machine.

    Attributes:
        address: IP address.
    """

    def __init__(
        self, name: str, bridge: str, link: str, address: str, gateway: str, mounts: str
    ) -> None:
        self.name, self.address = name, address
        self._link = link
        self._outer = subprocess.Popen(
            [
                *("unshare", *_NAMESPACES, "--fork", "--kill-child"),
                *("bash", "-ec", _FIRST.format(name=name, mounts=mounts)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # It complains of its own end.
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        eventually(lambda: bool(children.read_text().split()), what="the namespaces")
        self.pid = int(children.read_text().split()[0])
        eventually(lambda: Path("/proc/self/ns/net").readlink() != self._net(), what="the network")
        peer = ("peer", "name", "eth0", "netns", str(self.pid))
        _call("ip", "link", "add", link, "type", "veth", *peer)
        _call("ip", "link", "set", link, "master", bridge, "up")
        self.check("ip", "addr", "add", f"{address}/24", "dev", "eth0")
        self.check("ip", "link", "set", "eth0", "up")
        self.check("ip", "route", "add", "default", "via", gateway)
        # The first process mounts before it brings up the loopback.
        eventually(lambda: "UP" in self.check("ip", "-o", "link", "show", "lo"), what="the host")

    def _net(self) -> Path:
        return Path(f"/proc/{self.pid}/ns/net").readlink()

    def words(self, *words: str) -> list[str]:
        """The command line that runs a program there."""
        return ["nsenter", "-t", str(self.pid), "-n", "-p", "-m", "-u", "-i", *words]

    def check(
        self, *words: str, environment: Mapping[str, str] | None = None, timeout_s: float = _CALL_S
    ) -> str:
        """Run a program there to its end; return its output. Its failure fails the test."""
        # A file, since a program that it leaves running would hold a pipe open.
        with open(f"/proc/self/fd/{os.memfd_create('output')}", "w+b") as output:
            code = subprocess.run(
                self.words(*words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | dict(environment or {}),
                timeout=timeout_s,
            ).returncode
            output.seek(0)
            text = output.read().decode(errors="replace")
        assert code == 0, f"{self.name}: {' '.join(words)}: {text[-4000:]}"
        return text

    def pids(self, *parts: str) -> list[int]:
        """Processes of the host, by ids of this machine, whose command line has all the parts."""
        found = []
        try:
            space = Path(f"/proc/{self.pid}/ns/pid").readlink()
        except FileNotFoundError:
            # The host was killed.
            return []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if (path / "ns/pid").readlink() == space and all(part in line for part in parts):
                    found.append(int(path.name))
        return found

    def kill(self) -> None:
        """End all its processes, as at a loss of power; peers still see their connections close."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._outer.wait()
        # The kernel removes the link of an ended namespace a moment later.
        eventually(lambda: not Path("/sys/class/net", self._link).exists(), what="no link")

    def cut(self) -> None:
        """Pull its network cable: peers see only silence."""
        _call("ip", "link", "set", self._link, "down")

    def mend(self) -> None:
        """Plug the cable in again."""
        _call("ip", "link", "set", self._link, "up")


class Hosts:
    """Machines on one bridge; this machine reaches them and they reach it.

    Args:
        count: Number of machines.
        mounts: Shell commands that mount what each of them has for itself.

    Attributes:
        hosts: The machines.
        gateway: Address of this machine.
    """

    def __init__(self, count: int, mounts: str) -> None:
        self._mounts = mounts
        number = random.SystemRandom().randrange(1, 250)
        self._tag = f"t{os.getpid() % 100_000}"
        self._bridge = f"{self._tag}br"
        self._network = f"10.77.{number}"
        self.gateway = f"{self._network}.254"
        self.hosts: list[Host] = []
        # A bridge without its own address takes one of its links', and hosts lose this machine when it ends.
        own = f"02:00:00:00:{number:02x}:fe"
        _call("ip", "link", "add", self._bridge, "address", own, "type", "bridge")
        try:
            _call("ip", "addr", "add", f"{self.gateway}/24", "dev", self._bridge)
            _call("ip", "link", "set", self._bridge, "up")
            for number in range(1, count + 1):
                self.hosts.append(self.new(number))
        except BaseException:
            self.close()
            raise

    def new(self, number: int) -> Host:
        """Start a machine with the address of this number, from 1; a former one must have ended."""
        return Host(
            f"node{number}",
            self._bridge,
            f"{self._tag}v{number}",
            f"{self._network}.{number}",
            self.gateway,
            self._mounts,
        )

    def close(self) -> None:
        """End all machines."""
        for host in self.hosts:
            host.kill()
        _call("ip", "link", "del", self._bridge)


def run_all(commands: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Wait for the ends of commands that run at once. A failure fails the test."""
    codes = [command.wait(timeout_s) for command in commands]
    assert not any(codes), [command.args for command in commands]
