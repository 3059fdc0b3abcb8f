"""What operators, launchers and the autoscaler ask of the balancer."""

from __future__ import annotations

import grpc

from eaas.errors import ClusterError
from eaas.grpc_client import channel
from eaas.rpc.v1 import balancer_pb2, balancer_pb2_grpc
from eaas.tls import Identity
from eaas.types import Role

__all__ = ["MOST_NUMBER", "drain_server", "refuse_scale", "scale_servers"]

MOST_NUMBER = 2**31 - 1
"""Of servers, layers or experts in a call; the balancer says what it allows of them."""

_CALL_S = 10.0
# Nobody waits for a launcher's word but a person, who sees the launcher's log, too.
_WORD_S = 2.0
_LONGEST_REASON = 4096


def drain_server(balancer_address: str, server_id: str, tls: Identity | None = None) -> None:
    """Have a server leave; its experts are moved first. Returns at once.

    Raises:
        ClusterError: The balancer refuses, in its words, or cannot be reached.
    """
    with channel(balancer_address, Role.BALANCER.value, tls) as line:
        try:
            balancer_pb2_grpc.BalancerServiceStub(line).DrainServer(
                balancer_pb2.DrainServerRequest(server_id=server_id), timeout=_CALL_S
            )
        except grpc.RpcError as error:
            raise ClusterError(f"{server_id} does not leave: {error.details()}") from error


def scale_servers(balancer_address: str, servers: int, tls: Identity | None = None) -> None:
    """Have a launcher start or end servers until there are so many. Returns at once.

    Raises:
        ClusterError: The balancer refuses, in its words, or cannot be reached.
    """
    with channel(balancer_address, Role.BALANCER.value, tls) as line:
        try:
            balancer_pb2_grpc.BalancerServiceStub(line).Scale(
                balancer_pb2.ScaleRequest(servers=min(max(0, servers), MOST_NUMBER)),
                timeout=_CALL_S,
            )
        except grpc.RpcError as error:
            raise ClusterError(f"not {servers} servers: {error.details()}") from error


def refuse_scale(
    balancer_address: str, wish: int, reason: str, tls: Identity | None = None
) -> None:
    """Tell those who asked for a number of servers that a launcher gives it up.

    Args:
        balancer_address: host:port of the balancer.
        wish: As `WatchScale` named it.
        reason: Why, for people.
        tls: Who refuses; None: plain text.

    Raises:
        ClusterError: The balancer cannot be reached.
    """
    request = balancer_pb2.RefuseScaleRequest(wish=wish, reason=reason[:_LONGEST_REASON])
    with channel(balancer_address, Role.BALANCER.value, tls) as line:
        try:
            balancer_pb2_grpc.BalancerServiceStub(line).RefuseScale(request, timeout=_WORD_S)
        except grpc.RpcError as error:
            raise ClusterError(f"the balancer at {balancer_address}: {error.details()}") from error
