"""Single calls of the balancer, without a `BalancerClient`."""

from __future__ import annotations

from typing import Any

import grpc

from eaas.errors import ClusterError
from eaas.net.grpc_client import channel
from eaas.net.tls import Identity
from eaas.rpc.v1 import balancer_pb2, balancer_pb2_grpc
from eaas.types import Role

__all__ = ["MOST_NUMBER", "drain_server", "refuse_scale", "scale_servers"]

MOST_NUMBER = 2**31 - 1
"""Largest number of servers, layers or experts in a call; the balancer has lower limits."""

_CALL_S = 10.0
# A refusal is only a message for people, who also see the launcher's log.
_REFUSAL_S = 2.0
_LONGEST_REASON = 4096


def drain_server(balancer_address: str, server_id: str, tls: Identity | None = None) -> None:
    """Make a server leave after its experts have moved. Returns at once.

    Raises:
        ClusterError: The balancer refuses or cannot be reached.
    """
    request = balancer_pb2.DrainServerRequest(server_id=server_id)
    _call(balancer_address, tls, "DrainServer", request, f"{server_id} does not leave")


def scale_servers(balancer_address: str, servers: int, tls: Identity | None = None) -> None:
    """Make a launcher start or stop servers until there are this many. Returns at once.

    Raises:
        ClusterError: The balancer refuses or cannot be reached.
    """
    request = balancer_pb2.ScaleRequest(servers=min(max(0, servers), MOST_NUMBER))
    _call(balancer_address, tls, "Scale", request, f"not {servers} servers")


def refuse_scale(
    balancer_address: str, wish: int, reason: str, tls: Identity | None = None
) -> None:
    """Report that a launcher cannot provide the number of servers.

    Args:
        balancer_address: host:port of the balancer.
        wish: Id of the request, from `WatchScale`.
        reason: Message for the callers of `Scale`.
        tls: Identity of the launcher; None means plain text.

    Raises:
        ClusterError: The balancer cannot be reached.
    """
    request = balancer_pb2.RefuseScaleRequest(wish=wish, reason=reason[:_LONGEST_REASON])
    failure = f"the balancer at {balancer_address}"
    _call(balancer_address, tls, "RefuseScale", request, failure, _REFUSAL_S)


def _call(
    address: str,
    tls: Identity | None,
    method: str,
    request: Any,
    failure: str,
    timeout_s: float = _CALL_S,
) -> None:
    with channel(address, Role.BALANCER.value, tls) as opened:
        try:
            getattr(balancer_pb2_grpc.BalancerServiceStub(opened), method)(
                request, timeout=timeout_s
            )
        except grpc.RpcError as error:
            raise ClusterError(f"{failure}: {error.details()}") from error
