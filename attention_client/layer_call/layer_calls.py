"""The layer calls of one client: compiled code makes the common ones, and `LayerCall` the others.

In the common case every chosen server is healthy, has a free slot and answers in its usual time. Compiled
code (`attention_client.exchange`) makes the same choices, requests and sums as `LayerCall`, which takes the
requests over as soon as something unusual happens. What compiled code measures is read here from time to
time: metrics, service times and speeds lag by some calls.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, cast

import torch

from attention_client.exchange import Exchange, Route, reads_tensors
from attention_client.layer_call.call import Arguments, LayerCall, abandon
from attention_client.layer_call.shared import CallContext, ClusterView
from attention_client.telemetry.request_outcomes import Outcome

if TYPE_CHECKING:
    from attention_client.connections.connection import Connection

__all__ = ["LayerCalls"]

# Read the measurements after so many calls. Each reading learns from a few of them.
_READ_EACH = 32
_LEARN_FROM = 4


class LayerCalls:
    """Makes the layer calls of one client. Thread-safe.

    Args:
        shared: State shared by all calls.
        checksum: Whether slots have checksums; compiled code has none.
    """

    def __init__(self, shared: CallContext, checksum: bool) -> None:
        self.shared = shared
        self._compiles = bool(reads_tensors) and not checksum and shared.traces is None
        self._lock = threading.Lock()
        # Both at once, because calls of other threads replace them.
        self._current: tuple[ClusterView, Route | None] | None = None
        self._all_direct = True
        # Routes of former views, until their last call is over.
        self._former: list[tuple[ClusterView, Route]] = []
        self._compiled = 0

    @property
    def in_flight(self) -> int:
        """Calls that have begun and not ended."""
        current = self._current
        route = current[1] if current is not None else None
        compiled = 0 if route is None else route.running
        compiled += sum(former.running for _, former in self._former)
        return self.shared.count.in_flight + compiled

    @property
    def finished(self) -> int:
        """Calls that have ended: the progress that the client reports."""
        return self.shared.count.finished + self.compiled

    @property
    def compiled(self) -> int:
        """Calls that ended in compiled code."""
        self.read()
        return self._compiled

    def run(
        self,
        layer: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        scores_TK: torch.Tensor,
        wanted_T: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute the routed experts of one MoE layer on the expert servers, and wait for the result.

        Args:
            layer: MoE layer.
            x_TH: Hidden states in fp32, bf16 or fp16. The tensors must not change before the call ends.
            ids_TK: Logical expert ids.
            scores_TK: Weights of the experts.
            wanted_T: bool; tokens to compute, others give 0. None: all.

        Returns:
            (T, H) in the dtype of the hidden states; the servers' parts are added in float32.

        Raises:
            ExpertsUnavailableError: No live replica answered before the deadline.
            WrongRequestError: A server refused the request.
        """
        # Not by way of `start`, because a call takes tens of microseconds.
        shared, exchange = self.shared, None
        ready = self._ready()
        if ready is not None:
            view, route = ready
            epoch, now = view.placement.epoch, shared.clock()
            exchange = route.start(
                layer, x_TH, ids_TK, scores_TK, wanted_T, epoch, shared.timeout_s, now
            )
            self._started(view, route, exchange)
        if exchange is not None:
            try:
                out_TH = shared.finish(exchange)
            except BaseException:
                abandon(exchange)
                raise
            if out_TH is not None:
                return out_TH
        arguments = Arguments(layer, x_TH, ids_TK, scores_TK, wanted_T)
        return LayerCall(shared, arguments, exchange, self.read).recover()

    def start(
        self,
        layer: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        scores_TK: torch.Tensor,
        wanted_T: torch.Tensor | None,
    ) -> LayerCall:
        """Send the requests of a layer call; `LayerCall.finish` of the result waits for the answers.

        Takes the arguments of `run`.

        Raises:
            WrongRequestError: The hidden states are not of the model's size.
        """
        shared, exchange = self.shared, None
        ready = self._ready()
        if ready is not None:
            view, route = ready
            epoch, now = view.placement.epoch, shared.clock()
            exchange = route.start(
                layer, x_TH, ids_TK, scores_TK, wanted_T, epoch, shared.timeout_s, now
            )
            self._started(view, route, exchange)
        arguments = Arguments(layer, x_TH, ids_TK, scores_TK, wanted_T)
        call = LayerCall(shared, arguments, exchange, self.read)
        if exchange is None:
            call.start()
        return call

    def read(self) -> None:
        """Read what compiled calls have measured: counts, and samples of times to learn from.

        Called every few calls and at each heartbeat, so that the counts are never far behind.
        """
        with self._lock:
            self._read_all()

    def _ready(self) -> tuple[ClusterView, Route] | None:
        """Return the view to call in and its route; None while compiled code cannot make calls."""
        shared, current = self.shared, self._current
        if not self._compiles or shared.attribution.is_watching:
            return None
        view = shared.replicas.view()
        if current is None or current[0] is not view:
            current = self._follow(view)
        route = current[1]
        if route is None or shared.ejections.any_out(shared.clock):
            return None
        return view, route

    def _started(self, view: ClusterView, route: Route, exchange: Exchange | None) -> None:
        """Tell servers that do not poll of their requests; None: the call is not of the common case."""
        if route.waiting >= _READ_EACH:
            self.read()
        if exchange is None:
            # Perhaps a server's times were unknown and have been learnt since.
            self._tell(view, route)
        elif not self._all_direct:
            for server, slot in exchange.sent:
                cast("Connection", view.connections[server]).notify(slot)

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
                    self.shared.policy.levels,
                    self.shared.attempt_timeout_s,
                )
                self._tell(view, route)
            self._all_direct = all(c.is_direct for c in view.connections if c is not None)
            self._current = current = view, route
            return current

    def _tell(self, view: ClusterView, route: Route) -> None:
        """Give compiled code the servers' rates and usual times."""
        servers = view.placement.servers
        load = self.shared.speeds.load(servers, [0.0] * len(servers), self.shared.clock())
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
        shared, metrics = self.shared, self.shared.metrics
        self._compiled += calls
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
