"""One life of a member, as the registry keeps it, and what watchers are told of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from eaas.types import Member, MemberState
from monitor.detector import Arrivals
from monitor.progress import Progress

__all__ = ["Life", "MemberEvent"]


@dataclass(frozen=True)
class MemberEvent:
    """A member changed.

    Attributes:
        revision: Rises by 1 with every event of a registry.
        member: What it is now.
        reason: Why, for people.
        forgotten: It is no longer listed.
    """

    revision: int
    member: Member
    reason: str
    forgotten: bool = False


@dataclass(slots=True)
class Life:
    """One life of a member.

    Attributes:
        member: As others see it, but for what rises with every request. An event for each heartbeat of a busy
            member, sent to each watcher, would be quadratic traffic that says nothing: that is for snapshots.
        reported: What it says of itself; member.state is SUSPECT while there is a reason for that.
        arrivals: Of its heartbeats; whether it is late.
        progress: Of its work; whether that is stuck.
        accusation: Why its clients suspect it.
        busy_s: For how long it has been at work, as it last said.
        forget_at: Monotonic seconds at which it is forgotten; inf while it lives.
    """

    member: Member
    reported: MemberState
    arrivals: Arrivals
    progress: Progress
    accusation: str | None = None
    busy_s: float = 0.0
    forget_at: float = math.inf

    @property
    def state(self) -> MemberState:
        """What its member's state should be."""
        suspected = self.arrivals.late or self.progress.stuck or self.accusation
        return MemberState.SUSPECT if suspected else self.reported

    def full(self, silence_s: float) -> Member:
        """The member with its load, and for how long it was not heard."""
        return replace(
            self.member,
            progress=self.progress.count,
            in_flight=self.progress.in_flight,
            silence_s=silence_s,
            busy_s=self.busy_s,
        )
