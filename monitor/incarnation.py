"""The registry's entry for a member, and the events that watchers receive."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from eaas.types import Member, MemberState
from monitor.failure_detection.detector import Arrivals
from monitor.failure_detection.progress import Progress

__all__ = ["MemberEntry", "MemberEvent"]


@dataclass(frozen=True)
class MemberEvent:
    """A member changed.

    Attributes:
        revision: Rises by 1 with every event of a registry.
        member: The member after the change.
        reason: Reason for the change, as text.
        forgotten: The member is no longer listed.
    """

    revision: int
    member: Member
    reason: str
    forgotten: bool = False


@dataclass(slots=True)
class MemberEntry:
    """One incarnation of a member.

    Attributes:
        member: As watchers see it, without the counters that change with every request: an event per
            heartbeat, sent to every watcher, would be quadratic traffic. Snapshots have them.
        reported: The state that the member reports; member.state is SUSPECT while there is a suspicion.
        arrivals: Its heartbeats; whether they are late.
        progress: Its work; whether it is stuck.
        accusation: Why its clients suspect it; None if they do not.
        busy_s: Its busy time, as last reported.
        forget_at: When its tombstone is forgotten, in monotonic seconds; inf while it is live.
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
        """The state that the member should have."""
        suspected = self.arrivals.late or self.progress.stuck or self.accusation
        return MemberState.SUSPECT if suspected else self.reported

    def full(self, silence_s: float) -> Member:
        """The member with its counters and its silence."""
        return replace(
            self.member,
            progress=self.progress.count,
            in_flight=self.progress.in_flight,
            silence_s=silence_s,
            busy_s=self.busy_s,
        )
