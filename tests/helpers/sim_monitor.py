"""The monitor of a simulated cluster."""

from __future__ import annotations

from typing import Any

from eaas.rpc.v1 import monitor_pb2
from eaas.types import Member, Role
from monitor.registry import IdTakenError, Registry, UnknownIncarnationError
from monitor.store.kept import Kept
from sim_clock import demand
from sim_process import DEAD, HEARTBEAT_S, LEASE_S, PUSH_S, SERVING, Process, Refused

# Events at about the same time are pushed together.
_BATCH_S = 0.005


class MonitorProcess(Process):
    """The registry, and the streams of its watchers."""

    def start(self, kept: Kept | None) -> None:
        self.is_pushing = False
        self.registry = Registry(LEASE_S, HEARTBEAT_S, self.sim.now, kept)
        own = Member("monitor", Role.MONITOR, self.pid, "h", "", SERVING)
        self.own_incarnation, events = self.registry.register(own, 0, self.sim.now)
        self.note(events)
        self.tick()
        self.push_all()

    def tick(self) -> None:
        now = self.sim.now
        self.note(self.registry.heartbeat("monitor", self.own_incarnation, now, state=SERVING))
        self.note(self.registry.tick(now))
        self.soon(min(LEASE_S / 8, max(0.005, self.registry.due_at() - now)), self.tick)

    def register(self, process: Process, previous: int) -> int:
        try:
            incarnation, events = self.registry.register(
                process.member(), previous, self.sim.now, process.ended_pids, process.pid
            )
        except IdTakenError as error:
            raise Refused from error
        self.sim.lives[process.id, incarnation] = process
        process.heard_at = self.sim.now
        self.note(events)
        return incarnation

    def heartbeat(self, process: Process, incarnation: int, told: dict[str, Any]) -> bool:
        try:
            events = self.registry.heartbeat(process.id, incarnation, self.sim.now, **told)
        except UnknownIncarnationError:
            return False
        process.heard_at = self.sim.now
        self.note(events)
        return True

    def note(self, events: Any) -> None:
        for event in events:
            member = event.member
            if event.forgotten:
                self.sim.kept.pop(member.id, None)
                continue
            self.sim.kept[member.id] = event
            name = f"{member.id}#{member.incarnation}"
            self.sim.say(f"monitor: {name} {member.state.value}: {event.reason}")
            process = self.sim.lives.get((member.id, member.incarnation))
            if member.state is DEAD and process is not None:
                silence_s = self.sim.now - process.heard_at
                seen = event.reason == "its parent saw it end" and not process.alive
                demand(seen or silence_s >= LEASE_S - 1e-9, f"{name} DEAD after {silence_s:.3f} s")
                calm_s = self.sim.now - max(process.disturbed_at, self.disturbed_at)
                if process.alive and process.incarnation == member.incarnation:
                    demand(calm_s < 3 * LEASE_S, f"{name} is healthy, and was declared DEAD")
        if events and not self.is_pushing:
            self.is_pushing = True
            self.soon(_BATCH_S, self.push_now)

    def push_all(self) -> None:
        self.push_now()
        self.soon(PUSH_S, self.push_all)

    def push_now(self) -> None:
        """Push to all watchers, in order. (Live, a stream continues with events.)"""
        self.is_pushing = False
        position = (self.pid, self.registry.revision)
        behind = [
            p for p in self.sim.processes if p is not self and p.alive and p.position != position
        ]
        if not behind:
            return
        members = [m.to_proto() for m in self.registry.members(self.sim.now)]
        response = monitor_pb2.WatchResponse(
            snapshot=monitor_pb2.Snapshot(revision=position[1], members=members, life=self.pid)
        )
        for process in behind:
            self.sim.stream(self, process, lambda p=process: p.take_members(response))
