"""The monitor's gRPC endpoint: serves calls while this monitor leads, else names the leader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from eaas.membership.monitors import LEADER_KEY
from eaas.net.request_validation import reader
from eaas.rpc.v1 import monitor_pb2 as pb
from monitor.refusal import Refused, refusals, require_valid
from monitor.service import MonitorService

__all__ = ["SERVICE", "LeaderProxy"]

SERVICE = "eaas.rpc.v1.MonitorService"
_UNARY = grpc.unary_unary_rpc_method_handler
_STREAM = grpc.stream_stream_rpc_method_handler
_ANSWERS = grpc.unary_stream_rpc_method_handler
_CALLS = ("Register", "Deregister", "ReportOutcome", "KeepRecord", "GetRecord")


class LeaderProxy:
    """Forwards calls to the service while this monitor leads; otherwise refuses them and names the leader."""

    def __init__(self) -> None:
        self.service: MonitorService | None = None
        """The leading service; None while this monitor stands by."""
        self._leader: str | None = None

    def lead(self, service: MonitorService) -> None:
        """Forward calls to `service` from now on, because this monitor has taken the lead."""
        self.service = service

    def follow(self, leader: str | None) -> None:
        """End the service and refuse calls from now on, with the leading monitor's address if it is known."""
        former, self.service, self._leader = self.service, None, leader
        if former is not None:
            former.end()

    def add_to(self, server: Any) -> None:
        """Add MonitorService's methods to the monitor's gRPC server, before it starts.

        It replaces the generated function, because streams send bytes that are serialized once for many
        members.
        """
        handlers = {
            name: _UNARY(
                self._forward(name),
                reader(getattr(pb, f"{name}Request").FromString),
                getattr(pb, f"{name}Response").SerializeToString,
            )
            for name in _CALLS
        }
        for name, handler in (("Heartbeat", _STREAM), ("Watch", _ANSWERS)):
            handlers[name] = handler(
                self._forward(name), reader(getattr(pb, f"{name}Request").FromString)
            )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    def _forward(self, name: str) -> Callable[[Any, Any], Any]:
        async def call(request: Any, context: Any) -> Any:
            async with refusals(context):
                require_valid(request)
                return await getattr(self._leading(), name)(request, context)

        return call

    def _leading(self) -> MonitorService:
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
