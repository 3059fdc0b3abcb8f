"""How an expert server leaves the cluster: first, other servers take over its experts, if any can."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from eaas.log import get_logger
from eaas.membership.cluster_view import MembershipView
from eaas.net.grpc_client import STREAM_SILENCE_S
from eaas.types import MemberState, Role

__all__ = ["Leaving", "can_be_relieved"]

_log = get_logger(__name__)
_POLL_S = 0.05
# Waits for the requests in flight, once the experts have moved or no other server can take them.
_LAST_REQUESTS_S = 1.0


def can_be_relieved(view: MembershipView, server_id: str, now: float) -> bool:
    """Whether other servers can take over a leaving server's experts, so that it should wait.

    This needs clients, a balancer, and another server that stays. While the monitor is silent, no process
    learns that this server leaves.
    """
    others = (m for m in view.live(Role.EXPERT_SERVER) if m.id != server_id)
    return bool(
        view.age_s(now) < STREAM_SILENCE_S
        and view.live(Role.ATTENTION_CLIENT)
        and view.live(Role.BALANCER)
        and any(m.state is not MemberState.DRAINING for m in others)
    )


class Leaving:
    """One expert server's drain, started at most once: hand over the experts, answer, end the process.

    Args:
        server_id: Id of this server.
        view: Returns the cluster's members.
        held: Returns the number of replicas held.
        in_flight: Returns the number of requests admitted and not answered.
        begin: Announces DRAINING.
        end: Ends the server.
        timeout_s: Longest wait for other servers.
    """

    def __init__(
        self,
        server_id: str,
        view: Callable[[], MembershipView],
        held: Callable[[], int],
        in_flight: Callable[[], int],
        begin: Callable[[], None],
        end: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self._server_id = server_id
        self._view = view
        self._held = held
        self._in_flight = in_flight
        self._begin = begin
        self._end = end
        self._timeout_s = timeout_s
        self._begun = threading.Lock()

    def start(self) -> None:
        """In a background thread: announce DRAINING, wait until other servers hold the experts, end.

        Returns at once. Idempotent.
        """
        if self._begun.acquire(blocking=False):
            threading.Thread(target=self._leave, name="leaving", daemon=True).start()

    def _leave(self) -> None:
        self._begin()
        _log.info("leaving: %d experts to hand over", self._held())
        relieved = self._wait(self._is_relieved, self._timeout_s)
        # Clients send no more requests now, unless no other server can take over.
        self._wait(lambda: not self._in_flight(), _LAST_REQUESTS_S)
        _log.info("left with %d experts%s", self._held(), "" if relieved else ": timed out")
        self._end()

    def _is_relieved(self) -> bool:
        return not self._held() or not can_be_relieved(
            self._view(), self._server_id, time.monotonic()
        )

    @staticmethod
    def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not (met := condition()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return met
