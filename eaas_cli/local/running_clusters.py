"""Records of this user's running `eaas up`, by which commands find the endpoint."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal
from urllib.parse import urlsplit

from eaas import user_files
from eaas.errors import ConfigError
from eaas.log import get_logger, print_line
from eaas.net.server_records import started_at

__all__ = [
    "Up",
    "chosen",
    "forget_on_ray",
    "name_cluster",
    "record_on_ray",
    "recorded",
    "running",
    "up_at",
]

_log = get_logger(__name__)
_PREFIX = "up-"
_ON_RAY = f"{_PREFIX}ray"
_REACH_S = 1.0


@dataclass(frozen=True)
class Up:
    """A running `eaas up`, as its launcher recorded it for this user's other commands.

    Attributes:
        endpoint: URL of its HTTP endpoint.
        tls_dir: Directory of certificates; empty: no TLS.
        pid: Process id of the launcher; 0 for a cluster on Ray, which has none.
        started: Start time of the launcher (`eaas.net.server_records.ServerRecord.started`).
        serving_at: Seconds since boot, a clock that all processes share.
        model: Name of the model in requests.
    """

    endpoint: str
    tls_dir: str
    pid: int
    started: int
    serving_at: float
    model: str = ""

    @property
    def on_ray(self) -> bool:
        """Whether the cluster runs on Ray."""
        return self.pid == 0

    def __str__(self) -> str:
        return f"{self.endpoint} ({self.model})" if self.model else self.endpoint


@contextlib.contextmanager
def recorded(endpoint: str, tls_dir: str, model: str) -> Iterator[None]:
    """Record a cluster of this launcher during the block; arguments as in `Up`."""
    pid = os.getpid()
    name = f"{_PREFIX}{pid}"
    _write(name, Up(endpoint, tls_dir, pid, started_at(pid), _now(), model))
    try:
        yield
    finally:
        user_files.remove(name)


def record_on_ray(endpoint: str, tls_dir: str, model: str) -> None:
    """Record a cluster on Ray, for commands on this machine; arguments as in `Up`."""
    _write(_ON_RAY, Up(endpoint, tls_dir, 0, 0, _now(), model))


def forget_on_ray() -> None:
    """Remove the record of a cluster on Ray, if there is one."""
    user_files.remove(_ON_RAY)


def running(on: Literal["local", "ray"] | None = None) -> list[Up]:
    """List this user's clusters that serve, oldest first. `on`: where they run; None: anywhere."""
    ups = (up for up in _running() if on is None or up.on_ray == (on == "ray"))
    return sorted(ups, key=lambda up: up.serving_at)


def chosen(on: Literal["local", "ray"] | None = None) -> Up | None:
    """Find this user's only running cluster, for commands without an endpoint; None: none runs.

    Raises ConfigError: there are several; commands do not guess.
    """
    ups = running(on)
    if len(ups) > 1:
        raise ConfigError(
            f"{len(ups)} clusters of yours run: {', '.join(map(str, ups))}: "
            "name one with --endpoint or EAAS_ENDPOINT"
        )
    return ups[0] if ups else None


def name_cluster(endpoint: str) -> None:
    """Print on standard error the cluster that a command acts on, if its output does not name it."""
    print_line(f"cluster: {up_at(endpoint) or endpoint}", sys.stderr)


def up_at(endpoint: str) -> Up | None:
    """Find this user's running `eaas up` with this endpoint, to name its certificates in an error."""
    wanted = endpoint.replace("://localhost:", "://127.0.0.1:").rstrip("/").removesuffix("/v1")
    return next((up for up in _running() if up.endpoint == wanted), None)


def _running() -> list[Up]:
    found = []
    for name, document in user_files.read_all().items():
        if not name.startswith(_PREFIX):
            continue
        try:
            up = Up(**document)
        except TypeError:
            continue
        if up.on_ray:
            # Its record stays when the Ray cluster ends without `eaas down`.
            if _answers(up.endpoint):
                found.append(up)
        elif started_at(up.pid) == up.started:
            found.append(up)
        else:
            # The record is left over from a launcher that was killed.
            user_files.remove(name)
    return found


def _now() -> float:
    """Seconds since boot, a clock that all processes share."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _write(name: str, up: Up) -> None:
    try:
        user_files.write(name, asdict(up))
    except ConfigError as error:
        # Continue, because the cluster serves without the record.
        _log.warning("commands find this cluster only with --endpoint: %s", error)


def _answers(endpoint: str) -> bool:
    """Whether something listens at an endpoint's address."""
    url = urlsplit(endpoint)
    try:
        socket.create_connection((url.hostname or "", url.port or 80), timeout=_REACH_S).close()
    except OSError:
        return False
    return True
