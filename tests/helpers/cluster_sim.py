"""A whole cluster in simulated time: the code that runs live, on a clock and a network that a seed draws.

Real: the layer calls of clients with all that belongs to them (attempts, standing, races, budgets, ejections),
their connections, slots and placement switch; the servers' slot table, admission, loop, replies and placement
calls; the cable's frames, both ends; the monitor's registry and detector; the members' view of it; the
balancer's planner. Simulated: the clock, the network, processes, and the threads that tie these together
(`eaas.session`, `balancer.rollout`, `attention_client.cluster`), each a few lines here.

A layer call waits as it does live; what it waits with is a greenlet that the agenda goes on with. A server's
expert e multiplies a token by e + 1, so that every answer is known exactly.

What the network does: delays; control calls whose request or answer is lost, or that come twice; frames of a
cable that come twice, late, or never (then the stream breaks some time later); cuts between two hosts. What
processes do: they are killed and started again, or stop for a while. The wall clock jumps all the time.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import greenlet
import grpc
import numpy as np
import torch
from prometheus_client import CollectorRegistry

from attention_client.budget import HedgeBudget, ServiceTimes
from attention_client.connection import Connection
from attention_client.dispatch import dispatch_policy
from attention_client.layer_call import ClusterView, Dispatcher, LayerCall
from attention_client.messages import LayerInput, Ticket
from attention_client.metrics import ClientMetrics
from attention_client.placements import PlacementSwitch
from attention_client.transports.cable import _Cable
from attention_client.transports.mirror import mirror_arena
from balancer.actions import Call, Inspect, Prepare, Publish, Retire
from balancer.drafts import Draft
from balancer.planner import Planner
from eaas.errors import ExpertsUnavailableError
from eaas.membership import MembershipFold
from eaas.rpc.v1 import common_pb2
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import monitor_pb2
from eaas.types import Member, MemberState, ModelShape, Placement, Role
from eaas.wire import Arena, RequestHeader, SlotState
from eaas.wire.frame import REQUEST_FRAMES
from eaas.wire.header import WireDtype, payload_layout, result_length
from expert_server.endpoint import _Stream
from expert_server.loop import ServeLoop
from expert_server.placements import PlacementHandler
from expert_server.slots import SlotTable
from monitor.registry import IdTakenError, Registry, UnknownLifeError
from monitor.store.kept import Kept

LAYERS, EXPERTS, HIDDEN, TOP_K = 2, 6, 2, 2
SHAPE = ModelShape("tiny", EXPERTS, HIDDEN, TOP_K, ("l0", "l1"), "float32", "digest")
FULL = (LAYERS, EXPERTS)
TOKENS, SLOTS, CLIENT_SLOTS = 4, 8, 3
LEASE_S, HEARTBEAT_S = 2.0, 0.9
GRACE_S, ACK_S, HOLD_S = 3.0, 4.0, 3.0
CALL_S, ATTEMPT_S = 3.0, 0.15
# Of a control call without an answer, and before it is tried again.
_RPC_S, _RETRY_S = 1.0, 0.5
_PUSH_S = 1.0
# Until both ends of a stream that lost a frame know it.
_BREAK_S = (0.3, 1.5)
_RECONNECT_S = 0.25
REDUNDANCY = 2
SUSPECT, DEAD, JOINING, SERVING = (
    MemberState.SUSPECT,
    MemberState.DEAD,
    MemberState.JOINING,
    MemberState.SERVING,
)
_USABLE = (SERVING, SUSPECT, MemberState.DRAINING)


class Violation(AssertionError):
    """Something happened that never may."""


def demand(condition: Any, what: str) -> None:
    if not condition:
        raise Violation(what)


class Agenda:
    """Simulated time: what is to happen when."""

    def __init__(self) -> None:
        self.now = 100.0
        self._steps = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._hub = greenlet.getcurrent()

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._steps += 1
        heapq.heappush(self._heap, (max(when, self.now), self._steps, action))

    def run_until(self, end: float) -> None:
        while self._heap and self._heap[0][0] <= end:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self.now = end

    def spawn(self, work: Callable[[], None]) -> None:
        """Run it as a thread would run: it may `pause`."""
        self.at(self.now, greenlet.greenlet(work, self._hub).switch)

    def pause(self, waiters: list[Callable[[], None]], timeout_s: float) -> None:
        """Sleep until one of `waiters` is called, or the time is over; for a spawned one."""
        me = greenlet.getcurrent()
        asleep = [True]

        def wake() -> None:
            if asleep[0]:
                asleep[0] = False
                self.at(self.now, me.switch)

        waiters.append(wake)
        if timeout_s < 1e6:
            self.at(self.now + max(timeout_s, 1e-6), wake)
        self._hub.switch()
        waiters.remove(wake)


@dataclass(eq=False)
class Process:
    """One life of a process.

    Attributes:
        host: Whom it shares a fate with when the network is cut.
        stopped_until: As after SIGSTOP: nothing of it runs before that.
        disturbed_at: When something last happened to it that excuses what it does.
    """

    sim: Simulation
    id: str
    role: Role
    pid: int
    alive: bool = True
    incarnation: int = 0
    stopped_until: float = 0.0
    disturbed_at: float = 0.0
    fold: MembershipFold = field(default_factory=MembershipFold)
    heard_at: float = 0.0

    @property
    def host(self) -> str:
        return self.id

    def soon(self, delay_s: float, action: Callable[[], None]) -> None:
        """In this process, after a while; not once it is dead, and not while it is stopped."""

        def run() -> None:
            if not self.alive:
                return
            if self.sim.now < self.stopped_until:
                self.sim.agenda.at(self.stopped_until + self.sim.dice.uniform(0, 0.002), run)
                return
            action()

        self.sim.agenda.at(self.sim.now + delay_s, run)

    # -- membership, as `eaas.session` does it ----------------------------------------------------

    def report(self) -> dict[str, Any]:
        return {"state": SERVING}

    def member(self) -> Member:
        state = self.report()["state"]
        return Member(self.id, self.role, self.pid, "h", f"{self.id}:{self.pid}", state, model=SHAPE)

    def join(self) -> None:
        before = self.incarnation

        def registered(incarnation: int) -> None:
            if before and incarnation != before:
                self.reborn()
            self.incarnation = incarnation
            self.beat()

        def take(monitor: MonitorProcess) -> int:
            return monitor.register(self, before)

        self.sim.call(self, "monitor", take, registered, lambda: self.soon(_RETRY_S, self.join))

    def reborn(self) -> None:
        """The former life had ended."""

    def beat(self) -> None:
        incarnation, told = self.incarnation, self.report()

        def take(monitor: MonitorProcess) -> bool:
            return monitor.heartbeat(self, incarnation, told)

        def answered(known: bool) -> None:
            self.soon(HEARTBEAT_S, self.beat) if known else self.join()

        self.sim.call(self, "monitor", take, answered, lambda: self.soon(0.0, self.beat))

    def take_members(self, response: monitor_pb2.WatchResponse) -> None:
        if self.fold.take(response, self.sim.now):
            self.on_members()

    def on_members(self) -> None:
        """The view changed."""


# -- the monitor ----------------------------------------------------------------------------------


class MonitorProcess(Process):
    """The registry, and whoever is told of it."""

    def start(self, kept: Kept | None) -> None:
        self.registry = Registry(LEASE_S, HEARTBEAT_S, self.sim.now, kept)
        own = Member("monitor", Role.MONITOR, self.pid, "h", "", SERVING)
        self.life, events = self.registry.register(own, 0, self.sim.now)
        self.note(events)
        self.tick()
        self.push_all()

    def tick(self) -> None:
        now = self.sim.now
        self.note(self.registry.heartbeat("monitor", self.life, now, state=SERVING))
        self.note(self.registry.tick(now))
        self.soon(min(LEASE_S / 8, max(0.005, self.registry.due_at() - now)), self.tick)

    def register(self, process: Process, previous: int) -> int:
        try:
            incarnation, events = self.registry.register(process.member(), previous, self.sim.now)
        except IdTakenError as error:
            raise Refused from error
        self.sim.lives[process.id, incarnation] = process
        process.heard_at = self.sim.now
        self.note(events)
        return incarnation

    def heartbeat(self, process: Process, incarnation: int, told: dict[str, Any]) -> bool:
        try:
            events = self.registry.heartbeat(process.id, incarnation, self.sim.now, **told)
        except UnknownLifeError:
            return False
        process.heard_at = self.sim.now
        self.note(events)
        return True

    def note(self, events: Any) -> None:
        for event in events:
            member = event.member
            self.sim.kept[member.id] = event
            life = f"{member.id}#{member.incarnation}"
            self.sim.say(f"monitor: {life} {member.state.value}: {event.reason}")
            process = self.sim.lives.get((member.id, member.incarnation))
            if member.state is DEAD and process is not None:
                silence_s = self.sim.now - process.heard_at
                demand(silence_s >= LEASE_S - 1e-9, f"{life} DEAD after {silence_s:.3f} s")
                calm_s = self.sim.now - max(process.disturbed_at, self.disturbed_at)
                if process.alive and process.incarnation == member.incarnation:
                    demand(calm_s < 3 * LEASE_S, f"{life} is healthy, and was declared DEAD")
        if events:
            self.push_now()

    def push_all(self) -> None:
        self.push_now()
        self.soon(_PUSH_S, self.push_all)

    def push_now(self) -> None:
        """To everybody, in order; live, a stream goes on with events."""
        members = [m.to_proto() for m in self.registry.members(self.sim.now)]
        response = monitor_pb2.WatchResponse(
            snapshot=monitor_pb2.Snapshot(
                revision=self.registry.revision, members=members, life=self.pid
            )
        )
        for process in tuple(self.sim.processes):
            if process is not self and process.alive:
                self.sim.stream(self, process, lambda p=process: p.take_members(response))


class Refused(Exception):
    """A control call was refused."""


# -- expert servers -------------------------------------------------------------------------------


class Store:
    """What a server holds; since when, and how often each was loaded."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.since: dict[tuple[int, int], float] = {}

    @property
    def count(self) -> int:
        return len(self.since)

    def held(self) -> dict[int, list[int]]:
        return {layer: sorted(e for at, e in self.since if at == layer) for layer in range(LAYERS)}

    def load(self, wanted: Any, is_given_up: Callable[[], bool]) -> int:
        for layer, experts in wanted.items():
            for expert in experts:
                self.since.setdefault((layer, expert), self.sim.now)
        return 0

    def unload(self, unwanted: Any) -> None:
        for layer, experts in unwanted.items():
            for expert in experts:
                self.since.pop((layer, expert), None)

    def holds_LE(self) -> np.ndarray:
        found_LE = np.zeros(FULL, dtype=bool)
        for layer, expert in self.since:
            found_LE[layer, expert] = True
        return found_LE


class Context:
    """As much of gRPC's as the placement calls need."""

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Refused(f"{code.name}: {details}")


class ServerProcess(Process):
    """Slots, loop and placement calls."""

    def start(self) -> None:
        self.disturbed_at = self.sim.now
        self.state = JOINING
        self.slow = 1.0
        total = payload_layout(TOKENS, HIDDEN, TOP_K, WireDtype.FLOAT32).total
        self.arena = Arena.create_local(SLOTS, total, result_length(TOKENS, HIDDEN), self.pid)
        self.table = SlotTable(self.arena)
        self.store = Store(self.sim)
        self.loop = ServeLoop(
            self.arena, self.table, self.compute, SHAPE, 0, clock=lambda: self.sim.now
        )
        self.placements = PlacementHandler(self.store, SHAPE, self.prepared, self.retired)
        self.streams: dict[str, Stream] = {}
        self.newest_told = 0
        self.join()

    def report(self) -> dict[str, Any]:
        return {"state": self.state, "experts": self.store.count, "epoch": self.placements.epoch}

    def prepared(self, epoch: int) -> None:
        self.state, self.loop.epoch = SERVING, epoch

    def retired(self, epoch: int) -> None:
        self.loop.epoch = epoch

    def reborn(self) -> None:
        self.disturbed_at = self.sim.now
        self.table.revoke_all()
        for stream in tuple(self.streams.values()):
            stream.break_soon("its lease was gone")

    def compute(self, x_TH: Any, ids_TK: Any, scores_TK: Any, layer: int) -> torch.Tensor:
        ids = ids_TK.numpy()
        for expert in set(ids[ids >= 0].tolist()):
            if (layer, expert) not in self.store.since:
                raise LookupError(f"layer {layer}, expert {expert} is not here")
        weights_T1 = (scores_TK * (ids_TK + 1) * (ids_TK >= 0)).sum(1, keepdim=True)
        return x_TH.float() * weights_T1

    def order(self, call: Call) -> tuple[Any, int] | None:
        """What a call of the balancer does here. Raises Refused."""
        if isinstance(call, Inspect):
            return self.store.holds_LE(), self.placements.ListExperts(None, Context()).epoch
        placement = call.placement
        layers = [common_pb2.Holding(experts=e) for e in placement.experts_of(self.id)]
        if isinstance(call, Prepare):
            request = pb.PreparePlacementRequest(epoch=placement.epoch, layers=layers)
            self.newest_told = max(self.newest_told, placement.epoch)
            self.placements.PreparePlacement(request, Context())
        else:
            before = self.sim.coverages()
            request = pb.RetirePlacementRequest(epoch=placement.epoch, layers=layers)
            self.placements.RetirePlacement(request, Context())
            demand(placement.epoch >= self.newest_told, f"{self.id} retired by an older epoch")
            self.newest_told = placement.epoch
            self.sim.check_retirement(self, before)
        return None

    # -- data -------------------------------------------------------------------------------------

    def connect(self, client: ClientProcess) -> tuple[pb.ConnectResponse, Stream]:
        grant = self.table.grant(client.id, client.incarnation, CLIENT_SLOTS)
        if grant is None:
            raise Refused("no free slots")
        granted = pb.ConnectResponse(
            connection_id=grant.connection_id,
            generation=grant.generation,
            server_incarnation=self.pid,
            slots=grant.slots,
            payload_capacity=self.arena.payload_capacity,
            result_capacity=self.arena.result_capacity,
        )
        for old in [s for s in self.streams.values() if s.client is client]:
            old.break_soon("connected anew")
        stream = self.streams[grant.connection_id] = Stream(self, client, grant)
        return granted, stream

    def work(self) -> None:
        """A round of the loop over what is written."""
        ready = self.arena.flags.scan(0, SLOTS, SlotState.WRITTEN.mask)
        if ready:
            self.loop.serve(ready)
        for stream in tuple(self.streams.values()):
            stream.answer()


class Stream:
    """A cable between a client and a server: frames both ways, in order, until it breaks."""

    def __init__(self, server: ServerProcess, client: ClientProcess, grant: Any) -> None:
        self.sim, self.server, self.client, self.grant = server.sim, server, client, grant
        self.far = _Stream(server.arena, server.table)
        first = pb.ExchangeRequest(connection_id=grant.connection_id).SerializeToString()
        demand(self.far.receive(first), "the stream was not taken")
        self.link: Link | None = None
        self.broken = False

    def break_soon(self, why: str) -> None:
        """Both ends learn of it, each in its time."""
        if self.broken:
            return
        self.broken = True
        self.server.streams.pop(self.grant.connection_id, None)
        dice = self.sim.dice
        self.server.soon(
            dice.uniform(0, 0.2), lambda: self.server.table.revoke(self.grant.connection_id)
        )
        if self.link is not None:
            self.client.soon(dice.uniform(0.001, 0.2), lambda: self.link.on_lost(why))

    def frame(self, sender: Process, to: Process, deliver: Callable[[], None]) -> None:
        """One frame: it comes, comes twice, comes late, or never, and then the stream is broken."""
        sim = self.sim
        if self.broken:
            return
        fate = sim.fate()
        if fate == "lost" or sim.is_cut(sender, to):
            sim.agenda.at(sim.now + sim.dice.uniform(*_BREAK_S), lambda: self.break_soon("silence"))
            return

        def arrive() -> None:
            if sim.is_cut(sender, to):
                self.break_soon("cut")
            elif not to.alive:
                self.break_soon("the other end is gone")
            else:
                deliver()

        to_s = sim.delay_s()
        for extra_s in (0.0, sim.dice.uniform(0, 0.3)) if fate == "twice" else (0.0,):
            to.soon(to_s + extra_s, arrive)

    def ask(self, data: bytes) -> None:
        """From the client."""

        def arrive() -> None:
            if self.broken:
                return
            if not self.far.receive(data):
                self.break_soon(self.far._refusal)
                return
            server = self.server
            server.soon(self.sim.dice.uniform(0.0005, 0.01) * server.slow, server.work)

        self.frame(self.client, self.server, arrive)

    def answer(self) -> None:
        """From the server: what its loop wrote."""
        with self.server.table.copying(self.grant) as lives:
            frames = self.far._take(self.grant) if lives else None
        if frames is None:
            self.break_soon("the connection is over")
            return
        for data in frames:

            def arrive(data: bytes = data) -> None:
                if self.link is None or self.broken:
                    return
                if refusal := self.link._deliver(data):
                    self.break_soon(refusal)
                self.link.wake()

            self.frame(self.server, self.client, arrive)


# -- clients --------------------------------------------------------------------------------------


class Link(_Cable):
    """The cable's client end, without its threads."""

    def __init__(self, granted: pb.ConnectResponse, stream: Stream) -> None:
        self.slots, self.generation = granted.slots, granted.generation
        self.arena = mirror_arena(granted)
        self.stream = stream
        self.waiters: list[Callable[[], None]] = []
        self.on_lost: Callable[[str], None] = lambda _why: None

    def kick(self, slot: int) -> None:
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
        self.lives: dict[str, Any] = {}
        self.connecting: dict[str, Any] = {}
        self.times: dict[str, ServiceTimes] = {}
        self.switch = PlacementSwitch(HOLD_S)
        self.epoch = 0
        self.followed: list[tuple[float, Placement]] = []
        self.current: ClusterView | None = None
        self.changes: list[Callable[[], None]] = []
        self.shared = Dispatcher(
            self,
            dispatch_policy("least_loaded"),
            CALL_S,
            ATTEMPT_S,
            HedgeBudget(0.05),
            self.sim.metrics(),
            clock=lambda: self.sim.now,
        )
        self.join()

    def report(self) -> dict[str, Any]:
        placement = self.switch.current
        return {"state": SERVING, "epoch": placement.epoch if placement else 0}

    def wait_while_stopped(self) -> None:
        if self.sim.now < self.stopped_until:
            self.sim.agenda.pause([], self.stopped_until - self.sim.now)
        if not self.alive:
            raise greenlet.GreenletExit

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
        ids_TK = np.array([sim.dice.sample(range(EXPERTS), TOP_K) for _ in range(tokens)])
        scores_TK = np.ones((tokens, TOP_K), dtype=np.float32)
        inputs = LayerInput.of(layer, x_TH, scores_TK)
        call = LayerCall(self.shared, inputs, ids_TK, np.ones(ids_TK.shape, dtype=bool))
        began, sim.open_calls = sim.now, sim.open_calls + 1
        try:
            out_TH = call.run()
        except ExpertsUnavailableError as error:
            sim.failed += 1
            sim.say(f"{self.id}: {error}")
            sim.check_failure(self, layer, error.experts, began)
        else:
            expected_TH = x_TH * torch.from_numpy((ids_TK + 1).sum(1)[:, None]).float()
            demand(torch.equal(out_TH, expected_TH), f"{self.id}: a wrong answer")
            sim.right += 1
        finally:
            sim.open_calls -= 1
        took_s = sim.now - began
        stopped_s = max(0.0, self.stopped_until - began)
        demand(took_s <= CALL_S + 1.0 + stopped_s, f"{self.id}: a call took {took_s:.2f} s")
        self.call_soon(sim.dice.expovariate(3.0))

    # -- placements and connections ---------------------------------------------------------------

    def take_placement(self, placement: Placement) -> None:
        if placement.epoch <= self.epoch:
            return
        self.epoch = placement.epoch
        self.sim.check_epoch(placement)
        if self.switch.offer(placement, self.sim.now):
            self.refresh()
            if (due_at := self.switch.due_at()) is not None:
                self.soon(due_at - self.sim.now, self.refresh)

    def refresh(self) -> None:
        connected = {s for s, c in self.connections.items() if c.lost_reason is None}
        if self.switch.look(connected, self.sim.now):
            before = self.followed[-1][1].epoch if self.followed else 0
            demand(self.switch.current.epoch > before, f"{self.id} went back to an older epoch")
            self.followed.append((self.sim.now, self.switch.current))
        placement = self.switch.current
        if placement is not None:
            found = tuple(self.connections.get(server) for server in placement.servers)
            self.current = ClusterView(placement, found)
        for wake in tuple(self.changes):
            wake()

    def on_members(self) -> None:
        for member in self.fold.view.members.values():
            if member.role is not Role.EXPERT_SERVER:
                continue
            connection = self.connections.get(member.id)
            stale = connection is not None and self.lives[member.id] != member.life
            silent = member.state is DEAD and connection and connection.owes_answer()
            if connection is not None and (stale or silent):
                connection.lose(f"the monitor says {member.state.value}")
            if member.state in _USABLE:
                self.connect_soon(member)

    def still_wanted(self, member: Member) -> bool:
        now = self.fold.view.members.get(member.id)
        return now is not None and now.life == member.life and now.state in _USABLE

    def connect_soon(self, member: Member, delay_s: float = 0.0) -> None:
        if self.connecting.get(member.id) == member.life or (
            member.id in self.connections and self.lives[member.id] == member.life
        ):
            return
        self.connecting[member.id] = member.life

        def ask() -> None:
            if not self.still_wanted(member):
                over()
                return
            self.sim.call(self, member.id, take, connected, failed, pid=member.pid)

        def take(server: ServerProcess) -> tuple[pb.ConnectResponse, Stream]:
            return server.connect(self)

        def over() -> None:
            if self.connecting.get(member.id) == member.life:
                del self.connecting[member.id]
            # A view that came after the last look at it found this one still at work.
            if self.still_wanted(member) and member.id not in self.connections:
                self.connect_soon(member, _RECONNECT_S)

        def failed() -> None:
            self.soon(_RECONNECT_S, ask)

        def connected(granted: tuple[pb.ConnectResponse, Stream]) -> None:
            response, stream = granted
            if not self.still_wanted(member) or stream.broken:
                stream.break_soon("not wanted")
                over()
                return
            if (old := self.connections.get(member.id)) is not None:
                old.lose("another life of the server began")
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
            self.lives[member.id] = member.life
            self.connections[member.id] = connection
            if self.connecting.get(member.id) == member.life:
                del self.connecting[member.id]
            self.refresh()

        self.soon(delay_s, ask)

    def on_lost(self, connection: Connection) -> None:
        self.sim.say(f"{self.id}: lost {connection.server_id}: {connection.lost_reason}")
        if self.connections.get(connection.server_id) is connection:
            del self.connections[connection.server_id]
        self.refresh()
        for other in tuple(self.connections.values()):
            other.wake()

        def after() -> None:
            connection.close()
            member = self.fold.view.members.get(connection.server_id)
            if member is not None and member.state in _USABLE:
                self.connect_soon(member, _RECONNECT_S)

        self.soon(0.001, after)


# -- the balancer ---------------------------------------------------------------------------------


class BalancerProcess(Process):
    """The planner, and a roll-out of a few lines."""

    def start(self, wanted: Placement | None) -> None:
        self.planner = Planner(self.sim.servers, REDUNDANCY, GRACE_S, ACK_S)
        if wanted is not None:
            self.planner.remember(wanted)
        self.published: Placement | None = None
        self.join()
        self.push_all()
        self.tick()

    def on_members(self) -> None:
        # Who is not known yet by this life of it has no number.
        if self.incarnation:
            self.act(self.planner.observe(self.fold.view.members, self.sim.now))

    def tick(self) -> None:
        if self.incarnation:
            self.act(self.planner.tick(self.sim.now))
        self.soon(0.25, self.tick)

    def act(self, actions: Any) -> None:
        for action in actions:
            if isinstance(action, Publish):
                self.sim.say(f"{self.id}({self.pid}): publish {action.placement.epoch}")
                self.published = action.placement
                self.push_now()
            elif isinstance(action, Inspect | Prepare | Retire):
                if isinstance(action, Prepare):
                    self.sim.wanted = action.placement
                self.send(action)

    def send(self, call: Call) -> None:
        def done(told: tuple[Any, int] | None) -> None:
            self.act(self.planner.succeeded(call, self.sim.now, *(told or ())))

        def failed() -> None:
            self.soon(_RETRY_S, lambda: self.planner.is_wanted(call) and self.send(call))
            self.act(self.planner.failed(call, self.sim.now))

        pid = int(call.address.rpartition(":")[2])
        self.sim.call(self, call.server_id, lambda s: s.order(call), done, failed, pid=pid)

    def push_all(self) -> None:
        self.push_now()
        self.soon(_PUSH_S, self.push_all)

    def push_now(self) -> None:
        placement = self.published
        if placement is None:
            return
        for process in tuple(self.sim.processes):
            if isinstance(process, ClientProcess) and process.alive:
                self.sim.stream(self, process, lambda p=process: p.take_placement(placement))

    def propose_any(self) -> None:
        """As an operator does."""
        now = self.planner.current
        if now is None:
            return
        dice = np.random.default_rng(self.sim.dice.getrandbits(32))
        replicas = min(REDUNDANCY, len(now.servers))
        holds_LSE = dice.random(now.holds_LSE.shape).argsort(1).argsort(1) < replicas
        shares_LSE = (holds_LSE / replicas).astype(np.float32)
        self.planner.propose([Draft(now.servers, holds_LSE, shares_LSE)], now.epoch)


# -- all of it ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weather:
    """How bad the network is while faults come.

    Attributes:
        delay_s: Mean of a message's way.
        lost: Share of messages.
        twice: Share of messages.
    """

    delay_s: float = 0.001
    lost: float = 0.0
    twice: float = 0.0


class Simulation:
    """One seed. `run` raises Violation.

    Args:
        seed: Draws everything.
        fault_s: Seconds in which faults come.
        rest_s: Seconds after them, in which all must become well.

    Attributes:
        trace: A line an event.
        right, failed: Layer calls by their end.
    """

    _metrics: list[ClientMetrics] = []

    def __init__(self, seed: int, fault_s: float = 6.0, rest_s: float = 14.0) -> None:
        self.dice = random.Random(seed)
        self.agenda = Agenda()
        self.fault_s, self.rest_s = fault_s, rest_s
        self.trace: list[str] = []
        self.servers, self.clients = self.dice.randint(2, 4), self.dice.randint(1, 2)
        self.weather = Weather(
            self.dice.choice([0.0005, 0.002, 0.02]),
            self.dice.choice([0.0, 0.0, 0.02, 0.1]),
            self.dice.choice([0.0, 0.05]),
        )
        self.calm = Weather()
        self.processes: list[Process] = []
        self.lives: dict[tuple[str, int], Process] = {}
        self.kept: dict[str, Any] = {}
        self.wanted: Placement | None = None
        self.cuts: dict[frozenset[str], float] = {}
        self.last_cut: dict[frozenset[str], float] = {}
        self.epochs: dict[int, bytes] = {}
        self.calling = True
        self.right = self.failed = self.open_calls = 0
        self._pids = 0
        self._streams_until: dict[tuple[Process, Process], float] = {}

    @property
    def now(self) -> float:
        return self.agenda.now

    def say(self, what: str) -> None:
        self.trace.append(f"{self.now:9.4f} {what}")

    def metrics(self) -> ClientMetrics:
        # Registries are slow to make, and what they count is nobody's business here.
        if not self._metrics:
            self._metrics.append(ClientMetrics(CollectorRegistry()))
        return self._metrics[0]

    # -- the network ------------------------------------------------------------------------------

    @property
    def in_faults(self) -> bool:
        return self.now < 100.0 + self.fault_s

    def _now_weather(self) -> Weather:
        return self.weather if self.in_faults else self.calm

    def delay_s(self) -> float:
        mean_s = self._now_weather().delay_s
        return self.dice.uniform(0.0001, 2 * mean_s) if self.dice.random() < 0.95 else 20 * mean_s

    def fate(self) -> str:
        weather, drawn = self._now_weather(), self.dice.random()
        if drawn < weather.lost:
            return "lost"
        return "twice" if drawn < weather.lost + weather.twice else "once"

    def is_cut(self, one: Process, other: Process) -> bool:
        return self.cuts.get(frozenset((one.host, other.host)), 0.0) > self.now

    def peer(self, name: str, pid: int | None = None) -> Process | None:
        """Who answers at an address now."""
        found = [p for p in self.processes if p.id == name and p.alive and pid in (None, p.pid)]
        return found[-1] if found else None

    def call(
        self,
        sender: Process,
        name: str,
        take: Callable[[Any], Any],
        done: Callable[[Any], None],
        failed: Callable[[], None],
        pid: int | None = None,
    ) -> None:
        """A control call: carried out never, once or twice; its sender hears of it once."""
        over = [False]

        def end(action: Callable[[], None]) -> None:
            if not over[0]:
                over[0] = True
                action()

        sender.soon(_RPC_S, lambda: end(failed))
        to = self.peer(name, pid)
        fate = self.fate()
        if to is None or fate == "lost" or self.is_cut(sender, to):
            return

        def arrive() -> None:
            if self.is_cut(sender, to):
                return
            try:
                answer = take(to)
            except Refused:
                self._reply(to, sender, lambda: end(failed))
            else:
                self._reply(to, sender, lambda: end(lambda: done(answer)))

        for extra_s in (0.0, self.dice.uniform(0, 2.0)) if fate == "twice" else (0.0,):
            to.soon(self.delay_s() + extra_s, arrive)

    def _reply(self, sender: Process, to: Process, action: Callable[[], None]) -> None:
        if self.fate() == "lost":
            return
        to.soon(self.delay_s(), lambda: None if self.is_cut(sender, to) else action())

    def stream(self, sender: Process, to: Process, deliver: Callable[[], None]) -> None:
        """In order; what is lost is said again with what follows."""
        if self.fate() == "lost" or self.is_cut(sender, to):
            return
        arrives_at = max(self.now + self.delay_s(), self._streams_until.get((sender, to), 0.0))
        self._streams_until[sender, to] = arrives_at + 1e-9
        to.soon(arrives_at - self.now, lambda: None if self.is_cut(sender, to) else deliver())

    # -- what must hold ---------------------------------------------------------------------------

    def coverages(self) -> dict[ClientProcess, np.ndarray]:
        """Experts that each client would find, by what it follows and what live servers hold."""
        stores = {
            p.id: p.store.holds_LE()
            for p in self.processes
            if isinstance(p, ServerProcess) and p.alive
        }
        found = {}
        for client in self.processes:
            if isinstance(client, ClientProcess) and client.alive and client.followed:
                placement = client.followed[-1][1]
                covered_LE = np.zeros(FULL, dtype=bool)
                for s, name in enumerate(placement.servers):
                    if name in stores:
                        covered_LE |= placement.holds_LSE[:, s] & stores[name]
                found[client] = covered_LE
        return found

    def check_retirement(self, server: ServerProcess, before: dict[Any, np.ndarray]) -> None:
        """Nobody whom the balancer could reach loses an expert to a retirement."""
        after = self.coverages()
        for client, covered_LE in before.items():
            lost_LE = covered_LE & ~after[client]
            undisturbed_s = self.now - max(client.disturbed_at, self._last_cut_of(client))
            if undisturbed_s > ACK_S + LEASE_S and self.weather.lost == 0:
                where = np.argwhere(lost_LE).tolist()
                demand(not where, f"{client.id} lost {where} to a retirement of {server.id}")

    def check_epoch(self, placement: Placement) -> None:
        """There are no two placements of one epoch."""
        said = placement.to_proto().SerializeToString(deterministic=True)
        same = self.epochs.setdefault(placement.epoch, said) == said
        demand(same, f"two placements of epoch {placement.epoch}")

    def check_failure(
        self, client: ClientProcess, layer: int, experts: Any, began: float
    ) -> None:
        """No error where a replica lived: on a server that was well all along, and that the client could know."""
        if self.now - max(client.disturbed_at, began - 1.0) < CALL_S:
            return
        since = began - 1.0
        placements = [p for at, p in client.followed if at < self.now]
        first = max((i for i, (at, _) in enumerate(client.followed) if at <= since), default=None)
        if first is None:
            return
        for expert in experts:
            for server in self.processes:
                if not isinstance(server, ServerProcess) or not server.alive:
                    continue
                cut_at = self.last_cut.get(frozenset((client.host, server.host)), 0.0)
                well = max(server.disturbed_at, cut_at) < since - 1.0 and server.slow == 1.0
                held = server.store.since.get((layer, expert), np.inf) < since
                led = all(
                    server.id in p.servers
                    and p.holds_LSE[layer, p.servers.index(server.id), expert]
                    for p in placements[first:]
                )
                if well and held and led and self.weather.lost == 0:
                    demand(False, f"{client.id}: no expert {expert}, which {server.id} had")

    def check_end(self) -> None:
        """All requests have ended; all that live hold their shares and nothing else; everybody follows that."""
        demand(self.open_calls == 0, f"{self.open_calls} calls have no end")
        balancer = self.peer("balancer")
        assert isinstance(balancer, BalancerProcess)
        placement = balancer.published
        demand(placement is not None, "there is no placement")
        live = sorted(p.id for p in self.processes if isinstance(p, ServerProcess) and p.alive)
        demand(sorted(placement.servers) == live, f"placement of {placement.servers}, not {live}")
        replicas = placement.holds_LSE.sum(axis=1)
        demand((replicas >= min(REDUNDANCY, len(live))).all(), "too few replicas")
        for s, name in enumerate(placement.servers):
            held_LE = self.peer(name).store.holds_LE()
            demand(
                (held_LE == placement.holds_LSE[:, s]).all(), f"{name} holds more or less than its share"
            )
        for client in self.processes:
            if isinstance(client, ClientProcess) and client.alive:
                demand(client.switch.current is not None, f"{client.id} has no placement")
                epoch = client.switch.current.epoch
                demand(epoch == placement.epoch, f"{client.id} follows {epoch}")
                usable = client.view().usable_S()
                demand(usable.all(), f"{client.id} is not connected to everybody")
        monitor = self.peer("monitor")
        assert isinstance(monitor, MonitorProcess)
        for member in monitor.registry.members(self.now):
            process = self.peer(member.id)
            alive = process is not None and process.incarnation == member.incarnation
            if member.role is not Role.MONITOR and alive:
                demand(member.state is SERVING, f"{member.id} is {member.state.value}")

    # -- faults -----------------------------------------------------------------------------------

    def _last_cut_of(self, process: Process) -> float:
        return max((at for pair, at in self.last_cut.items() if process.host in pair), default=0.0)

    def start(self, kind: type[Process], name: str, role: Role, *arguments: Any) -> None:
        self._pids += 1
        process = kind(self, name, role, self._pids)
        self.processes = [p for p in self.processes if p.alive] + [process]
        process.start(*arguments)  # type: ignore[attr-defined]

    def start_server(self, name: str) -> None:
        self.start(ServerProcess, name, Role.EXPERT_SERVER)

    def start_monitor(self) -> None:
        events = sorted(self.kept.values(), key=lambda event: event.revision)
        kept = None
        if events:
            kept = Kept(1, events[-1].revision, 0, tuple(events)).without_monitors()
        self.start(MonitorProcess, "monitor", Role.MONITOR, kept)

    def start_balancer(self) -> None:
        wanted = self.wanted if self.dice.random() < 0.7 else None
        self.start(BalancerProcess, "balancer", Role.BALANCER, wanted)

    def kill(self, process: Process) -> None:
        self.say(f"kill {process.id}({process.pid})")
        process.alive = False
        if isinstance(process, ServerProcess):
            for stream in tuple(process.streams.values()):
                stream.break_soon("killed")
        if isinstance(process, ClientProcess):
            for server in self.processes:
                if isinstance(server, ServerProcess):
                    for stream in tuple(server.streams.values()):
                        if stream.client is process:
                            stream.break_soon("the client is gone")

    def strike(self) -> None:
        """One fault."""
        dice, live = self.dice, [p for p in self.processes if p.alive]
        process = dice.choice(live)
        lasts_s = dice.choice([dice.uniform(0.01, 0.5), dice.uniform(0.5, 3.0)])
        fault = dice.choice(("kill", "stop", "slow", "cut", "twin", "propose", "propose"))
        if fault == "kill" and not isinstance(process, ClientProcess):
            self.kill(process)
            again: dict[Role, Callable[[], None]] = {
                Role.EXPERT_SERVER: lambda: self.start_server(process.id),
                Role.MONITOR: self.start_monitor,
                Role.BALANCER: self.start_balancer,
            }
            if self.peer(process.id) is None:
                self.agenda.at(self.now + lasts_s, again[process.role])
        elif fault == "stop":
            self.say(f"stop {process.id} for {lasts_s:.2f} s")
            process.stopped_until = self.now + lasts_s
            process.disturbed_at = self.now + lasts_s
        elif fault == "slow" and isinstance(process, ServerProcess):
            process.slow = dice.choice([1.0, 5.0, 100.0])
        elif fault == "cut":
            other = dice.choice(live)
            pair = frozenset((process.host, other.host))
            if len(pair) == 2:
                self.say(f"cut {sorted(pair)} for {lasts_s:.2f} s")
                self.cuts[pair] = self.last_cut[pair] = self.now + lasts_s
                if "monitor" in pair:
                    process.disturbed_at = other.disturbed_at = self.now + lasts_s
                for server in live:
                    if isinstance(server, ServerProcess) and server.host in pair:
                        for stream in tuple(server.streams.values()):
                            if stream.client.host in pair:
                                at = self.now + dice.uniform(*_BREAK_S)
                                self.agenda.at(at, lambda s=stream: s.break_soon("cut"))
        elif fault == "twin":
            # Somebody takes the balancer for dead that is only out of sight, and starts another.
            balancer = self.peer("balancer")
            if balancer is not None:
                self.say("another balancer")
                pair = frozenset(("balancer", "monitor"))
                balancer.disturbed_at = self.now
                self.start_balancer()
                self.agenda.at(self.now + lasts_s, lambda: balancer.alive and self.kill(balancer))
        elif fault == "propose":
            balancer = self.peer("balancer")
            if isinstance(balancer, BalancerProcess):
                balancer.propose_any()

    def mend(self) -> None:
        """The faults are over: whoever was slow is not, and nobody has a twin."""
        for process in self.processes:
            if isinstance(process, ServerProcess):
                process.slow = 1.0
            process.stopped_until = min(process.stopped_until, self.now)
        self.cuts.clear()

    def run(self) -> Simulation:
        self.start_monitor()
        for number in range(self.servers):
            self.start_server(f"s{number}")
        self.start_balancer()
        for number in range(self.clients):
            self.start(ClientProcess, f"c{number}", Role.ATTENTION_CLIENT)
        for client in self.processes:
            if isinstance(client, ClientProcess):
                client.call_soon(0.5)
        begin = self.now
        for _ in range(self.dice.randint(2, 7)):
            self.agenda.at(begin + self.dice.uniform(0.3, self.fault_s), self.strike)
        with jumping_wall_clock(self.dice.random()), torch.inference_mode():
            self.agenda.run_until(begin + self.fault_s)
            self.mend()
            self.agenda.run_until(begin + self.fault_s + self.rest_s - CALL_S - 2.0)
            failed, right = self.failed, self.right
            self.agenda.run_until(self.now + 1.0)
            demand(self.failed == failed, "calls fail though all is well")
            demand(self.right > right, "no call ends though all is well")
            self.calling = False
            self.agenda.run_until(self.now + CALL_S + 1.0)
        self.check_end()
        return self


@contextmanager
def jumping_wall_clock(seed: float) -> Any:
    """The wall clock goes back and forth by hours; who reads it to decide something decides wrongly."""
    dice, real = random.Random(seed), (time.time, time.time_ns)
    time.time = lambda: 1.8e9 + dice.uniform(-7200, 7200)  # type: ignore[assignment]
    time.time_ns = lambda: int(time.time() * 1e9)  # type: ignore[assignment]
    try:
        yield
    finally:
        time.time, time.time_ns = real
