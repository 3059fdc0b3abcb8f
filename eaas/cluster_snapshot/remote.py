"""Snapshot reader of `eaas top`: reads a running cluster's monitor by gRPC and its endpoint by HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import grpc
import httpx

from eaas.cluster_snapshot.counters import Counters, read_counters
from eaas.cluster_snapshot.reader import SnapshotReader
from eaas.errors import ClusterError
from eaas.membership.monitors import Monitors
from eaas.net.http_client import failure, http_settings
from eaas.net.tls import Identity
from eaas.types import Member

__all__ = ["remote_reader"]

_FIRST_S = 1.0


@contextmanager
def remote_reader(
    monitor_address: str,
    endpoint: str,
    headers: Mapping[str, str] | None = None,
    tls: Identity | None = None,
) -> Iterator[SnapshotReader]:
    """Open a `SnapshotReader` for a running cluster, as a context manager.

    Args:
        monitor_address: host:port, or "host:port,host:port" for several monitors.
        endpoint: URL without /v1.
        headers: HTTP headers (`eaas.net.api_keys.authorization`).
        tls: Identity of the caller; None means plain text.

    Raises:
        ClusterError: The cluster belongs to another user.
    """
    monitors = Monitors(monitor_address, tls)
    try:
        monitors.now.members(_FIRST_S)
    except grpc.RpcError as error:
        # Other failures may be temporary; snapshots show them.
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            monitors.close()
            raise ClusterError(f"the monitor at {monitor_address}: {error.details()}") from error

    def members(timeout_s: float) -> list[Member] | None:
        monitor = monitors.now
        try:
            return monitor.members(timeout_s)
        except grpc.RpcError as error:
            # The next reading uses another monitor, if there is one.
            monitors.leave(monitor, error)
            raise

    with httpx.Client(**http_settings(endpoint), headers=dict(headers or {})) as http:

        def counters(timeout_s: float) -> Counters:
            try:
                answer = http.get(f"{endpoint.rstrip('/')}/metrics", timeout=timeout_s)
                answer.raise_for_status()
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise ClusterError(failure(endpoint, error)) from error
            return read_counters(answer.text)

        reader = SnapshotReader(members, counters, tls)
        try:
            yield reader
        finally:
            reader.close()
            monitors.close()
