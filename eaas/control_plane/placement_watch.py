"""Subscription to new placements from the balancer, in attention clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eaas.control_plane.balancer_watch import BalancerWatch
from eaas.log import get_logger
from eaas.net.tls import Identity
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.types import Placement

__all__ = ["PlacementWatch"]

_logger = get_logger(__name__)


class PlacementWatch(BalancerWatch):
    """Calls `on_placement` from a daemon thread with each newer placement that the balancer announces.

    Args:
        balancer_address: See `BalancerWatch`.
        on_placement: Must not block; its exceptions are logged.
        tls: Identity of this process; None means plain text.

    Attributes:
        epoch: Epoch of the last placement; 0 before the first one.
    """

    def __init__(
        self,
        balancer_address: Callable[[], str | None],
        on_placement: Callable[[Placement], None],
        tls: Identity | None = None,
    ) -> None:
        self.epoch = 0
        self._on_placement = on_placement
        super().__init__(balancer_address, self._placements, self._newer, tls, "placement-watch")

    def _placements(self, stub: Any) -> Any:
        return stub.WatchPlacement(pb.WatchPlacementRequest(known_epoch=self.epoch))

    def _newer(self, response: pb.WatchPlacementResponse) -> None:
        # An outdated balancer may send an old epoch.
        if not response.HasField("placement") or response.placement.epoch <= self.epoch:
            return
        self.epoch = response.placement.epoch
        try:
            self._on_placement(Placement.from_proto(response.placement))
        except Exception:
            _logger.exception("cannot use placement %d", self.epoch)
