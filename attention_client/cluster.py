"""The cluster as one attention client sees it: membership, placement and a connection to each server.

Views come from the monitor and the balancer and are kept: both are off the data path, and with both gone
serving goes on with the last views. A server that is seen to be gone is dropped at once, whatever the
monitor says.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import torch

from attention_client.budget import HedgeBudget, ServiceTimes
from attention_client.connecting import CONNECT_S, Connector, refuse_other_model
from attention_client.connection import Connection
from attention_client.dispatch import dispatch_policy
from attention_client.layer_call import ClusterView, Dispatcher, LayerCall
from attention_client.messages import LayerInput
from attention_client.metrics import ClientMetrics
from attention_client.placements import PlacementSwitch
from attention_client.reach import ReachBook
from attention_client.tracing import RequestTraces
from attention_client.witness import Witness
from eaas.config import HOLD_BACK_S, AttentionClientConfig
from eaas.errors import ClusterError, ConnectionLostError, EaasError, ExpertsUnavailableError
from eaas.grpc_client import Backoff
from eaas.log import get_logger
from eaas.outcome_reports import OutcomeReporter
from eaas.session import MemberSession, MembershipView, PlacementWatch, Report
from eaas.tls import Identity
from eaas.types import Member, MemberState, ModelShape, Placement, Role

__all__ = ["Cluster"]

_log = get_logger(__name__)
_RECONNECT_S = 0.25
_RECONNECT_MOST_S = 2.0
# A process may hold several models, each a member of its own.
_numbers = itertools.count()
# A server that is JOINING, too: it is given experts once its clients are connected to it.
_USABLE = (MemberState.JOINING, MemberState.SERVING, MemberState.SUSPECT, MemberState.DRAINING)


class Cluster:
    """A client's membership in a cluster, and its calls to the experts.

    Args:
        monitor_address: host:port of the monitor.
        shape: The model that this client runs.
        config: Transport, slots, timeouts.
        metrics: Counters.
        client_id: Unique in the cluster; by default made of host and process id.
        address: Where this client serves HTTP, for `status`; may be set later.
        on_stopping: Called when the operator stops the cluster.
        tls: Who this process is; None: plain text.
        traces: Of requests; None: there are none.

    Raises:
        ClusterError: The monitor cannot be reached.
        ConfigError: The transport is not installed.
    """

    def __init__(
        self,
        monitor_address: str,
        shape: ModelShape,
        config: AttentionClientConfig,
        metrics: ClientMetrics,
        *,
        client_id: str | None = None,
        address: str = "",
        on_stopping: Callable[[], None] | None = None,
        tls: Identity | None = None,
        traces: RequestTraces | None = None,
    ) -> None:
        self.shape = shape
        self.config = config
        self.metrics = metrics
        self.monitor_address = monitor_address
        self._changed = threading.Condition()
        self._connections: dict[str, Connection] = {}
        # Which process (`Member.life`) each of them leads to, and which one is being connected to.
        self._lives: dict[str, tuple[object, ...]] = {}
        self._connecting: dict[str, tuple[object, ...]] = {}
        # Former connections that are being closed.
        self._closing: dict[str, threading.Event] = {}
        self._reach = ReachBook()
        # Kept over the lives of a server: what it can do does not change with its process.
        self._service_times: dict[str, ServiceTimes] = {}
        self._pid = os.getpid()
        self._switch = PlacementSwitch(HOLD_BACK_S)
        self._view: ClusterView | None = None
        self._members: MembershipView | None = None
        self._state = MemberState.JOINING
        self._counting = threading.Lock()
        self._in_flight = 0
        self._finished = 0
        self.witness = Witness()
        self._dispatcher = Dispatcher(
            replicas=self,
            policy=dispatch_policy(config.dispatch),
            timeout_s=config.layer_timeout_s,
            attempt_timeout_s=config.attempt_timeout_s,
            hedges=HedgeBudget(config.hedge_share),
            metrics=metrics,
            witness=self.witness,
            traces=traces,
        )
        self._closed = threading.Event()
        self._joined = threading.Event()
        hostname = socket.gethostname()
        self.client_id = client_id or f"client-{hostname}-{os.getpid()}-{next(_numbers)}"
        self._connector = Connector(self.client_id, shape, config, metrics, self._on_lost, tls)
        member = Member(
            id=self.client_id,
            role=Role.ATTENTION_CLIENT,
            pid=os.getpid(),
            host=hostname,
            address=address,
            state=MemberState.JOINING,
            model=shape,
        )
        self.session = MemberSession(
            monitor_address,
            member,
            report=self._report,
            on_change=self._on_members,
            on_stopping=on_stopping,
            tls=tls,
        )
        self._joined.set()
        self._reporter = OutcomeReporter(self.session, metrics.outcomes, self._settle)
        metrics.view_age.set_function(lambda: self.session.view.age_s(time.monotonic()))
        self._placements = PlacementWatch(self._balancer_address, self._on_placement, tls)

    # -- calls ----------------------------------------------------------------------------------------

    def layer_call(
        self,
        layer: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        scores_TK: torch.Tensor,
        wanted_T: torch.Tensor | None,
    ) -> torch.Tensor:
        """Have the experts of one layer computed.

        Args:
            layer: MoE layer.
            x_TH: Hidden states in fp32, bf16 or fp16.
            ids_TK: Logical expert ids.
            scores_TK: Their weights.
            wanted_T: bool; tokens to compute, the others count as 0. None: all.

        Returns:
            float32 (T, H).

        Raises:
            ExpertsUnavailableError: No live replica answered before the deadline.
            WrongRequestError: A server refused the request.
        """
        call = self._layer_call(layer, x_TH, ids_TK, scores_TK, wanted_T)
        with self._counted(call):
            return call.run()

    @contextlib.contextmanager
    def start_layer_call(
        self,
        layer: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        scores_TK: torch.Tensor,
        wanted_T: torch.Tensor | None,
    ) -> Iterator[LayerCall]:
        """A layer call that the servers work on while its caller does something else.

        Args and errors are those of `layer_call`; the result is what `finish` of the call returns. A call
        that was not finished at the end of the context is given up.
        """
        call = self._layer_call(layer, x_TH, ids_TK, scores_TK, wanted_T)
        with self._counted(call):
            try:
                call.start()
                yield call
            finally:
                call.cancel()

    def _layer_call(
        self,
        layer: int,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        scores_TK: torch.Tensor,
        wanted_T: torch.Tensor | None,
    ) -> LayerCall:
        ids = ids_TK.to(torch.int64).contiguous().numpy()
        wanted_TK = np.ones(ids.shape, dtype=np.bool_)
        if wanted_T is not None:
            wanted_TK &= wanted_T.numpy()[:, None]
        inputs = LayerInput.of(layer, x_TH.contiguous(), scores_TK.to(torch.float32).numpy())
        return LayerCall(self._dispatcher, inputs, ids, wanted_TK)

    @contextlib.contextmanager
    def _counted(self, call: LayerCall) -> Iterator[None]:
        started = time.monotonic()
        with self._counting:
            self._in_flight += 1
        try:
            yield
        except ExpertsUnavailableError:
            self.metrics.unavailable.inc()
            raise
        finally:
            with self._counting:
                self._in_flight -= 1
                self._finished += 1
            self.metrics.layer_calls.inc()
            self.metrics.pairs.inc(call.pairs)
            self.metrics.layer_call_seconds.observe(time.monotonic() - started)

    def view(self) -> ClusterView:
        """The newest view. Raises ClusterError while there has been no placement."""
        if self._view is None:
            raise ClusterError("the balancer has not published a placement yet; wait until SERVING")
        return self._view

    def wait_for_change(self, seen: ClusterView, timeout_s: float) -> None:
        """Sleep until there is another view than `seen`, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._view is not seen, timeout_s)

    def wait_until_covered(self, timeout_s: float, stopping: threading.Event | None = None) -> None:
        """Sleep until there is a placement and every expert has a connected replica.

        Args:
            timeout_s: Longest wait.
            stopping: Ends the wait early.

        Raises:
            ClusterError: Not within the time, naming what is missing.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self.missing() and not (stopping and stopping.is_set()):
                servers = self.session.view.live(Role.EXPERT_SERVER)
                refuse_other_model(servers, self.shape, self.monitor_address)
                if time.monotonic() >= deadline:
                    raise ClusterError(f"not ready after {timeout_s:.0f} s: {self.missing()}")
                self._changed.wait(0.2)

    def missing(self) -> str:
        """What keeps this client from serving; empty when nothing does."""
        view = self._view
        if view is None:
            return "no placement yet"
        if uncovered := self.uncovered():
            layer, expert = uncovered[0]
            why = "".join(
                f"; {server}: {reason}" for server, reason in self._reach.refusals().items()
            )
            return (
                f"{len(uncovered)} expert(s) without a live replica, "
                f"first: layer {layer}, expert {expert}{why}"
            )
        return ""

    def uncovered(self) -> list[tuple[int, int]]:
        """(layer, expert) pairs without a connected replica."""
        view = self._view
        if view is None:
            return []
        covered_LE = view.placement.holds_LSE[:, view.usable_S()].any(axis=1)
        return [(int(layer), int(expert)) for layer, expert in np.argwhere(~covered_LE)]

    @property
    def placement(self) -> Placement | None:
        """The placement in use; None while there is none."""
        return self._switch.current

    # -- membership -----------------------------------------------------------------------------------

    def serving(self) -> None:
        """Report SERVING from now on."""
        self._state = MemberState.SERVING
        self.session.report_now()

    def _report(self) -> Report:
        placement = self._switch.current
        with self._changed:
            connections = tuple(self._connections.values())
        return Report(
            state=self._state,
            progress=self._finished,
            in_flight=self._in_flight,
            experts=0,
            epoch=placement.epoch if placement else 0,
            reach=self._reach.report(connections),
        )

    def _balancer_address(self) -> str | None:
        live = self._members.live(Role.BALANCER) if self._members else ()
        return live[0].address if live else None

    def _on_placement(self, placement: Placement) -> None:
        shape = (self.shape.num_layers, self.shape.num_experts)
        if (placement.holds_LSE.shape[0], placement.holds_LSE.shape[2]) != shape:
            _log.error("placement %d is of another model: ignored", placement.epoch)
            return
        with self._changed:
            if not self._switch.offer(placement, time.monotonic()):
                return
            self._refresh()
            due_at = self._switch.due_at()
        if due_at is not None:
            timer = threading.Timer(max(0.0, due_at - time.monotonic()), self._look_again)
            timer.daemon = True
            timer.start()

    def _look_again(self) -> None:
        with self._changed:
            self._refresh()

    def _on_members(self, members: MembershipView) -> None:
        self._members = members
        servers = [m for m in members.members.values() if m.role is Role.EXPERT_SERVER]
        self._reach.keep({m.life for m in servers if m.state in _USABLE})
        for member in servers:
            with self._changed:
                connection = self._connections.get(member.id)
                stale = connection is not None and self._lives[member.id] != member.life
            # Answers are worth more than silence elsewhere: a server that only the monitor cannot reach
            # serves on. Whoever said goodbye takes its slots back by itself.
            silent = member.state.is_gone and connection and connection.owes_answer()
            if connection is not None and (stale or silent):
                connection.lose(f"the monitor says {member.state.value}")
            if member.state.is_gone:
                self.metrics.outcomes.forget(member.id)
            if member.state in _USABLE:
                self._connect_soon(member)

    def _settle(self) -> bool:
        """Take late answers in; says whether a server still owes one."""
        with self._changed:
            connections = tuple(self._connections.values())
        return any([connection.owes_answer() for connection in connections])

    # -- connections ----------------------------------------------------------------------------------

    def _connect_soon(self, member: Member) -> None:
        with self._changed:
            known = self._connections.get(member.id)
            if self._closed.is_set() or self._connecting.get(member.id) == member.life:
                return
            if known is not None and self._lives[member.id] == member.life:
                return
            self._connecting[member.id] = member.life
        threading.Thread(
            target=self._connect, args=(member,), name=f"connect-{member.id}", daemon=True
        ).start()

    def _still_wanted(self, member: Member) -> bool:
        current = self._usable(member.id)
        return not self._closed.is_set() and current is not None and current.life == member.life

    def _usable(self, server_id: str) -> Member | None:
        member = self._members.members.get(server_id) if self._members else None
        return member if member is not None and member.state in _USABLE else None

    def _connect(self, member: Member) -> None:
        self._joined.wait()
        backoff = Backoff(_RECONNECT_S, _RECONNECT_MOST_S)
        try:
            while self._still_wanted(member):
                try:
                    self._connect_once(member)
                    return
                except (grpc.RpcError, EaasError) as error:
                    what = str(error.details() if isinstance(error, grpc.Call) else error)
                except Exception as error:  # noqa: BLE001 (logged; the other servers are served on)
                    what = repr(error)
                    _log.exception("%s: not connected", member.id)
                if self._reach.failed(member, what):
                    _log.warning("%s: not connected, trying on: %s", member.id, what)
                    self.session.report_now()
                self._closed.wait(backoff.next_s())
        finally:
            with self._changed:
                if self._connecting.get(member.id) == member.life:
                    del self._connecting[member.id]
            # A view that came after the last look at it, or a loss, found this thread still at work.
            if self._still_wanted(member):
                self._connect_soon(member)

    def _connect_once(self, member: Member) -> None:
        closing = self._closing.get(member.id)
        if closing is not None:
            # What the former connection still writes must not meet slots that are granted anew.
            closing.wait(CONNECT_S)
        incarnation = self.session.incarnation
        connection = self._connector.connect(member, incarnation, lambda c: self._list(member, c))
        if connection.lost_reason is not None:
            raise ConnectionLostError(connection.lost_reason)
        with self._changed:
            listed = self._connections.get(member.id) is connection
        if not (listed and self._still_wanted(member)):
            connection.lose("another life of the server began")
        else:
            _log.info("%s: connected (%s)", member.id, self.config.transport)

    def _list(self, member: Member, connection: Connection) -> None:
        with self._changed:
            if not self._still_wanted(member):
                # The connection to another life, which began meanwhile, may be listed already.
                return
            if self._lives.get(member.id, member.life) != member.life:
                # The new life's incarnation may be below the former's, whose totals would hide its own.
                self.metrics.outcomes.forget(member.id)
            connection.service = self._service_times.setdefault(member.id, connection.service)
            self._lives[member.id] = member.life
            self._connections[member.id] = connection
            self._reach.connected(member.id)
            self._refresh()
        self.session.report_now()

    def _on_lost(self, connection: Connection) -> None:
        _log.info("%s: connection lost: %s", connection.server_id, connection.lost_reason)
        with self._changed:
            if self._connections.get(connection.server_id) is connection:
                del self._connections[connection.server_id]
                member = self._usable(connection.server_id)
                if member is not None and member.life == self._lives[member.id]:
                    self._reach.failed(member, str(connection.lost_reason), lost=True)
            others = tuple(self._connections.values())
            closed = self._closing.setdefault(connection.server_id, threading.Event())
            self._refresh()
        self.session.report_now()
        # Whoever waits, maybe on another server of the same call, is to look around at once.
        for other in others:
            other.wake()
        threading.Thread(
            target=self._after_loss, args=(connection, closed), name="after-loss", daemon=True
        ).start()

    def _after_loss(self, connection: Connection, closed: threading.Event) -> None:
        """Let go of the link, and try the same life again if it still lives (a broken stream, say)."""
        try:
            connection.close()
        finally:
            with self._changed:
                self._closing.pop(connection.server_id, None)
            closed.set()
        self._closed.wait(_RECONNECT_S)
        if (member := self._usable(connection.server_id)) is not None:
            self._connect_soon(member)

    def _refresh(self) -> None:
        """Make the view anew; the lock is held."""
        connected = {s for s, c in self._connections.items() if c.lost_reason is None}
        switched = self._switch.look(connected, time.monotonic())
        placement = self._switch.current
        if placement is not None:
            self._view = ClusterView(
                placement, tuple(self._connections.get(server) for server in placement.servers)
            )
        if switched and placement is not None:
            self.metrics.epoch.set(placement.epoch)
            # The balancer waits for everybody to say so.
            self.session.report_now()
        self.metrics.connections.set(len(self._connections))
        self._changed.notify_all()

    def close(self) -> None:
        """Leave the cluster: give slots back, say goodbye to the monitor, end the threads. Idempotent.

        Does nothing in a forked child: membership and slots are its parent's.
        """
        if self._closed.is_set() or os.getpid() != self._pid:
            return
        self._closed.set()
        self._placements.close()
        self._reporter.close()
        self.session.close(deregister=True)
        with self._changed:
            connections = tuple(self._connections.values())
            self._changed.notify_all()
        for connection in connections:
            connection.close()
