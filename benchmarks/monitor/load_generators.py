"""One process's share of the simulated members, in one thread."""

from __future__ import annotations

import selectors
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from benchmarks.monitor.line import Call, Line
from benchmarks.monitor.member import SimulatedMember
from benchmarks.monitor.watching import Sightings, Watcher
from eaas.rpc.v1 import monitor_pb2 as pb

__all__ = ["LoadGenerators"]

# Largest number of concurrent registrations.
_JOINING = 32
_TICK_S = 0.002


class LoadGenerators:
    """Simulated members that each send a heartbeat every `interval_s`, once the last one is answered.

    Args:
        numbers: Numbers of this process's members (`member.describe`).

    Attributes:
        ended: Streams and calls that the monitor ended.
    """

    def __init__(
        self,
        address: str,
        numbers: Sequence[int],
        lines: int,
        interval_s: float,
        selector: selectors.BaseSelector,
    ) -> None:
        self._selector = selector
        self._interval_s = interval_s
        self._lines = [Line(address) for _ in range(lines)]
        for line in self._lines:
            selector.register(line, selectors.EVENT_READ, line)
        self._dirty: set[Line] = set(self._lines)
        self._members = [
            SimulatedMember(number, self._lines[place % lines])
            for place, number in enumerate(numbers)
        ]
        self._to_join: deque[SimulatedMember] = deque()
        self._joining = 0
        # Next heartbeats, ordered by time because all members have the same interval.
        self._due: deque[tuple[float, SimulatedMember]] = deque()
        self._delays_us: list[int] = []
        self._sent = self._late = 0
        self.sightings = Sightings()
        self._watchers: list[Watcher] = []
        self.ended = 0

    # -- commands ------------------------------------------------------------------------------

    def join(self) -> None:
        """Begin to register all members at the monitor; their heartbeats follow."""
        self._to_join.extend(self._members)

    @property
    def joined(self) -> bool:
        """Whether all members are registered."""
        return not self._to_join and not self._joining

    def watch(self, count: int, revision: int, life: int) -> None:
        """Make the first `count` members watch the membership from a revision."""
        position = pb.WatchRequest(from_revision=revision, life=life, heartbeats_tell=True)
        for member in self._members[len(self._watchers) : count]:
            watcher = Watcher(self.sightings, revision)
            self._watchers.append(watcher)
            member.watch(position, Call(watcher.take, self._end))
            self._dirty.add(member.line)

    def seen(self, member_id: str, incarnation: int) -> dict[str, Any]:
        """Count the watchers that saw a member's death; the first and the last time (monotonic seconds)."""
        times = self.sightings.of_death(member_id, incarnation)
        return {"count": len(times), "first": times[:1], "last": times[-1:]}

    def vanish(self, place: int, *, goodbye: bool) -> dict[str, Any]:
        """End a member, silently or with a goodbye; return its id and the time (monotonic seconds)."""
        member = self._members[place]
        if goodbye:
            member.say_goodbye(Call(lambda _: None, lambda: None))
        else:
            member.vanish()
        self._dirty.add(member.line)
        # Take the time before the flush, because a watcher may see the end before this process continues.
        at = time.monotonic()
        self._flush()
        return {"id": member.id, "incarnation": member.incarnation, "at": at}

    def revive(self, place: int) -> None:
        """Register a vanished member again, with a new incarnation."""
        self._to_join.append(self._members[place])

    def take_figures(self) -> dict[str, Any]:
        """Return the counters since the last call, and reset them."""
        sightings = self.sightings
        figures = {
            "delays_us": self._delays_us,
            "sent": self._sent,
            "late": self._late,
            "ended": self.ended,
            "watched": sightings.messages,
            "watched_bytes": sightings.bytes,
            "signs": sightings.signs,
            "gaps": sightings.gaps,
        }
        self._delays_us, self._sent, self._late, self.ended = [], 0, 0, 0
        sightings.messages = sightings.bytes = sightings.signs = sightings.gaps = 0
        return figures

    # -- the loop ------------------------------------------------------------------------------

    def turn(self, now: float) -> float:
        """Send due registrations and heartbeats; return the seconds until the next turn."""
        while self._to_join and self._joining < _JOINING:
            self._joining += 1
            member = self._to_join.popleft()
            member.register(self._registered, self._join_ended)
            self._dirty.add(member.line)
        while self._due and self._due[0][0] <= now:
            due_at, member = self._due.popleft()
            if member.dead:
                continue
            if member.waits:
                self._late += 1
                member.overdue = True
            else:
                self._beat(member, due_at)
        self._flush()
        wait_s = self._due[0][0] - now if self._due else self._interval_s
        return max(_TICK_S, wait_s)

    def ready(self, line: Line) -> None:
        """Read and send on a connection that the selector reports as ready."""
        line.pump()
        self._dirty.add(line)

    def _beat(self, member: SimulatedMember, due_at: float) -> None:
        member.beat(time.monotonic(), Call(lambda _: self._answered(member), lambda: self._end()))
        self._sent += 1
        self._due.append((due_at + self._interval_s, member))
        self._dirty.add(member.line)

    def _answered(self, member: SimulatedMember) -> None:
        now = time.monotonic()
        self._delays_us.append(round(1e6 * (now - member.sent_at)))
        member.waits = False
        if member.overdue and not member.dead:
            self._beat(member, now)

    def _registered(self, member: SimulatedMember) -> None:
        member.dead = member.waits = False
        self._beat(member, time.monotonic())

    def _join_ended(self) -> None:
        self._joining -= 1

    def _end(self) -> None:
        self.ended += 1

    def _flush(self) -> None:
        for line in self._dirty:
            line.flush()
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.unsent else 0)
            if self._selector.get_key(line).events != wanted:
                self._selector.modify(line, wanted, line)
        self._dirty.clear()

    def close(self) -> None:
        """Close all connections to the monitor."""
        for line in self._lines:
            self._selector.unregister(line)
            line.close()
