"""Give slots back."""

from __future__ import annotations

import grpc

from eaas.log import get_logger
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1.expert_pb2_grpc import ExpertServiceStub

__all__ = ["disconnect"]

_log = get_logger(__name__)
_DEADLINE_S = 1.0


def disconnect(service: ExpertServiceStub, connection_id: str) -> bool:
    """Tell the server that a connection is closed. Returns whether the server answered.

    Without this call, the server takes the slots back when the client's lease ends.
    """
    try:
        service.Disconnect(pb.DisconnectRequest(connection_id=connection_id), timeout=_DEADLINE_S)
    except grpc.RpcError as error:
        _log.debug("%s: the server did not answer Disconnect: %s", connection_id, error)
        return False
    return True
