"""A reader of a cluster that one reaches over the network: monitor by gRPC, endpoint by HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import grpc
import httpx

from eaas.errors import ClusterError
from eaas.facts.counters import Counters, read_counters
from eaas.facts.reader import FactsReader
from eaas.monitors import Monitors
from eaas.tls import Identity
from eaas.types import Member

__all__ = ["remote_reader"]

_FIRST_S = 1.0


@contextmanager
def remote_reader(
    monitor_address: str,
    endpoint: str,
    headers: Mapping[str, str] | None = None,
    tls: Identity | None = None,
) -> Iterator[FactsReader]:
    """A reader for as long as the block lasts.

    Args:
        monitor_address: host:port, or "host:port,host:port" where there are several.
        endpoint: Its URL, without /v1.
        headers: What the endpoint asks for (`eaas.api_keys.authorization`).
        tls: Who asks; None: plain text.

    Raises:
        ClusterError: The cluster is another user's.
    """
    monitors = Monitors(monitor_address, tls)
    try:
        monitors.now.members(_FIRST_S)
    except grpc.RpcError as error:
        # Every later look tells of the other failures, which may pass.
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            monitors.close()
            raise ClusterError(f"the monitor at {monitor_address}: {error.details()}") from error

    def members(timeout_s: float) -> list[Member] | None:
        line = monitors.now
        try:
            return line.members(timeout_s)
        except grpc.RpcError as error:
            # The next look is at another one, where there is one.
            monitors.leave(line, error)
            raise

    with httpx.Client(headers=dict(headers or {})) as http:

        def counters(timeout_s: float) -> Counters:
            try:
                answer = http.get(f"{endpoint.rstrip('/')}/metrics", timeout=timeout_s)
                answer.raise_for_status()
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise ClusterError(str(error).partition("\n")[0] or type(error).__name__) from error
            return read_counters(answer.text)

        reader = FactsReader(members, counters, tls)
        try:
            yield reader
        finally:
            reader.close()
            monitors.close()
