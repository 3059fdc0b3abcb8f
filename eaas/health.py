"""`python -m eaas.health ADDRESS [ROLE]`: whether a process serves; for health checks of containers.

It is no command of `eaas`, since it runs every few seconds: the command line would take four times as long to
import as all the rest takes.
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
    """None where a process serves, else the reason, for people.

    Args:
        address: host:port of a monitor, balancer or expert server; or the URL of an endpoint's /health.
        role: What is there, and whose certificate is shown: a container has its own alone. To be given where
            EAAS_SECURITY__TLS_DIR names certificates.

    Raises:
        ConfigError: The certificates cannot be used.
    """
    return _http(address) if address.startswith("http://") else _grpc(address, role)


def _http(url: str) -> str | None:
    # Members are no web sites: a proxy of the environment is not for them.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_ANSWER_S):
            return None
    except urllib.error.HTTPError as error:
        # The document says which experts are missing.
        return f"{error.code} {error.read().decode(errors='replace')}"
    except (OSError, http.client.HTTPException) as error:
        return str(error)


def _grpc(address: str, role: str | None) -> str | None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from eaas.grpc_client import channel
    from eaas.tls import Identity

    directory = os.environ.get(_TLS_VARIABLE)
    tls = Identity(Path(directory), role) if directory and role else None
    with channel(address, role, tls) as line:
        try:
            answer = health_pb2_grpc.HealthStub(line).Check(
                health_pb2.HealthCheckRequest(), timeout=_ANSWER_S
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main(arguments: list[str]) -> int:
    """Exit code 0 where the one process that is named serves, else 1 and a line."""
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
