"""A monitor's registry and its members in simulated time. A seed replays exactly.

    member: send --delay--> registry.heartbeat --delay--> member: sleep heartbeat_s, send again

The delays of one round sum to at most `jitter_s`. A message held up by a cut arrives soon after it. If the
cut lasts for a lease, the message is lost, and its sender tries again, as `eaas.membership.session` does. A
paused monitor runs nothing; messages that arrive meanwhile are handled before or after its first tick. A
restarted monitor knows what a store has kept, and members have to find it.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from eaas.types import Member, MemberState, Role
from monitor.incarnation import MemberEvent
from monitor.registry import IdTakenError, Registry, UnknownIncarnationError
from monitor.store.kept import Kept

LEASE_S, HEARTBEAT_S = 2.0, 0.9
SUSPECT, DEAD = MemberState.SUSPECT, MemberState.DEAD
_RETRY_S = 0.5
# After a cut, until held-up messages are sent again.
_RESENT_S = 0.3
# After a restart, until `eaas.membership.session` has found the monitor.
_FOUND_S = 6.0


@dataclass(frozen=True)
class Plan:
    """One schedule. Members are m0, m1, ...; times in seconds from the start.

    Attributes:
        kills: When, which member, and when it is started again (infinity: never).
        cuts: Begin, end, and the members that cannot reach the monitor.
        pauses: Begin and end of the monitor's pauses.
        downs: When the monitor ends, and when another one starts.
    """

    members: int
    seconds: float
    jitter_s: float
    kills: tuple[tuple[float, int, float], ...] = ()
    cuts: tuple[tuple[float, float, frozenset[int]], ...] = ()
    pauses: tuple[tuple[float, float], ...] = ()
    downs: tuple[tuple[float, float], ...] = ()


@dataclass
class Process:
    """One process; another process of the same id is another object.

    Attributes:
        ended_pids: Former processes, if their parent saw them end.
        heard_at: When the registry last heard it.
        beats: Heartbeats that the registry received.
        suspected: Value of `beats` at each suspicion.
    """

    index: int
    pid: int
    ended_pids: tuple[int, ...] = ()
    incarnation: int = 0
    alive: bool = True
    killed_at: float | None = None
    heard_at: float = 0.0
    beats: int = 0
    dead_at: float | None = None
    replaced: bool = False
    suspected: list[int] = field(default_factory=list)

    @property
    def id(self) -> str:
        return f"m{self.index}"


class Watcher:
    """Rebuilds the membership from events, or from a snapshot if necessary."""

    def __init__(self) -> None:
        self.revision = -1
        self.members: dict[str, Member] = {}
        self.seen: list[int] = []

    def catch_up(self, registry: Registry, now: float) -> None:
        events = registry.since(self.revision)
        if events is None:
            self.members = {m.id: m for m in registry.members(now)}
            self.revision = registry.revision
            self.seen.clear()
            return
        for event in events:
            if event.forgotten:
                del self.members[event.member.id]
            else:
                self.members[event.member.id] = event.member
            self.seen.append(event.revision)
            self.revision = event.revision

    def check(self, registry: Registry, now: float) -> None:
        assert self.seen == sorted(set(self.seen))
        if self.seen:
            assert self.seen == list(range(self.seen[0], self.seen[-1] + 1))
        told = {m.id: _comparable(m) for m in registry.members(now)}
        assert {i: _comparable(m) for i, m in self.members.items()} == told


def _comparable(m: Member) -> Member:
    return replace(m, silence_s=0.0, in_flight=0, progress=0)


def _once_awake(act: Callable[..., None]) -> Callable[..., None]:
    """Of the monitor: it acts when it is neither paused nor down."""

    def later(sim: Simulation, *arguments: Any) -> None:
        for begin, end in (*sim.plan.pauses, *sim.plan.downs):
            if begin <= sim.now < end:
                sim._at(end + sim.dice.uniform(0, 0.002), later, sim, *arguments)
                return
        act(sim, *arguments)

    return later


class Simulation:
    """Runs one schedule. `run` checks the general invariants, the caller the others.

    Attributes:
        processes: All processes so far.
        trace: One line per event.
    """

    def __init__(self, seed: int, plan: Plan) -> None:
        self.plan = plan
        self.dice = random.Random(seed)
        self.now = 0.0
        self.registry = Registry(LEASE_S, HEARTBEAT_S, 0.0)
        self.processes: list[Process] = []
        self.trace: list[str] = []
        self._agenda: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._steps = 0
        self._pids = iter(range(1, 1_000_000))
        self._present: dict[int, Process] = {}
        self._ended: dict[int, tuple[int, ...]] = {}
        self._revision = 0
        self._given: dict[str, int] = {}
        self._watcher = Watcher()
        self._kept: dict[str, MemberEvent] = {}

    def run(self) -> Simulation:
        self._begin()
        for index in range(self.plan.members):
            self._at(self.dice.uniform(0, HEARTBEAT_S), self._start, index)
        for at, index, again_at in self.plan.kills:
            self._at(at, self._kill, index)
            if again_at <= self.plan.seconds:
                self._at(again_at, self._start, index)
        for _, up_at in self.plan.downs:
            self._at(up_at, self._restart)
        self._at(0.0, self._tick)
        while self._agenda and self._agenda[0][0] <= self.plan.seconds:
            self.now, _, action, arguments = heapq.heappop(self._agenda)
            action(*arguments)
        self._watcher.catch_up(self.registry, self.now)
        self._watcher.check(self.registry, self.now)
        return self

    def _at(self, when: float, action: Callable[..., None], *arguments: Any) -> None:
        self._steps += 1
        heapq.heappush(self._agenda, (when, self._steps, action, arguments))

    # -- the monitor -----------------------------------------------------------------------------

    def _begin(self) -> None:
        own = Member("monitor", Role.MONITOR, 0, "h", "", MemberState.SERVING)
        self._monitor_incarnation, events = self.registry.register(own, 0, self.now)
        self._note(events)

    def _restart(self) -> None:
        events = sorted(self._kept.values(), key=lambda event: event.revision)
        kept = Kept(1, self._revision, self.registry.forgotten_incarnation, tuple(events))
        self.registry = Registry(LEASE_S, HEARTBEAT_S, self.now, kept.without_monitors())
        self._begin()

    @_once_awake
    def _tick(self) -> None:
        incarnation = self._monitor_incarnation
        self._note(
            self.registry.heartbeat("monitor", incarnation, self.now, state=MemberState.SERVING)
        )
        self._note(self.registry.tick(self.now))
        pause_s = min(LEASE_S / 8, max(0.005, self.registry.due_at() - self.now))
        self._at(self.now + pause_s, self._tick)
        if self.dice.random() < 0.05:
            self._watcher.catch_up(self.registry, self.now)
            self._watcher.check(self.registry, self.now)

    def _note(self, events: list[MemberEvent]) -> None:
        for event in events:
            member = event.member
            self._revision += 1
            assert event.revision == self._revision
            if event.forgotten:
                del self._kept[member.id]
                continue
            self._kept[member.id] = event
            self.trace.append(
                f"{self.now:9.4f} {member.id}#{member.incarnation} {member.state.value}: {event.reason}"
            )
            if member.role is Role.MONITOR:
                assert member.state is MemberState.SERVING
                continue
            key = (member.id, member.incarnation)
            process = next(p for p in self.processes if (p.id, p.incarnation) == key)
            if member.state is DEAD:
                process.dead_at = self.now
                silence_s = self.now - process.heard_at
                seen = event.reason == "its parent saw it end" and not process.alive
                assert seen or silence_s >= LEASE_S - 1e-9, "a lease is a lease"
                cut = self.was_cut(process.index, process.heard_at, self.now)
                assert cut or process.killed_at is not None, f"{process.id} is healthy"
            elif member.state is SUSPECT:
                process.suspected.append(process.beats)

    # -- members ---------------------------------------------------------------------------------

    def was_cut(self, index: int, begin: float, end: float) -> bool:
        """Whether the member was cut off at any moment in this interval."""
        return any(index in who and a < end and begin < b for a, b, who in self.plan.cuts)

    def _kill(self, index: int) -> None:
        if (process := self._present.pop(index, None)) is not None:
            process.alive, process.killed_at = False, self.now
            self._ended[index] = (*process.ended_pids, process.pid)

    def _start(self, index: int) -> None:
        assert index not in self._present
        # A process started by hand knows of no end.
        ended_pids = self._ended.get(index, ()) if self.dice.random() < 0.5 else ()
        process = Process(index, next(self._pids), ended_pids)
        self._present[index] = process
        self._register(process)

    def _message(self, process: Process, handle: Callable[..., None], *arguments: Any) -> None:
        """Send a message from or to the monitor."""
        arrives_at = self.now + self.dice.uniform(0, self.plan.jitter_s / 2)
        for begin, end, who in self.plan.cuts:
            if process.index in who and begin <= arrives_at and self.now < end:
                arrives_at = end + self.dice.uniform(0, _RESENT_S)
        for begin, end in self.plan.downs:
            if begin <= arrives_at and self.now < end:
                self._at(end + self.dice.uniform(0, _FOUND_S), self._register, process)
                return
        if arrives_at - self.now > LEASE_S:
            self._at(self.now + LEASE_S, self._register, process)
        else:
            self._at(arrives_at, handle, process, *arguments)

    def _register(self, process: Process) -> None:
        if process.alive:
            self._message(process, self._take_register)

    @_once_awake
    def _take_register(self, process: Process) -> None:
        member = Member(process.id, Role.EXPERT_SERVER, process.pid, "h", "", MemberState.SERVING)
        try:
            incarnation, events = self.registry.register(
                member, process.incarnation, self.now, process.ended_pids
            )
        except IdTakenError:
            holder = (process.id, self._given[process.id])
            gone = next(p for p in self.processes if (p.id, p.incarnation) == holder)
            assert process.incarnation or gone.pid not in process.ended_pids, (
                "its parent saw its end"
            )
            self._at(self.now + _RETRY_S, self._register, process)
            return
        before = self._given.get(process.id, 0)
        if incarnation == before:
            assert incarnation == process.incarnation, "an incarnation is one process's"
        else:
            assert incarnation > before
            for other in self.processes:
                if (other.id, other.incarnation) == (process.id, before) and not other.dead_at:
                    other.replaced = True
            if process.incarnation:
                # It continues as a new incarnation, unless it was killed meanwhile.
                alive, process.alive = process.alive, False
                process = replace(process, alive=alive, dead_at=None, suspected=[], beats=0)
                if alive:
                    self._present[process.index] = process
            process.incarnation = incarnation
            self.processes.append(process)
        self._given[process.id] = incarnation
        process.heard_at = self.now
        self._note(events)
        self._message(process, self._send)

    def _send(self, process: Process) -> None:
        if process.alive:
            self._message(process, self._take_heartbeat)

    @_once_awake
    def _take_heartbeat(self, process: Process) -> None:
        try:
            events = self.registry.heartbeat(
                process.id, process.incarnation, self.now, state=MemberState.SERVING
            )
        except UnknownIncarnationError:
            self._message(process, self._register)
            return
        process.heard_at = self.now
        process.beats += 1
        self._note(events)
        self._message(process, self._answered)

    def _answered(self, process: Process) -> None:
        self._at(self.now + HEARTBEAT_S, self._send, process)
