"""The monitor's address on the wire, whether it leads or stands by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from eaas.monitors import LEADER_KEY
from eaas.rpc.v1 import monitor_pb2 as pb
from monitor.service import MonitorService

__all__ = ["Front"]


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

    def _now(self, context: Any) -> MonitorService:
        service, leader = self.service, self._leader
        if service is not None:
            return service
        what = "no monitor leads at the moment: try again"
        if leader is not None:
            context.set_trailing_metadata(((LEADER_KEY, leader),))
            what = f"this monitor stands by; the one at {leader} leads: give both addresses"
        context.abort(grpc.StatusCode.UNAVAILABLE, what)
        raise AssertionError("abort raises")

    # -- the contract --------------------------------------------------------------------------

    def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        """See `MonitorService`; so do the others. UNAVAILABLE: another one leads."""
        return self._now(context).Register(request, context)

    def Heartbeat(
        self, requests: Iterator[pb.HeartbeatRequest], context: Any
    ) -> Iterator[pb.HeartbeatResponse]:
        """Renews the lease."""
        return self._now(context).Heartbeat(requests, context)

    def Watch(self, request: pb.WatchRequest, context: Any) -> Iterator[pb.WatchResponse]:
        """What happens."""
        return self._now(context).Watch(request, context)

    def Deregister(self, request: pb.DeregisterRequest, context: Any) -> pb.DeregisterResponse:
        """A goodbye."""
        return self._now(context).Deregister(request, context)

    def ReportOutcome(
        self, request: pb.ReportOutcomeRequest, context: Any
    ) -> pb.ReportOutcomeResponse:
        """What a client's requests came to."""
        return self._now(context).ReportOutcome(request, context)
