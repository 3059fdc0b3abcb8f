"""The monitor's address on the wire, whether it leads or stands by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from eaas.grpc_requests import reader
from eaas.monitors import LEADER_KEY
from eaas.rpc.v1 import monitor_pb2 as pb
from monitor.refusal import Refused, refusals, require_sound
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
                reader(pb.RegisterRequest.FromString),
                pb.RegisterResponse.SerializeToString,
            ),
            "Heartbeat": (_STREAM, reader(pb.HeartbeatRequest.FromString), None),
            "Watch": (_ANSWERS, reader(pb.WatchRequest.FromString), None),
            "Deregister": (
                _UNARY,
                reader(pb.DeregisterRequest.FromString),
                pb.DeregisterResponse.SerializeToString,
            ),
            "ReportOutcome": (
                _UNARY,
                reader(pb.ReportOutcomeRequest.FromString),
                pb.ReportOutcomeResponse.SerializeToString,
            ),
            "KeepRecord": (
                _UNARY,
                reader(pb.KeepRecordRequest.FromString),
                pb.KeepRecordResponse.SerializeToString,
            ),
            "GetRecord": (
                _UNARY,
                reader(pb.GetRecordRequest.FromString),
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
                require_sound(request)
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
