"""Records of this user's running `eaas up`, by which commands find the endpoint."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from eaas import user_files
from eaas.errors import ConfigError
from eaas.log import get_logger
from eaas.net.server_records import started_at

__all__ = ["Up", "latest_up", "recorded", "up_at"]

_log = get_logger(__name__)
_PREFIX = "up-"


@dataclass(frozen=True)
class Up:
    """A running `eaas up`, as its launcher recorded it for this user's other commands.

    Attributes:
        endpoint: URL of its HTTP endpoint.
        tls_dir: Directory of certificates; empty: no TLS.
        started: Start time of the launcher (`eaas.net.server_records.ServerRecord.started`).
        serving_at: Seconds since boot, a clock that all processes share.
    """

    endpoint: str
    tls_dir: str
    pid: int
    started: int
    serving_at: float


@contextlib.contextmanager
def recorded(endpoint: str, tls_dir: str) -> Iterator[None]:
    """Record a running cluster during the block, so that this user's commands find its endpoint.

    Args:
        endpoint: URL of its HTTP endpoint.
        tls_dir: Directory of certificates; empty: no TLS.
    """
    pid = os.getpid()
    up = Up(endpoint, tls_dir, pid, started_at(pid), time.clock_gettime(time.CLOCK_BOOTTIME))
    try:
        user_files.write(f"{_PREFIX}{pid}", asdict(up))
    except ConfigError as error:
        # Continue, because the cluster serves without the record.
        _log.warning("commands find this cluster only with --endpoint: %s", error)
    try:
        yield
    finally:
        user_files.remove(f"{_PREFIX}{pid}")


def latest_up() -> Up | None:
    """Find this user's newest running `eaas up`, which commands call if no --endpoint is given."""
    return max(_running(), key=lambda up: up.serving_at, default=None)


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
        if started_at(up.pid) == up.started:
            found.append(up)
        else:
            # The record is left over from a launcher that was killed.
            user_files.remove(name)
    return found
