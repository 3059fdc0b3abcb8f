"""An attention client of a simulated cluster: `attention_client.cluster` without its threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import greenlet
import torch

from attention_client.connections.connection import Connection
from attention_client.connections.deadlines import HedgeBudget, ServiceTimes
from attention_client.connections.messages import Ticket
from attention_client.connections.reach import ReachBook
from attention_client.connections.transports.granted import mirror_arena
from attention_client.connections.transports.grpc_transport import GrpcLink
from attention_client.dispatch import dispatch_policy
from attention_client.exchange import Exchange
from attention_client.layer_call.layer_calls import LayerCalls
from attention_client.layer_call.shared import CallContext, ClusterView
from attention_client.placement_adoption import PlacementSwitch
from eaas.errors import ExpertsUnavailableError
from eaas.rpc.v1 import common_pb2
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.spares import SpareReplicas
from eaas.types import Member, Placement, Role
from eaas.wire import RequestHeader
from eaas.wire.frame import REQUEST_FRAMES
from sim_clock import demand
from sim_process import (
    ATTEMPT_S,
    CALL_S,
    EXPERTS,
    HIDDEN,
    HOLD_S,
    JOINING,
    LAYERS,
    RECONNECT_S,
    SERVING,
    TOKENS,
    TOP_K,
    USABLE,
    Process,
)
from sim_server import ServerProcess, Stream


class Link(GrpcLink):
    """The transport's client end, without its threads."""

    def __init__(self, granted: pb.ConnectResponse, stream: Stream) -> None:
        self.slots, self.generation = granted.slots, granted.generation
        self.arena = mirror_arena(granted)
        self.payload_capacity = self.arena.payload_capacity
        self.result_capacity = self.arena.result_capacity
        self.stream = stream
        self.waiters: list[Callable[[], None]] = []
        self.on_lost: Callable[[str], None] = lambda _why: None

    def notify(self, slot: int) -> None:
        offset = self.arena.request_offset(slot)
        end = offset + RequestHeader.unpack_from(self.arena.buffer, offset).end
        self.stream.ask(REQUEST_FRAMES.encode(slot, self.arena.buffer, offset, end))

    def close(self) -> None:
        self.stream.break_soon("closed")

    def wake(self) -> None:
        for wake in tuple(self.waiters):
            wake()


class SimConnection(Connection):
    """Waits in simulated time."""

    def wait(self, ticket: Ticket, seen_seq: int, timeout_s: float) -> None:
        link: Any = self._link
        client = link.stream.client
        if self.seq() == seen_seq and self.lost_reason is None:
            client.sim.agenda.pause(link.waiters, timeout_s)
        client.wait_while_stopped()

    def wake(self) -> None:
        super().wake()
        link: Any = self._link
        link.wake()


class ClientProcess(Process):
    """A member that makes layer calls: `attention_client.cluster` without threads."""

    def start(self) -> None:
        self.disturbed_at = self.sim.now
        self.connections: dict[str, Connection] = {}
        self.processes: dict[str, Any] = {}
        self.connecting: dict[str, Any] = {}
        self.times: dict[str, ServiceTimes] = {}
        self.reach = ReachBook()
        self.switch = PlacementSwitch(HOLD_S)
        self.spares = SpareReplicas()
        self.epoch = 0
        self.followed: list[tuple[float, Placement]] = []
        self.current: ClusterView | None = None
        self.changes: list[Callable[[], None]] = []
        self.shared = CallContext(
            self,
            dispatch_policy("least_loaded"),
            CALL_S,
            ATTEMPT_S,
            HedgeBudget(0.05),
            self.sim.metrics(),
            clock=lambda: self.sim.now,
            on_stale=self.drop_spares,
            finish=self.finish,
        )
        self.calls = LayerCalls(self.shared, checksum=False)
        self.join()

    def report(self) -> dict[str, Any]:
        placement = self.switch.current
        reach = self.reach.report(self.connections.values())
        if placement is None:
            return {"state": JOINING, "reach": reach}
        return {"state": SERVING, "epoch": placement.epoch, "reach": reach}

    def wait_while_stopped(self) -> None:
        if self.sim.now < self.stopped_until:
            self.sim.agenda.pause([], self.stopped_until - self.sim.now)
        if not self.alive:
            raise greenlet.GreenletExit

    def finish(self, exchange: Exchange) -> torch.Tensor | None:
        """`Exchange.finish` in simulated time."""
        came = None
        while came is None:
            server, due_at = awaited = exchange.awaited
            connection = exchange.view.connections[server]
            seen = connection.seq()
            came = exchange.advance(self.sim.now)
            if came is None and exchange.awaited == awaited:
                connection.wait(None, seen, due_at - self.sim.now)
        return exchange.collect(self.sim.now) if came else None

    # -- calls: `Replicas` ------------------------------------------------------------------------

    def view(self) -> ClusterView:
        assert self.current is not None
        return self.current

    def wait_for_change(self, seen: ClusterView, timeout_s: float) -> None:
        if self.current is seen:
            self.sim.agenda.pause(self.changes, timeout_s)
        self.wait_while_stopped()

    def call_soon(self, delay_s: float) -> None:
        self.soon(delay_s, lambda: self.sim.agenda.spawn(self.call))

    def call(self) -> None:
        """One layer call, and the next some time later."""
        sim = self.sim
        if not self.alive or not sim.calling:
            return
        if self.current is None:
            self.call_soon(0.2)
            return
        tokens, layer = sim.dice.randint(1, 2 * TOKENS), sim.dice.randrange(LAYERS)
        x_TH = torch.arange(1, tokens * HIDDEN + 1).reshape(tokens, HIDDEN).float()
        x_TH += sim.dice.randrange(1000)
        ids_TK = torch.tensor([sim.dice.sample(range(EXPERTS), TOP_K) for _ in range(tokens)])
        scores_TK = torch.ones(tokens, TOP_K)
        began, sim.open_calls = sim.now, sim.open_calls + 1
        try:
            if sim.dice.random() < 0.3:
                with self.calls.start(layer, x_TH, ids_TK, scores_TK, None) as call:
                    # The client computes something else meanwhile.
                    sim.agenda.pause([], sim.dice.uniform(0, 0.02))
                    self.wait_while_stopped()
                    out_TH = call.finish()
            else:
                out_TH = self.calls.run(layer, x_TH, ids_TK, scores_TK, None)
        except ExpertsUnavailableError as error:
            sim.failed += 1
            sim.say(f"{self.id}: {error}")
            sim.check_failure(self, layer, error.experts, began)
        else:
            expected_TH = x_TH * (ids_TK + 1).sum(1, keepdim=True).float()
            demand(torch.equal(out_TH, expected_TH), f"{self.id}: a wrong answer")
            sim.right += 1
        finally:
            sim.open_calls -= 1
        took_s = sim.now - began
        stopped_s = max(0.0, self.stopped_until - began)
        demand(took_s <= CALL_S + 1.0 + stopped_s, f"{self.id}: a call took {took_s:.2f} s")
        self.call_soon(sim.dice.uniform(0.05, 0.6) if sim.in_faults else 0.9)

    # -- placements and connections ---------------------------------------------------------------

    def take_placement(self, message: common_pb2.Placement) -> None:
        if message.epoch <= self.epoch:
            return
        placement = Placement.from_proto(message)
        self.epoch = placement.epoch
        self.sim.check_epoch(placement)
        if self.switch.offer(placement, self.sim.now):
            self.refresh()
            if (due_at := self.switch.due_at()) is not None:
                self.soon(due_at - self.sim.now, self.refresh)

    def take_spares(self, spares: SpareReplicas) -> None:
        self.spares = spares
        self.refresh()

    def drop_spares(self, server: str, spares: SpareReplicas) -> None:
        if self.spares is spares:
            self.spares = spares.without(server)
            self.refresh()

    def refresh(self) -> None:
        connected = {s for s, c in self.connections.items() if c.lost_reason is None}
        if self.switch.advance(connected, self.sim.now):
            before = self.followed[-1][1].epoch if self.followed else 0
            demand(self.switch.current.epoch > before, f"{self.id} went back to an older epoch")
            self.followed.append((self.sim.now, self.switch.current))
        placement = self.switch.current
        if placement is not None:
            found = tuple(self.connections.get(server) for server in placement.servers)
            is_theirs = self.spares.epoch == placement.epoch
            spares = self.spares if is_theirs else SpareReplicas()
            self.current = ClusterView(placement, found, spares)
        for wake in tuple(self.changes):
            wake()

    def on_members(self) -> None:
        members = self.fold.view.members.values()
        self.reach.keep({m.process for m in members if m.state in USABLE})
        for member in self.fold.view.members.values():
            if member.role is not Role.EXPERT_SERVER:
                continue
            connection = self.connections.get(member.id)
            stale = connection is not None and self.processes[member.id] != member.process
            silent = member.state.is_gone and connection and connection.owes_answer()
            if connection is not None and (stale or silent):
                connection.lose(f"the monitor says {member.state.value}")
            if member.state in USABLE:
                self.connect_soon(member)

    def still_wanted(self, member: Member) -> bool:
        now = self.fold.view.members.get(member.id)
        return now is not None and now.process == member.process and now.state in USABLE

    def connect_soon(self, member: Member, delay_s: float = 0.0) -> None:
        if self.connecting.get(member.id) == member.process or (
            member.id in self.connections and self.processes[member.id] == member.process
        ):
            return
        self.connecting[member.id] = member.process

        def ask() -> None:
            if not self.still_wanted(member):
                over()
                return
            self.sim.call(self, member.id, take, connected, failed, pid=member.pid)

        def take(server: ServerProcess) -> tuple[pb.ConnectResponse, Stream]:
            return server.connect(self)

        def over() -> None:
            if self.connecting.get(member.id) == member.process:
                del self.connecting[member.id]
            # A view that came after the last check found this attempt still running.
            if self.still_wanted(member) and member.id not in self.connections:
                self.connect_soon(member, RECONNECT_S)

        def failed() -> None:
            self.reach.failed(member, "no answer")
            self.soon(RECONNECT_S, ask)

        def connected(granted: tuple[pb.ConnectResponse, Stream]) -> None:
            response, stream = granted
            if not self.still_wanted(member) or stream.broken:
                stream.break_soon("not wanted")
                over()
                return
            if (old := self.connections.get(member.id)) is not None:
                old.lose("a new incarnation of the server")
            link = stream.link = Link(response, stream)
            connection = SimConnection(
                member.id,
                member.incarnation,
                link,
                HIDDEN,
                0,
                False,
                self.on_lost,
                lambda: None,
                self.shared.metrics,
            )
            link.on_lost = connection.lose
            connection.service = self.times.setdefault(member.id, connection.service)
            self.processes[member.id] = member.process
            self.connections[member.id] = connection
            self.reach.connected(member.id)
            if self.connecting.get(member.id) == member.process:
                del self.connecting[member.id]
            self.refresh()

        self.soon(delay_s, ask)

    def on_lost(self, connection: Connection) -> None:
        self.sim.say(f"{self.id}: lost {connection.server_id}: {connection.lost_reason}")
        if self.connections.get(connection.server_id) is connection:
            del self.connections[connection.server_id]
            member = self.fold.view.members.get(connection.server_id)
            if member is not None and member.process == self.processes[member.id]:
                self.reach.failed(member, str(connection.lost_reason), lost=True)
        self.refresh()
        for other in tuple(self.connections.values()):
            other.wake()

        def after() -> None:
            connection.close()
            member = self.fold.view.members.get(connection.server_id)
            if member is not None and member.state in USABLE:
                self.connect_soon(member, RECONNECT_S)

        self.soon(0.001, after)
