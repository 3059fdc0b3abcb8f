"""Which clusters of `eaas up` this user runs on this machine: how commands find them by themselves."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from eaas import user_files
from eaas.errors import ConfigError
from eaas.log import get_logger
from eaas.server_records import started_at

__all__ = ["ENDPOINT_VARIABLE", "Up", "latest_up", "recorded", "up_at"]

ENDPOINT_VARIABLE = "EAAS_ENDPOINT"
"""URL of the endpoint that commands use where `--endpoint` gives none."""

_log = get_logger(__name__)
_PREFIX = "up-"


@dataclass(frozen=True)
class Up:
    """A running `eaas up`.

    Attributes:
        endpoint: URL of its HTTP endpoint.
        tls_dir: Its directory of certificates; empty: it has no TLS.
        pid: Of the launcher.
        started: When the launcher started (`eaas.server_records.ServerRecord.started`).
        serving_at: Monotonic seconds since boot; the same for all processes of a machine.
    """

    endpoint: str
    tls_dir: str
    pid: int
    started: int
    serving_at: float


@contextlib.contextmanager
def recorded(endpoint: str, tls_dir: str) -> Iterator[None]:
    """Let commands of this user find a cluster for as long as the block lasts.

    Args:
        endpoint: URL of its HTTP endpoint.
        tls_dir: Its directory of certificates; empty: it has no TLS.
    """
    pid = os.getpid()
    up = Up(endpoint, tls_dir, pid, started_at(pid), time.clock_gettime(time.CLOCK_BOOTTIME))
    try:
        user_files.write(f"{_PREFIX}{pid}", asdict(up))
    except ConfigError as error:
        # The cluster has certificates, or was told --insecure: it serves without this.
        _log.warning("commands do not find this cluster without --endpoint: %s", error)
    try:
        yield
    finally:
        user_files.remove(f"{_PREFIX}{pid}")


def latest_up() -> Up | None:
    """The cluster that came last among those that run."""
    return max(_running(), key=lambda up: up.serving_at, default=None)


def up_at(endpoint: str) -> Up | None:
    """The running cluster with this endpoint."""
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
        if started_at(up.pid) == up.started:
            found.append(up)
        else:
            # Its launcher was killed.
            user_files.remove(name)
    return found
