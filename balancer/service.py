"""The placement on the wire."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from eaas.grpc_client import STREAM_SIGN_S
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.rpc.v1 import common_pb2
from eaas.types import Placement

__all__ = ["BalancerService"]


class BalancerService:
    """Answers the contract's BalancerService with the placement last published.

    Any thread may call it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._placement = common_pb2.Placement()
        self._closed = False

    @property
    def epoch(self) -> int:
        """Epoch of the placement now; 0 when there is none yet."""
        return int(self._placement.epoch)

    def publish(self, placement: Placement) -> None:
        """From now on this is the placement."""
        message = placement.to_proto()
        with self._changed:
            self._placement = message
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the watchers' streams; they look for another balancer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def GetPlacement(
        self, request: pb.GetPlacementRequest, context: Any
    ) -> pb.GetPlacementResponse:
        """The placement now; epoch 0 when there is none yet."""
        return pb.GetPlacementResponse(placement=self._placement)

    def WatchPlacement(
        self, request: pb.WatchPlacementRequest, context: Any
    ) -> Iterator[pb.WatchPlacementResponse]:
        """The placement where it is newer than the caller's, then each newer one.

        A sign of life where nothing happens.
        """
        if not context.add_callback(self._wake):
            return
        epoch = request.known_epoch

        def is_due() -> bool:
            return self._placement.epoch > epoch or self._closed or not context.is_active()

        while context.is_active():
            with self._changed:
                self._changed.wait_for(is_due, STREAM_SIGN_S)
                placement = self._placement
                if self._closed:
                    return
            if placement.epoch > epoch:
                epoch = placement.epoch
                yield pb.WatchPlacementResponse(placement=placement, epoch=placement.epoch)
            else:
                yield pb.WatchPlacementResponse(epoch=placement.epoch)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
