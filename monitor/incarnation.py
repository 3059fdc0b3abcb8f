"""Types of the monitor's registry: its entry for one incarnation of a member, and the events for watchers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from eaas.types import Member, MemberState
from monitor.failure_detection.detector import Arrivals
from monitor.failure_detection.progress import Progress

__all__ = ["MemberEntry", "MemberEvent"]


@dataclass(frozen=True)
class MemberEvent:
    """A change of a member, as sent to watchers and stored.

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
    """The registry's entry for one incarnation of a member.

    Attributes:
        member: As watchers see it, without the counters that change with every request, because an event per
            heartbeat, sent to every watcher, would be quadratic traffic. Snapshots have the counters.
        reported: The state that the member reports; member.state is SUSPECT while there is a suspicion.
        arrivals: Its heartbeat arrivals, and whether they are late.
        progress: The progress of its work, and whether it is stuck.
        session: Random number of its process; 0: unknown, as of members that a former monitor stored.
        accusation: Why its clients suspect it; None if they do not.
        busy_s: Its busy time, as last reported.
        loading_bytes: Bytes that its current load takes, as last reported.
        loaded_bytes: How many of them are loaded.
        revision: Revision of its last event.
        forget_at: When its tombstone is forgotten, in monotonic seconds; inf while it is live.
    """

    member: Member
    reported: MemberState
    arrivals: Arrivals
    progress: Progress
    session: int = 0
    accusation: str | None = None
    busy_s: float = 0.0
    loading_bytes: int = 0
    loaded_bytes: int = 0
    revision: int = 0
    forget_at: float = math.inf

    @property
    def state(self) -> MemberState:
        """State that the member should have: SUSPECT while there is a suspicion, else the reported state."""
        suspected = self.arrivals.late or self.progress.stuck or self.accusation
        return MemberState.SUSPECT if suspected else self.reported

    def counters(self, silence_s: float) -> dict[str, Any]:
        """The fields of `Member` that change without an event, for snapshots and events."""
        return {
            "progress": self.progress.count,
            "in_flight": self.progress.in_flight,
            "silence_s": silence_s,
            "busy_s": self.busy_s,
            "loading_bytes": self.loading_bytes,
            "loaded_bytes": self.loaded_bytes,
        }

    def full(self, silence_s: float) -> Member:
        """The member with its current counters and its silence, as in events."""
        return replace(self.member, **self.counters(silence_s))
