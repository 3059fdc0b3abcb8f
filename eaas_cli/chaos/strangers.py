"""The chaos fault "names": attempts to register at the monitor under hostile names, which it must refuse."""

from __future__ import annotations

import random

import grpc

from eaas.errors import ClusterError
from eaas.membership.session import PROTOCOL_VERSION
from eaas.net.grpc_client import channel
from eaas.rpc.v1 import common_pb2, monitor_pb2, monitor_pb2_grpc
from eaas.types import Role

__all__ = ["hostile_name", "is_refused"]

_CALL_S = 2.0
_LONGEST = 300
# Markup, scripts, paths, options, format strings and control sequences.
_PIECES = (
    *("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", ":href=location=/a/.source"),
    *("../../etc/passwd", "/", "\\", "{{7*7}}", "${IFS}", "$(id)", "`id`", "%s%n", "'", '"', ";"),
    *("\x00", "\n", "\r\n", "\x1b[2J", "\u202e", "\ufeff", "é", " ", "y x=[1(] \\"),
)
_WHOLE = ("", ".", "..", "-rf", "--help", "x" * _LONGEST)


def hostile_name(dice: random.Random) -> str:
    """Draw a random name that the monitor must refuse."""
    if dice.random() < 0.2:
        return dice.choice(_WHOLE)
    pieces = ["expert-server-", dice.choice(_PIECES), dice.choice(("0", dice.choice(_PIECES)))]
    dice.shuffle(pieces)
    return "".join(pieces)


def is_refused(monitor_address: str, name: str) -> bool:
    """Whether the monitor refuses an expert server of this name; False if it does not answer.

    Raises ClusterError: the monitor registers the server, or refuses it for another reason.
    """
    member = common_pb2.Member(
        id=name, role=Role.EXPERT_SERVER.number, pid=1, state=common_pb2.MEMBER_STATE_SERVING
    )
    request = monitor_pb2.RegisterRequest(member=member, protocol_version=PROTOCOL_VERSION)
    with channel(monitor_address, Role.MONITOR.value, None) as line:
        try:
            monitor_pb2_grpc.MonitorServiceStub(line).Register(request, timeout=_CALL_S)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                return True
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return False
            why = f"{error.code().name}: {error.details()}"
            raise ClusterError(f"the name {name!r} was refused as {why}") from error
    raise ClusterError(f"the monitor registered a server as {name!r}")
