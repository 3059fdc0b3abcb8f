"""Layer calls in compiled code, for the common case: every chosen server is healthy and has a free slot.

The compiled code (`attention_client.exchange`) makes the same choices, requests and sums as `LayerCall`, and
hands the requests over to one as soon as something unusual happens. What it measures is read here from time
to time: metrics, service times and speeds lag by some calls.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from attention_client.dispatch.parts import Part
from attention_client.exchange import Exchange, Route, reads_tensors
from attention_client.layer_call.attempts import Attempt
from attention_client.layer_call.shared import ClusterView, Dispatcher
from attention_client.telemetry.request_outcomes import Outcome

if TYPE_CHECKING:
    from attention_client.connections.connection import Connection

__all__ = ["CompiledCalls", "abandon", "attempts_of"]

# Read the measurements after so many calls. Each reading learns from a few of them.
_READ_EACH = 32
_LEARN_FROM = 4


class CompiledCalls:
    """Sends and finishes layer calls of one client in compiled code. Thread-safe.

    Args:
        shared: State shared by all calls.
        checksum: Whether slots have checksums; compiled code has none.
    """

    def __init__(self, shared: Dispatcher, checksum: bool) -> None:
        self._shared = shared
        self._possible = bool(reads_tensors) and not checksum and shared.traces is None
        self._lock = threading.Lock()
        # Both at once, because calls of other threads replace them.
        self._current: tuple[ClusterView, Route | None] | None = None
        self._all_direct = True
        # Routes of former views, until their last call is over.
        self._former: list[tuple[ClusterView, Route]] = []
        self.finished = 0
        """Calls that ended in compiled code, as of the last `read`."""

    @property
    def running(self) -> int:
        """Calls in compiled code now."""
        current = self._current
        route = current[1] if current is not None else None
        running = 0 if route is None else route.running
        return running + sum(former.running for _, former in self._former)

    def start(
        self,
        layer: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        scores_TK: torch.Tensor,
        wanted_T: torch.Tensor | None,
        left_s: float,
    ) -> Exchange | None:
        """Send a layer call, or return None if it is not of the common case; then nothing was sent.

        The tensors must stay as they are until the call ends. `left_s`: seconds until its deadline.
        """
        shared = self._shared
        if not self._possible or shared.attribution.is_watching:
            return None
        view, current = shared.replicas.view(), self._current
        if current is None or current[0] is not view:
            current = self._follow(view)
        route = current[1]
        if route is None or shared.ejections.any_out(shared.clock):
            return None
        epoch, now = view.placement.epoch, shared.clock()
        exchange = route.start(layer, x_TH, ids_TK, scores_TK, wanted_T, epoch, left_s, now)
        if route.waiting >= _READ_EACH:
            self.read()
        if exchange is None:
            # Perhaps a server's times were unknown and have been learnt since.
            self._tell(view, route)
        elif not self._all_direct:
            for server, slot in exchange.sent:
                cast("Connection", view.connections[server]).notify(slot)
        return exchange

    def read(self) -> None:
        """Read what compiled calls have measured: counts, and samples of times to learn from.

        Called every few calls and at each heartbeat, so that the counts are never far behind.
        """
        with self._lock:
            self._read_all()

    def _follow(self, view: ClusterView) -> tuple[ClusterView, Route | None]:
        """Make the route of a new view; servers without a connection get no share."""
        with self._lock:
            if self._current is not None and self._current[1] is not None:
                self._former.append((self._current[0], self._current[1]))
            self._read_all()
            usable_S = view.usable_S()
            replicas = view.replicas(usable_S)
            route = None
            if usable_S.any():
                route = Route(
                    view,
                    [
                        connection.slots if connection is not None and usable else None
                        for connection, usable in zip(view.connections, usable_S, strict=True)
                    ],
                    replicas.first_LX,
                    replicas.server_N,
                    replicas.share_N,
                    len(replicas.first_LX),
                    replicas.experts,
                    self._shared.policy.levels,
                    self._shared.attempt_timeout_s,
                )
                self._tell(view, route)
            self._all_direct = all(c.is_direct for c in view.connections if c is not None)
            self._current = current = view, route
            return current

    def _tell(self, view: ClusterView, route: Route) -> None:
        """Give compiled code the servers' rates and usual times."""
        servers = view.placement.servers
        load = self._shared.speeds.load(servers, [0.0] * len(servers), self._shared.clock())
        route.set_load(load.rate_S, load.backlog_S, load.load_pairs)
        for connection in view.connections:
            if connection is not None:
                connection.slots.set_times(*connection.service.table())

    def _read_all(self) -> None:
        # The lock is held.
        over = [route for _, route in self._former if not route.running]
        for view, route in self._former:
            self._read(view, route)
        self._former = [former for former in self._former if former[1] not in over]
        if self._current is not None and self._current[1] is not None:
            self._read(self._current[0], self._current[1])

    def _read(self, view: ClusterView, route: Route) -> None:
        calls, pairs, nonfinite, answered, samples, took_s = route.take()
        if not calls and not any(answered):
            return
        shared, metrics = self._shared, self._shared.metrics
        self.finished += calls
        metrics.layer_calls.inc(calls)
        metrics.pairs.inc(pairs)
        metrics.nonfinite_rows.inc(nonfinite)
        metrics.server_requests.inc(sum(answered))
        shared.hedges.earn(sum(answered))
        for seconds in took_s:
            metrics.layer_call_seconds.observe(seconds)
        now = shared.clock()
        for server, answers in enumerate(answered):
            connection = view.connections[server]
            if answers and connection is not None:
                shared.ejections.answered(connection.server_id)
                metrics.outcomes.count(connection, Outcome.ANSWERED, answers)
        for server, rows, work, pairs_sent, seconds, service_s, queue_s in samples[-_LEARN_FROM:]:
            connection = view.connections[server]
            assert connection is not None
            connection.service.observe(rows, seconds)
            if service_s:
                shared.speeds.observe(
                    connection.server_id, work, service_s, now, pairs=pairs_sent, queue_s=queue_s
                )
            shared.eject_if_slow(connection.server_id, now)
        self._tell(view, route)


def abandon(exchange: Exchange) -> None:
    """Stop waiting for the requests of a call; their slots are freed once the servers answer."""
    for attempt in attempts_of(exchange):
        attempt.connection.abandon(attempt.ticket, overdue=False)


def attempts_of(exchange: Exchange) -> list[Attempt]:
    """Take over the requests of a call from compiled code, as attempts of a `LayerCall`."""
    attempts = []
    view = cast(ClusterView, exchange.view)
    for server, slot, request_id, rows, ids, work, *times in exchange.requests():
        rows_R = np.frombuffer(rows, np.int64)
        ids_RK = np.frombuffer(ids, np.int32).reshape(-1, exchange.top_k)
        connection: Connection | None = view.connections[server]
        assert connection is not None
        ticket = connection.adopt(slot, request_id, rows_R.size, work)
        sent_at, hedge_at, expires_at = times
        hedge_at = hedge_at if hedge_at < expires_at else math.inf
        part = Part(server, rows_R, ids_RK, work)
        attempts.append(
            Attempt(part, connection, ticket, sent_at, hedge_at, expires_at, spares=view.spares)
        )
    return attempts
