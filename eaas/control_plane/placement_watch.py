"""Subscription to placements, across restarts and changes of the balancer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc

from eaas.log import get_logger
from eaas.net.async_channel import AsyncChannel, responses
from eaas.net.grpc_client import Backoff
from eaas.net.tls import Identity
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.rpc.v1 import balancer_pb2_grpc
from eaas.types import Placement, Role

__all__ = ["PlacementWatch"]

_logger = get_logger(__name__)

_NO_BALANCER_S = 0.25
_JOIN_S = 3.0


class PlacementWatch:
    """Calls `on_placement` from a daemon thread with each placement of a newer epoch.

    Args:
        balancer_address: Returns the balancer's host:port, None if there is none. Called before each attempt
            to connect.
        on_placement: Must not block; its exceptions are logged.
        tls: Identity of this process; None means plain text.
    """

    def __init__(
        self,
        balancer_address: Callable[[], str | None],
        on_placement: Callable[[Placement], None],
        tls: Identity | None = None,
    ) -> None:
        self._tls = tls
        self._balancer_address = balancer_address
        self._on_placement = on_placement
        self._epoch = 0
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._call: Any = None
        self._thread = threading.Thread(target=self._follow, name="placement-watch", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        """Epoch of the last placement; 0 before the first one."""
        return self._epoch

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        with self._lock:
            self._closed.set()
            if self._call is not None:
                self._call.cancel()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def _follow(self) -> None:
        backoff = Backoff()
        while not self._closed.is_set():
            address = self._balancer_address()
            if address is None:
                self._closed.wait(_NO_BALANCER_S)
                continue
            with AsyncChannel(address, Role.BALANCER.value, self._tls) as opened:
                try:
                    self._watch(balancer_pb2_grpc.BalancerServiceStub(opened), backoff)
                except (grpc.RpcError, TimeoutError) as error:
                    _logger.debug("watching the balancer at %s again: %s", address, error)
            self._closed.wait(backoff.next_s())

    def _watch(self, stub: Any, backoff: Backoff) -> None:
        with self._lock:
            if self._closed.is_set():
                return
            self._call = stub.WatchPlacement(pb.WatchPlacementRequest(known_epoch=self._epoch))
        for response in responses(self._call):
            backoff.reset()
            # An outdated balancer may send an old epoch.
            if not response.HasField("placement") or response.placement.epoch <= self._epoch:
                continue
            self._epoch = response.placement.epoch
            try:
                self._on_placement(Placement.from_proto(response.placement))
            except Exception:
                _logger.exception("cannot use placement %d", self._epoch)
