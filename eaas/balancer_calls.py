"""What operators, launchers and the autoscaler ask of the balancer."""

from __future__ import annotations

import grpc

from eaas.errors import ClusterError
from eaas.grpc_client import channel
from eaas.rpc.v1 import balancer_pb2, balancer_pb2_grpc
from eaas.tls import Identity
from eaas.types import Role

__all__ = ["drain_server", "scale_servers"]

_CALL_S = 10.0


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
                balancer_pb2.ScaleRequest(servers=max(0, servers)), timeout=_CALL_S
            )
        except grpc.RpcError as error:
            raise ClusterError(f"not {servers} servers: {error.details()}") from error
