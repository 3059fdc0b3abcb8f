"""`python -m eaas.health ADDRESS [ROLE]`: health check of a process of the cluster, for containers.

This is not a command of `eaas`, because it runs every few seconds and importing the command line takes four
times as long.
"""

from __future__ import annotations

import http.client
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

from eaas.errors import EaasError

__all__ = ["main", "why_not_serving"]

_ANSWER_S = 4.0
_TLS_VARIABLE = "EAAS_SECURITY__TLS_DIR"


def why_not_serving(address: str, role: str | None = None) -> str | None:
    """Ask a process for its health; return None if it serves, else the reason.

    Args:
        address: host:port of a monitor, balancer or expert server; or the URL of an endpoint's /health.
        role: Role of the process, and of the certificate to use. Needed if EAAS_SECURITY__TLS_DIR is set.

    Raises:
        ConfigError: The certificates cannot be used.
    """
    return _http(address) if address.startswith("http://") else _grpc(address, role)


def _http(url: str) -> str | None:
    # Ignore proxies in the environment.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_ANSWER_S):
            return None
    except urllib.error.HTTPError as error:
        # The body names missing experts.
        return f"{error.code} {error.read().decode(errors='replace')}"
    except (OSError, http.client.HTTPException) as error:
        return str(error)


def _grpc(address: str, role: str | None) -> str | None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from eaas.net.grpc_client import channel
    from eaas.net.tls import Identity

    directory = os.environ.get(_TLS_VARIABLE)
    tls = Identity(Path(directory), role) if directory and role else None
    with channel(address, role, tls) as opened:
        try:
            answer = health_pb2_grpc.HealthStub(opened).Check(
                health_pb2.HealthCheckRequest(), timeout=_ANSWER_S
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main(arguments: list[str]) -> int:
    """Check a process: return exit code 0 if it serves; else print the reason and return 1."""
    address, role = (*arguments, None)[:2]
    assert address is not None
    try:
        reason = why_not_serving(address, role)
    except EaasError as error:
        reason = str(error)
    if reason is not None:
        print(f"{address}: {reason}")
    return int(reason is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
