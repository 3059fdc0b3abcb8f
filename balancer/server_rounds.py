"""A thread that calls all expert servers round by round: base of the balancer's reader and spare slots."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import grpc

from balancer.channel_pool import ServerChannels
from eaas.log import get_logger
from eaas.net.tls import Identity
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.types import Member

__all__ = ["ServerRounds"]

_log = get_logger(__name__)
_JOIN_S = 3.0


class ServerRounds(ABC):
    """A daemon thread that does rounds of calls to expert servers, from the first `begin` until `close`.

    Args:
        name: Name of the thread.
        on_broken: Called with an unexpected error; there are no rounds after it.
        tls: This process's identity; None: plain text.
    """

    def __init__(
        self, name: str, on_broken: Callable[[Exception], None], tls: Identity | None = None
    ) -> None:
        self._on_broken = on_broken
        self._channels = ServerChannels(tls)
        self._calls: list[grpc.Future] = []
        self._closed = threading.Event()
        self._due = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Begin a round now, or after the one that is running. Does not block."""
        self._due.set()

    def close(self) -> None:
        """Stop the thread and cancel its calls; servers keep what they hold. Idempotent."""
        self._closed.set()
        self._due.set()
        self._cancel()
        self._thread.join(_JOIN_S)

    def _cancel(self) -> None:
        for call in tuple(self._calls):
            call.cancel()

    @abstractmethod
    def _round(self) -> float | None:
        """Do a round; return the seconds until the next one, None: until `begin`."""

    def _run(self) -> None:
        try:
            wait_s = None
            while not self._closed.is_set():
                self._due.wait(wait_s)
                self._due.clear()
                if not self._closed.is_set():
                    wait_s = self._round()
        except Exception as error:  # noqa: BLE001 - the owner ends the process with it
            if not self._closed.is_set():
                _log.exception("the thread %s has failed", self._thread.name)
                self._on_broken(error)
        finally:
            self._channels.close()

    def _call_all(
        self,
        servers: Mapping[str, Member],
        send: Callable[[expert_pb2_grpc.ExpertServiceStub, str], grpc.Future],
    ) -> tuple[dict[str, Any], dict[str, grpc.StatusCode]]:
        """Call servers in parallel; return the answers, and the errors' codes, by server.

        Args:
            servers: By id; connections to all others are closed.
            send: Begins the call to a server, by its stub and id.
        """
        self._channels.keep({m.address for m in servers.values()})
        calls = {}
        for server_id, member in servers.items():
            pooled = self._channels.acquire(member.address)
            stub = expert_pb2_grpc.ExpertServiceStub(pooled.channel)
            calls[server_id] = pooled, send(stub, server_id)
        self._calls = [call for _, call in calls.values()]
        if self._closed.is_set():
            # `close` may have come before there was anything to cancel.
            self._cancel()
        answers: dict[str, Any] = {}
        errors: dict[str, grpc.StatusCode] = {}
        for server_id, (pooled, call) in calls.items():
            try:
                answers[server_id] = call.result()
            except (grpc.FutureCancelledError, grpc.RpcError) as error:
                errors[server_id] = call.code()
                _log.debug("%s: %s", server_id, error)
            self._channels.release(pooled, works=server_id in answers)
        self._calls = []
        return answers, errors
