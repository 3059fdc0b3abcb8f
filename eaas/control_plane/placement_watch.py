"""Subscription to new placements and spare replicas from the balancer, in attention clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eaas.control_plane.balancer_watch import BalancerWatch
from eaas.log import get_logger
from eaas.net.tls import Identity
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.spares import SpareReplicas
from eaas.types import Placement

__all__ = ["PlacementWatch"]

_logger = get_logger(__name__)


class PlacementWatch(BalancerWatch):
    """Calls back from a daemon thread with what the balancer announces: placements and spare replicas.

    Args:
        balancer_address: See `BalancerWatch`.
        on_placement: Called with each newer placement. Must not block; its exceptions are logged.
        tls: Identity of this process; None means plain text.
        on_spares: Called with the spare replicas after each change, and after their placement.

    Attributes:
        epoch: Epoch of the last placement; 0 before the first one.
    """

    def __init__(
        self,
        balancer_address: Callable[[], str | None],
        on_placement: Callable[[Placement], None],
        tls: Identity | None = None,
        on_spares: Callable[[SpareReplicas], None] = lambda _spares: None,
    ) -> None:
        self.epoch = 0
        self._on_placement = on_placement
        self._on_spares = on_spares
        super().__init__(balancer_address, self._placements, self._newer, tls, "placement-watch")

    def _placements(self, stub: Any) -> Any:
        return stub.WatchPlacement(pb.WatchPlacementRequest(known_epoch=self.epoch))

    def _newer(self, response: pb.WatchPlacementResponse) -> None:
        # An outdated balancer may send an old epoch.
        if response.HasField("placement") and response.placement.epoch > self.epoch:
            self.epoch = response.placement.epoch
            try:
                self._on_placement(Placement.from_proto(response.placement))
            except Exception:
                _logger.exception("cannot use placement %d", self.epoch)
        if response.HasField("spares"):
            try:
                self._on_spares(SpareReplicas.from_proto(response.spares))
            except Exception:
                _logger.exception("cannot use the spare replicas of placement %d", self.epoch)
