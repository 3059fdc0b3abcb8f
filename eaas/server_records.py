"""Which processes of this user listen on this machine, and the secret that their callers show.

Without TLS every local user can connect to a loopback port. So each server of a cluster on loopback asks
its callers for the cluster's secret and leaves a record (`eaas.user_files`) under its address. A caller of
the same user finds the record by the address that it calls. It shows the secret only while the process of
the record lives: nobody else can listen at that address meanwhile, so no other user's process learns the
secret or passes for the server.

The monitor makes the secret, and the others of its cluster take it from the monitor's record. A monitor that
is started again at its address finds the former one's record and goes on with the secret.
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
"""Of an endpoint: what follows is the operator's token, the secret of the endpoint's record."""

_SECRET_BYTES = 32
_LOCAL = "localhost"


@dataclass(frozen=True)
class ServerRecord:
    """A process that listens at an address.

    Attributes:
        secret: What its callers show.
        pid: Process id, as /proc has it.
        proc: Device of that /proc: another container may have one of its own.
        started: When it started, in the kernel's ticks since boot; tells it from a later process of that pid.
        keep: The record outlives its process while others of the cluster live: one that starts again at the
            address goes on with the secret.
    """

    secret: str
    pid: int
    proc: int
    started: int
    keep: bool

    def __repr__(self) -> str:
        # Without the secret: it might get into a log.
        return f"ServerRecord(pid={self.pid})"

    @classmethod
    def of(cls, document: dict[str, Any]) -> Self | None:
        """A record as it was read; None where it is none."""
        try:
            record = cls(**document)
        except TypeError:
            return None
        return record if isinstance(record.secret, str) and isinstance(record.pid, int) else None

    @property
    def lives(self) -> bool:
        """Whether the process is still there; another container's cannot be seen and counts as there."""
        return self.proc != _proc() or started_at(self.pid) == self.started


def new_secret() -> str:
    """32 random bytes, in hex."""
    return secrets.token_hex(_SECRET_BYTES)


def find(address: str) -> ServerRecord | None:
    """The record of a server on this machine's loopback, of a living one if there is one.

    Args:
        address: host:port. Of host names only localhost and this machine's own are looked up.
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
    """Leave this process's record; another one's at this address is replaced.

    Args:
        address: host:port, the host an address of the loopback.
        secret: What callers show.
        keep: See `ServerRecord`.

    Raises:
        ConfigError: There is no directory that only this user can use.
    """
    (key,) = _keys(address)
    prune()
    with user_files.change():
        user_files.write(key, _own(secret, keep=keep))


def withdraw(address: str) -> None:
    """Remove what a former process left at an address where this one asks for no secret."""
    for key in _keys(address):
        user_files.remove(key)


def cluster_secret(monitor_addresses: str) -> str | None:
    """The secret of a cluster on this machine; None where its monitor has left no record for this user.

    Args:
        monitor_addresses: "host:port", or "host:port,host:port".
    """
    for address in monitor_addresses.split(","):
        record = find(address.strip())
        if record is not None:
            return record.secret
    return None


def monitor_secret(address: str) -> str:
    """The secret for a monitor that is about to listen: that of its former process there, else a new one.

    Args:
        address: host:port; port 0 is a free one.
    """
    return (None if address.endswith(":0") else cluster_secret(address)) or new_secret()


def shared_secret(name: str) -> str:
    """The secret for monitors of one cluster at several addresses: the first one makes it.

    Args:
        name: What they share, in any form.

    Raises:
        ConfigError: There is no directory that only this user can use.
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
    """Remove records of processes that ended, but those that a next process at the address needs."""
    found = user_files.read_all()
    records = {name: r for name, document in found.items() if (r := ServerRecord.of(document))}
    if all(record.lives for record in records.values()):
        return
    # Looked at again: a process may have replaced its former one's record.
    with contextlib.suppress(ConfigError), user_files.change():
        found = user_files.read_all()
        records = {name: r for name, document in found.items() if (r := ServerRecord.of(document))}
        living = {record.secret for record in records.values() if record.lives}
        for name, record in records.items():
            if not record.lives and not (record.keep and record.secret in living):
                user_files.remove(name)


def started_at(pid: int) -> int:
    """When a process started, in ticks since boot; 0 where it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read().decode(errors="replace")
    except OSError:
        return 0
    # From the third field on: the second, the name, may hold blanks and parentheses.
    fields = text.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def _own(secret: str, *, keep: bool) -> dict[str, Any]:
    # Not getpid(): a process with ids of its own may see the /proc of the others.
    pid = int(os.readlink("/proc/self"))
    return asdict(ServerRecord(secret, pid, _proc(), started_at(pid), keep))


def _proc() -> int:
    return os.stat("/proc").st_dev


def _keys(address: str) -> list[str]:
    """The names of records that an address may have; none where it is not of the loopback."""
    host, _, port = address.rpartition(":")
    return [f"{host}:{port}" for host in _loopback(host.strip("[]"))] if port.isdigit() else []


@functools.lru_cache(256)
def _loopback(host: str) -> tuple[str, ...]:
    """The loopback's addresses that a host of an address stands for."""
    try:
        hosts = [str(ipaddress.ip_address(host))]
    except ValueError:
        hosts = _resolve(host)
    return tuple(host for host in hosts if ipaddress.ip_address(host).is_loopback)


def _resolve(host: str) -> list[str]:
    # No other names: a name server may take its time, and no loopback address is its to tell.
    if host not in (_LOCAL, socket.gethostname()):
        return []
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))
