"""Stream of the balancer for clients and launchers, kept up across its restarts and changes of address."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc

from eaas.log import get_logger
from eaas.net.async_channel import AsyncChannel, responses
from eaas.net.grpc_client import Backoff
from eaas.net.tls import Identity
from eaas.rpc.v1 import balancer_pb2_grpc
from eaas.types import Role

__all__ = ["BalancerWatch"]

_logger = get_logger(__name__)

_NO_BALANCER_S = 0.25
_JOIN_S = 3.0


class BalancerWatch:
    """Reads a stream of the balancer in a daemon thread, which starts at construction.

    Args:
        balancer_address: Returns the balancer's host:port, None if there is none. Called before each attempt
            to connect.
        start: Starts the stream, from a stub.
        take: Called with each message; must not block.
        tls: Identity of this process; None means plain text.
        name: Name of the thread.
    """

    def __init__(
        self,
        balancer_address: Callable[[], str | None],
        start: Callable[[Any], Any],
        take: Callable[[Any], None],
        tls: Identity | None,
        name: str,
    ) -> None:
        self._balancer_address = balancer_address
        self._start = start
        self._take = take
        self._tls = tls
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._call: Any = None
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread that reads the stream: no further messages are taken. Idempotent."""
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
            self._call = self._start(stub)
        for response in responses(self._call):
            backoff.reset()
            self._take(response)
