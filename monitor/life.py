"""One life of a member, as the registry keeps it, and what watchers are told of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from eaas.types import Member, MemberState

__all__ = ["Life", "MemberEvent", "visible"]


@dataclass(frozen=True)
class MemberEvent:
    """A member changed.

    Attributes:
        revision: Rises by 1 with every event of a registry.
        member: What it is now.
        reason: Why, for people.
    """

    revision: int
    member: Member
    reason: str


@dataclass
class Life:
    """One life of a member.

    Attributes:
        member: As others see it.
        reported: What it says of itself; member.state is SUSPECT while it is silent for too long, or accused.
        heard_at: Monotonic seconds.
        lease_from: The lease runs from here: heard_at, or the end of a pause of the monitor.
        silent: For so long that it is suspected.
        accusation: Why its clients suspect it.
    """

    member: Member
    reported: MemberState
    heard_at: float
    lease_from: float
    silent: bool = False
    accusation: str | None = None

    @property
    def state(self) -> MemberState:
        """What its member's state should be."""
        suspected = self.silent or self.accusation is not None
        return MemberState.SUSPECT if suspected else self.reported


def visible(member: Member) -> Member:
    """What watchers are told of, if it changes."""
    # What rises with every request is for snapshots: an event for each heartbeat of a busy member,
    # sent to each watcher, would be quadratic traffic that says nothing.
    return replace(member, progress=0, in_flight=0, silence_s=0.0)
