"""Records of this user's servers on loopback, with the secret that their callers must send.

Without TLS every local user can connect to a loopback port. So each server on loopback requires the cluster's
secret and publishes a record (`eaas.user_files`) under its address. A caller of the same user finds the
record by the address, and sends the secret only while the recorded process lives. During that time no other
process can listen at the address, so no other user's process learns the secret or impersonates the server.

The monitor creates the secret; the other processes read it from the monitor's record. A monitor that restarts
at its address finds its earlier record and keeps the secret.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import ipaddress
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from typing import Any, Self

from eaas import user_files
from eaas.errors import ConfigError

__all__ = [
    "OPERATOR_PATH",
    "ServerRecord",
    "cluster_secret",
    "find",
    "monitor_secret",
    "new_secret",
    "prune",
    "publish",
    "shared_secret",
    "started_at",
    "withdraw",
]

OPERATOR_PATH = "/operator/"
"""URL path of the HTTP endpoint; the operator's token follows (the secret in the endpoint's record)."""

_SECRET_BYTES = 32
_LOCAL = "localhost"


@dataclass(frozen=True)
class ServerRecord:
    """Record of a server process that listens at a loopback address.

    Attributes:
        secret: Callers must present it.
        pid: Process id in /proc.
        proc: Device of that /proc; containers may have their own.
        started: Start time in ticks since boot; distinguishes processes with the same pid.
        keep: The record outlives its process while others of the cluster live, so that a restarted process
            keeps the secret.
    """

    secret: str
    pid: int
    proc: int
    started: int
    keep: bool

    def __repr__(self) -> str:
        # The repr omits the secret, which must not get into a log.
        return f"ServerRecord(pid={self.pid})"

    @classmethod
    def of(cls, document: dict[str, Any]) -> Self | None:
        """Parse the record of a server; None if it is not valid."""
        try:
            record = cls(**document)
        except TypeError:
            return None
        return record if isinstance(record.secret, str) and isinstance(record.pid, int) else None

    @property
    def lives(self) -> bool:
        """Whether the recorded process lives, so that callers may send it the secret.

        A process in another container is invisible and counts as alive.
        """
        return self.proc != _proc() or started_at(self.pid) == self.started


def new_secret() -> str:
    """Make a random secret (32 bytes in hex), for a new cluster or an endpoint's operator page."""
    return secrets.token_hex(_SECRET_BYTES)


def find(address: str) -> ServerRecord | None:
    """Find the record of a server on loopback by its address, preferably of a live process.

    Args:
        address: host:port. Only the host names localhost and this machine's own are resolved.
    """
    ended = None
    for key in _keys(address):
        for document in user_files.read(key):
            record = ServerRecord.of(document)
            if record is not None and record.lives:
                return record
            ended = ended or record
    return ended


def publish(address: str, secret: str, *, keep: bool = False) -> None:
    """Publish the record of this server process, and replace any other record of the address.

    Args:
        address: host:port with a loopback address.
        secret: Callers must present it.
        keep: See `ServerRecord`.

    Raises:
        ConfigError: There is no directory private to this user.
    """
    (key,) = _keys(address)
    prune()
    with user_files.change():
        user_files.write(key, _own(secret, keep=keep))


def withdraw(address: str) -> None:
    """Remove the record of an earlier server process at an address, because this one needs no secret."""
    for key in _keys(address):
        user_files.remove(key)


def cluster_secret(monitor_addresses: str) -> str | None:
    """Read the secret of a cluster on this machine; None if its monitor has no record for this user.

    Args:
        monitor_addresses: "host:port", or "host:port,host:port".
    """
    for address in monitor_addresses.split(","):
        record = find(address.strip())
        if record is not None:
            return record.secret
    return None


def monitor_secret(address: str) -> str:
    """Choose the secret of a starting monitor: that of the earlier process at the address, else a new one.

    Args:
        address: host:port; port 0 means a free port.
    """
    return (None if address.endswith(":0") else cluster_secret(address)) or new_secret()


def shared_secret(name: str) -> str:
    """Read the common secret of several monitors of one cluster; the first monitor creates it.

    Args:
        name: Any text that identifies the cluster.

    Raises:
        ConfigError: There is no directory private to this user.
    """
    key = f"shared-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    prune()
    with user_files.change():
        for document in user_files.read(key):
            record = ServerRecord.of(document)
            if record is not None:
                return record.secret
        secret = new_secret()
        user_files.write(key, _own(secret, keep=True))
    return secret


def prune() -> None:
    """Remove the records of ended server processes, except those that a restarted process needs."""
    found = user_files.read_all()
    records = {name: r for name, document in found.items() if (r := ServerRecord.of(document))}
    if all(record.lives for record in records.values()):
        return
    # Read again under the lock, because a process may have replaced its earlier record.
    with contextlib.suppress(ConfigError), user_files.change():
        found = user_files.read_all()
        records = {name: r for name, document in found.items() if (r := ServerRecord.of(document))}
        living = {record.secret for record in records.values() if record.lives}
        for name, record in records.items():
            if not record.lives and not (record.keep and record.secret in living):
                user_files.remove(name)


def started_at(pid: int) -> int:
    """Start time of a process in ticks since boot, 0 if it has ended; tells a reused pid apart."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read().decode(errors="replace")
    except OSError:
        return 0
    # The second field, the name, may contain blanks and parentheses.
    fields = text.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def _own(secret: str, *, keep: bool) -> dict[str, Any]:
    # Not getpid(), because a process in a pid namespace may see another /proc.
    pid = int(os.readlink("/proc/self"))
    return asdict(ServerRecord(secret, pid, _proc(), started_at(pid), keep))


def _proc() -> int:
    return os.stat("/proc").st_dev


def _keys(address: str) -> list[str]:
    """Possible record names of a server address; empty if it is not a loopback address."""
    host, _, port = address.rpartition(":")
    return [f"{host}:{port}" for host in _loopback(host.strip("[]"))] if port.isdigit() else []


@functools.lru_cache(256)
def _loopback(host: str) -> tuple[str, ...]:
    """Resolve a host to its loopback addresses."""
    try:
        hosts = [str(ipaddress.ip_address(host))]
    except ValueError:
        hosts = _resolve(host)
    return tuple(host for host in hosts if ipaddress.ip_address(host).is_loopback)


def _resolve(host: str) -> list[str]:
    # No other names are resolved, because name servers may be slow and may lie about loopback addresses.
    if host not in (_LOCAL, socket.gethostname()):
        return []
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))
