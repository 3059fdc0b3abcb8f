"""A cluster as an HTTP endpoint sees it, which has no connections to expert servers of its own."""

from __future__ import annotations

from typing import Any

import grpc

from eaas.control_plane.placement_watch import PlacementWatch
from eaas.control_plane.status import status_document
from eaas.log import get_logger
from eaas.membership.monitors import Monitors
from eaas.membership.reachability import fewest_nodes, fewest_replicas
from eaas.net.tls import Identity
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.types import Member, MemberState, Placement, Role

__all__ = ["ClusterObserver"]

_log = get_logger(__name__)
_ASK_S = 0.5


class ClusterObserver:
    """Reads members from the monitor and follows the balancer's placement. Thread-safe; close it.

    Args:
        monitor_address: host:port of the monitor; "host:port,host:port" for several.
        tls: Identity of this process; None: plain text.
    """

    def __init__(self, monitor_address: str, tls: Identity | None = None) -> None:
        self._monitors = Monitors(monitor_address, tls)
        self._members: tuple[Member, ...] = ()
        self._placement: Placement | None = None
        self._placements = PlacementWatch(self._balancer_address, self._on_placement, tls)

    def members(self, timeout_s: float) -> list[Member] | None:
        """Ask the monitor for all members; None if it does not answer in time."""
        monitor = self._monitors.now
        try:
            found = monitor.members(timeout_s)
        except grpc.RpcError as error:
            # The next call uses another monitor, if there is one.
            self._monitors.leave(monitor, error)
            _log.debug("cannot read the members: %s", error)
            return None
        if found is not None:
            self._members = tuple(found)
        return found

    def status(self, endpoint: str) -> dict[str, Any]:
        """Make the document of `eaas status --json`, with the last members if the monitor is silent.

        Args:
            endpoint: URL of the HTTP endpoint.
        """
        known, placement = self.members(_ASK_S) or self._members, self._placement
        replicas_LE = nodes_LE = None
        if placement is not None:
            replicas_LE = fewest_replicas(placement.replicas, placement.servers, known)
            nodes_LE = fewest_nodes(placement.replicas, placement.servers, known)
        return status_document(known, placement, replicas_LE, nodes_LE, endpoint)

    def serves(self, address: str, timeout_s: float) -> bool:
        """Whether an attention client with this HTTP address is SERVING, by the monitor's word."""
        clients = self.clients(address, timeout_s)
        return any(m.state is MemberState.SERVING for m in clients)

    def deregister(self, address: str) -> None:
        """Make the attention clients with this HTTP address LEFT, because their processes have ended."""
        for member in self.clients(address, _ASK_S):
            goodbye = pb.DeregisterRequest(
                id=member.id, incarnation=member.incarnation, reason="its process has ended"
            )
            try:
                self._monitors.now.stub.Deregister(goodbye, timeout=_ASK_S)
            except grpc.RpcError as error:
                _log.debug("cannot deregister %s: %s", member.id, error)

    def clients(self, address: str, timeout_s: float) -> list[Member]:
        """Return the live attention clients with this HTTP address, by id: one for each of vLLM's workers."""
        members = self.members(timeout_s) or ()
        clients = (m for m in members if m.role is Role.ATTENTION_CLIENT and m.address == address)
        return sorted((m for m in clients if not m.state.is_gone), key=lambda m: m.id)

    def close(self) -> None:
        """End the connections to monitor and balancer. Idempotent."""
        self._placements.close()
        self._monitors.close()

    def _balancer_address(self) -> str | None:
        members = self.members(_ASK_S) or self._members
        return next(
            (m.address for m in members if m.role is Role.BALANCER and not m.state.is_gone), None
        )

    def _on_placement(self, placement: Placement) -> None:
        self._placement = placement
