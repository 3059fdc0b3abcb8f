"""The monitor's address on the wire, whether it leads or stands by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from eaas.monitors import LEADER_KEY
from eaas.rpc.v1 import monitor_pb2 as pb
from monitor.refusal import Refused, refusals, require_whole
from monitor.service import MonitorService

__all__ = ["SERVICE", "Front"]

SERVICE = "eaas.rpc.v1.MonitorService"
_UNARY = grpc.unary_unary_rpc_method_handler
_STREAM = grpc.stream_stream_rpc_method_handler
_ANSWERS = grpc.unary_stream_rpc_method_handler


class Front:
    """Passes calls on to the service of the present lead; without one it names the leader."""

    def __init__(self) -> None:
        self.service: MonitorService | None = None
        """Of the present lead; None: this monitor stands by."""
        self._leader: str | None = None

    def lead(self, service: MonitorService) -> None:
        """From now on `service` answers."""
        self.service = service

    def follow(self, leader: str | None) -> None:
        """From now on nobody answers; callers are told the leader's address, if there is one."""
        former, self.service, self._leader = self.service, None, leader
        if former is not None:
            former.end()

    def add_to(self, server: Any) -> None:
        """Adds the contract to a gRPC server.

        By hand, since streams are answered with bytes that were serialized for many members at once.
        """
        calls: dict[str, tuple[Any, Callable[[bytes], Any], Callable[[Any], bytes] | None]] = {
            "Register": (
                _UNARY,
                _reader(pb.RegisterRequest),
                pb.RegisterResponse.SerializeToString,
            ),
            "Heartbeat": (_STREAM, _reader(pb.HeartbeatRequest), None),
            "Watch": (_ANSWERS, _reader(pb.WatchRequest), None),
            "Deregister": (
                _UNARY,
                _reader(pb.DeregisterRequest),
                pb.DeregisterResponse.SerializeToString,
            ),
            "ReportOutcome": (
                _UNARY,
                _reader(pb.ReportOutcomeRequest),
                pb.ReportOutcomeResponse.SerializeToString,
            ),
            "KeepRecord": (
                _UNARY,
                _reader(pb.KeepRecordRequest),
                pb.KeepRecordResponse.SerializeToString,
            ),
            "GetRecord": (
                _UNARY,
                _reader(pb.GetRecordRequest),
                pb.GetRecordResponse.SerializeToString,
            ),
        }
        handlers = {
            name: handler(self._passing(name), read, write)
            for name, (handler, read, write) in calls.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def _passing(self, name: str) -> Callable[[Any, Any], Any]:
        async def call(request: Any, context: Any) -> Any:
            async with refusals(context):
                require_whole(request)
                return await getattr(self._now(), name)(request, context)

        return call

    def _now(self) -> MonitorService:
        service, leader = self.service, self._leader
        if service is not None:
            return service
        if leader is None:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "no monitor leads at the moment: try again")
        raise Refused(
            grpc.StatusCode.UNAVAILABLE,
            f"this monitor stands by; the one at {leader} leads: give both addresses",
            ((LEADER_KEY, leader),),
        )


def _reader(cls: Any) -> Callable[[bytes], Any]:
    """Reads messages of a type; what is none becomes its error, which the call raises.

    gRPC's own loop would take one that is raised here for a mistake of ours: UNKNOWN, and a trace in the log.
    """

    def read(data: bytes) -> Any:
        try:
            return cls.FromString(data)
        except DecodeError as error:
            return error

    return read
